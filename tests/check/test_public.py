"""Bugs reported in public are found without a GPU by the default command, and their mended twins are clean."""

import json
from pathlib import Path

import pytest
from test_cli_check import run

STEPS = Path(__file__).parent / "public" / "steps.py"


@pytest.mark.parametrize(("name", "code"), [("talker", "CG104"), ("denoise", "CG206")])
def test_a_public_bug_is_found_and_its_mend_is_clean(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", f"{STEPS}:{name}_bad", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    errors = [(f["code"], f["line"]) for f in report["findings"] if f["severity"] == "error"]
    lines = STEPS.read_text().splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if f"# hazard: {code}" in text]
    assert errors == [(code, line)]
    assert run("check", f"{STEPS}:{name}_mended", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
