"""The calibration corpus: packed for the package, and measured.

    python -m tools corpus --write              # packs data/calibration into src/onegraph/data/calibration.jsonl.xz
    python -m tools corpus --model M            # how diverse it is, by kind, in tokens of M
    python -m tools corpus --model M --compare docstrings.txt   # beside other texts
    python -m tools corpus --model M --experts  # and the experts of an MoE that tokens of each kind choose

A folder of data/calibration is a kind. A .txt or .md file is one document, a line of a .jsonl file a conversation.
recipe.json has the share of each kind. The order within a kind follows digests of the documents: a new one moves no
other, and the beginning of a kind is a mixture of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "data" / "calibration"
TOKENS = 16384  # of each text, where texts of unlike length are compared: fewer n-grams repeat in a shorter one


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "corpus",
        help="pack the calibration corpus, measure its diversity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the file of the package")
    parser.add_argument("--model", help="model whose tokenizer and chat template count; required to measure")
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="FILE", help="other texts to measure")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of each text [{TOKENS}]")
    parser.add_argument("--experts", action="store_true", help="also count the experts that MODEL chooses")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a line of results for each text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.calibration import CORPUS

    data = packed()
    if args.write:
        CORPUS.write_bytes(data)
        print(f"{CORPUS.relative_to(ROOT)}: {len(data):,} bytes of {len(lzma.decompress(data)):,}")
    from tools import diversity

    problems = [line for kind in shares() for line in diversity.problems(kind, text_of(SOURCES / kind))]
    for line in problems:
        print(line)
    if args.model is None:
        return bool(problems)
    from onegraph.api.calibration import corpus, draw, sources
    from onegraph.api.hub import locate
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.engine.record import machine, with_id
    from onegraph.formats.checkpoint import Checkpoint

    with Checkpoint.open(locate(args.model).path) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
        kinds = {source.name: draw(tokenizer, [source], 1 << 24).ids for source in sources("bundled")}
        whole = draw(tokenizer, sources("bundled"), 1 << 24).ids
        rows = {"corpus": whole[: args.tokens]}
        rows |= {str(file.name): tokenizer.encode(file.read_text("utf-8"))[: args.tokens] for file in args.compare}
        count = sum(map(len, corpus()[1].values()))
        print(f"{len(whole):,} tokens, {count} documents; {args.tokens:,} tokens of each text:")
        print(diversity.HEAD)
        for name, ids in (rows | {f"  {name}": ids[: args.tokens] for name, ids in kinds.items()}).items():
            found = diversity.measure(ids, tokenizer.decode(ids))
            print(found.line(name, len(ids)))
            if args.out is not None:
                row = {"bench": "corpus", "name": name.strip(), "tokens": len(ids), **asdict(found), **machine("cpu")}
                with args.out.open("a") as stream:
                    stream.write(json.dumps(with_id(row)) + "\n")
        if args.experts:
            for line in diversity.experts(checkpoint, kinds | {"all": whole}):
                print(line)
    return bool(problems)


def text_of(kind: Path) -> str:
    """The words of a kind without what a chat template adds."""
    rows = (row.get("messages", [{"content": row.get("text")}]) for row in documents(kind))
    return "\n\n".join(message["content"] for messages in rows for message in messages)


def shares() -> dict[str, float]:
    """Of the tokens, by kind."""
    found: dict[str, float] = json.loads((SOURCES / "recipe.json").read_text())["shares"]
    return found


def packed() -> bytes:
    """The file of the package: a header, then a document a line, as xz. The same sources give the same bytes with one
    version of liblzma."""
    kinds = {kind: list(documents(SOURCES / kind)) for kind in shares()}
    header = {"license": "Apache-2.0", "shares": shares()}
    rows: list[Mapping[str, Any]] = [{"kind": kind, **row} for kind, found in kinds.items() for row in ordered(found)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [header, *rows])
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def documents(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Of a kind: {"text": ...} or {"messages": [...]}. Raises ValueError for another sort of file, and a kind that has
    none."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise ValueError(f"{folder}: has no documents; a kind of recipe.json is a folder of .txt, .md and .jsonl files")
    for file in files:
        text = file.read_text("utf-8")
        if file.suffix == ".jsonl":
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
        elif file.suffix in (".txt", ".md"):
            yield {"text": text.strip("\n")}
        else:
            raise ValueError(f"{file}: allowed are .txt, .md and .jsonl")


def ordered(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """In an order that depends on each document alone, and mixes them."""
    return sorted(found, key=lambda row: hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest())
