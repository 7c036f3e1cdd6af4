"""What `eval` measured, in the model card: between two marks, a table for each measure, which the same one replaces."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegraph import __version__
from onegraph.api.provenance import named
from onegraph.formats.checkpoint import CARD
from onegraph.formats.digests import SUMS, read_sums
from onegraph.formats.files import CheckpointError, member, read_bytes, replace_bytes

HEAD, BEGIN, END = "## Quality", "<!-- onegraph eval -->", "<!-- /onegraph eval -->"
MAX_CARD = 4 << 20  # bytes; cards are some kilobytes
_MEASURE = re.compile(r"^<!-- measure ([0-9a-f]{12}) -->[ \t]*\r?$", re.MULTILINE)


def section(inside: str) -> str:
    """The part of a new card that `record` writes later."""
    return f"{HEAD}\n\n{_marked(inside)}"


def _marked(inside: str) -> str:
    return f"{BEGIN}\n\n{inside}\n\n{END}"  # not every reader of Markdown ends a table at a comment


def plain(text: str) -> str:
    """A name as code in a card may have it; a directory's may have any characters."""
    return "".join(c if c.isprintable() and c != "`" else "?" for c in text)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One run of `eval`. figures: as `evaluate_checkpoint` gives them. text: what it is called; sha256: of its UTF-8.
    reference: the path that was compared with. computed: in which dtype and on what. day: in ISO's form."""

    figures: Mapping[str, Any]
    text: str
    sha256: str
    reference: Path | None
    needle: int | None
    computed: str
    day: str

    @property
    def against(self) -> str | None:
        """The name of the reference; a path would tell more of somebody's machine than of the model."""
        return None if self.reference is None else "@".join(named(self.reference).values())

    @property
    def key(self) -> str:
        """The same for the same measure, whichever day, device and version it is taken with."""
        what = [self.figures[name] for name in ("tokens", "window", "kv")]
        told = json.dumps([*what, self.sha256, self.against, self.needle, False])  # False: keys of cards have it
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        found = self.figures
        kv = "" if found["kv"] == "exact" else f"KV cache `{found['kv']}`, "
        against = "" if found["kl"] is None else "against the exact cache, "
        if self.against is not None:
            against = f"against `{plain(self.against)}`, "
        rows = [["", "this model", "reference"], ["---"] * 3]
        rows += [["perplexity", f"{found['perplexity']:.4f}", ""]]
        if found["kl"] is not None:
            rows[-1][2] = f"{found['reference_perplexity']:.4f}"
            rows += [["KL to the reference, nats per token", f"{found['kl']:.5f} ± {found['kl_error']:.5f}", ""]]
            rows += [["top-1 agreement", f"{100 * found['top1']:.2f} %", ""]]
        if found["needle"] is not None:
            hits, count = sum(map(sum, found["needle"])), sum(map(len, found["needle"]))
            rows += [[f"needles found in {self.needle} tokens", f"{hits} of {count}", ""]]
        width = 2 if found["kl"] is None else 3
        table = "\n".join("| " + " | ".join(row[:width]) + " |" for row in rows)
        on = f"`{plain(self.text)}` (SHA-256 `{self.sha256}`)"
        where = f"{found['tokens']:,} tokens in windows of {found['window']}"
        how = f"{against}{kv}computed {self.computed}, onegraph {__version__}, {self.day}"
        return f"On {on}, {where}: {how}.\n\n{table}"


def card_of(model: Path) -> Path:
    """The card of a model directory, which `record` can write. Raises CheckpointError where it cannot, and why."""
    if not model.is_dir():
        raise CheckpointError(f"{model}: a .gguf file has no model card; figures are written to a model directory's")
    file = member(model, CARD)
    if file is None:
        raise CheckpointError(f"{model / CARD}: no such file; figures are added to a model card that is there")
    if file.resolve().parent != model.resolve():
        raise CheckpointError(
            f"{file}: is in the cache of the hub, which is not ours to change; fetch the model into a directory "
            "(hf download ORG/NAME --local-dir DIR) and give DIR"
        )
    if CARD in (read_sums(model) or {}):
        raise CheckpointError(f"{model / SUMS}: has a digest of {CARD}, which would be wrong then; take out that line")
    if not os.access(file.resolve().parent, os.W_OK):
        raise CheckpointError(f"{model}: the directory cannot be written, so the card cannot be changed")
    _parts(file)
    return file


def record(card: Path, measure: Measure) -> None:
    """Writes a measure into a card of `card_of`, in place of the same one; other text than ours stays as it is.

    The card is changed whole or not at all. Raises CheckpointError, and OSError that names the file.
    """
    front, measures, back = _parts(card)
    measures[measure.key] = str(measure)
    inside = "\n\n".join(f"<!-- measure {key} -->\n\n{told}" for key, told in measures.items())
    replace_bytes(card.resolve(), f"{front}{_marked(inside)}{back}".encode())


def _parts(card: Path) -> tuple[str, dict[str, str], str]:
    """What is in front of our part, the measures in it by key, and what is behind it."""
    try:
        text = read_bytes(card, MAX_CARD).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{card}: not UTF-8 text at byte {error.start}") from None
    begins, ends = (
        list(re.finditer(rf"^{re.escape(mark)}[ \t]*(?=\r?$)", text, re.MULTILINE)) for mark in (BEGIN, END)
    )
    if not begins and not ends:
        return f"{text.rstrip()}\n\n{HEAD}\n\n", {}, "\n"
    if len(begins) != 1 or len(ends) != 1 or begins[0].end() > ends[0].start():
        raise CheckpointError(
            f"{card}: has {len(begins)} lines {BEGIN} and {len(ends)} lines {END}; it takes one and behind it one, or "
            "none of both"
        )
    _, *told = _MEASURE.split(text[begins[0].end() : ends[0].start()])
    measures = {key: each.strip("\r\n") for key, each in zip(told[::2], told[1::2], strict=True)}
    return text[: begins[0].start()], measures, text[ends[0].end() :]
