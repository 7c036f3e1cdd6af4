"""The simulation against what the GPU measured: every case of the corpus, and those held out while it was written."""

import contextlib
import io

import corpus_tools
import pytest
from accuracy import bad

from onegraph.check import CheckError, Severity, check_step
from onegraph.check.report import relative

TRUTH = corpus_tools.truth()
CASES = [(folder, case) for folder in corpus_tools.FOLDERS for case in corpus_tools.cases(folder)]
SEEN = [pytest.param(f, c, id=f"{f}-{c.name}") for f, c in CASES]
REFUSED = {"heldout3/h01_training:factory_ok_lazy_layer": "lazy module"}
"""The one kind of code that a simulation refuses."""


@pytest.mark.parametrize(("folder", "case"), SEEN)
def test_findings_stand_on_the_expected_lines(folder, case):
    if refusal := REFUSED.get(f"{folder}/{case.name}"):
        with pytest.raises(CheckError, match=refusal):
            check_step(case.factory)
        return
    with contextlib.redirect_stdout(io.StringIO()):
        report = check_step(case.factory, source=folder == "triton")  # Triton's: source and steps, as the command
    found = {(f.line, f.code): f for f in report.findings}
    for expected in case.expected:
        hits = [found[expected.line, code] for code in expected.codes if (expected.line, code) in found]
        assert hits or expected.optional, f"line {expected.line}: {set(expected.codes)} not among {sorted(found)}"
    # What the author of a held-out case did not think of may be told, as long as it is no error.
    told = report.findings if folder == "corpus" else report.errors
    counted = {(f.line, f.code) for f in told}
    unexpected = [p for p in counted if not any(e.line == p[0] and p[1] in e.codes for e in case.expected)]
    assert not unexpected
    row = TRUTH[f"{folder}/{case.name}"]
    assert bool(report.errors) == bad(row), f"the GPU says {row}"


def test_truth_was_measured_for_every_case_of_one_gpu():
    assert {f"{f}/{c.name}" for f, c in CASES if c.gpus == 1} <= set(TRUTH)


def test_kinds_of_cases_are_what_the_gpu_measured():
    for folder, case in CASES:
        row = TRUTH.get(f"{folder}/{case.name}")
        if row is not None:
            assert row["eager"] == "ok"
            assert bad(row) == (case.kind == "bad"), f"{case.name}: {row}"


def test_every_hazard_has_a_failing_case_and_a_safe_twin():
    for path in {case.path for folder, case in CASES if folder == "corpus"}:
        kinds = {case.kind for folder, case in CASES if case.path == path}
        assert "ok" in kinds, path
        assert kinds & {"bad", "quiet"}, path


def test_message_of_a_stale_number_names_the_line_of_the_read():
    case = next(c for _, c in CASES if c.name == "h01_item:factory_bad_item")
    report = check_step(case.factory)
    read = next(f for f in report.findings if f.code == "CG101")
    stale = next(f for f in report.findings if f.code == "CG202")
    assert stale.severity is Severity.ERROR
    assert f"{relative(read.path)}:{read.line}" in stale.message
    assert ".item()" in stale.message
