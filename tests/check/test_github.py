"""`--format`: workflow commands of GitHub Actions, and what machines are told where the check could not run."""

import json
from pathlib import Path

import pytest
from test_cli_check import BAD, run

from onegraph.check.output import github
from onegraph.check.report import Finding, Origin, Report, Severity


def test_a_finding_is_one_command_that_the_runner_reads_back(tmp_path: Path) -> None:
    finding = Finding(
        code="CG101", severity=Severity.UNVERIFIED, origin=Origin.SIMULATE, path=str(tmp_path / "a,b:c" / "steps.py"),
        line=3, column=7, message="100 % of it\nis read", values=("step 0: 1",), fix="keep it",
    )  # fmt: skip
    command, verdict = github.render(Report(target="t", findings=(finding,)), str(tmp_path)).splitlines()
    assert command == (
        "::warning file=a%2Cb%3Ac/steps.py,line=3,col=7,title=CG101 device-value-read-on-host"
        "::100 %25 of it%0Ais read%0Astep 0: 1%0Afix: keep it"
    )
    assert verdict == "t: unverified (1 unverified)"


def test_counts_are_words(tmp_path: Path) -> None:
    findings = [
        Finding(code="CG101", severity=severity, origin=Origin.SOURCE, path="a.py", line=line, message="m")
        for severity, count in ((Severity.ERROR, 2), (Severity.UNVERIFIED, 2), (Severity.WARNING, 1))
        for line in range(count)
    ]
    told = github.render(Report(target="t", findings=tuple(findings))).splitlines()[-1]
    assert told == "t: not capturable (2 errors, 1 warning, 2 unverified)"


def test_paths_are_those_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "steps.py"
    path.write_text(BAD)
    monkeypatch.chdir(path.parent)
    finding = Finding(code="CG101", severity=Severity.ERROR, origin=Origin.SOURCE, path=str(path), line=1, message="m")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert "file=steps.py," in github.render(Report(target="t", findings=(finding,)))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "::error file=sub/steps.py,line=1,col=1," in github.render(Report(target="t", findings=(finding,)))


def test_every_format_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.py"
    path.write_text("import torch\nx = torch.zeros(1, device='cuda')\nwith torch.cuda.graph(g):\n    x.item()\n")
    outputs = {}
    for args in (["--format", "json"], ["--json"], ["--format=sarif"], ["--sarif"], ["--format", "github"], []):
        assert run("check", str(path), *args) == 1
        outputs[" ".join(args)] = capsys.readouterr().out
    assert outputs["--format json"] == outputs["--json"]
    assert outputs["--format=sarif"] == outputs["--sarif"]
    assert outputs["--format github"].startswith("::error file=")
    assert outputs[""].startswith("CG101 error")
    with pytest.raises(SystemExit):
        run("check", str(path), "--format", "xml")


def test_sarif_says_why_a_check_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "missing.py:step", "--sarif") == 2
    out = capsys.readouterr()
    (log,) = json.loads(out.out)["runs"]
    (invocation,) = log["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["exitCode"] == 2
    (told,) = invocation["toolExecutionNotifications"]
    assert told["level"] == "error"
    assert out.err == f"onegraph: error: {told['message']['text']}\n"
    assert log["results"] == []
    assert log["tool"]["driver"]["rules"]


def test_sarif_gives_the_exit_status_of_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.py"
    path.write_text("import torch\n\ndef decode_step(x: torch.Tensor):\n    return x.item()\n")
    for args, status in ([], 0), (["--strict"], 1):
        assert run("check", str(path), "--sarif", *args) == status
        assert json.loads(capsys.readouterr().out)["runs"][0]["invocations"][0]["exitCode"] == status


def test_github_says_why_a_check_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "missing.py:step", "--format", "github") == 2
    assert capsys.readouterr().out.startswith("::error title=onegraph check::target 'missing.py:step'")
