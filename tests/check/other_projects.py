"""Other projects' tests that capture graphs, each as a program under `onegraph check --run`.

    python tests/check/other_projects.py NAME TESTS.py FOLDER [PATTERN]    # results in FOLDER and other_projects.json

TESTS.py is a unittest file in a checkout of that project; none is part of this repository. Its module is imported once,
on the simulated GPU. Then each test whose source captures goes on in a process of its own, as the rest of the program,
so that its report is about it alone. A row of other_projects.json says what the test found and what was reported.
"""

import importlib.util
import inspect
import json
import os
import re
import signal
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".json")
LONGEST = 90
"""Seconds of one test and its report."""

CAPTURES = re.compile(
    r"cuda\.graph\(|CUDAGraph|make_graphed_callables|cudagraph|reduce-overhead|max-autotune|cuda_graph|capture_begin"
)
POLICIES = ("_do_cuda_memory_leak_check", "_do_cuda_non_default_stream")
"""Of torch's TestCase: they ask for functions of torch._C that a CPU build lacks."""

PLACE = "ONEGRAPH_OTHER_PROJECT"
"""The variable of the environment in which the process of a test says where its results belong."""


def program(path: Path, folder: Path, pattern: str) -> None:
    """Fork for every test that is not in `folder` yet. The process of a test returns; the first one never does."""
    sys.path[:0] = [str(path.parent), str(path.parents[1])]
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for cls in [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]:
        for policy in POLICIES:
            setattr(cls, policy, False)  # a test takes them up where it is made
    for test in flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        place = folder / test.id().split(".", 1)[-1].replace(".", "::")
        if not (re.search(pattern, test.id()) and captures(test)) or place.with_suffix(".test").exists():
            continue
        process = os.fork()
        if process == 0:
            os.environ[PLACE] = str(place)
            signal.alarm(LONGEST)
            return run(test, place)
        _, status = os.waitpid(process, 0)
        if not place.with_suffix(".test").exists():
            place.with_suffix(".test").write_text(json.dumps({"test": "died", "why": f"status {status}"}))
    os._exit(0)


def captures(test: unittest.TestCase) -> bool:
    """Whether the test's name or source says that it captures."""
    try:
        text = inspect.getsource(inspect.unwrap(getattr(test, test._testMethodName)))
    except (OSError, TypeError):
        text = ""
    return CAPTURES.search(test.id() + text) is not None


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def run(test: unittest.TestCase, place: Path) -> None:
    """Run one test, and note what it found."""
    result = unittest.TestResult()
    test.run(result)
    told: dict[str, Any] = {"test": "passed"}
    for how, found in (("skipped", result.skipped), ("failed", result.failures), ("raised", result.errors)):
        if found:
            place.with_suffix(".err").write_text(str(found[0][1]))
            raised = [line for line in str(found[0][1]).splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
            told = {"test": how, "why": (raised or str(found[0][1]).splitlines())[-1][:160]}
    place.with_suffix(".test").write_text(json.dumps(told))


def reported(words: list[str]) -> dict[str, Any]:
    """What the check says of a program: its verdict, captures, compared replays, codes by severity."""
    from onegraph.check.program.run import run_program
    from onegraph.check.report import CheckError

    try:
        report = run_program(words)
    except CheckError as error:
        return {"check": str(error).partition(f"{words[0]} ")[2].partition(": ")[2][:160] or str(error)[-160:]}
    found = report.facts["captures"]
    return {
        "check": str(report.verdict),
        "captures": len(found) + report.facts["compiled calls"],
        "compared": sum(capture["compared"] for capture in found),
        "findings": dict(sorted(Counter(f"{f.code} {f.severity}" for f in report.findings).items())),
        "lines": sorted({f"{f.code} {os.path.basename(f.path)}:{f.line}" for f in report.findings}),
    }


def main(name: str, tests: str, folder: str, pattern: str = "") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process == 0:
        row = reported([__file__, "--program", str(Path(tests).resolve()), str(Path(folder).resolve()), pattern])
        place = Path(os.environ.get(PLACE, f"{folder}/module"))
        place.with_suffix(".report").write_text(json.dumps(row))
        os._exit(0)
    os.waitpid(process, 0)
    known = json.loads(LIST.read_text()) if LIST.is_file() else {}
    rows = known[name] = {}
    for path in sorted(Path(folder).glob("*.test")):
        told = path.with_suffix(".report")
        row = json.loads(told.read_text()) if told.is_file() else {"check": "no report"}
        rows[path.stem] = json.loads(path.read_text()) | row
    LIST.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(name, len(rows), Counter((row["test"], "captures" in row) for row in rows.values()))


if __name__ == "__main__":
    if sys.argv[1] == "--program":
        program(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main(*sys.argv[1:])
