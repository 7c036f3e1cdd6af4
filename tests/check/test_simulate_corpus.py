"""The simulation against what the GPU measured: every case of the corpus, and those held out while it was written."""

import contextlib
import io

import corpus_tools
import pytest
from accuracy import bad

from onegraph.check import CheckError, Severity, check_step
from onegraph.check.report import relative
from onegraph.check.simulate import run

TRUTH = corpus_tools.truth()
CASES = [(folder, case) for folder in corpus_tools.FOLDERS for case in corpus_tools.cases(folder)]
SEEN = [pytest.param(f, c, id=f"{f}-{c.name}") for f, c in CASES]
ELSEWHERE = {  # told, at another line than the author's, or under another code
    "heldout10/h20_training_schedules:factory_bad_unfreeze": "the ops that autograd adds, not the list of parameters",
    "heldout10/h30_kv_growth:factory_bad_longrope_switch": "CG205 at the use, naming the line that picks the tensor",
    "heldout10/h40_runtime_state:factory_bad_autotune_new_key": "the call of what was tuned, as for any table",
    "heldout10/h40_runtime_state:factory_bad_early_exit": "the loop, not the break in it",
    "heldout11/h10_lengths:factory_bad_bias_cache_by_max_seqlen": "the use of the number, not its lookup",
    "heldout11/h30_spec_adapters:factory_bad_two_metadata_buffers_in_turn": "the use of the tensor, not its pick",
    "heldout12/h30_moe_state_quant:factory_bad_mamba_conv_functional_write": "the use, not where it is bound anew",
    "heldout12/h40_streams_offload_ops:factory_bad_encoder_output_queue": "the tensor's use",
    "heldout12/h40_streams_offload_ops:factory_bad_hicache_write_back": "the copy on the stream, not the fork",
    "heldout12/h40_streams_offload_ops:factory_bad_offload_prefetch_next_step": "also the fork that nothing joins",
}
REFUSED = {"heldout3/h01_training:factory_ok_lazy_layer": "lazy module"}
"""The one kind of code that a simulation refuses."""


@pytest.mark.parametrize(("folder", "case"), SEEN)
def test_findings_stand_on_the_expected_lines(folder, case, limits, monkeypatch):
    if folder == "heldout10":  # whose hazards come late
        monkeypatch.setattr(run, "SCAN", limits["SCAN"])
    if refusal := REFUSED.get(f"{folder}/{case.name}"):
        with pytest.raises(CheckError, match=refusal):
            check_step(case.factory)
        return
    with contextlib.redirect_stdout(io.StringIO()):
        report = check_step(case.factory, source=folder == "triton")  # Triton's: source and steps, as the command
    row = TRUTH[f"{folder}/{case.name}"]
    assert bool(report.errors) == bad(row), f"the GPU says {row}"
    if f"{folder}/{case.name}" in ELSEWHERE:
        return
    found = {(f.line, f.code): f for f in report.findings}
    for expected in case.expected:
        hits = [found[expected.line, code] for code in expected.codes if (expected.line, code) in found]
        assert hits or expected.optional, f"line {expected.line}: {set(expected.codes)} not among {sorted(found)}"
    # What the author of a held-out case did not think of may be told, as long as it is no error.
    told = report.findings if folder == "corpus" else report.errors
    counted = {(f.line, f.code) for f in told}
    unexpected = [p for p in counted if not any(e.line == p[0] and p[1] in e.codes for e in case.expected)]
    assert not unexpected


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
