"""How diverse a text is, in figures that filler and repeated templates move.

- `ratio`: bytes over those that xz needs. Text written once has 2.3 to 3.2; text from templates has more.
- `distinct`: share of n-grams of tokens that occur once or for the first time, for n = 2 and 4 (distinct-n of Li et
  al., arXiv 1510.03055).
- `copied`: share of the tokens inside a run of at least `RUN` tokens that occurred before: boilerplate.
- `vocabulary`: how many different tokens there are.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onegraph.formats.checkpoint import Checkpoint

RUN = 12  # tokens
HEAD = f"{'':24}{'tokens':>8}{'ratio':>8}{'distinct-2':>12}{'distinct-4':>12}{'copied':>8}{'vocabulary':>12}"
# (least distinct-4, most copied) of a kind, in words; data and code repeat names and keys of their own, formulas
# their symbols
LIMITS = {"code": (0.80, 0.08), "data": (0.75, 0.12), "chat": (0.82, 0.10), "math": (0.90, 0.02)}
LIMIT = 0.92, 0.02
WORDS = 8000  # of a kind, on which the limits are checked
RATIO = 3.2  # at most
EXPERT_TOKENS = 16384  # of each text, on which experts are counted


@dataclass(frozen=True)
class Diversity:
    """Of one text, as the module says."""

    ratio: float
    distinct2: float
    distinct4: float
    copied: float
    vocabulary: int

    def line(self, name: str, tokens: int) -> str:
        """A row under `HEAD`."""
        return (
            f"{name[:23]:24}{tokens:>8}{self.ratio:>8.2f}{self.distinct2:>12.3f}{self.distinct4:>12.3f}"
            f"{self.copied:>8.3f}{self.vocabulary:>12}"
        )


def measure(ids: Sequence[int], text: str) -> Diversity:
    """Of a text and its tokens, at least 4 of them."""
    data = text.encode()
    return Diversity(
        ratio=len(data) / len(lzma.compress(data, preset=9)),
        distinct2=distinct(ids, 2),
        distinct4=distinct(ids, 4),
        copied=copied(ids),
        vocabulary=len(set(ids)),
    )


def words(text: str) -> list[int]:
    """A number for each word and mark: tokens that need no tokenizer."""
    table: dict[str, int] = {}
    return [table.setdefault(word, len(table)) for word in re.findall(r"\w+|[^\w\s]", text)]


def problems(kind: str, text: str) -> list[str]:
    """What in the text of a kind looks like filler or templates, a line each; judged in windows of `WORDS` words."""
    found = []
    least, most = LIMITS.get(kind, LIMIT)
    pieces = re.findall(rf"(?:\S+\s+){{1,{WORDS // 2}}}", text + "\n")
    for number, piece in enumerate(pieces, 1):
        if len(ids := words(piece)) < 400:  # too few to say anything
            continue
        made, where = measure(ids[:WORDS], piece), f"{kind}, part {number}"
        if made.distinct4 < least:
            found.append(f"{where}: {made.distinct4:.3f} of its 4-grams are distinct; at least {least}")
        if made.copied > most:
            found.append(f"{where}: {made.copied:.3f} of its words are in copied runs; at most {most}")
        if made.ratio > RATIO:
            found.append(f"{where}: compresses {made.ratio:.2f} times; at most {RATIO}")
    return found


def distinct(ids: Sequence[int], n: int) -> float:
    """Different n-grams over all of them."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def copied(ids: Sequence[int], run: int = RUN) -> float:
    """Share of the tokens in a run that occurred before."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(ids)
    for i in range(len(ids) - run + 1):
        gram = tuple(ids[i : i + run])
        if gram in seen:
            inside[i : i + run] = [True] * run
        seen.add(gram)
    return sum(inside) / len(ids)


def experts(checkpoint: Checkpoint, texts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """For each text the experts of all layers that at least one in a thousand tokens chooses, and the least and most
    used one of all layers; unquantized model, on the CPU."""
    import torch

    from onegraph.models.source import LlamaSource
    from onegraph.quant.calibrate import packed_tokens
    from onegraph.quant.hessian import gather

    model = LlamaSource(checkpoint, "cpu", torch.float32)
    positions = int(checkpoint.config.get("max_position_embeddings", 512))
    for name, ids in texts.items():
        length = min(512, positions, len(ids))
        stream = list(model.embed(packed_tokens(list(ids), length=length, limit=EXPERT_TOKENS)).split(8))
        tokens = sum(part.shape[0] * part.shape[1] for part in stream)
        counts: list[int] = []
        for i in range(model.num_blocks):
            block = model.load_block(i)
            layers = model.expert_layers(block)
            gathered = gather(model, block, stream, [], experts=range(len(layers)))
            counts += [n for at, layer in enumerate(layers) for n in gathered.experts[at].counts(layer.count).tolist()]
            stream = list(gathered.outputs)
        reached = sum(count * 1000 >= tokens for count in counts)
        told = f"reach {reached} of {len(counts)} experts; {min(counts)} to {max(counts)} each"
        yield f"{name:24}{tokens:>8} tokens {told}"
