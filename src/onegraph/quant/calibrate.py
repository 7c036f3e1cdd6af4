"""What the quantizer asks of a model, and text that the model itself samples to calibrate on."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ExpertLayer(Protocol):
    """The routed experts of a block, dense, as the quantizer sees them."""

    @property
    def names(self) -> tuple[str, str]:
        """Of gate-up and down within the block."""

    @property
    def module(self) -> nn.Module:
        """What is called with x [..., D] and the experts that each token chose, int [..., K]."""

    @property
    def count(self) -> int: ...

    @property
    def stacks(self) -> tuple[Tensor, Tensor]:
        """The weights of both as the module holds them, whose values `put` replaces."""

    def weight(self, which: int, expert: int) -> Tensor:
        """float32 gate-up [2F, D], gate rows first (`which` 0), or down [D, F] (1)."""

    def put(self, which: int, expert: int, weight: Tensor) -> None:
        """Replace a weight."""

    def inner(self, expert: int, x: Tensor) -> Tensor:
        """What down of the expert reads for x [T, D], by the weights as they are: float32 [T, F]."""


class QuantizableModel(Protocol):
    """An unquantized decoder, handed over block by block so that memory is bounded by one block.

    `hidden` is the residual stream [B, T, D] before a block. Nothing here may depend on rows of other sequences.
    """

    config: dict[str, Any]  # the Hugging Face config.json

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_drafts(self) -> int:
        """Layers behind the blocks, numbered with them, that predict further tokens and are to be rounded."""

    @property
    def kept(self) -> Collection[str]:
        """Linears of the blocks, by full name, that are none of `shapes` and stay as they are."""

    def shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """What of block `i` may be rounded, by its name within the block: linears [n, k], then stacks of experts
        [E, n, k], those of a layer's gate-up and down one after the other."""

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """int [B, T] -> [B, T, D]; table [V, D] stands for the embedding, where the model lets its ends be rounded."""

    def load_block(self, i: int) -> nn.Module:
        """Block `i`, dense, on the device; its weights are read from disk now."""

    def run_block(self, block: Any, hidden: Tensor) -> Tensor:
        """Residual stream before the block -> after it, causal over the whole sequence, without a cache; the argument
        is left as it was. Differentiable under `ops.registry.reference_ops()`."""

    def draft_inputs(self, block: Any, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What `run_block` takes for a draft layer: tokens int [B, T], the stream behind the last block [B, T, D] ->
        [B, T - 1, ...]."""

    def linear_groups(self, block: Any) -> list[list[tuple[str, Any]]]:
        """Linears by shared input, in the order they run: (name within the block, module with .weight [n, k])."""

    def expert_layers(self, block: Any) -> Sequence["ExpertLayer"]:
        """The routed experts of the block."""

    def block_prefix(self, i: int) -> str:
        """What the names of block `i` begin with, e.g. "model.layers.0."."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Residual stream after the last block -> input of the head."""

    def head(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Residual stream after the last block -> logits [..., V]; weight [V, D] stands for the head's, likewise."""


Generate = Callable[[list[list[int]], int], list[list[int]]]


def sampled_tokens(generate: Generate, *, starts: Sequence[list[int]], length: int) -> Tensor:
    """Calibration tokens int64 [N, length] that the model wrote itself, behind one start a row: for when there is no
    text at hand, or little.

    Args:
        generate: (prompts, new tokens) -> continuations, sampled at temperature 1 with a seed a prompt, and not stopped
            by an end token (or stopped: a row that ends is begun again from its start).
        starts: tokens that a row begins with: the BOS token, or a piece of a text (`pieces`).

    Raises ValueError if the model continues none of the starts.
    """
    if length < 1 or not starts or not all(starts):
        raise ValueError(f"length is {length}, starts {list(starts)}; each needs at least 1")
    texts: list[list[int]] = [[] for _ in starts]
    for _ in range(length):
        short = [i for i, text in enumerate(texts) if len(text) < length]
        if not short:
            break
        # A fresh text is appended to what a row has so far: calibration packs documents as training did.
        wanted = max(length - len(texts[i]) for i in short)
        written = generate([list(starts[i]) for i in short], wanted)
        if not any(written) and not any(texts):
            raise ValueError("the model ends each text before its first token; calibrate on a text file instead")
        for i, more in zip(short, written, strict=True):
            texts[i].extend(starts[i] + more)
    return torch.tensor([text[:length] for text in texts], dtype=torch.int64)


def pieces(tokens: list[int], *, length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens of a text, from all of it and in order; more than it has are the same ones
    several times. Raises ValueError where the text is shorter than one."""
    there = len(tokens) // length
    if there == 0:
        raise ValueError(f"the text has {len(tokens)} tokens; a piece to go on with has {length}")
    places = [i * there // count * length for i in range(count)]
    return [tokens[at : at + length] for at in places]


def packed_tokens(tokens: list[int], *, length: int, limit: int) -> Tensor:
    """The first `limit` tokens of a text as int64 [N, length]; the remainder that fills no row is dropped.

    Raises ValueError where the text is shorter than one row.
    """
    rows = min(len(tokens), limit) // length
    if rows == 0:
        raise ValueError(
            f"the calibration text has {len(tokens)} tokens; it needs at least {length}, and some 4000 to be of use"
        )
    return torch.tensor(tokens[: rows * length], dtype=torch.int64).view(rows, length)
