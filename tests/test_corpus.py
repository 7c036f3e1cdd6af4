"""The calibration corpus: packed from its sources, in the kinds and amounts that its recipe says, and varied."""

from __future__ import annotations

import json
import lzma
import random
import re
from pathlib import Path

import pytest

from models import save_hf
from onegraph.api.calibration import CORPUS
from onegraph.formats.checkpoint import Checkpoint
from tools import corpus, diversity

KINDS = {"prose", "fiction", "news", "chat", "code", "data", "math", "languages", "long"}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {kind: corpus.text_of(corpus.SOURCES / kind) for kind in corpus.shares()}


def test_the_package_has_what_the_sources_say() -> None:
    """By content: bytes of xz may differ with the version of liblzma."""
    assert lzma.decompress(CORPUS.read_bytes()) == lzma.decompress(corpus.packed()), "python -m tools corpus --write"
    header, *rows = map(json.loads, lzma.decompress(CORPUS.read_bytes()).decode().splitlines())
    assert header["license"] == "Apache-2.0"
    assert set(header["shares"]) == {row["kind"] for row in rows} == KINDS
    assert sum(header["shares"].values()) == pytest.approx(1)
    assert CORPUS.stat().st_size < 300_000
    assert "Apache-2.0" in (CORPUS.parent / "README.md").read_text()


def test_the_order_of_a_kind_depends_on_each_document_alone() -> None:
    rows = [{"text": str(i)} for i in range(50)]
    order = corpus.ordered(rows)
    assert order != rows
    assert order == corpus.ordered(rows[::-1])
    assert [row for row in corpus.ordered([*rows, {"text": "new"}]) if row["text"] != "new"] == order


def test_no_document_is_there_twice(texts: dict[str, str]) -> None:
    found = [json.dumps(row) for kind in texts for row in corpus.documents(corpus.SOURCES / kind)]
    assert len(found) == len(set(found)) > 100


def test_every_kind_is_varied(texts: dict[str, str]) -> None:
    assert [line for kind, text in texts.items() for line in diversity.problems(kind, text)] == []


NAMES = "Ada Bo Cy Di Ed Flo Gus".split()  # noqa: SIM905


def templated(draw: random.Random) -> str:
    name, place, day = draw.choice(NAMES), draw.choice(["shop", "park", "zoo"]), draw.choice(["Monday", "Friday"])
    return (
        f"{name} went to the {place} on {day} and bought {draw.randint(2, 99)} {draw.choice(['apples', 'pens'])} for "
        f"{draw.randint(2, 99)} dollars. How much did one of them cost, and what would be left of a hundred dollars?"
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("what", ["template", "filler"])
def test_a_sixth_of_filler_or_templates_is_found(texts: dict[str, str], kind: str, what: str) -> None:
    draw, text = random.Random(0), texts[kind][:12_000]
    bad, paragraph = "", text[:600]
    while len(bad) < len(text) // 6 + 600:
        bad += "\n\n" + (templated(draw) if what == "template" else paragraph)
    assert diversity.problems(kind, text[: len(text) // 2] + bad + "\n\n" + text[len(text) // 2 :])


def test_measures_of_texts_whose_figures_are_known() -> None:
    varied, twice = list(range(100)), [*range(50), *range(50)]
    assert (diversity.distinct(varied, 4), diversity.copied(varied)) == (1, 0)
    assert diversity.distinct(twice, 2) == pytest.approx(50 / 99)
    assert diversity.copied(twice) == 0.5
    assert diversity.copied(twice, run=51) == 0
    assert diversity.words("a b, a") == [0, 1, 2, 0]


def test_a_file_of_another_sort_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"x\.csv: allowed are \.txt, \.md and \.jsonl"):
        list(corpus.documents(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no documents"):
        list(corpus.documents(tmp_path / "empty"))


def test_experts_that_a_text_reaches_are_counted(tmp_path: Path) -> None:
    save_hf("qwen3_moe", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        vocabulary = int(checkpoint.config["vocab_size"])
        one, many = diversity.experts(checkpoint, {"one": [5] * 64, "many": list(range(vocabulary)) * 2})
    (few, whole), (more, _) = (map(int, re.findall(r"reach (\d+) of (\d+) experts", line)[0]) for line in (one, many))
    assert 0 < few < more <= whole, "a word said again and again reaches few"
