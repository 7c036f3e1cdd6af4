"""Precision, recall and line accuracy of the default command and of each way alone, against what the GPU measured.

    python tests/check/accuracy.py --ways default                   # `onegraph check file.py:factory`, as users run it
    python tests/check/accuracy.py --ways source simulate           # on any machine
    python tests/check/accuracy.py --ways live --save live.json     # on a GPU; --load joins it elsewhere
    python tests/check/accuracy.py --folders heldout4 --by-author   # as for a set that no GPU has measured yet

A case is *bad* if torch alone could not capture it, or a replay differed from eager, on the GPU (truth.json). Counted:

- recall: bad cases in which the way reports an error under an expected code, over bad cases of the hazards it claims.
- precision: error findings at an expected line under an expected code of a bad case, over all error findings.
- line: bad cases found whose finding stands on the expected line, over bad cases found under that code anywhere.
"""

import argparse
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import corpus_tools
import lanes

from onegraph.engine.record import emit, machine

NOT_CLAIMED = {
    # hazard of the file name -> why. Rows "-" and "~" of the table of hazards, as far as this way goes.
    "simulate": {},
    "source": {10: "host state", 11: "numbers that change", 12: "values", 14: "storages", 16: "pinned memory",
               17: "shapes", 18: "output order", 23: "streams", 26: "autograd", 27: "laziness", 31: "modes",
               6: "kernels' host code"},
    "live": {},
    "default": {},
}  # fmt: skip


def bad(row: dict[str, Any]) -> bool:
    return row.get("capture") != "ok" or row.get("replay") != "equal"


def look(way: str, folder: str, name: str) -> dict[str, Any]:
    """The findings of one way of looking at one case: [[code, severity, line], ...] or {"error": ...}."""
    warnings.filterwarnings("ignore")
    case = next(c for c in corpus_tools.cases(folder) if c.name == name)
    from onegraph.check.report import CheckError

    if way == "default":
        return _command(case)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if way == "source":
                from onegraph.check.source import check_source

                report = check_source(str(case.path), case.name.split(":")[1])
            else:
                from onegraph.check import check_step

                report = check_step(case.factory, source=False, simulate=way == "simulate", live=way == "live")
    except CheckError as error:
        return {"error": str(error)}
    return {"findings": [[f.code, f.severity.value, f.line] for f in report.findings]}


def _command(case: corpus_tools.Case) -> dict[str, Any]:
    """What `onegraph check file.py:factory --json` prints, with every default; exit status 2 is an error."""
    from onegraph.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["check", case.target, "--gpus", str(case.gpus), "--json"])
    if status == 2:
        return {"error": err.getvalue().strip()}
    found = json.loads(out.getvalue())["findings"]
    return {"findings": [[f["code"], f["severity"], f["line"]] for f in found if not f.get("follows")]}


def by_author(folder: str) -> dict[str, Any]:
    """Rows as truth.json would hold them, if each case did what its name says."""
    replays = {"bad": "differs"}
    return {
        f"{folder}/{case.name}": {"eager": "ok", "capture": "ok", "replay": replays.get(case.kind, "equal")}
        for case in corpus_tools.cases(folder)
    }


def score(way: str, folder: str, seen: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    wrong: list[str] = []
    found = claimed = right_line = errors = right_errors = unable = 0
    for case in corpus_tools.cases(folder):
        row, result = truth.get(f"{folder}/{case.name}"), seen.get(f"{folder}/{case.name}")
        if row is None or result is None or row.get("eager") != "ok":
            continue
        unable += "error" in result
        reported = [(c, line) for c, severity, line in result.get("findings", []) if severity == "error"]
        errors += len(reported)
        right = [r for r in reported if bad(row) and any(r[0] in e.codes and r[1] == e.line for e in case.expected)]
        right_errors += len(right)
        wrong += [f"{case.name}: {c} at line {line} is not expected" for c, line in reported if (c, line) not in right]
        needed = [e for e in case.expected if not e.optional and e.codes != {"CG210"}]
        if not bad(row) or (case.hazard in NOT_CLAIMED[way]):
            continue
        claimed += 1
        codes = frozenset().union(*(e.codes for e in case.expected))
        hit = [r for r in reported if r[0] in codes]
        found += bool(hit)
        lines = {e.line for e in needed or case.expected}
        right_line += any(r in hit and r[1] in lines for r in right)
        if not hit:
            wrong.append(f"{case.name}: missed")
    return {
        "bad cases": claimed,
        "recall": round(found / max(claimed, 1), 3),
        "error findings": errors,
        "precision": round(right_errors / max(errors, 1), 3),
        "right line": round(right_line / max(found, 1), 3),
        "could not run": unable,
        "wrong": wrong,
    }


def raw_line(way: str, cases: str, row: dict[str, Any]) -> dict[str, Any]:
    """The score as a raw line; `wrong` says which cases and why."""
    what = {"bench": "check-accuracy", "cases": cases, "way": way, "run": "now"}
    return (
        what
        | {key.replace(" ", "_"): value for key, value in row.items()}
        | machine("cuda" if way == "live" else "cpu")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["source", "simulate"])
    parser.add_argument("--folders", nargs="+", default=list(corpus_tools.FOLDERS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of the cases to look at")
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th case, from the K-th on")
    parser.add_argument("--save", default="", help="write the findings here, as they come")
    parser.add_argument("--load", nargs="+", default=[], help="findings saved before; this run's replace them")
    parser.add_argument(
        "--out", type=Path, help="append a line a score, as benchmarks/results/check-accuracy.jsonl has"
    )
    parser.add_argument("--by-author", action="store_true", help="cases without a measured row do what their name says")
    arguments = parser.parse_args()
    seen: dict[str, dict[str, Any]] = {}
    for path in arguments.load:
        for way, results in json.loads(Path(path).read_text()).items():
            seen.setdefault(way, {}).update(results)
    todo = [(w, f, c) for w in arguments.ways for f in arguments.folders for c in corpus_tools.cases(f)]
    todo = [(w, f, c) for w, f, c in todo if any(part in f"{f}/{c.name}" for part in arguments.cases)]
    first, count = map(int, arguments.shard.split("/"))
    tasks = [(w, f, c.name) for w, f, c in todo if _possible(w, c)][first::count]
    # Imported once, before the fork; nothing here touches the GPU.
    import onegraph.check.live.run  # noqa: F401

    spoiled = []
    for task, answer in lanes.answers(look, tasks, workers=arguments.workers, fit=_fit):
        _keep(seen, task, answer, arguments.save)
        if "CUDA" in answer.get("error", ""):
            spoiled.append(task)  # perhaps by a capture that broke before it in the same process
    for task, answer in lanes.answers(look, spoiled, workers=1, fit=lambda: False):
        _keep(seen, task, answer, arguments.save)
    truth = corpus_tools.truth()
    for folder in arguments.folders:
        for way in seen:
            assumed = by_author(folder) if arguments.by_author else {}
            row = score(way, folder, seen[way], assumed | truth)
            print(f"{folder:8} {way:9}", {k: v for k, v in row.items() if k != "wrong"})
            if arguments.out:
                emit(raw_line(way, folder, row), arguments.out)
            for line in row["wrong"]:
                print("    ", line)
    for way, results in seen.items():
        for name, answer in results.items():
            if "error" in answer:
                print(f"     could not run: {way} {name}: {answer['error'][:200]}")


def _keep(seen: dict[str, dict[str, Any]], task: tuple[Any, ...], answer: dict[str, Any], save: str) -> None:
    way, folder, name = task
    seen.setdefault(way, {})[f"{folder}/{name}"] = answer
    if save:
        Path(save).write_text(json.dumps(seen, indent=0, sort_keys=True))


def _fit() -> bool:
    """Whether this process can go on: a case may leave the GPU, or its random numbers, unusable, and the first thing
    that torch compiles switches the checks of its distributions off."""
    import torch

    if not torch.distributions.Distribution._validate_args:
        return False
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.rand(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _possible(way: str, case: Any) -> bool:
    if way != "live":
        return True
    import torch

    return torch.cuda.device_count() >= case.gpus


if __name__ == "__main__":
    main()
