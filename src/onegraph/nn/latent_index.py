"""The sparse indexer of latent attention (DSA, DeepSeek-V3.2): which tokens a query attends to.

A few cheap heads score every token that the query may see; attention then reads the best of them. The scores and the
choice are DeepSeek-V4's op (`ops.deepseek_index`), here over single tokens, with queries and keys rotated before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from onegraph.nn.linear import Linear
from onegraph.ops.deepseek_index import deepseek_index
from onegraph.ops.latent_attention import turn
from onegraph.ops.linear import linear

EPS = 1e-6  # of the norm of keys


class IndexInputs(NamedTuple):
    """What the indexer's linears give for a call's tokens: queries [B, Q, heads dim], keys [B, Q, dim] after their
    norm, and the weight of each head [B, Q, heads]."""

    queries: Tensor
    keys: Tensor
    gains: Tensor


class Indexer(nn.Module):
    """One layer's indexer.

    Args:
        q_b: the queries' low rank -> heads dim. k: x -> dim; k_norm, k_bias: LayerNorm of it, float32 [dim].
        gains: x -> the weight of each head, [heads, D], in its file's dtype or a wider one.
        rope: leading numbers of queries and keys that rotate; interleaved: pairs are neighbours.
        top_k: tokens that a query attends to.
    """

    k_norm: Tensor
    k_bias: Tensor
    gains: Tensor
    ones: Tensor
    zeros: Tensor

    def __init__(
        self, *, q_b: Linear, k: Linear, k_norm: Tensor, k_bias: Tensor, gains: Tensor, rope: int, interleaved: bool,
        top_k: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.q_b, self.k, self.rope, self.interleaved, self.top_k = q_b, k, rope, interleaved, top_k
        self.dim, self.heads = k_norm.shape[0], gains.shape[0]
        self.register_buffer("k_norm", k_norm)
        self.register_buffer("k_bias", k_bias)
        self.register_buffer("gains", gains)
        # The op rotates queries itself; by these it leaves them as they are.
        self.register_buffer("ones", torch.ones(1, rope // 2, device=gains.device), persistent=False)
        self.register_buffer("zeros", torch.zeros(1, rope // 2, device=gains.device), persistent=False)

    def inputs(self, x: Tensor, low: Tensor) -> IndexInputs:
        """x [B, Q, D] behind the block's norm, low [B, Q, rank] behind its own."""
        keys = self.k(x)
        normed = nn.functional.layer_norm(keys.float(), (self.dim,), self.k_norm, self.k_bias, EPS).to(keys.dtype)
        return IndexInputs(self.q_b(low), normed, linear(x.to(self.gains.dtype), self.gains, True))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., dim] with its leading part rotated; tables [..., rope / 2]."""
        return torch.cat(
            (turn(x[..., : self.rope], cos, sin, self.interleaved).to(x.dtype), x[..., self.rope :]), dim=-1
        )

    def write(self, keys: Tensor, cos: Tensor, sin: Tensor, place: tuple[Tensor, Tensor, Tensor], pool: Tensor) -> None:
        """The call's keys [B, Q, dim] go to `place` (page, place in it, whether it is real) of the pool."""
        page, inside, real = (t.flatten() for t in place)
        values = torch.where(real.unsqueeze(1), self.turned(keys, cos, sin).flatten(0, 1), pool[0, 0])
        pool.index_put_((torch.where(real, page, 0).long(), torch.where(real, inside, 0).long()), values)

    def mask(self, given: IndexInputs, cos: Tensor, sin: Tensor) -> Tensor:
        """bool [B, T, T]: of whole sequences, the tokens that each query attends to; tables [T, rope / 2]."""
        heads = given.queries.unflatten(2, (self.heads, self.dim))
        heads = self.turned(heads, cos.unsqueeze(1), sin.unsqueeze(1)).float()
        keys = self.turned(given.keys, cos, sin).float()
        dots = torch.einsum("bqhd,bkd->bqhk", heads, keys).relu()
        scores = (dots * given.gains.float().unsqueeze(3)).sum(2) * (self.dim**-0.5 * self.heads**-0.5)
        causal = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
        best = scores.masked_fill(~causal, float("-inf")).topk(min(self.top_k, scores.shape[2]), dim=2).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, True) & causal

    def chosen(
        self, given: IndexInputs, cos: Tensor, sin: Tensor, rows: tuple[Tensor, Tensor, Tensor], pool: Tensor
    ) -> Tensor:
        """int32 [B, Q, top_k]: places in the pool of the tokens that each query attends to, -1 where there are fewer.
        rows: positions, counts and the block table."""
        heads = given.queries.unflatten(2, (self.heads, self.dim))
        heads = self.turned(heads, cos.unsqueeze(2), sin.unsqueeze(2)).contiguous()
        found: Tensor = deepseek_index(heads, given.gains, self.ones, self.zeros, *rows, pool, 1, self.top_k)
        return found
