"""Whether edited files still mean what they meant: checked and run again, in a process and a folder of their own.

`python -m onegraph.check.rewrite.verify TARGET OUT OPTIONS` writes the report of a target and what its steps give;
OPTIONS are those of the check, as JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onegraph.check.api import check_target
from onegraph.check.report import CheckError, Report
from onegraph.check.targets import Options, has_factory, load

STEPS = 4

_ROUNDED = 1e-3


@dataclass(frozen=True)
class Seen:
    """A target as it was checked: the report, and what each step returned and left, by path (None for a file)."""

    report: Report
    results: Any


def look(target: str, edited: dict[str, bytes], root: str, options: Options) -> Seen:
    """Check `target` with the files below `root` in `edited` (by absolute path) in place of what is on the disk.

    The rest of `root` is linked to. Raises CheckError where the target cannot be checked.
    """
    with tempfile.TemporaryDirectory(prefix="onegraph-fix-") as folder:
        copy, out = os.path.join(folder, "tree"), os.path.join(folder, "seen")
        _mirror(root, copy, edited)
        where, colon, name = target.rpartition(":") if has_factory(target) else (target, "", "")
        module = not (where.endswith(".py") or os.sep in where)
        if not module:
            where = os.path.join(copy, os.path.relpath(os.path.abspath(where), root))
        command = [
            sys.executable,
            "-m",
            "onegraph.check.rewrite.verify",
            f"{where}{colon}{name}",
            out,
            json.dumps(asdict(options)),
        ]
        path = os.pathsep.join(dict.fromkeys(["", *filter(None, sys.path)]))
        environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy if module else None, env=os.environ | environment, capture_output=True,
                text=True, timeout=options.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CheckError(
                f"target {target!r}: --fix took longer than {options.timeout_s:g} seconds to check it again"
            ) from None
        if not os.path.exists(out):
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckError(f"target {target!r}: {last.removeprefix('onegraph: error: ')}")
        return _loaded(out, copy, root)


def same(before: Seen, after: Seen, gone: list[str], *, rounded: bool = False) -> bool:
    """Whether a finding of each code in `gone` went, none came, and every step gives what it gave.

    `rounded`: a rewrite computes the same in another order of roundings, which add up over the steps.
    """
    old, new = (Counter(f.code for f in seen.report.findings) for seen in (before, after))
    if any(new[code] > old[code] for code in new) or any(old[c] - new[c] < n for c, n in Counter(gone).items()):
        return False
    return before.results is None or equal(before.results, after.results, rounded=rounded)


def _mirror(root: str, copy: str, edited: dict[str, bytes]) -> None:
    """`copy` is `root` by links, but for the files in `edited`."""
    os.makedirs(copy)
    own = {os.path.relpath(path, root).split(os.sep)[0] for path in edited}
    for entry in os.scandir(root):
        target = os.path.join(copy, entry.name)
        if entry.name not in own:
            os.symlink(entry.path, target)
        elif entry.path in edited:
            Path(target).write_bytes(edited[entry.path])
        else:
            below = {p: text for p, text in edited.items() if p.startswith(entry.path + os.sep)}
            _mirror(entry.path, target, below)


def _loaded(out: str, copy: str, root: str) -> Seen:
    import torch

    body = torch.load(out, weights_only=True)
    text = body["report"].replace(os.path.realpath(copy), root).replace(copy, root)
    return Seen(Report.from_json(text), body["results"])


def equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, rounded: bool = False) -> bool:
    """Whether two runs gave the same tensors, up to one rounding, or (`rounded`) to a thousandth of the largest."""
    from onegraph.check.simulate.replay import close

    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a.keys() - b.keys() or any(not key.startswith("state ") for key in b.keys() - a.keys()):
            return False  # what is made at construction now is state that was not there
    pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) for key in a]
    compared = [close(x, y) for x, y in pairs]
    return all(fine or (rounded and error <= _ROUNDED) for fine, error in compared)


def results(target: str, steps: int, gpus: int) -> list[dict[str, Any]]:
    """What the first steps of a target return on the simulated machine, run eagerly, plain tensors by path."""
    import torch

    from onegraph.check import compat, containers
    from onegraph.check.simulate import frames
    from onegraph.check.simulate.calling import call_step, given_of
    from onegraph.check.simulate.cuda import machine
    from onegraph.check.simulate.device import plain_of
    from onegraph.check.simulate.state import Snapshot
    from onegraph.check.simulate.world import World

    factory = load(target).factory
    roots = frames.Roots()
    world = World(call_step.__code__, roots, gpus)
    torch.default_generator.manual_seed(0)
    found = []
    with machine(world):
        step, inputs = factory()
        held = Snapshot(step, roots).tensors
        for index in range(steps):
            arguments, keywords = given_of(index, inputs(index))
            result = call_step(step, arguments, keywords)
            tensors = {f"result{path}": t for path, t in containers.tensors(result).items()}
            tensors |= {f"given{path}": t for path, t in containers.tensors((arguments, keywords)).items()}
            tensors |= {f"state {name}": t for name, t in Snapshot(step, roots).tensors.items() if name in held}
            with compat.no_torch_function(), world.off():
                found.append({path: plain_of(t).detach().clone() for path, t in tensors.items()})
    return found


def main(target: str, out: str, options: Options) -> int:
    """See the module; the exit status is 2 where the target cannot be checked."""
    import torch

    try:
        with contextlib.redirect_stdout(sys.stderr):
            report = check_target(target, options)
            given = results(target, STEPS, options.gpus) if has_factory(target) else None
    except CheckError as error:
        print(f"onegraph: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    torch.save({"report": report.to_json(), "results": given}, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Options(**json.loads(sys.argv[3]))))
