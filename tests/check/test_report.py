"""The data model, declarations and targets: standard library only."""

import json
import re
import subprocess
import sys

import pytest

from onegraph.check.declared import capturable, declare, declared
from onegraph.check.judge import merge
from onegraph.check.output import text
from onegraph.check.report import (
    CheckError,
    Event,
    Finding,
    Frame,
    Origin,
    Report,
    Severity,
    StorageInfo,
    Verdict,
)
from onegraph.check.targets import load, split


def finding(code="CG101", severity=Severity.ERROR, origin=Origin.SIMULATE, line=3, **other):
    return Finding(code=code, severity=severity, origin=origin, path="/a/b.py", line=line, message="m", **other)


def test_a_report_prints_as_the_command_line_does():
    report = Report(target="t", origins=(Origin.SIMULATE,), steps=4, findings=(finding(),))
    assert str(report) == text.render(report).rstrip("\n")
    assert str(report).startswith("CG101 error device-value-read-on-host\n")
    assert str(report).endswith("t: not capturable (1 error)\n  4 steps simulated")
    assert repr(report).startswith("Report(target='t'")


def test_json_round_trip():
    report = Report(
        target="t",
        findings=(finding(values=("a", "b"), calls=(Frame(path="/a/b.py", line=1, function="f"),)),),
        origins=(Origin.SIMULATE,),
        steps=4,
        timeline=(Event(index=0, name="aten.add", kind="op", path="/a/b.py", line=3, reads=(1,), codes=("CG101",)),),
        storages=(StorageInfo(number=1, kind="input", bytes=4),),
        facts={"torch": "2.13"},
    )
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="report format: got 99, allowed 1"):
        Report.from_json('{"format_version": 99}')


def test_json_is_json_where_a_replay_has_no_finite_error():
    report = Report(target="t", findings=(), origins=(), facts={"largest replay error": float("inf"), "n": 0.5})
    facts = json.loads(report.to_json(), parse_constant=pytest.fail)["facts"]
    assert facts == {"largest replay error": "inf", "n": 0.5}


@pytest.mark.parametrize(
    ("severities", "verdict", "code", "strict"),
    [
        ([], Verdict.CAPTURABLE, 0, 0),
        ([Severity.NOTE], Verdict.CAPTURABLE, 0, 0),
        ([Severity.WARNING], Verdict.WARNINGS, 0, 1),
        ([Severity.WARNING, Severity.UNVERIFIED], Verdict.UNVERIFIED, 0, 1),
        ([Severity.UNVERIFIED, Severity.ERROR], Verdict.NOT_CAPTURABLE, 1, 1),
    ],
)
def test_verdict_and_exit_code(severities, verdict, code, strict):
    report = Report(target="t", findings=tuple(finding(severity=s) for s in severities))
    assert (report.verdict, report.exit_code(), report.exit_code(strict=True)) == (verdict, code, strict)


def test_select_and_ignore_by_prefix():
    report = Report(target="t", findings=(finding("CG101"), finding("CG102"), finding("CG202")))
    assert report.select(["CG1"]).codes == {"CG101", "CG102"}
    assert report.select(["CG1"], ["CG102"]).codes == {"CG101"}
    assert report.select((), ["CG1"]).codes == {"CG202"}


def test_merge_says_a_place_once_by_who_knows_most():
    source = Report(target="t", findings=(finding(origin=Origin.SOURCE), finding(origin=Origin.SOURCE, line=9)))
    live = Report(target="t", findings=(finding(origin=Origin.LIVE, severity=Severity.WARNING),), steps=5)
    merged = merge("t", [source, live])
    assert [(f.origin, f.line) for f in merged.findings] == [(Origin.SOURCE, 9), (Origin.LIVE, 3)]
    assert merged.steps == 5


def test_declarations_end_with_their_block_and_the_last_word_wins():
    with declared("lib::*"):
        assert capturable("lib::a") is True
        with declared("lib::a", capturable=False):
            assert capturable("lib::a") is False
        assert capturable("lib::a") is True
    assert capturable("lib::a") is None
    with pytest.raises(ValueError, match="declare: got int"):
        declare(3)


def test_target_loads_a_file_and_finds_its_neighbours(tmp_path):
    (tmp_path / "helper_of_target.py").write_text("VALUE = 7\n")
    (tmp_path / "target.py").write_text("import helper_of_target\ndef factory():\n    return helper_of_target.VALUE\n")
    found = load(f"{tmp_path}/target.py:factory")
    assert found.factory() == 7
    assert found.path == str(tmp_path / "target.py")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("target.py", "allowed path/to/file.py:factory"),
        ("emptydir", "no such file or folder; allowed path/to/file.py:factory"),
        ("{tmp}", "name the function that builds the step"),
        ("target.py:", "allowed path/to/file.py:factory"),
        ("nowhere.py:factory", "no such file: nowhere.py"),
        ("no.such.module:factory", "no module 'no.such.module'"),
        ("{tmp}/notes.txt:factory", "is not a Python file"),
        ("{tmp}/target.py:other", "no function 'other' in .*; it defines factory"),
        ("{tmp}/target.py:VALUE", "'VALUE' is of type int, allowed a function"),
        ("{tmp}/broken.py:factory", "broken.py:1: syntax error"),
        ("{tmp}/raises.py:factory", r"importing it raised KeyError: 'x' \({tmp}/raises.py:1\)"),
        ("{tmp}/leaves.py:factory", "importing it raised SystemExit"),
        ("{tmp}/early.py:factory", r"early.py:2\)\. There is a simulated GPU inside of the factory; .*\(--run\)"),
    ],
)
def test_bad_targets_are_one_line(tmp_path, spec, told):
    for name, body in {
        "target.py": "VALUE = 3\ndef factory():\n    pass\n",
        "broken.py": "def factory(:\n",
        "raises.py": "{}['x']\n",
        "leaves.py": "raise SystemExit(3)\n",
        "early.py": "import torch\nassert torch.cuda.is_available()\n",
        "notes.txt": "hello\n",
    }.items():
        (tmp_path / name).write_text(body)
    with pytest.raises(CheckError, match=told.replace("{tmp}", re.escape(str(tmp_path)))) as error:
        load(spec.format(tmp=tmp_path))
    assert "\n" not in str(error.value)


def test_split_imports_nothing(tmp_path):
    (tmp_path / "raises.py").write_text("1 / 0\n")
    assert split(f"{tmp_path}/raises.py:factory") == (str(tmp_path / "raises.py"), "factory")


def test_importing_check_imports_no_torch():
    code = "import sys, onegraph.check; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
