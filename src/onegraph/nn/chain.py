"""From one attention to the next in one op, for a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onegraph.nn.attention import Attention
from onegraph.nn.linear import E8PLinear
from onegraph.ops.cuda import e8p_chain as kernel
from onegraph.ops.e8p_chain import e8p_chain


class Chain:
    """What follows a layer's attention: its output, gate-up and down, and qkv of the next layer, if there is one.

    It holds no buffers: the layers do. `gate_up` and `qkv` hold their norm's weight (`E8PLinear.after_norm`).
    """

    def __init__(self, attention: Attention, links: Sequence[E8PLinear], eps: float) -> None:
        self.attention, self.links, self.eps = attention, links, eps
        attention.chained = True

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., k] that attention gave, residual [..., D] -> residual [..., D], qkv [..., n]: `ops/e8p_chain.py`."""
        links = self.links
        return e8p_chain(
            x,
            residual,
            [link.codes for link in links],
            [link.residual for link in links if link.residual is not None],
            links[0].codebook,
            [link.in_scale for link in links],
            [link.out_scale for link in links],
            [link.bias for link in links],
            links[0].bits,
            self.eps,
        )


def chains(layers: Sequence[tuple[Attention, nn.Module, nn.Module]], eps: float) -> list[Chain]:
    """From the (attention, gate_up, down) of each layer, fused with what stands around them (`models/llama.py`); none
    where one launch for four linears would not be quicker."""
    found = []
    for i, (attention, gate_up, down) in enumerate(layers):
        links = [attention.out, gate_up, down, *(each[0].qkv for each in layers[i + 1 : i + 2])]
        coded = [link for link in links if isinstance(link, E8PLinear)]
        if len(coded) < len(links) or len({link.bits for link in coded}) > 1:
            return []
        out, _, down, *qkv = coded
        sizes = out.in_features, out.out_features, down.in_features, sum(each.out_features for each in qkv)
        if not kernel.takes(1, sizes, out.bits, torch.bfloat16):
            return []
        found.append(Chain(attention, coded, eps))
    return found
