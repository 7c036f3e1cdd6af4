"""`onegraph check --run` as a command: what it prints where, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import HEAD, Command, cli

from onegraph.check import CheckError
from onegraph.check.program import run_program


def test_an_allowance_in_the_program_counts(tmp_path: Path, here: Command) -> None:
    text = HEAD + "x + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n"
    (tmp_path / "program.py").write_text(f"{text}    y = x * w.sum().item()  # onegraph: allow[CG101] known\n")
    done = here("--run", "program.py")
    assert done.returncode == 0, done.stdout
    assert "1 allowed in the source" in done.stdout


def test_json_is_alone_on_stdout_and_the_program_has_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + "import os, sys\nx + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = x + w\n"
        "if __name__ == '__main__':\n    print('said', sys.argv)\n    os.system('echo shouted')\n"
    )
    done = cli("--json", "--run", "program.py", "--json", "--debug", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    assert body["facts"]["captures"][0]["line"] == 7
    assert "said ['program.py', '--json', '--debug', '-m']" in done.stderr
    assert "shouted" in done.stderr


def test_what_follows_from_another_finding_is_counted_apart(tmp_path: Path, here: Command) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + "s = x.sum().item()\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n"
        "    s = x.sum().item()\n    y = x * s\nfor i in (2, 3):\n    x.fill_(i)\n    g.replay()\n"
    )
    done = here("--json", "--run", "program.py")
    assert done.returncode == 1, done.stderr
    found = {f["code"]: f["follows"] and f["follows"]["code"] for f in json.loads(done.stdout)["findings"]}
    assert found == {"CG101": None, "CG202": "CG101"}


def test_a_module_that_raises_shows_its_traceback_and_its_findings(tmp_path: Path, here: Command) -> None:
    package = tmp_path / "package_that_raises"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        HEAD + "def late():\n    raise KeyError('lost')\n\nx + w\ng = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(g):\n    y = x * x.sum().item()\nlate()\n"
    )
    done = here("--run", "-m", "package_that_raises")
    assert done.returncode == 2
    assert "CG101 error" in done.stdout
    assert "in late\n" in done.stderr
    assert "onegraph/check" not in done.stderr
    assert (
        done.stderr.splitlines()[-1] == "onegraph: error: -m package_that_raises: the program raised KeyError: 'lost'"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)\n", "0 captures found"),
        ("import sys\nsys.exit(3)\n", r"sys.exit\(3\)"),
        ("def broken(:\n", "program.py:1: syntax error"),
        ("import nothing_of_the_kind\n", "the program raised ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_reported_on(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(text)
    with pytest.raises(CheckError, match=words):
        run_program([str(script)])


@pytest.mark.parametrize("words", [[], ["-m"], ["missing.py"], ["--lr", "3"], ["-m", "nothing_of_the_kind"]])
def test_no_such_program(words: list[str]) -> None:
    with pytest.raises(CheckError, match=r"^--run"):
        run_program(words)
