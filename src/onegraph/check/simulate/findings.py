"""From what was seen while running to findings at the user's lines: one per code and place."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, Protocol

from onegraph.check.causes import CAUSES
from onegraph.check.report import SILENT, Cause, Event, Finding, Origin, Report, Severity, StorageInfo, ordered
from onegraph.check.rules import fix
from onegraph.check.simulate import frames
from onegraph.check.simulate.compare import traced
from onegraph.check.simulate.follow import Trace, link
from onegraph.check.simulate.records import RawFinding, Step
from onegraph.check.simulate.replay import Verdict
from onegraph.check.simulate.state import assignment_of

_ALWAYS = {"CG401", "CG210"}
_REPEATED = {"CG205"}
"""Where one cause shows at several lines, the first of them stands for the others."""
_MOST_VALUES = 6


class Watched(Protocol):
    """What watched the steps: a simulated world, or the recorder on a GPU."""

    captured_step: int
    asked_capturing: list[frames.Chain]

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each storage, by number."""


class Findings:
    """Collects findings; `report` gives them in reading order with the timeline of the captured step."""

    def __init__(
        self,
        world: Watched,
        roots: frames.Roots,
        steps: dict[int, Step],
        names: dict[int, str],
        home: frames.CodeLocation,
        *,
        origin: Origin = Origin.SIMULATE,
    ) -> None:
        self.origin = origin
        self.world, self.roots, self.steps, self.names = world, roots, steps, names
        self.home = home  # where a finding stands that no line of the user's led to
        self.found: dict[tuple[str, str, int], Finding] = {}
        self.traces: dict[tuple[str, str, int], Trace] = {}
        self.opaque: dict[str, frames.CodeLocation] = {}  # where each op that nothing looks into was met first

    def of_running(self, raw_findings: Iterable[RawFinding]) -> None:
        """Hazards of single ops. What only the warm-up does is what warm-ups are for; what only later, uncaptured steps
        do counts unless the step looked whether it is being captured."""
        captured = self.world.captured_step
        for raw in raw_findings:
            if raw.step < captured:
                continue
            if raw.step > captured and self.world.asked_capturing and raw.code not in _ALWAYS:
                continue
            self._add(raw, self.roots.place(raw.chain), construct=raw.construct)

    def of_comparison(self, raw_findings: Iterable[RawFinding]) -> None:
        groups: dict[tuple[str, frames.Chain, int], list[RawFinding]] = {}
        for raw in raw_findings:
            groups.setdefault((raw.code, raw.chain, raw.position), []).append(raw)
        for (code, chain, _), group in sorted(groups.items(), key=lambda item: not item[0][1]):
            place = self.roots.place(chain)
            if place is None and any(f.severity is Severity.ERROR for f in self.found.values()):
                continue  # inside of torch alone, as a backward pass is: what is known already may be why
            known = self.found.get((code, place.path, place.line)) if place else None
            values = tuple(dict.fromkeys(v for s in group for v in s.values))
            if sum(v.startswith(f"step {self.world.captured_step}: ") for v in values) > 1:  # of several numbers
                values = tuple(dict.fromkeys(" -> ".join(s.values) for s in group))
            numbers = {s.step: s.note[1] for s in group if s.note}
            if group[0].note:
                numbers[self.world.captured_step] = group[0].note[0]
            origin = traced(numbers, self.steps, self.roots.place)
            if known is not None and code in ("CG102", "CG103"):
                self._replace(
                    known, values=values[:_MOST_VALUES], message=f"{known.message}; its contents change{origin}"
                )
                continue
            worst = max(group, key=lambda s: s.severity.rank)
            if code in ("CG202", "CG208") and place is not None and self._read_here(place, values, worst.message):
                continue
            at = place or self.home
            trace = self.traces.setdefault((code, at.path, at.line), Trace())
            for raw in group:
                trace.add(raw, self.roots.where(chain))
            # Of many ops at one line (a loop, an optimizer) the first one's values are shown.
            worst.values = values[:_MOST_VALUES] if known is None else ()
            worst.message += origin
            self._add(worst, place)

    def of_launches(self) -> None:
        """A kernel is compiled anew because a number that it is launched with changes: that number is the cause."""
        for (code, path, line), finding in list(self.found.items()):
            cause = self.found.get(("CG202", path, line))
            if code == "CG307" and cause is not None and cause.severity is Severity.ERROR and finding.values:
                self._replace(finding, severity=Severity.WARNING)

    def of_branches(self, branches: Sequence[tuple[frames.CodeLocation, RawFinding]]) -> None:
        asked = list(self.world.asked_capturing)
        later = {index for index in self.steps if index > self.world.captured_step}
        parted: dict[frames.CodeLocation, set[int]] = {}
        for place, raw in branches:
            parted.setdefault(place, set()).add(raw.step)

        def capture_decides(place: frames.CodeLocation) -> bool:
            """Whether all steps that are not captured part from the captured one; live, it from its own eager run."""
            return bool(asked) and parted[place] in (later, {self.world.captured_step})

        # Where a step that is not captured takes the captured path, what does decide comes first.
        for place, raw in sorted(branches, key=lambda b: capture_decides(b[0])):
            if capture_decides(place):
                raw.code, raw.message = "CG211", "the step takes another path while it is captured"
                raw.values = ()  # what it did in other steps is no part of it
                if any(f.severity is Severity.ERROR for f in self.found.values()):
                    raw.severity = Severity.WARNING  # what is known already may be why a replay differs
                self._add(raw, self.roots.place(asked[0]))
                continue
            if raw.code != "CG202" and self._read_here(place, raw.values, raw.message):
                continue  # the host read is the cause and is named already
            self._add(raw, place)

    def _read_here(self, place: frames.CodeLocation, values: tuple[str, ...], what: str) -> bool:
        """Whether a host read of the same line is reported: what it does to that line's ops is told there."""
        for code in ("CG101", "CG108", "CG104"):
            known = self.found.get((code, place.path, place.line))
            if known is None or known.severity is not Severity.ERROR:
                continue
            if not known.values:
                told = what.split(";")[0]
                self._replace(known, values=values[:_MOST_VALUES], message=f"{known.message}; then {told}")
            return True
        return False

    def of_state(self, changed: dict[int, dict[str, tuple[Any, Any]]], codes: list[CodeType]) -> None:
        """Python state that a step changed in every step that was looked at after the warm-up."""
        later = {i: c for i, c in changed.items() if i > self.world.captured_step}
        names = dict.fromkeys(name for c in later.values() for name in c)
        if self.world.asked_capturing:  # what a step remembers about being captured flips back once
            first = min(later, default=0)
            names = dict.fromkeys(name for i, c in later.items() if i > first for name in c)
        for name in names:
            place = assignment_of(name, codes)
            if place is None:
                continue
            values = tuple(
                f"step {i}: {_show(c[name][0])} -> {_show(c[name][1])}" for i, c in changed.items() if name in c
            )
            mode = name.endswith(".training") or "_hooks" in name
            code = "CG311" if mode else "CG210"
            what = "the mode or hooks of a module change" if mode else "Python state changes"
            raw = RawFinding(
                0, code, Severity.WARNING, (),
                f"{what} in the step and not in a replay: {name.removesuffix(' (length)')}",
                SILENT, values[:_MOST_VALUES],
            )  # fmt: skip
            self._add(raw, place)

    def of_results(self, frozen: dict[str, tuple[Any, Any]]) -> None:
        """Python values that a step returns, by path, with what they were at capture and in a later step."""
        explained = any(f.severity is Severity.ERROR for f in self.found.values())
        for path, (ours, theirs) in frozen.items():
            at = self.world.captured_step
            raw = RawFinding(
                at, "CG210", Severity.WARNING if explained else Severity.ERROR, (),
                f"the step returns a Python value that changes, and a replay returns none: result{path}", SILENT,
                (f"step {at}: {_show(ours)}", f"later: {_show(theirs)}"),
            )  # fmt: skip
            self._add(raw, self.home, construct="return")

    def of_referee(self, verdicts: dict[int, Verdict]) -> None:
        """A replay that differs although nothing above explains it."""
        stale = [v for v in verdicts.values() if v.stale]
        if not stale or any(f.severity is Severity.ERROR for f in self.found.values()):
            return
        suspects = [f for f in self.found.values() if f.silent and f.code != "CG210"]
        if suspects:
            for finding in suspects:
                self._replace(finding, severity=Severity.ERROR)
            return
        unsure = all(v.doubtful and not v.outputs and not v.state and not v.failed for v in stale)
        text = "a replay gives another result than eager; no op explains it"
        if unsure:
            text = "a replay gives an op that cannot be computed here other arguments than eager did; no op explains it"
        values = tuple(
            f"step {v.step}: {', '.join(v.doubtful)} may differ"
            if unsure
            else f"step {v.step}: {v.failed or ', '.join(f'result{path}' for path in v.outputs) or 'state'} differs"
            for v in stale
        )
        raw = RawFinding(
            stale[0].step, "CG212", Severity.ERROR, (), text, SILENT, values[:_MOST_VALUES],
        )  # fmt: skip
        self._add(raw, self.home)

    def of_failure(self, error: str) -> None:
        """A capture that failed is an error, also where nothing names the line."""
        if not any(f.severity is Severity.ERROR for f in self.found.values()):
            text = "the step cannot be captured, and no op or call names the line"
            raw = RawFinding(self.world.captured_step, "CG105", Severity.ERROR, (), text, error)
            self._add(raw, self.home)

    def _add(self, raw: RawFinding, place: frames.CodeLocation | None, *, construct: str = "") -> None:
        place = place or self.home
        construct = construct or _unlooked(raw)
        key = (raw.code, place.path, place.line)
        known = self.found.get(key)
        if known is not None:
            worse = raw.severity.rank > known.severity.rank
            self._replace(
                known,
                count=known.count + raw.count,
                severity=raw.severity if worse else known.severity,
                follows=known.follows if known.follows and self._cause(raw, place) else None,
                values=tuple(dict.fromkeys(known.values + raw.values))[:_MOST_VALUES],
            )
            return
        self.found[key] = Finding(
            code=raw.code,
            severity=raw.severity,
            origin=self.origin,
            path=place.path,
            line=place.line,
            column=place.column,
            source=place.source,
            message=raw.message,
            happens=raw.happens,
            values=raw.values,
            calls=frames.frames(raw.chain, self.roots) if raw.chain else (),
            fix=fix(raw.code, place.path, place.line, place.column, construct=construct),
            follows=self._cause(raw, place),
            count=raw.count,
        )

    def _cause(self, raw: RawFinding, place: frames.CodeLocation) -> Cause | None:
        """The host read that simulation saw first, the line that used a rebound tensor first, or the one where the same
        op was met as opaque before."""
        if raw.code == "CG401" and isinstance(raw.note, str):
            first = self.opaque.setdefault(raw.note, place)
            return Cause(path=first.path, line=first.line, code="CG401") if first[:2] != place[:2] else None
        read = self.roots.place(raw.cause) if raw.cause else None
        if read is None:
            return None
        codes = sorted(CAUSES)
        if raw.code in _REPEATED and read[:2] != place[:2]:
            codes.append(raw.code)
        known = (self.found.get((code, read.path, read.line)) for code in codes)
        return next((Cause(path=f.path, line=f.line, code=f.code) for f in known if f is not None), None)

    def _replace(self, finding: Finding, **fields: Any) -> None:
        self.found[(finding.code, finding.path, finding.line)] = replace(finding, **fields)

    def report(self, target: str, steps: int) -> Report:
        captured = self.steps[self.world.captured_step]
        places = (self.roots.place(op.chain) for op in captured.ops)
        ran = frozenset((at.path, at.line) for at in places if at is not None)
        link(self.found, self.traces, self.steps, self.world.captured_step, ran)
        timeline = []
        seen: dict[int, StorageInfo] = {}
        by_place: dict[tuple[str, int], list[str]] = {}
        for code, path, line in self.found:
            by_place.setdefault((path, line), []).append(code)
        for index, op in enumerate(captured.ops):
            place = self.roots.place(op.chain) or frames.CodeLocation("", 0, 0, "")
            kind = "sync" if op.name == "aten._local_scalar_dense.default" else op.kind
            timeline.append(
                Event(
                    index=index, name=op.name, kind=kind, path=place.path, line=place.line, module=_module(op.chain),
                    reads=op.reads, writes=op.writes, allocates=op.allocates, bytes=op.bytes,
                    codes=tuple(dict.fromkeys((*op.codes, *by_place.get((place.path, place.line), ())))),
                )
            )  # fmt: skip
            for number in (*op.reads, *op.writes, *op.allocates):
                kind = "input" if number in captured.inputs else "external" if number in op.externals else "graph"
                if number not in seen:
                    size = self.world.sizes.get(number, 0)
                    seen[number] = StorageInfo(number=number, kind=kind, bytes=size, name=self.names.get(number, ""))
        return Report(
            target=target,
            findings=ordered(self.found.values()),
            origins=(self.origin,),
            steps=steps,
            timeline=tuple(timeline),
            storages=tuple(seen[n] for n in sorted(seen)),
            facts={"warm-up": self._warm_up_alone()},
        )

    def _warm_up_alone(self) -> list[tuple[str, int]]:
        """Lines whose ops ran before the captured step, and never again."""
        before: set[frames.Chain] = set()
        since: set[frames.Chain] = set()
        for index, step in self.steps.items():
            chains = {id(op.chain): op.chain for op in step.ops}  # most are those of the captured step: hashed once
            (before if index < self.world.captured_step else since).update(chains.values())
        if not before - since:
            return []
        first, later = (
            {(at.path, at.line) for at in map(self.roots.place, chains) if at is not None} for chains in (before, since)
        )
        return sorted(first - later)


def home_of(step: Callable[..., Any], factory: Callable[..., Any]) -> frames.CodeLocation:
    """The first line of the step's own code, or of the factory's where the step is torch's (a module, an op)."""
    for thing in (step, getattr(step, "__func__", None), getattr(type(step), "forward", None), inspect.unwrap(factory)):
        code = getattr(thing, "__code__", None)
        if code is not None and not frames._skipped(code.co_filename):
            source = frames.linecache.getline(code.co_filename, code.co_firstlineno).rstrip("\n")
            return frames.place(code, 0)._replace(line=code.co_firstlineno, source=source)
    return frames.CodeLocation("<step>", 1, 1, "")


def _module(chain: frames.Chain) -> str:
    """Name of the innermost `forward`'s class, for grouping."""
    return next((code.co_qualname.rsplit(".", 1)[0] for code, _ in chain if code.co_name == "forward"), "")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _unlooked(raw: RawFinding) -> str:
    """Of a launch that nothing looked into, what it was: the code around it may only call what launches."""
    if raw.code != "CG401":
        return ""
    if raw.severity is Severity.ERROR:
        return "declared"
    if not isinstance(raw.note, str):
        return "address"
    return "kernel" if raw.note.startswith("triton:") else ""
