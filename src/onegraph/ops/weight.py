"""How weights of a format are run: one record beside the ops of each format, found through `WeightFormat.ops`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.weight import WeightFormat

KernelArgs = Mapping[str, Tensor]  # the tensors of `WeightFormat.fields` and `.constants`, by name


@dataclass(frozen=True)
class ChainOps:
    """Four linears between two attentions as one launch, for few tokens.

    Args:
        most: (format, (inputs of out, width, inputs of down, outputs of qkv or 0)) -> tokens that it takes, 0: none.
        run: (format, x, residual, weights and biases of out, gate-up, down and maybe qkv, eps) -> residual, qkv.
    """

    most: Callable[[Any, tuple[int, int, int, int]], int]
    run: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class WeightOps:
    """The ops on weights of one format.

    Args:
        linear: (format, x [..., k], weight, bias [n] or None, add, eps, silu, float32) -> [..., n] in x's dtype, or in
            float32. `add`, `eps` (an RMSNorm whose weight is in the layer) and `silu` are given only to a format that
            fuses them.
        all_reduce: (format, x [..., k], weight, bias, add, silu, group) -> the sum of all ranks' results and `add`,
            [..., n], in the launch of the linear; None where so many tokens are better exchanged in one of their own.
            group: `nn.peers.Peer.group`.
        decode: (format, weight) -> the dense weight float32 [n, k] that the tensors stand for, exact.
        grouped: (format, x [..., G, k], weight [G, n, k]) -> [..., G, n].
        experts: (format, x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D], down [E, D, F],
            gate: a `Gate`, biases: float32 ([E, 2F], [E, D]) or None) -> [T, D]. Raises ValueError where biases are
            given to a format that takes none. One that `experts_add` takes add [T, D] last, the other part of a sum.
        embedding: (format, ids [...], weight [V, D]) -> float32 [..., D], of a weight whose output side is not rotated.
        chain: for small models.
        steady: (format, x [..., k], weight) -> whether `linear` of 1 to `invariant.AT_ONCE` such tokens, where
            `invariant.on`, gives each the same bits.
        reads: (format, n, k, dtype of activations, GPU's number) -> whether a kernel that can be had there multiplies
            by the codes as they are. Else a call decodes the whole weight or runs Triton's kernel: slower than dense.

    What a format does not have is None.
    """

    linear: Callable[..., Tensor]
    decode: Callable[[Any, KernelArgs], Tensor]
    all_reduce: Callable[..., Tensor | None] | None = None
    grouped: Callable[[Any, Tensor, KernelArgs], Tensor] | None = None
    experts: Callable[..., Tensor] | None = None
    experts_add: bool = False
    embedding: Callable[[Any, Tensor, KernelArgs], Tensor] | None = None
    chain: ChainOps | None = None
    steady: Callable[[Any, Tensor, KernelArgs], bool] | None = None
    reads: Callable[[Any, int, int, torch.dtype, int], bool] | None = None


@cache
def weight_ops(format: WeightFormat) -> WeightOps:
    ops = importlib.import_module(format.ops).WEIGHT
    assert isinstance(ops, WeightOps)
    return ops
