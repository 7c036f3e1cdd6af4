"""The command, `check_step`, `assert_capturable` and the marker report the same findings of one target."""

import argparse
import contextlib
import sys
from pathlib import Path

import pytest

from onegraph.check import Severity, check_step, cli
from onegraph.check.pytest_plugin import assert_capturable
from onegraph.check.report import Report
from onegraph.check.targets import load

PACKAGE = """\
import torch


class Layer(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x * x.amax().item()
"""

STEPS = """\
import os
import time

import torch

import layers_of_doors


def inputs(i):
    return (torch.full((4,), 1.0 + i, device="cuda"),)


def clean():
    return (lambda x: x * 2), inputs


def read_on_host():
    def step(x):
        return x * x.sum().item()

    return step, inputs


def allowed():
    def step(x):
        n = x.sum().item()  # onegraph: allow[CG101] calibration
        return x * 2

    return step, inputs


def without_a_reason():
    def step(x):
        n = x.sum().item()  # onegraph: allow[CG101]
        return x * 2

    return step, inputs


def allows_nothing():
    def step(x):
        return x * 2  # onegraph: allow[CG101] it was there once

    return step, inputs


def in_the_source_alone():
    def step(x):
        if os.environ.get("NEVER_SET_BY_ANYBODY"):
            return x * x.sum().item()
        return x * (1.0 + 0.0 * (time.time() > 1e12))

    return step, inputs


def seldom():
    count = [0]

    def step(x):
        count[0] += 1
        return x * (count[0] // 16)

    return step, inputs


def in_a_package():
    return layers_of_doors.Layer(), inputs


def package_below_own_line():
    layer = layers_of_doors.Layer()

    def step(x):
        return layer(x)  # onegraph: allow[CG108] chosen once

    return step, inputs
"""
NAMES = ("clean", "read_on_host", "allowed", "without_a_reason", "allows_nothing", "in_the_source_alone", "seldom",
         "in_a_package", "package_below_own_line")  # fmt: skip

Findings = list[tuple[str, str, int, str]]


def told(report: Report) -> Findings:
    return sorted((f.code, f.path, f.line, f.severity.value) for f in report.findings)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of factories beside an installed package that they use."""
    folder = tmp_path_factory.mktemp("doors")
    site = folder / "site-packages"
    (site / "layers_of_doors").mkdir(parents=True)
    (site / "layers_of_doors" / "__init__.py").write_text(PACKAGE)
    (folder / "steps_of_doors.py").write_text(STEPS)
    sys.path.insert(0, str(site))
    yield folder / "steps_of_doors.py"
    sys.path.remove(str(site))


def by_command(target: str, capsys: pytest.CaptureFixture[str]) -> Findings:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["check", target, "--json"])
    assert args.run(args) in (0, 1)
    return told(Report.from_json(capsys.readouterr().out))


def by_assertion(factory) -> Findings:
    """What the report of an assertion lists, whether it fails or not."""
    reports = []

    def looked(*args, **keywords):
        reports.append(check_step(*args, **keywords))
        return reports[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onegraph.check.pytest_plugin.check_step", looked)
        with contextlib.suppress(AssertionError):
            assert_capturable(factory)
    return told(reports[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_door_reports_the_same_findings(name: str, steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{steps}:{name}"
    factory = load(target).factory
    expected = by_command(target, capsys)
    assert told(check_step(factory)) == expected
    assert by_assertion(factory) == expected
    assert bool(expected) is (name not in ("clean", "allowed"))


def test_reading_allowances_and_own_lines_each_change_what_is_found(steps: Path) -> None:
    of = {name: load(f"{steps}:{name}").factory for name in NAMES}
    assert check_step(of["in_the_source_alone"]).findings
    assert not check_step(of["in_the_source_alone"], source=False).findings
    assert check_step(of["allowed"]).facts["allowed"] == 1
    assert {(f.code, f.severity) for f in check_step(of["without_a_reason"]).errors} >= {("CG402", Severity.ERROR)}
    assert {f.path for f in check_step(of["package_below_own_line"]).findings} == {str(steps)}


def test_the_marker_reports_what_the_command_does(
    steps: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """It calls `assert_capturable` with the test as the factory; the hooks of pre-commit run the command."""
    test = steps.parent / "test_marked.py"
    body = STEPS[STEPS.index("def read_on_host") :].split("\n\n\n")[0].replace("def read_on_host", "def test_read")
    given = STEPS[STEPS.index("def inputs") :].split("def clean")[0]
    test.write_text(f"import pytest\nimport torch\n{given}\n@pytest.mark.capturable\n{body}\n")
    loaded = any(pytestconfig.pluginmanager.hasplugin(name) for name in ("onegraph", "onegraph.check.pytest_plugin"))
    plugins = ["no:cacheprovider", "no:xdist", "no:timeout", "no:faulthandler"]
    plugins += [] if loaded else ["onegraph.check.pytest_plugin"]
    options = [word for plugin in plugins for word in ("-p", plugin)]
    assert pytest.main(["-q", "--import-mode=importlib", *options, str(test)]) == 1
    printed = capsys.readouterr().out
    shown = by_command(f"{test}:test_read", capsys)
    assert ("CG101", str(test), 11, "error") in shown
    listed = {line.split("--> ")[1].split(":")[1] for line in printed.splitlines() if "--> " in line}
    assert listed == {str(line) for _, _, line, _ in shown}


@pytest.mark.parametrize("name", ["read_on_host", "allowed"])
def test_a_program_that_captures_the_step_is_told_the_same_lines(
    name: str, steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = steps.parent / f"program_{name}.py"
    program.write_text(
        f"import torch\nfrom steps_of_doors import {name}\nstep, inputs = {name}()\nx, = inputs(0)\nstep(x)\n"
        "graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    y = step(x)\n"
        "for i in range(3):\n    x.copy_(inputs(i)[0])\n    graph.replay()\n"
    )
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["check", "--json", "--run", str(program)])
    args.run(args)
    found = told(Report.from_json(capsys.readouterr().out))
    assert {(code, line) for code, _, line, severity in found if severity == "error"} == {
        (code, line) for code, _, line, severity in by_command(f"{steps}:{name}", capsys) if severity == "error"
    }
