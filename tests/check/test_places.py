"""A hazard inside of an installed package stands where the user's code calls into it."""

import sys
from dataclasses import replace
from textwrap import dedent

import pytest

from onegraph.check import check_step
from onegraph.check.places import relocate_to_user_code
from onegraph.check.report import Cause, Finding, Frame, Origin, Report, Severity
from onegraph.check.targets import load

PACKAGE = """\
import torch


class Layer(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        if x.mean() > 0:
            x = x + 2
        return x * x.amax().item()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a module that branches on values twice and reads one."""
    site = tmp_path / "site-packages"
    (site / "layers_of_others").mkdir(parents=True)
    (site / "layers_of_others" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(site))
    yield tmp_path
    sys.modules.pop("layers_of_others", None)


def factory(folder, step: str):
    path = folder / "mine.py"
    body = f"""\
    import layers_of_others
    import torch


    def factory():
        layer = layers_of_others.Layer()

        def call(x):
            return layer(x)

        return {step}, lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)
    """
    path.write_text(dedent(body))
    return load(f"{path}:factory").factory


def test_the_user_s_call_is_the_place_and_the_message_names_the_lines(package):
    errors = check_step(factory(package, "call")).errors
    assert [(f.code, f.path, f.source.strip(), f.column) for f in errors] == [
        (code, str(package / "mine.py"), "return layer(x)", 9) for code in ("CG101", "CG108")
    ]
    reads, branches = errors
    assert reads.message.endswith("in layers_of_others/__init__.py:10")
    assert branches.message.endswith("in layers_of_others/__init__.py:6, layers_of_others/__init__.py:8")
    assert branches.calls[-1].path.endswith("layers_of_others/__init__.py")


def test_a_step_that_is_the_package_s_own_keeps_its_lines(package):
    errors = check_step(factory(package, "layer")).errors
    assert [(f.code, f.line) for f in errors] == [("CG108", 6), ("CG108", 8), ("CG101", 10)]


def test_consequences_move_with_their_cause():
    calls = (
        Frame(path="/me/mine.py", line=3, function="step"),
        Frame(path="/x/site-packages/a/b.py", line=7, function="f"),
    )
    cause = Finding(
        code="CG101", severity=Severity.ERROR, origin=Origin.SIMULATE, path=calls[1].path, line=7, message="a read",
        calls=calls,
    )  # fmt: skip
    after = replace(
        cause, code="CG202", line=8, calls=(calls[0], replace(calls[1], line=8)),
        follows=Cause(path=cause.path, line=7, code="CG101"),
    )  # fmt: skip
    report = relocate_to_user_code(Report(target="", findings=(cause, after)))
    assert [f.code for f in report.errors] == ["CG101"]
    assert [f.code for f in report.following(report.errors[0])] == ["CG202"]
