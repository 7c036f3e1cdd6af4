"""`onegraph check` and `onegraph rule` as people run them: what they print, and with which exit status they end."""

import argparse
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from onegraph.check import CheckError, check_step, cli, reconcile
from onegraph.check.pytest_plugin import assert_capturable
from onegraph.check.report import Event, Finding, Origin, Report, Severity
from onegraph.check.rules import RULES
from onegraph.check.targets import load

CLEAN = """\
import torch


def factory():
    weight = torch.ones(4, device="cuda")

    def step(x):
        return x * weight

    return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
"""

BAD = CLEAN.replace("return x * weight", "return x * weight.sum().item() * x.sum().item()")
COUNTING = CLEAN.replace("return x * weight", "seen.append(1)\n        return x * weight").replace(
    "import torch\n", "import torch\n\nseen = []\n"
)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(a) for a in argv])
    return int(args.run(args))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "steps.py"
    path.write_text(CLEAN)
    return path


def test_clean_target(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", f"{target}:factory") == 0
    out = capsys.readouterr().out
    assert f"{target}:factory: capturable\n" in out
    assert " steps simulated" in out


def test_bad_target_shows_line_caret_and_cure(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD)
    assert run("check", f"{target}:factory") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "CG101 error device-value-read-on-host" in lines
    shown = next(i for i, line in enumerate(lines) if line.startswith("8 | return x"))
    assert lines[shown + 1].endswith("^")
    assert any(line.strip().startswith("= fix: ") for line in lines)
    assert any("not capturable" in line for line in lines)


def test_select_ignore_and_strict(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD)
    assert run("check", f"{target}:factory", "--ignore", "CG101,CG202,CG212") == 0
    assert f"{target}:factory: nothing else found, 1 left out\n" in capsys.readouterr().out
    assert run("check", f"{target}:factory", "--select", "CG3") == 0
    assert run("check", f"{target}:factory", "--select", "device-value-read-on-host") == 1
    target.write_text(COUNTING)
    assert run("check", f"{target}:factory") == 0
    assert run("check", f"{target}:factory", "--strict") == 1
    assert "CG210 warning" in capsys.readouterr().out


def test_json_round_trip(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD)
    assert run("check", f"{target}:factory", "--json") == 1
    text = capsys.readouterr().out
    report = Report.from_json(text)
    assert "CG101" in report.codes
    assert json.loads(text)["verdict"] == "not capturable"
    assert "read" not in report.facts  # the functions that were read: thousands in a tree


def test_what_the_step_prints_is_no_part_of_the_report(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD.replace("def factory", "print('at import')\n\n\ndef factory"))
    assert run("check", f"{target}:factory", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "not capturable"
    assert "at import" in printed.err


def test_allowance_in_a_target(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD.replace("x.sum().item()", "x.sum().item()  # onegraph: allow[CG101,CG202] a test"))
    assert run("check", f"{target}:factory") == 0
    assert "allowed in the source" in capsys.readouterr().out


def test_folder_and_file_read_sources_alone(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD)
    for path in (target, target.parent):
        assert run("check", str(path)) == 1
        assert "read in the source; 1 file, 1 step found, 1 function read\n" in capsys.readouterr().out
    (target.parent / "broken.py").write_text("import torch\ndef f(:\n")
    assert run("check", str(target.parent), "--ignore", "CG") == 2, "a gate does not pass on what it could not look at"
    captured = capsys.readouterr()
    assert "nothing else found, 2 left out" in captured.out
    assert captured.err.count("\n") == 2
    assert "broken.py:2: syntax error" in captured.err
    assert f"error: {target.parent}: 1 of the files could not be read" in captured.err
    assert run("check", str(target.parent), "--sarif") == 2
    (invocation,) = json.loads(capsys.readouterr().out)["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "could not be read" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_what_cannot_be_checked_does_not_hide_the_rest(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(BAD + "\n\ndef raises():\n    raise RuntimeError('no weights')\n")
    assert run("check", f"{target}:factory", f"{target}:raises", f"{target}:factory") == 2
    captured = capsys.readouterr()
    assert "CG101 error" in captured.out
    assert "no weights" in captured.err
    assert captured.err.count("onegraph: error") == 1
    assert run("check", f"{target}:raises", f"{target}:raises") == 2
    assert "no weights" in capsys.readouterr().err


def test_a_file_that_is_no_python_is_an_error_where_it_is_asked_for(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.write_text("def f(:\n")  # no word of torch in it either
    assert run("check", str(target)) == 2
    assert ":1: syntax error" in capsys.readouterr().err


DECORATED = """
import functools
import torch

def plainly(make):
    return lambda: make()

def build():
    return (lambda x: x.sum().item() * x), lambda i: (torch.ones(2, device="cuda") * i,)

@torch.no_grad()
def wrapped(): return build()

@functools.cache
def cached(): return build()

@plainly
def hidden(): return build()

partial = functools.partial(build)
"""


@pytest.mark.parametrize(
    ("factory", "read"), [("wrapped", True), ("cached", True), ("hidden", False), ("partial", False)]
)
def test_a_factory_is_run_where_it_cannot_be_read(
    factory: str, read: bool, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.write_text(DECORATED)
    assert run("check", f"{target}:{factory}") == 1
    said = capsys.readouterr().out
    assert ("read in the source" in said) is read
    assert ("it was only run" in said) is not read
    with pytest.raises(CheckError) if not read else contextlib.nullcontext():
        check_step(load(f"{target}:{factory}").factory, source=True, simulate=False)


def test_source_mode_runs_and_imports_nothing(target: Path) -> None:
    target.write_text("raise SystemExit('imported')\nimport torch\ndef step(x: torch.Tensor): return x * 2\n")
    program = (
        "import sys, argparse; from onegraph.check import cli; p = argparse.ArgumentParser();"
        f"cli.add_parsers(p.add_subparsers()); a = p.parse_args(['check', {str(target)!r}]); s = a.run(a);"
        "assert 'torch' not in sys.modules; sys.exit(s)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


FACTORIES = {
    "raises": "def factory():\n    raise RuntimeError('no\\nweights')\n",
    "returns": "def factory():\n    return 3\n",
    "none": "def factory():\n    pass\n",
    "step": "def factory():\n    def step(x):\n        raise KeyError('x')\n    return step, lambda i: (1,)\n",
    "result": "def factory():\n    return (lambda: 'text'), (lambda i: ())\n",
    "inputs": "def factory():\n    return (lambda x: x), (lambda i: 1 / 0)\n",
    "argument": "def factory(n):\n    pass\n",
    "other": "def other():\n    pass\n",
    "value": "factory = 3\n",
    "syntax": "def factory(:\n",
    "host": "import torch\ndef factory():\n    return (lambda x: x * 2), (lambda i: (torch.ones(2),))\n",
    "import": "import no_such_module_anywhere\n",
    "exit": "import sys\nsys.exit(3)\n",
    "leave": "import os\ndef factory():\n    os._exit(0)\n",
    "leave in a step": "import os\ndef factory():\n    return os._exit, lambda i: (0,)\n",
}


@pytest.mark.parametrize("name", FACTORIES)
def test_bad_target_is_one_line_and_exit_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"bad_{name}.py"
    path.write_text(FACTORIES[name])
    assert run("check", f"{path}:factory") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("onegraph: error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("no/such/file.py:factory", "no such file"),
        ("no_such_module_anywhere:factory", "no module|No module|no Python module"),
        ("nothing", "allowed|no such"),
        ("no/such/folder", "no such file or folder"),
        ("none.py", "no such file or folder"),
    ],
)
def test_missing_targets(target: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", target) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert any(part in error for part in wanted.split("|")), error


def test_other_files_and_options(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("torch")
    for argv in (
        [str(tmp_path / "notes.txt")],
        [f"{tmp_path / 'notes.txt'}:factory"],
        [f"{target}:factory", "--steps", "2"],
        [f"{target}:factory", "--select", "CG999"],
        [str(target), "--live"],
        [f"{target}:factory", "--html", str(tmp_path / "no" / "folder.html")],
    ):
        assert run("check", *argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("onegraph: error: ")
        assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_rule_names_the_option(target: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", f"{target}:factory", option, "CG2,CG999") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"onegraph: error: {option}: got 'CG999', allowed CG101, ")


def test_a_report_that_cannot_be_written_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "steps.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n" + CLEAN)

    def refused(*words: str) -> str:
        assert run("check", f"{tmp_path / 'steps.py'}:factory", *words) == 2
        assert not ran.exists()
        return capsys.readouterr().err.removeprefix("onegraph: error: ").strip()

    page, known = str(tmp_path / "no" / "page.html"), str(tmp_path / "no" / "known.json")
    assert refused("--html", page) == f"--html {page}: {tmp_path / 'no'} is no folder; make it, or give another file"
    assert refused("--baseline", known, "--write-baseline").startswith(f"--baseline {known}: {tmp_path / 'no'} is no ")
    assert refused("--html", str(tmp_path)) == f"--html {tmp_path}: cannot be written; give another file"
    monkeypatch.setattr(cli.os, "access", lambda *_: False)
    page = str(tmp_path / "page.html")
    assert refused("--html", page) == f"--html {page}: cannot be written; give another file"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("option", ["--live", "--all"])
def test_without_a_gpu_the_options_that_need_one_are_named(
    target: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", f"{target}:factory", option) == 2
    assert "no CUDA GPU is visible; without --live, --all or live=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"steps": "4"}, "steps: got '4', allowed 3 or more"),
        ({"steps": True}, "steps: got True, allowed 3 or more"),
        ({"gpus": 0}, "gpus: got 0, allowed 1 or more"),
        ({"gpus": "1"}, "gpus: got '1', allowed 1 or more"),
        ({"ignore": "CG999"}, "ignore: got 'CG999', allowed CG101"),
    ],
)
def test_a_wrong_keyword_is_named(target: Path, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckError, match=says):
        assert_capturable(load(f"{target}:factory").factory, **keywords)


def test_several_targets_are_one_report(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = target.with_name("other.py")
    other.write_text(BAD)
    assert run("check", f"{target}:factory", str(other), "--json") == 1
    report = Report.from_json(capsys.readouterr().out)
    assert set(report.origins) == {Origin.SOURCE, Origin.SIMULATE}
    assert {Path(f.path).name for f in report.findings} == {"other.py"}
    other.with_name("third.py").write_text(BAD)
    assert run("check", str(other), str(other.with_name("third.py"))) == 1
    assert "2 files, 2 steps found, 2 functions read" in capsys.readouterr().out


def test_reading_alone_never_says_capturable(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(target)) == 0
    assert "nothing found in the source" in capsys.readouterr().out
    target.write_text(COUNTING)
    assert run("check", str(target)) == 0
    out = capsys.readouterr().out
    assert "suspects in the source (1 warning)" in out
    assert ": capturable" not in out


def shape_of(line: str) -> str:
    """A printed line without its indentation and the digits that differ from CPU to CPU."""
    return re.sub(r"\d\.\d{4,}", "<number>", " ".join(line.split()))


def test_guide_tells_the_truth(repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (repo / "docs/guides/check.md").read_text()
    example = re.search(r"```python\n(# steps.py\n.*?)```", guide, re.S)
    shown = re.search(r"```\n(CG101 .*?)```", guide, re.S)
    assert example is not None
    assert shown is not None
    path = tmp_path / "steps.py"
    path.write_text(example.group(1))
    assert run("check", f"{path}:decode", "--select", "CG101") == 1
    out = capsys.readouterr().out.replace(str(tmp_path) + "/", "")
    told, promised = ([shape_of(line) for line in text.splitlines()] for text in (out, shown.group(1)))
    assert [line for line in promised if line not in told] == []
    options = set(re.findall(r"--[a-z]+", guide)) - {"--lr"}  # of the program behind --run
    help_text = subprocess.run(
        [sys.executable, "-m", "onegraph.cli", "check", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert options <= set(re.findall(r"--[a-z]+", help_text))


def test_rule_explains_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rule", "cg205") == 0
    out = capsys.readouterr().out
    assert out.startswith("# CG205 rebound-storage\n")
    assert all(f"## {title}" in out for title in ("What it does", "Why is this bad", "Example", "Use instead"))
    assert run("rule") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RULES)
    assert run("rule", "CG999") == 2
    error = capsys.readouterr().err
    assert error.startswith("onegraph: error: rule: got 'CG999', allowed CG101, ")
    assert error.count("\n") == 1


def finding(line: int, code: str, origin: Origin, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(code=code, severity=severity, origin=origin, path="/t.py", line=line, message="m")


def test_what_ran_outranks_what_was_read() -> None:
    ran = Event(index=0, name="aten::add", kind="op", path="/t.py", line=5)
    report = Report(
        target="t",
        origins=(Origin.SOURCE, Origin.SIMULATE),
        timeline=(ran,),
        findings=(
            finding(5, "CG101", Origin.SOURCE),  # the line ran, and simulation sees every host read: cleared
            finding(5, "CG309", Origin.SOURCE),  # the line ran, but simulation does not see threads: kept as a warning
            finding(9, "CG101", Origin.SOURCE),  # the line never ran
            finding(7, "CG202", Origin.SIMULATE),
        ),
    )
    kept = {(f.line, f.code, f.severity.value) for f in reconcile.reconcile(report).findings}
    assert kept == {(5, "CG309", "warning"), (9, "CG101", "warning"), (7, "CG202", "error")}
    alone = Report(target="t", origins=(Origin.SOURCE,), findings=report.findings)
    assert reconcile.reconcile(alone) == alone


KEPT = """
    import torch

    class Masks:
        def __init__(self):
            self.length, self.masks = 0, {}

        def __call__(self, x):
            self.length += 1
            if self.length not in self.masks:
                self.masks[self.length] = torch.arange(16, device="cuda") < self.length
            return x.masked_fill(~self.masks[self.length], 0.0)

    def decode():
        return Masks(), lambda i: (torch.full((16,), i + 1.0, device="cuda"),)
"""


def test_a_proven_error_is_one_however_it_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading suspects the condition, which runs do not see change: what they prove does not follow from that."""
    path = tmp_path / "steps.py"
    path.write_text(dedent(KEPT))
    assert run("check", f"{path}:decode") == 1
    assert "CG202 error" in capsys.readouterr().out
    factory = load(f"{path}:decode").factory
    for report in (check_step(factory), check_step(factory, source=True)):
        assert [f.code for f in report.of(Severity.ERROR)] == ["CG202"]
    with pytest.raises(AssertionError, match="CG202 error"):
        assert_capturable(factory)


PLUGIN = """
    import pytest
    import torch
    from onegraph.check.pytest_plugin import assert_capturable


    @pytest.fixture
    def width():
        return 4


    @pytest.mark.capturable
    def test_clean(width):
        return (lambda x: x * 2), (lambda i: (torch.full((width,), float(i), device="cuda"),))


    @pytest.mark.capturable(ignore=["CG2"])
    def test_bad():
        return (lambda x: x * x.sum().item()), (lambda i: (torch.full((4,), float(i), device="cuda"),))


    @pytest.mark.capturable(stirct=True)
    def test_typo():
        return None


    @pytest.mark.capturable(ignore="CG2", baseline="known.json")
    def test_known():
        return (lambda x: x * x.sum().item()), (lambda i: (torch.full((4,), float(i), device="cuda"),))


    @pytest.mark.capturable(ignore="CG2")
    def test_ignored_as_one_text():
        return (lambda x: x * x.sum().item()), (lambda i: (torch.full((4,), float(i), device="cuda"),))


    def test_call():
        step, inputs = (lambda x: x * 2), (lambda i: (torch.full((4,), float(i), device="cuda"),))
        report = assert_capturable(lambda: (step, inputs))
        assert report.steps >= 3


    def test_unmarked():
        assert True


    @pytest.mark.capturable
    def test_nothing():
        torch.ones(2)


    @pytest.mark.capturable
    def test_raising():
        def step(x):
            return x @ torch.ones(3, 4, device="cuda")

        return step, lambda i: (torch.full((1, 4), float(i), device="cuda"),)


    def test_call_bad():
        assert_capturable(lambda: ((lambda x: x * x.sum().item()), (lambda i: (torch.ones(4, device="cuda") * i,))))


    def test_call_raising():
        assert_capturable(lambda: {}["width"])
"""


def test_pytest_plugin(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "steps" / "test_steps.py").write_text(dedent(PLUGIN))
    line = next(line.strip() for line in dedent(PLUGIN).splitlines() if "x.sum().item()" in line)
    known = {"path": "steps/test_steps.py", "code": "CG101", "source": line}
    (tmp_path / "known.json").write_text(json.dumps({"format_version": 1, "findings": [known]}))
    loaded = any(pytestconfig.pluginmanager.hasplugin(name) for name in ("onegraph", "onegraph.check.pytest_plugin"))
    argv = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "test_steps.py"]
    done = subprocess.run(
        argv if loaded else [*argv, "-p", "onegraph.check.pytest_plugin"],
        cwd=tmp_path / "steps",  # not the rootdir, from which the baseline is named
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # this very package, wherever it lies
        capture_output=True,
        text=True,
        check=False,
    )
    assert "7 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "CG101 error device-value-read-on-host" in done.stdout
    sections = re.split(r"^_{3,} (\w+) _{3,}$", done.stdout.partition("short test summary")[0], flags=re.MULTILINE)
    told = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert "CG202" not in told["test_bad"]
    assert "CG101" in told["test_ignored_as_one_text"]
    allowed = "steps=, live=, strict=, gpus=, ignore=, baseline="
    assert told["test_typo"].strip() == f"capturable: got stirct=, allowed {allowed}"
    assert "test_nothing(): got None, allowed a tuple (step, inputs)" in told["test_nothing"]
    assert '>       return x @ torch.ones(3, 4, device="cuda")' in told["test_raising"]
    assert ">       assert_capturable(lambda: ((lambda x" in told["test_call_bad"]
    assert '>       assert_capturable(lambda: {}["width"])' in told["test_call_raising"]
    frames = re.findall(r"^(\S+\.py):\d+: ", done.stdout, flags=re.MULTILINE)
    assert set(frames) == {"test_steps.py"}  # neither torch's lines nor ours
    assert "pyfuncitem" not in done.stdout


def test_the_page_about_ci_names_every_option_and_an_install_that_there_is(repo: Path) -> None:
    from onegraph.check.pytest_plugin import assert_capturable

    page = (repo / "docs" / "guides" / "check-ci.md").read_text()
    options = [p for p in inspect.signature(assert_capturable).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert options
    for option in options:
        default = '""' if option.default == "" else option.default
        assert f"| `{option.name}={default}` |" in page
    yaml = pytest.importorskip("yaml")
    job, *_, hooks = (yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    runs = [step["run"] for step in job["jobs"]["capture"]["steps"] if "run" in step]
    assert [run for run in runs if "onegraph @ git+https://" in run]
    assert not re.search(r"pip install (-\S+ )*onegraph\b", page)
    assert hooks["repos"][0]["hooks"][1]["additional_dependencies"]


def test_pre_commit_hooks_name_real_commands(repo: Path) -> None:
    text = (repo / ".pre-commit-hooks.yaml").read_text()
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load(text)
    assert {hook["id"] for hook in hooks} == {"onegraph-check", "onegraph-check-step"}
    assert all(hook["entry"] == "onegraph check" and hook["language"] == "python" for hook in hooks)
