"""`--baseline`, `--write-baseline` and `--changed-since`: what they leave out, what they tell, and how they fail."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli_check import run

from onegraph.check import baseline
from onegraph.check.changed import Changes
from onegraph.check.pytest_plugin import assert_capturable
from onegraph.check.report import CheckError, Finding, Frame, Origin, Report, Severity

CAPTURE = """\
import torch

x = torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()


def one():
    x.item()


def two():
    x.tolist()


with torch.cuda.graph(graph):
    one()
    two()
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "steps.py"
    path.write_text(CAPTURE)
    return path


def found(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int]]:
    return [(f["code"], f["line"]) for f in json.loads(capsys.readouterr().out)["findings"]]


def test_what_is_known_is_left_out_wherever_its_line_has_gone(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "steps.py") == 1
    capsys.readouterr()
    assert run("check", "steps.py", "--baseline", "known.json", "--write-baseline") == 0
    assert "2 findings written to known.json" in capsys.readouterr().err
    assert json.loads(Path("known.json").read_text())["findings"] == [
        {"path": "steps.py", "code": "CG101", "source": "x.item()"},
        {"path": "steps.py", "code": "CG101", "source": "x.tolist()"},
    ]
    steps.write_text("# a line\n# another\n" + CAPTURE.replace("x.item()", "x.item()\n    float(x)"))
    assert run("check", "steps.py", "--baseline", "known.json", "--json") == 1
    out = capsys.readouterr()
    assert [(f["code"], f["line"]) for f in json.loads(out.out)["findings"]] == [("CG101", 11)]
    assert out.err == "onegraph: 2 findings are known in known.json\n"


def test_a_program_that_raises_halfway_leaves_the_baseline_as_it_was(steps: Path) -> None:
    steps.write_text(CAPTURE + "\nraise KeyError('lost')\n")
    Path("known.json").write_text("as it was")
    assert run("check", "--baseline", "known.json", "--write-baseline", "--run", "steps.py") == 2
    assert Path("known.json").read_text() == "as it was"


def test_as_many_as_are_known_and_no_more(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", "steps.py", "--baseline", "known.json", "--write-baseline")
    steps.write_text(CAPTURE.replace("x.tolist()", "x.item()"))
    capsys.readouterr()
    assert run("check", "steps.py", "--baseline", "known.json", "--json") == 1
    assert found(capsys) == [("CG101", 12)]


def test_what_is_found_no_longer_is_told(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", "steps.py", "--baseline", "known.json", "--write-baseline")
    steps.write_text(CAPTURE.replace("x.item()", "x.add_(1)"))
    capsys.readouterr()
    assert run("check", "steps.py", "--baseline", "known.json") == 0
    assert "known.json: CG101 in steps.py is found no longer: 'x.item()'" in capsys.readouterr().err
    # The line is there still, and all of the file was read: what it says is no hazard any more.
    steps.write_text(CAPTURE.replace('device="cuda"', 'device="cpu"'))
    assert run("check", "steps.py", "--baseline", "known.json") == 0
    assert capsys.readouterr().err.count("is found no longer") == 2
    # Where other rules were asked for, nothing is known about this one.
    assert run("check", "steps.py", "--baseline", "known.json", "--ignore", "CG1") == 0
    assert "no longer" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "no such file; write it with --write-baseline"),
        ("[project]", "not a baseline that onegraph wrote; a new one is made by --baseline capture-baseline.json"),
        ("[]", "not a baseline that onegraph wrote"),
        ("{}", "not a baseline that onegraph wrote"),
        ('{"format_version": 2}', "not a baseline of format_version 1"),
        ('{"format_version": 1, "findings": [{"path": "a"}]}', "an entry needs path, code and source"),
        ('{"format_version": 1, "findings": 3}', "an entry needs path, code and source"),
    ],
)
def test_what_is_no_baseline_is_told_in_one_line(
    steps: Path, capsys: pytest.CaptureFixture[str], body: str | None, said: str
) -> None:
    if body is not None:
        Path("known.json").write_text(body)
    assert run("check", "steps.py", "--baseline", "known.json") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_paths_are_relative_to_the_baseline(steps: Path, tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    assert run("check", "steps.py", "--baseline", "ci/known.json", "--write-baseline") == 0
    assert {f["path"] for f in json.loads(Path("ci/known.json").read_text())["findings"]} == {"../steps.py"}
    assert run("check", str(steps), "--baseline", str(tmp_path / "ci" / "known.json")) == 0


def test_options_that_do_not_go_together(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "steps.py", "--write-baseline") == 2
    assert "needs the file, --baseline FILE" in capsys.readouterr().err
    assert run("check", "steps.py", "--baseline", "f", "--write-baseline", "--changed-since", "HEAD") == 2
    assert "give one of the two" in capsys.readouterr().err


def test_the_plugin_takes_a_baseline(tmp_path: Path) -> None:
    import torch

    def factory() -> object:
        def step(x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

        return step, lambda i: (torch.full((4,), float(i + 1), device="cuda"),)

    with pytest.raises(AssertionError) as caught:
        assert_capturable(factory)
    assert "CG101" in str(caught.value)
    finding = Finding(
        code="CG101", severity=Severity.ERROR, origin=Origin.SIMULATE, path=__file__, line=1, message="",
        source="return x * x.sum().item()",
    )  # fmt: skip
    known = tmp_path / "known.json"
    known.write_text(baseline.dump(Report(target="t", findings=(finding,)), str(known)))
    assert assert_capturable(factory, baseline=str(known)).findings == ()


# ---- --changed-since


@pytest.fixture
def git(steps: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*args: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *args], cwd=steps.parent, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main")
    git("add", "steps.py")
    git("commit", "-qm", "one")
    return git


def test_only_what_changed_and_the_functions_that_did(
    steps: Path, git: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "steps.py", "--changed-since", "HEAD") == 0
    assert "2 findings are on lines unchanged since HEAD" in capsys.readouterr().err
    steps.write_text(CAPTURE.replace("    x.tolist()", "    x.add_(1)\n    x.tolist()"))  # not the line, the function
    assert run("check", "steps.py", "--changed-since", "HEAD", "--json") == 1
    assert found(capsys) == [("CG101", 13)]
    git("commit", "-qam", "two")
    assert run("check", "steps.py", "--changed-since", "HEAD") == 0
    assert run("check", "steps.py", "--changed-since", "HEAD~1") == 1


@pytest.mark.parametrize("name", ["evil", "e.v=il"])
@pytest.mark.parametrize("key", ["clean", "process"])
def test_no_command_of_the_repositorys_config_runs(
    name: str, key: str, steps: Path, git: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sign = steps.parent / "owned"
    (steps.parent / ".gitattributes").write_text(f"*.py filter={name} diff=evil\n")
    git("config", f"filter.{name}.{key}", f"touch {sign}; cat")
    git("config", f"filter.{name}.required", "true")
    git("config", "diff.evil.command", f"touch {sign}")
    git("config", "diff.evil.textconv", f"touch {sign}; cat")
    git("config", "core.fsmonitor", f"touch {sign}")
    hook = steps.parent / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {sign}\n")
    hook.chmod(0o755)
    steps.write_text(CAPTURE.replace("    x.tolist()", "    x.add_(1)\n    x.tolist()"))
    assert run("check", "steps.py", "--changed-since", "HEAD", "--json") == 1
    assert found(capsys) == [("CG101", 13)]
    assert not sign.exists()


def test_git_is_asked_where_the_target_lies(
    steps: Path,
    git: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(elsewhere)
    steps.write_text(CAPTURE.replace("    x.tolist()", "    x.add_(1)\n    x.tolist()"))
    step = (
        "        return x * x.sum().item()\n\n    return step, lambda i: (torch.full((2,), i + 1.0, device='cuda'),)\n"
    )
    step = "import torch\n\n\ndef factory():\n    def step(x):\n" + step
    (steps.parent / "other.py").write_text(step)
    capsys.readouterr()
    for target, lines in ((str(steps), [13]), (f"{steps.parent / 'other.py'}:factory", [6])):
        run("check", target, "--changed-since", "HEAD", "--json")
        assert [line for _, line in found(capsys)] == lines
    (elsewhere / "third.py").write_text(CAPTURE)
    assert run("check", str(steps), "third.py", "--changed-since", "HEAD") == 2
    assert "not a git repository" in capsys.readouterr().err
    assert run("check", "missing", "--changed-since", "HEAD") == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_a_file_that_git_does_not_know_is_new(
    steps: Path, git: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.py").write_text(CAPTURE)
    capsys.readouterr()
    assert run("check", "other.py", "--changed-since", "HEAD", "--json") == 1
    assert len(found(capsys)) == 2


def test_what_the_other_branch_did_is_no_change(steps: Path, git: Callable[..., str]) -> None:
    git("checkout", "-qb", "mine")
    git("checkout", "-q", "main")
    steps.write_text(CAPTURE.replace("x.item()", "pass"))
    git("commit", "-qam", "mended there")
    git("checkout", "-q", "mine")
    assert run("check", "steps.py", "--changed-since", "main") == 0


def finding(path: Path, line: int, *calls: int) -> Finding:
    frames = tuple(Frame(path=str(path), line=at, function="f") for at in calls)
    return Finding(
        code="CG101", severity=Severity.ERROR, origin=Origin.SOURCE, path=str(path), line=line, message="", calls=frames
    )


def test_a_removal_changes_the_function_around_it_and_no_neighbour(steps: Path, git: Callable[..., str]) -> None:
    steps.write_text("def a():\n    b = 1\n    c = 2\n    return b\n\n\ndef d():\n    return 1\n")
    git("commit", "-qam", "two")
    steps.write_text("def a():\n    b = 1\n    return b\n\n\ndef d():\n    return 1\n")
    changes = Changes("HEAD")
    assert [line for line in range(1, 8) if changes.has(finding(steps, line))] == [1, 2, 3]
    steps.write_text("def a():\n    b = 1\n    c = 2\n    return b\n\ndef d():\n    return 1\n")
    changes = Changes("HEAD")
    assert not any(changes.has(finding(steps, line)) for line in range(1, 8))


def test_a_change_in_the_factory_changes_its_step_but_not_the_other_way_round(
    steps: Path, git: Callable[..., str]
) -> None:
    text = "def f():\n    a = 1\n    def s():\n        return a\n    return s\n"
    steps.write_text(text)
    git("commit", "-qam", "two")
    steps.write_text(text.replace("a = 1", "a = 2"))
    assert Changes("HEAD").has(finding(steps, 4))
    steps.write_text(text.replace("return a", "return a + 1"))
    changes = Changes("HEAD")
    assert changes.has(finding(steps, 3))
    assert not changes.has(finding(steps, 2))


def test_a_call_that_is_new_brings_what_it_reaches(steps: Path, git: Callable[..., str]) -> None:
    steps.write_text(CAPTURE + "    one()\n")
    changes = Changes("HEAD")
    assert changes.has(finding(steps, 8, 18, 8))
    assert not changes.has(finding(steps, 8, 16, 8))


def test_errors_of_git_are_told_in_one_line(
    steps: Path, git: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision in ("no-such", "--help", "HEAD:steps.py"):
        assert run("check", "steps.py", f"--changed-since={revision}") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"onegraph: error: --changed-since {revision}: ")
        assert error.count("\n") == 1
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CheckError, match="needs git, which is not on the PATH"):
        Changes("HEAD")


def test_outside_of_a_repository(
    steps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(steps.parent.parent))
    assert run("check", "steps.py", "--changed-since", "HEAD") == 2
    assert "not a git repository" in capsys.readouterr().err
