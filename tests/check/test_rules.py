"""Every rule explains itself, and its page tells the truth: Example fires, Use instead does not."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onegraph.check import allow
from onegraph.check.report import Origin, Report, Severity
from onegraph.check.rules import RULES, SECTIONS, find
from onegraph.check.source import check_source, check_tree

CODES = list(RULES)
BY_SOURCE = [code for code, rule in RULES.items() if Origin.SOURCE in rule.shown_by]
BY_SIMULATION = [code for code, rule in RULES.items() if Origin.SIMULATE in rule.shown_by]


def example(code: str, title: str, folder: Path) -> Path:
    path = folder / f"{code.lower()}_{title.split()[0].lower()}.py"
    path.write_text(RULES[code].code_of(title))
    return path


def read(path: Path) -> Report:
    factory = "def factory" in path.read_text()
    return allow.apply(check_source(str(path), "factory") if factory else check_tree(str(path)))


def simulate(path: Path) -> Report:
    from onegraph.check import check_step, declared
    from onegraph.check.targets import load

    with declared():  # an example that declares its kernel does so for this process
        return allow.apply(check_step(load(f"{path}:factory").factory))


@pytest.mark.parametrize("code", CODES)
def test_page_is_complete(code: str) -> None:
    rule = RULES[code]
    for title in SECTIONS:
        assert rule.section(title)
    for title in ("Example", "Use instead"):
        ast.parse(rule.code_of(title))
        assert "import torch" in rule.code_of(title)
    assert set(rule.seen) == set(Origin)
    assert set(rule.seen.values()) <= {"yes", "partly", "no"}
    for way in rule.shown_by:
        assert rule.seen[way] != "no"
    assert isinstance(rule.severity, Severity)
    assert rule.explain().startswith(f"# {code} {rule.name}\n")


def test_names_are_distinct_patterns() -> None:
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", name) for name in names)
    assert find("DEVICE-value-read-on-host") is RULES["CG101"] is find("cg101")


def test_unknown_rule_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"got 'CG999', allowed CG101, "):
        find("CG999")


def test_every_hazard_of_the_table_has_a_rule(repo: Path) -> None:
    covered = {number for rule in RULES.values() for number in rule.hazards}
    assert covered == set(range(1, 35))
    for line in (repo / "docs/reference/hazards.md").read_text().splitlines():
        row = re.match(r"\| (\d+) \|.*\| ([^|]+) \|$", line)
        if row:
            listed = set(row.group(2).split(", "))
            assert listed == {code for code, rule in RULES.items() if int(row.group(1)) in rule.hazards}, line


@pytest.mark.parametrize("code", BY_SOURCE)
def test_example_fires_in_source(code: str, tmp_path: Path) -> None:
    found = read(example(code, "Example", tmp_path))
    assert code in found.codes
    severity = next(f.severity for f in found.findings if f.code == code)
    assert severity is RULES[code].severity


@pytest.mark.parametrize("code", CODES)
def test_use_instead_is_silent_in_source(code: str, tmp_path: Path) -> None:
    assert read(example(code, "Use instead", tmp_path)).findings == ()


@pytest.mark.parametrize("code", BY_SIMULATION)
def test_example_fires_in_simulation(code: str, tmp_path: Path) -> None:
    assert code in simulate(example(code, "Example", tmp_path)).codes


@pytest.mark.parametrize("code", BY_SIMULATION)
def test_use_instead_is_silent_in_simulation(code: str, tmp_path: Path) -> None:
    assert simulate(example(code, "Use instead", tmp_path)).findings == ()


def test_rules_and_source_reading_import_no_torch() -> None:
    program = (
        "import sys; import onegraph.check.source, onegraph.check.allow, onegraph.check.cli,"
        " onegraph.check.rules, onegraph.check.output.html, onegraph.check.output.sarif,"
        " onegraph.check.pytest_plugin;"
        " assert not {'torch', 'numpy', 'pytest'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_code_refers_to_rules_that_exist(repo: Path) -> None:
    used = {c for p in (repo / "src").rglob("*.py") for c in re.findall(r"\bCG\d{3}\b", p.read_text(encoding="utf-8"))}
    assert used <= set(RULES)
