"""An optional pass over a loaded Llama: for few tokens, what lies between two attentions in one launch.

It is for models so small that the codes of four linears fit one cluster's shared memory (no dimension above 1536) and
returns every other model as it was. docs/benchmarks/decode.md has its figures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onegraph.models.blocks import Block
from onegraph.models.llama import Llama
from onegraph.nn.attention import Attend
from onegraph.nn.block import MLP, Stream
from onegraph.nn.linear import Linear
from onegraph.ops import invariant
from onegraph.ops.weight import weight_ops


class Chain:
    """What follows a layer's attention: out, gate-up and down, and qkv of the next layer if there is one."""

    def __init__(self, block: Block, following: Block | None) -> None:
        assert isinstance(block.mlp, MLP)
        self.attention, self.eps = block.attention, block.qkv.eps
        self.links: list[Any] = [block.out.linear, block.mlp.gate_up.linear, block.mlp.down.linear]
        if following is not None:
            self.links.append(following.qkv.linear)

    @property
    def most(self) -> int:
        """Tokens that one launch computes; 0 where linears are not of one format that has such a launch for them."""
        if not all(isinstance(link, Linear) and link.format is self.links[0].format for link in self.links):
            return 0
        format, (out, _, down, *qkv) = self.links[0].format, self.links
        sizes = out.in_features, out.out_features, down.in_features, sum(each.out_features for each in qkv)
        chain = weight_ops(format).chain
        return 0 if chain is None else chain.most(format, sizes)

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., k] that attention gave, residual [..., D] -> residual [..., D], qkv [..., n] of the next layer."""
        format = self.links[0].format
        chain = weight_ops(format).chain
        assert chain is not None
        weights, biases = [link.given for link in self.links], [link.bias for link in self.links]
        return chain.run(format, x, residual, weights, biases, self.eps)


class ChainedLlama(nn.Module):
    """`model`, whose steps and rounds of few tokens run through chains; everything else is the model's own."""

    def __init__(self, model: Llama, chains: list[Chain]) -> None:
        super().__init__()
        self.model, self.chains = model, chains
        self.most = min(chain.most for chain in chains)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    @property
    def ranks(self) -> list[ChainedLlama]:
        """Itself."""
        return [self]

    def forward(self, tokens: Tensor, cache: Attend) -> Tensor:
        """As `Llama.forward`."""
        return self.model.leave(self.run(0, self.model.enter(tokens), tokens, cache))

    def run(
        self, stage: int, stream: Stream, tokens: Tensor, cache: Attend, taps: dict[int, Tensor | None] | None = None
    ) -> Stream:
        """As `Llama.run`; two ops a layer where tokens are few. A chain gives a token the same bits among others, so
        many tokens go through chains too where they must have those of few."""
        if not (self._steady(stream) if invariant.on() else tokens.numel() <= self.most):
            return self.model.run(stage, stream, tokens, cache, taps)
        first = self.model.blocks[0]
        assert isinstance(first, Block)
        qkv, residual = first.qkv(stream)
        for i, chain in enumerate(self.chains):
            residual, qkv = self._follow(chain, cache.attend(chain.attention, qkv), residual)
            if taps is not None and i in taps:
                taps[i] = residual
        return Stream(residual)

    def _steady(self, stream: Stream) -> bool:
        """Whether a link that is a launch of its own has the same bits for one token and for several."""
        links = (link for chain in self.chains for link in chain.links)
        ops = ((weight_ops(link.format).steady, link) for link in links)
        return all(steady is not None and steady(link.format, stream.value, link.given) for steady, link in ops)

    def _follow(self, chain: Chain, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[:-1].numel() <= self.most:
            return chain(x, residual)
        passes = zip(*(each.flatten(0, -2).split(self.most) for each in (x, residual)), strict=True)
        made = zip(*(chain(*each) for each in passes), strict=True)
        stream, qkv = (torch.cat(each).unflatten(0, x.shape[:-1]) for each in made)
        return stream, qkv


def chained(model: Llama) -> Llama | ChainedLlama:
    """`model` with chains where every layer suits them, else `model` itself."""
    blocks: list[Any] = list(model.blocks)
    if not all(block.fused for block in blocks):
        return model
    chains = [Chain(block, following) for block, following in zip(blocks, [*blocks[1:], None], strict=True)]
    if not all(chain.most for chain in chains):
        return model
    made = ChainedLlama(model, chains)
    for block in blocks:
        block.attention.chained = made.most
    return made
