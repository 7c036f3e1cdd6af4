"""onegraph's own decode step obeys the contract that onegraph checks, on every commit; live where there is a GPU."""

import sys
import types

import own_step
import pytest

from onegraph.check import Verdict, check_step, declared
from onegraph.check.declared import _of_libraries, capturable

FACTORIES = [own_step.greedy, own_step.sampling, own_step.ngram, own_step.drafted]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_decode_step_is_clean_in_simulation(factory):
    report = check_step(factory, steps=5)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]
    assert len(report.timeline) > 20


def test_a_ranks_step_is_clean_in_simulation():
    report = check_step(own_step.rank, steps=5, gpus=2)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]


def test_a_kernel_that_nobody_vouches_for_is_never_called_safe(monkeypatch):
    monkeypatch.delattr("onegraph.ops.__capturable__")
    _of_libraries.cache_clear()
    report = check_step(own_step.greedy)
    _of_libraries.cache_clear()
    assert report.verdict is Verdict.UNVERIFIED
    assert report.codes == {"CG401"}
    assert report.exit_code() == 0
    assert report.exit_code(strict=True) == 1


def test_a_library_speaks_for_its_own_namespace_and_no_other(monkeypatch):
    module = types.ModuleType("a_library")
    module.__capturable__ = ("mylib::*", "*::anything", 3)
    monkeypatch.setitem(sys.modules, "a_library", module)
    assert capturable("mylib::op") is True
    assert capturable("other::anything") is None
    with declared("mylib::op", capturable=False):
        assert capturable("mylib::op") is False


@pytest.mark.gpu
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_decode_step_is_clean_live(factory):
    report = check_step(factory, simulate=False, live=True, steps=5)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.facts["replay equals eager"]
    assert report.facts["tensor bytes left by them"] == 0
