"""Advice is followed: a step with the hazard shows the text, the same step with the text applied is found clean."""

import re
from pathlib import Path

import pytest

from onegraph.check.api import check_target
from onegraph.check.report import Report
from onegraph.check.rules import RULES, fix
from onegraph.check.source import check_source
from onegraph.check.targets import Options

FOLDER = Path(__file__).parent / "advice"
PAIRS = {
    (code, words or ""): path
    for path in sorted(FOLDER.glob("*.py"))
    for code, words in re.findall(r"^def bad_(CG\d+)(?:_(\w+))?\(", path.read_text(), re.M)
}
ONLY_ON_A_GPU = {("CG311", "autocast")}
"""What neither reading nor simulation sees: the text stands on the rule's page alone."""
ONLY_IN_A_PROGRAM = {("CG201", "raise"), ("CG212", "refused_values"), ("CG401", "replay")}
"""What a step cannot show, since one that raises cannot be checked: test_program_refused has their pairs."""


def default_command(target: str) -> Report:
    """The report of `onegraph check target`."""
    return check_target(target, Options())


def needs(path: Path) -> None:
    if "import triton" in path.read_text():
        pytest.importorskip("triton")


def spelled(construct: str) -> str:
    return construct.replace(", ", "_").replace(" ", "_")


def name(code: str, words: str) -> str:
    return f"{code}_{words}".removesuffix("_") if not words.endswith("_") else f"{code}_{words}"


@pytest.mark.parametrize(("code", "words"), PAIRS)
def test_advice_is_shown_at_its_construct(code, words):
    needs(PAIRS[code, words])
    report = default_command(f"{PAIRS[code, words]}:bad_{name(code, words)}")
    construct = next(c for c in RULES[code].fixes if spelled(c) == words)
    read = check_source(str(PAIRS[code, words]), f"bad_{name(code, words)}")  # what files alone are checked by
    shown = [(f.code, f.fix) for r in (report, read) for f in r.findings]
    assert (code, RULES[code].fixes[construct]) in shown


@pytest.mark.parametrize(("code", "words"), PAIRS)
def test_advice_that_is_followed_leaves_nothing(code, words):
    needs(PAIRS[code, words])
    report = default_command(f"{PAIRS[code, words]}:good_{name(code, words)}")
    assert report.findings == ()
    assert report.exit_code(strict=True) == 0


def test_every_construct_has_a_pair():
    wanted = {(code, spelled(construct)) for code, rule in RULES.items() for construct in rule.fixes if construct}
    assert wanted - set(PAIRS) == ONLY_ON_A_GPU | ONLY_IN_A_PROGRAM


def test_every_rule_has_advice():
    for code, rule in RULES.items():
        assert fix(code) == rule.fixes[""]
        assert not any(not text or text.endswith(".") or "\n" in text for text in rule.fixes.values())


def test_a_clock_is_not_replaced_by_a_random_number(tmp_path: Path) -> None:
    path = tmp_path / "clock.py"
    path.write_text(
        "import time\nimport torch\n\ndef decode():\n    def step(x):\n        return x * time.perf_counter()\n"
        '    return step, lambda i: (torch.ones(4, device="cuda"),)\n'
    )
    (finding,) = default_command(f"{path}:decode").findings
    assert (finding.code, finding.fix) == ("CG202", RULES["CG202"].fixes[""])
