"""Figures that documents show can be made again: each raw line names itself, its command and its commit."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onegraph
from onegraph.cli import build_parser
from onegraph.cli.common import UsageError
from onegraph.engine import record
from onegraph.engine.record import command_line, emit, machine, with_id
from tools.__main__ import build_parser as build_tools_parser

ID = re.compile(r"`([a-z0-9][a-z0-9.-]*-[0-9a-f]{4})`(?: to `([a-z0-9][a-z0-9.-]*-[0-9a-f]{4})`)?")

SOURCES = {".py", ".cu", ".cuh", ".c"}


def results(repo: Path) -> dict[str, list[dict]]:
    files = sorted((repo / "benchmarks/results").iterdir())
    assert {file.suffix for file in files} == {".jsonl"}
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def documents(repo: Path) -> dict[str, str]:
    files = [repo / "README.md", *sorted((repo / "docs").rglob("*.md"))]
    return {str(file.relative_to(repo)): file.read_text() for file in files}


def test_files_of_results_that_are_named_exist(repo: Path) -> None:
    """In documents, and in what the sources say of their own choices."""
    texts = documents(repo) | {
        str(f.relative_to(repo)): f.read_text() for f in (repo / "src").rglob("*.*") if f.suffix in SOURCES
    }
    named = {(file, name) for file, text in texts.items() for name in re.findall(r"results/([\w.-]+\.jsonl)", text)}
    there = results(repo)
    assert [each for each in sorted(named) if each[1] not in there] == []


def test_every_raw_line_says_how_to_make_it_again(repo: Path) -> None:
    for file, rows in results(repo).items():
        for row in rows:
            assert row == with_id(row), f"{file}: the id is not that of the line; benchmarks/stamp.py makes it anew"
            lacking = {"id", "bench", "command", "commit", "date", "device", "torch"} - row.keys()
            assert not lacking, f"{file}: {row['id']} lacks {lacking}"
            assert re.fullmatch("[0-9a-f]{7}", row["commit"]), f"{file}: {row['id']} is of {row['commit']!r}"
            assert row.get("commit_of", "line") == "line"


def git(repo: Path, *words: str, **options: Any) -> str:
    if not (repo / ".git").exists():
        pytest.skip("not a checkout")
    return subprocess.run(
        ["git", "-C", str(repo), *words], capture_output=True, text=True, check=True, **options
    ).stdout


def test_commits_of_raw_lines_exist(repo: Path) -> None:
    if git(repo, "rev-parse", "--is-shallow-repository") == "true\n":
        pytest.skip("a shallow checkout has no history")
    commits = {row["commit"] for rows in results(repo).values() for row in rows}
    answer = git(repo, "cat-file", "--batch-check", input="".join(f"{sha}^{{commit}}\n" for sha in sorted(commits)))
    assert [line for line in answer.splitlines() if line.endswith("missing")] == []


def test_documents_cite_every_raw_line_and_no_other(repo: Path) -> None:
    files = results(repo)
    places = {row["id"]: (file, i) for file, rows in files.items() for i, row in enumerate(rows)}
    assert len(places) == sum(map(len, files.values())), "an id names two lines"
    cited: set[str] = set()
    for name, text in documents(repo).items():
        for first, last in ID.findall(re.sub(r"\s+", " ", text)):
            assert first in places, f"{name} cites {first}, which no line of benchmarks/results is"
            assert (last or first) in places, f"{name} cites {last}, which no line of benchmarks/results is"
            (file, begin), (other, end) = places[first], places[last or first]
            assert file == other, f"{name}: {first} and {last} are lines of {file} and {other}"
            assert begin <= end, f"{name}: {last} stands before {first}"
            cited |= {row["id"] for row in files[file][begin : end + 1]}
    assert sorted(places.keys() - cited) == [], "no document cites these lines"


def test_files_and_pictures_that_documents_name_are_there(repo: Path) -> None:
    for name, text in documents(repo).items():
        for target in re.findall(r"\]\(([^)#:,\s]+)(?:#[^)]*)?\)", text):
            assert ((repo / name).parent / target).exists(), f"{name} links {target}"
        text = re.sub(r"\]\([^)]*\)", "", text)
        for path in re.findall(
            r"(?<![\w/.-])((?:benchmarks|docs|tests|tools|src)/[\w/.-]+\.(?:py|cu|cuh|jsonl|json|md))\b", text
        ):
            assert (repo / path).exists(), f"{name} names {path}"
        for file in re.findall(r"`([\w.-]+\.jsonl)`", text):
            assert (repo / "benchmarks/results" / file).exists(), f"{name} names {file}"


def test_pictures_show_the_values_of_cited_lines(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point of a picture is named by the id of its line: of the right shape, and its value is in the picture."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    monkeypatch.delitem(sys.modules, "plot", raising=False)
    import plot

    found = plot.rows()
    for chosen in (plot.LINEAR, plot.STEP, plot.QUALITY, plot.FORMATS):
        assert {line for each in chosen.values() for line in each.values()} <= found.keys()
    assert all(found[line]["shape"] == "llama-3-8b" for each in plot.STEP.values() for line in each.values())
    assert all(found[line]["batch"] == 1 for each in plot.STEP.values() for line in each.values())
    linears = [found[line] for each in plot.LINEAR.values() for line in each.values()]
    assert {(row["k"], row["n"], row["tokens"]) for row in linears} == {(4096, 14336, 1)}
    pictures = {path.stem: path.read_text() for path in (repo / "docs/benchmarks").glob("*.svg")}
    assert pictures.keys() == {"overview", "performance", "quality", "turboquant"}
    for values, text, form in (
        (plot.values(plot.STEP, "tokens_per_second"), pictures["overview"], "{:.0f}"),
        (plot.values(plot.QUALITY, "kl"), pictures["overview"], "{:.3g}"),
        (plot.values(plot.FORMATS, "kl"), pictures["quality"], "{:.3g}"),
        (plot.values(plot.LINEAR, "us"), pictures["performance"], "{:.3g}"),
        (plot.values(plot.STEP, "tokens_per_second"), pictures["performance"], "{:.0f}"),
    ):
        for each in values.values():
            for value in each.values():
                assert f">{form.format(value)}</text>" in text
    for row in plot.kv_rows():
        name = row["kv"].removeprefix("turboquant:")
        assert f">{name} ({100 * row['perplexity_increase']:+.2f} %)</text>" in " ".join(
            pictures["turboquant"].replace("−", "-").split()
        )


def test_the_readme_has_one_picture_one_table_of_five_figures_and_fits_on_two_screens(repo: Path) -> None:
    text = documents(repo)["README.md"]
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"^!\[", text, re.M)) == 1
    table = text[text.index("| measured on one H200") :].split("\n\n")[0].splitlines()
    assert len(table) == 2 + 5
    assert not ID.search(text), "ids of lines are for docs/benchmarks"
    decode = documents(repo)["docs/benchmarks/decode.md"]
    assert "949 tok/s" in text
    assert "| 949 (" in decode


def test_an_id_follows_from_the_row() -> None:
    row = {"bench": "linear", "name": "onegraph e8p", "k": 4096, "n": 14336, "bits": 2, "tokens": 1, "us": 6.7}
    made = with_id(row)
    assert re.fullmatch("linear-e8p-4096x14336-2b-1t-[0-9a-f]{4}", made["id"])
    assert with_id(made) == made
    assert with_id(row | {"us": 6.8})["id"] != made["id"]
    assert with_id({"bench": "linear", "us": 6.7})["id"].startswith("linear-")


def test_a_row_names_the_command_without_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(record.__file__).parents[3]
    script = str(root / "benchmarks/linear.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", "a b.jsonl", "--shapes", "64x64", "--out=c"])
    assert command_line() == "PYTHONPATH=src python3 benchmarks/linear.py --shapes 64x64"
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["tests/check/accuracy.py", "--ways", "live"])
    assert command_line() == "PYTHONPATH=src python3 tests/check/accuracy.py --ways live"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/onegraph", "bench", "step", "my model", "--json"])
    assert command_line() == "onegraph bench step 'my model' --json"
    row = machine("cpu")
    assert {"date", "device", "torch", "onegraph", "python", "command", "commit"} == row.keys()
    assert row["torch"] == torch.__version__


def test_the_commit_is_that_of_the_checkout(repo: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    if repo in Path(record.__file__).parents:
        assert head.startswith(record.commit().removesuffix("-dirty"))
    else:
        assert record.commit() == onegraph.__version__  # installed, whatever directory that is in


def test_emitted_lines_are_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for us in (1.5, float("inf")):
        emit({"bench": "linear", "us": us}, tmp_path / "lines.jsonl")
    lines = (tmp_path / "lines.jsonl").read_text()
    assert capsys.readouterr().out == lines
    assert [json.loads(line)["us"] for line in lines.splitlines()] == [1.5, None]


def commands(repo: Path) -> list[tuple[str, list[str]]]:
    """The documents' fenced command lines, comments off: (document, words)."""
    found = []
    for name, text in documents(repo).items():
        blocks = re.findall(r"^```\w*\n(.*?)^```$", text.replace("\\\n", " "), re.S | re.M)
        lines = re.findall(r"^(?:[A-Z_]+=\S+ )*(?:onegraph|python3?) .*", "\n".join(blocks), re.M)
        found += [(name, shlex.split(line, comments=True)) for line in lines if name != "docs/reference/cli.md"]
    return found


def test_documented_commands_are_accepted(repo: Path) -> None:
    tools = ["python", "-m", "tools"]
    lines = [(name, words) for name, words in commands(repo) if words[0] == "onegraph" or words[:3] == tools]
    assert len(lines) > 15
    for name, words in lines:
        try:
            if words[:3] == tools:
                build_tools_parser().parse_args(words[3:])
            else:
                build_parser().parse_args(words[1:])
        except (SystemExit, UsageError) as error:
            pytest.fail(f"{name}: {shlex.join(words)}: {error}")


def test_documented_scripts_have_their_options(repo: Path) -> None:
    ours = [(name, words) for name, words in commands(repo) if "--run" not in words]  # behind it is a user's program
    lines = [(name, words) for name, words in ours if any(word.endswith(".py") for word in words)]
    assert len(lines) > 15
    for name, words in lines:
        script = next(word for word in words if word.endswith(".py"))
        text = (repo / script).read_text()
        for option in words[words.index(script) :]:
            assert not option.startswith("--") or f'"{option}"' in text, f"{name}: {script} has no {option}"


def test_lines_of_another_machine_get_their_commit(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    from stamp import main

    emit({"bench": "linear", "us": 1.5, "commit": onegraph.__version__}, tmp_path / "measured.jsonl")
    (tmp_path / "results.jsonl").write_text("{}\n")
    words = ["stamp.py", str(tmp_path / "measured.jsonl"), "--to", str(tmp_path / "results.jsonl"), "--commit"]
    monkeypatch.setattr(sys, "argv", [*words, "1a2b3c4"])
    main()
    _, line = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line) == with_id({"bench": "linear", "us": 1.5, "commit": "1a2b3c4"})
    monkeypatch.setattr(sys, "argv", [*words, "1a2b3c4-dirty"])
    with pytest.raises(SystemExit):
        main()
    assert "clean commit" in capsys.readouterr().err
