"""Why torch leaves out, splits or records again the CUDA graphs of a function that it compiles with graphs of its own.

`torch.compile(mode="reduce-overhead")` captures what it can and goes on without a word where it cannot (only
`TORCH_LOGS=cudagraphs` shows "skipping cudagraphs due to ..."). The reasons are inductor's own
(torch/_inductor/cudagraph_utils.py, `should_partition` of scheduler.py), applied to the ops that the function runs, so
that each has its line: a written input whose address is not fixed, an op or a copy on the CPU, a result whose shape
depends on values, a value read on the host, where one compiled graph ends and another begins; other shapes or numbers
in other calls, each of which is recorded as a graph of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onegraph.check import containers
from onegraph.check.report import Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.records import OpRecord, RawFinding
from onegraph.check.simulate.state import Snapshot

MOST_CALLS = 8
"""Calls of one function that are looked at."""

NO_GRAPH = "no error: torch runs the function without a CUDA graph"
SPLIT = "no error: torch captures the parts before and after it, and runs this part without a graph"
AGAIN = "no error: torch records another graph"
_BREAKS = {"CG101": "a device value is read on the host", "CG108": "a branch is taken on a device value"}
_SHAPES = {"CG104": "the shape of a result depends on device values"}


@dataclass(eq=False)
class Call:
    """One call of a function that torch compiles with graphs of its own.

    Args:
        ops: what it ran. hosts: ops on the CPU, by name, with their calls. seen: hazards met in it.
        fixed: storages whose address torch takes as fixed: those that modules hold. names: of storages.
        older: storages that were there before the call.
        shapes, numbers: of its arguments, by path.
    """

    function: Any
    chain: frames.Chain
    step: int
    ops: list[OpRecord] = field(default_factory=list)
    hosts: list[tuple[str, frames.Chain]] = field(default_factory=list)
    seen: list[RawFinding] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    older: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)


class _Held(Snapshot):
    """Also knows what is held by modules: whatever dynamo reaches through one (parameters, buffers, other tensors and
    what is in objects of theirs) it takes for static, which other closures, globals and arguments are not."""

    def __init__(self, function: Callable[..., Any], roots: frames.Roots) -> None:
        self.fixed: set[int] = set()
        self._modules: tuple[str, ...] = ()
        super().__init__(function, roots)

    def _visit(self, name: str, value: Any, roots: frames.Roots) -> Iterator[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            self._modules += (f"{name}.",)
        elif isinstance(value, DeviceTensor) and name.startswith(self._modules):
            self.fixed.add(value.record.number)
        yield from super()._visit(name, value, roots)


def watched(world: Machine, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)` in a running step, noted in `world.calls` for `skips`."""
    step = world.current
    if step is None or world.hosts is not None or sum(c.function is function for c in world.calls) >= MOST_CALLS:
        return function(*args, **kwargs)
    call = Call(function, world.chain(3), world.step, older=world.storages.count)
    given = {"args": args, "kwargs": kwargs}
    tensors = containers.tensors(given)
    call.shapes = {_named(path): tuple(t.shape) for path, t in tensors.items()}
    call.numbers = {_named(path): value for path, value in containers.numbers(given).items()}
    with world.off():
        held = _Held(function, world.roots)
    modules = [m for m in (*args, *kwargs.values()) if isinstance(m, nn.Module)]
    named_static = [t for t in tensors.values() if hasattr(t, "_dynamo_static_input_type")]
    inside = [t for m in modules for part in m.modules() for t in vars(part).values()]
    inside += [t for m in modules for t in (*m.parameters(), *m.buffers())]
    call.fixed = held.fixed | {t.record.number for t in (*named_static, *inside) if isinstance(t, DeviceTensor)}
    named = {t.record.number: f"the argument {_named(p)}" for p, t in tensors.items() if isinstance(t, DeviceTensor)}
    call.names = {**held.storages, **named}
    begin, seen, world.hosts = len(step.ops), len(world.raw_findings), call.hosts
    try:
        return function(*args, **kwargs)
    finally:
        world.hosts = None
        call.ops, call.seen = step.ops[begin:], world.raw_findings[seen:]
        world.calls.append(call)


def _named(path: str) -> str:
    return path.replace("['args']", "args", 1).replace("['kwargs']", "kwargs", 1)


def skips(calls: list[Call], at: int | None = None) -> list[RawFinding]:
    """What keeps torch from one graph for each function, each reason once a line, as warnings at the user's lines.

    Args:
        calls: as `watched` notes them.
        at: step that the warnings belong to; None: that of the call.
    """
    found: dict[tuple[str, frames.Chain], RawFinding] = {}
    for call in calls:
        for message, happens, chain, values in (*_written(call), *_outside(call), *_broken(call)):
            number = call.step if at is None else at
            made = RawFinding(number, "CG314", Severity.WARNING, chain, message, happens, values)
            found.setdefault((message, chain), made)
    for raw in _many(calls, at):
        found.setdefault((raw.message, raw.chain), raw)
    return list(found.values())


Reason = tuple[str, str, frames.Chain, tuple[str, ...]]


def _written(call: Call) -> Iterator[Reason]:
    """`check_for_mutation`: an input is written whose address torch does not take as fixed."""
    for op in call.ops:
        for number in op.writes:
            if number <= call.older and number not in call.fixed:
                name = call.names.get(number, "a tensor from outside of it")
                text = f"the compiled function writes {name}, whose address torch does not know to be fixed"
                yield text, NO_GRAPH, op.chain, ("torch: skipping cudagraphs due to mutated inputs",)


def _outside(call: Call) -> Iterator[Reason]:
    """`check_multiple_devices_or_any_cpu_nodes`, `should_partition`: work on the CPU, or a copy from or to it."""
    for name, chain in call.hosts:
        short = name.removeprefix("aten::")
        yield f"{short} runs on the CPU inside of the compiled function", SPLIT, chain, ("torch: cpu device",)
    for op in call.ops:
        if op.kind in ("h2d", "d2h"):
            ways = "to the device" if op.kind == "h2d" else "to the host"
            yield f"a copy {ways} inside of the compiled function", SPLIT, op.chain, ("torch: DeviceCopy ops",)


def _broken(call: Call) -> Iterator[Reason]:
    """Graph breaks of dynamo, and ops that inductor keeps out of graphs."""
    for raw in call.seen:
        what = raw.message
        if raw.code in _BREAKS:
            text = f"{what} ({raw.code}): the compiled graph ends here and a second one begins"
            yield text, "no error: two graphs, with the host in between", raw.chain, ()
        elif raw.code in _SHAPES:
            yield f"{what} (CG104): no graph can hold it", SPLIT, raw.chain, ("torch: unbacked binding ops",)
        elif raw.code == "CG105":
            yield f"{what} (CG105): no graph can hold it", SPLIT, raw.chain, ("torch: CUDAGraph-unsafe ops",)


def _many(calls: list[Call], at: int | None) -> Iterator[RawFinding]:
    """A function whose arguments change: torch compiles it for any size, and records a graph for each."""
    by: dict[int, list[Call]] = {}
    for call in calls:
        by.setdefault(id(call.function), []).append(call)
    for group in by.values():
        last = group[-1]
        for what, kind in (("shapes", "shape"), ("numbers", "number")):
            for path in getattr(last, what):
                values = dict.fromkeys(getattr(c, what).get(path) for c in group)
                if len(values) > 1:
                    shown = tuple(f"{path}: {list(v) if isinstance(v, tuple) else v}" for v in values)
                    yield RawFinding(
                        last.step if at is None else at, "CG314", Severity.WARNING, last.chain,
                        f"the {kind} of an argument of the compiled function changes: each is a graph of its own",
                        AGAIN, shown[:6],
                    )  # fmt: skip
                    break
