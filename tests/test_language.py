"""The style check finds what it is for, and nothing in this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import language


def test_pages_docstrings_help_and_messages_are_clean() -> None:
    assert [str(problem) for problem in language.problems()] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Requests finish, and who leaves gives the memory back.\n", "'who leaves'"),
        ("It reaches .8 of the roofline.\n", "'.8': write 0.8"),
        ("| KL | nats a token |\n", "'nats a token'"),
        ("Word " * 31 + "ends.\n", "a sentence of 32 words"),
        ("- item\n- " + "word " * 31 + "ends.\n", "a sentence of 32 words"),
    ],
)
def test_a_page_with_a_problem(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert any(says in str(problem) for problem in language.of_page(page))


@pytest.mark.parametrize(
    "text",
    [
        "```\nwho leaves gives the memory back: .8\n```\n",
        "`.8` and [a link](who-leaves.md) of 0.8 nats per token.\n",
        "One idea. " * 40 + "\n",
        "Lists read as such: " + "; ".join(["a part of five words"] * 12) + ".\n",
    ],
)
def test_a_page_without(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(language.of_page(page)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Who asks waits."""\n', 1),
        ('def f():\n    raise ValueError(f"{f} is told by its name")\n', 1),
        ('add(help="what it takes in nats a token")\n', 1),
        ('add(help="%s")\n' % ("word " * 31), 1),
        ('x = "schema(Tensor inbox)"\n# who asks\n', 0),
    ],
)
def test_a_source(text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(text)
    assert len(list(language.of_source(file))) == count
