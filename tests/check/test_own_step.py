"""onegraph's own decode step obeys the contract that onegraph checks, on every commit; live where there is a GPU."""

import own_step
import pytest

from onegraph.check import Verdict, check_step, declared


@pytest.mark.parametrize("factory", [own_step.greedy, own_step.sampling], ids=lambda f: f.__name__)
def test_decode_step_is_clean_in_simulation(factory):
    with declared("onegraph::*"):  # their references run in its place; the kernels' own tests vouch for them
        report = check_step(factory, steps=5)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]
    assert len(report.timeline) > 20


def test_undeclared_kernels_are_never_called_safe():
    report = check_step(own_step.greedy)
    assert report.verdict is Verdict.UNVERIFIED
    assert report.codes == {"CG401"}
    assert report.exit_code() == 0
    assert report.exit_code(strict=True) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("factory", [own_step.greedy, own_step.sampling], ids=lambda f: f.__name__)
def test_decode_step_is_clean_live(factory):
    report = check_step(factory, simulate=False, live=True, steps=5)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]
    assert report.facts["tensor bytes left by them"] == 0
