"""The figures of docs/benchmarks/checker.md: each is a raw line, and what needs no GPU is computed again."""

import json
import re
from pathlib import Path

import accuracy
import corpus_tools
import pytest

SETS = {"corpus": "corpus", "held out 1": "heldout", "held out 2": "heldout2", "held out 3": "heldout3",
        "held out 4": "heldout4", "held out 5": "heldout5", "held out 6": "heldout6",
        "held out 7": "heldout7", "held out 8": "heldout8", "held out 9": "heldout9", "held out 10": "heldout10",
        "held out 11": "heldout11", "held out 12": "heldout12",
        "Triton": "triton", "Triton users": "triton_users",
        "models": "models", "models 2": "models2"}  # fmt: skip
ZOOS = {"models": "zoo.json", "models 2": "zoo2.json"}
WAYS = {"simulation": "simulate", "source": "source", "live": "live", "default command": "default"}


def table(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == columns and not row[0].startswith("-")]


def raw(repo: Path) -> list[dict]:
    lines = (repo / "benchmarks/results/check-accuracy.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_guide_shows_every_raw_line_and_no_other(repo: Path) -> None:
    shown = []
    for row in table((repo / "docs/benchmarks/checker.md").read_text(), 7)[1:]:
        cases, way, bad, recall, errors, precision, right = row
        way, _, note = way.partition(", ")
        run = "first" if note == "first run" else "now"
        figures = (int(bad), float(recall), int(errors.split()[0]), float(precision), float(right) if right else None)
        shown.append((SETS[cases], WAYS[way], run, *figures))
    keys = ("cases", "way", "run", "bad_cases", "recall", "error_findings", "precision", "right_line")
    told = [tuple(line.get(key) for key in keys) for line in raw(repo)]
    assert sorted(shown, key=str) == sorted(told, key=str)


def test_the_guide_counts_the_cases_that_are_there(repo: Path) -> None:
    text = (repo / "docs/benchmarks/checker.md").read_text()
    counts = {row[0]: int(row[1]) for row in table(text, 3)[1:]}
    here = Path(__file__).parent
    models = {n: len(json.loads((here / f).read_text())["models"]) for n, f in ZOOS.items()}
    folders = {name: folder for name, folder in SETS.items() if name not in models}
    assert counts == {n: sum(1 for _ in corpus_tools.cases(f)) for n, f in folders.items()} | models
    truth = corpus_tools.truth()
    said = re.search(r"holds the (\d+) rows \((\d+) do not replay as eager\)", text)
    assert said is not None
    assert [int(n) for n in said.groups()] == [len(truth), sum(map(accuracy.bad, truth.values()))]


@pytest.mark.parametrize("folder", corpus_tools.FOLDERS)
def test_reading_the_source_scores_what_the_line_says(repo: Path, folder: str) -> None:
    """The simulation's score follows from test_simulate_corpus.py, case by case; live's needs a GPU."""
    lines = {(line["cases"], line["way"]): line for line in raw(repo)}  # the last one of a pair is today's
    seen = {f"{folder}/{c.name}": accuracy.look("source", folder, c.name) for c in corpus_tools.cases(folder)}
    row = accuracy.score("source", folder, seen, accuracy.by_author(folder) | corpus_tools.truth())
    assert {key.replace(" ", "_"): value for key, value in row.items()}.items() <= lines[folder, "source"].items()
