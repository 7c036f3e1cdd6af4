"""Allowances: what they silence, and what is said about those that say too little or too much."""

from pathlib import Path

import pytest

from onegraph.check.allow import apply, read
from onegraph.check.report import Report, Severity
from onegraph.check.source import check_source, check_tree

TARGET = """\
import torch


def factory():
    def step(x):
        {above}
        y = x.sum().item(){same}
        print(y)
        return x

    return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
"""


def checked(folder: Path, above: str = "pass", same: str = "") -> Report:
    path = folder / "t.py"
    path.write_text(TARGET.format(above=above, same="  " + same if same else ""))
    return apply(check_source(str(path), "factory"))


def places(report: Report) -> list[tuple[str, int]]:
    return sorted((f.code, f.line) for f in report.findings)


PRINTED = ("CG210", 8)


@pytest.mark.parametrize(
    ("above", "same"),
    [
        ("pass", "# onegraph: allow[CG101] read on purpose"),
        ("# onegraph: allow[CG101] read on purpose", ""),
        ("# onegraph: allow[CG101]: read on purpose", ""),
        ("pass", "# onegraph:allow[ cg101 , CG202 ] read on purpose"),
        ("pass", "# onegraph: allow[CG1] read on purpose"),
        ("pass", "# onegraph: allow[CG205, device-value-read-on-host] read on purpose"),
        ("pass", "# noqa: E501  # onegraph: allow[CG101] read on purpose"),
        ("pass", "# calibration; onegraph: allow[CG101] read on purpose  # noqa: E501"),
        ("# noqa  # onegraph: allow[CG205] not this one  # onegraph: allow[CG101] read on purpose", ""),
    ],
)
def test_allows_on_the_line_and_above(above: str, same: str, tmp_path: Path) -> None:
    report = checked(tmp_path, above, same)
    assert places(report) == [PRINTED]
    assert report.facts["allowed"] == 1


def test_a_comment_above_speaks_for_the_next_line_of_code(tmp_path: Path) -> None:
    above = "# onegraph: allow[CG101] read on purpose\n        # more about it\n"
    assert places(checked(tmp_path, above)) == [("CG210", 10)]


def test_a_comment_behind_code_does_not_speak_for_the_line_below(tmp_path: Path) -> None:
    found = places(checked(tmp_path, "z = 1  # onegraph: allow[CG101] not here"))
    assert ("CG101", 7) in found


def test_without_a_reason_it_allows_nothing(tmp_path: Path) -> None:
    report = checked(tmp_path, same="# onegraph: allow[CG101]")
    assert places(report) == [("CG101", 7), PRINTED, ("CG402", 7)]
    assert next(f for f in report.findings if f.code == "CG402").severity is Severity.ERROR


def test_other_codes_stay(tmp_path: Path) -> None:
    assert ("CG101", 7) in places(checked(tmp_path, same="# onegraph: allow[CG106] something else"))


def test_no_longer_firing_is_found_where_it_can_be_known(tmp_path: Path) -> None:
    # CG106 is always visible in source; CG205 is not, so its silence proves nothing.
    report = checked(tmp_path, same="# onegraph: allow[CG101, CG106, CG205] on purpose")
    assert places(report) == [PRINTED, ("CG403", 7)]
    assert "CG106" in next(f.message for f in report.findings if f.code == "CG403")


def test_unreached_code_is_not_called_stale(tmp_path: Path) -> None:
    report = checked(tmp_path)
    path = tmp_path / "t.py"
    path.write_text(path.read_text() + "\n\ndef other(x):\n    return x  # onegraph: allow[CG106] elsewhere\n")
    assert places(apply(check_source(str(path), "factory"))) == places(report)


def test_unknown_and_missing_codes(tmp_path: Path) -> None:
    assert ("CG403", 7) in places(checked(tmp_path, same="# onegraph: allow[CG999] what"))
    assert ("CG402", 7) in places(checked(tmp_path, same="# onegraph: allow this line"))


def test_behind_another_comment_the_same_is_said_of_it(tmp_path: Path) -> None:
    report = checked(tmp_path, same="# noqa  # onegraph: allow[CG101, CG106, CG999] on purpose")
    assert [f.message[:12] for f in report.findings if f.code == "CG403"] == ["allow[CG999]", "CG106 does n"]
    assert {f.column for f in report.findings if f.code == "CG403"} == {37}
    assert ("CG402", 7) in places(checked(tmp_path, same="# noqa  # onegraph: allow[CG101]"))
    # What another tool reads is no reason.
    assert ("CG402", 7) in places(checked(tmp_path, same="# onegraph: allow[CG101]  # noqa: E501"))


def test_a_comment_that_quotes_an_allowance_allows_nothing(tmp_path: Path) -> None:
    for quoted in ("see `# onegraph: allow[CG101] why`", "as in `onegraph: allow[CG101] why`"):
        assert places(checked(tmp_path, same=f"# {quoted}")) == [("CG101", 7), PRINTED]


def test_what_is_no_rule_is_told_as_it_is_written(tmp_path: Path) -> None:
    report = checked(tmp_path, same="# onegraph: allow[CG101, device-value-raed] on purpose")
    told = [f.message for f in report.findings if f.code == "CG403"]
    assert [t.partition(";")[0] for t in told] == ["allow[device-value-raed]: there is no such rule"]


def test_a_prefix_is_unused_only_where_each_of_its_rules_would_be_seen(tmp_path: Path) -> None:
    assert "CG403" not in {code for code, _ in places(checked(tmp_path, same="# onegraph: allow[CG101, CG2] why"))}
    report = checked(tmp_path, same="# onegraph: allow[CG101, CG106, explicit-synchronize] on purpose")
    assert ["CG106" in f.message for f in report.findings if f.code == "CG403"] == [True, True]


def test_only_comments_count(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text('text = "# onegraph: allow[CG101] reason"\n"""\n# onegraph: allow[CG101] reason\n"""\n')
    assert read(str(path)) == []
    path.write_bytes(b"\xff\xfe# onegraph: allow[CG101] x")
    assert read(str(path)) == []


def test_in_a_tree_files_without_findings_are_looked_at(tmp_path: Path) -> None:
    checked(tmp_path, same="# onegraph: allow[CG101]")
    (tmp_path / "clean.py").write_text("import torch\n\nx = 1  # onegraph: allow[CG101]\n")
    report = apply(check_tree(str(tmp_path)))
    assert sorted((Path(f.path).name, f.line) for f in report.findings if f.code == "CG402") == [
        ("clean.py", 3),
        ("t.py", 7),
    ]
    (tmp_path / "clean.py").write_text("import torch\n\nx = 1  # noqa  #onegraph:allow[CG101]\n")
    assert "clean.py" in [Path(f.path).name for f in apply(check_tree(str(tmp_path))).findings if f.code == "CG402"]


def test_no_allowance_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text(TARGET.format(above="pass", same=""))
    plain = check_source(str(path), "factory")
    assert apply(plain) == plain


def test_a_neighbour_that_the_target_does_not_reach_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    neighbour = "\n\ndef other(x):\n    return x.item()  # onegraph: allow[CG101]\n"
    path.write_text(TARGET.format(above="pass", same="") + neighbour)
    assert "CG402" not in {code for code, _ in places(apply(check_source(str(path), "factory")))}
    assert "CG402" in {code for code, _ in places(apply(check_tree(str(path))))}
