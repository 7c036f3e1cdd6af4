"""The attention layer of DeepSeek-V4: low-rank queries, one latent vector as key and value, grouped output.

As in `nn/attention.py` the layer brings weights and constants and the cache brings the state; what lies between the
linears is one call, `cache.attend`. Linears are whatever maps [..., k] to [..., n], dense or quantized.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from onegraph.nn.linear import Linear
from onegraph.ops.linear import linear_beside_norm
from onegraph.ops.norm import rms_norm


class Attend(Protocol):
    """The state's side: see `DeepseekCache.attend`."""

    def attend(
        self, attention: DeepseekAttention, q: Tensor, kv: Tensor, states: Tensor | None, index_q: Tensor | None
    ) -> Tensor: ...


class Compressor(nn.Module):
    """Constants of one compressor: `bias` float32 [ratio, c d], RMSNorm weight `norm` [d]; c is 2 with overlap."""

    bias: Tensor
    norm: Tensor

    def __init__(self, bias: Tensor, norm: Tensor) -> None:
        super().__init__()
        if bias.dim() != 2 or bias.shape[1] not in (norm.numel(), 2 * norm.numel()):
            raise ValueError(
                f"bias is {tuple(bias.shape)}, norm {tuple(norm.shape)}; they must be [ratio, c d] and [d]"
            )
        self.register_buffer("bias", bias.float().contiguous())
        self.register_buffer("norm", norm.contiguous())

    @property
    def ratio(self) -> int:
        return self.bias.shape[0]

    @property
    def dim(self) -> int:
        return self.norm.shape[0]

    @property
    def width(self) -> int:
        """Of one token's state: content and score."""
        return 2 * self.bias.shape[1]

    @property
    def reach(self) -> int:
        """Tokens that one entry sees, and so the least that a sequence keeps the state of."""
        return self.ratio * self.bias.shape[1] // self.dim


class DeepseekAttention(nn.Module):
    """One layer's attention. `compressor` is None where only the window is seen, `indexer` where all entries are.

    Args:
        index: number of the layer, by which a cache finds its part.
        qkv_a: x -> q's low rank | kv; q_norm [rank] and kv_norm [head_dim] are their RMSNorms.
        q_b: low rank -> heads * head_dim.
        states: x -> the compressor's state | the indexer's | the indexer's head weights; None without compressor.
        index_q: low rank -> index_heads * indexer.dim; None without indexer. queries: q_b and index_q as one layer in
            the same storage (`nn.linear.fuse`), where they are one.
        out_a, out_b: the grouped projection [.., groups, k] and the one behind it.
        sinks: float32 [heads]. cos, sin: float32 [positions, rope dimensions / 2], shared by layers of a kind.
        window: latest tokens that a query sees. top_k: entries that the indexer selects.
    """

    q_norm: Tensor
    kv_norm: Tensor
    sinks: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        index: int,
        qkv_a: nn.Module,
        q_norm: Tensor,
        kv_norm: Tensor,
        q_b: nn.Module,
        states: Linear | None,
        compressor: Compressor | None,
        index_q: nn.Module | None,
        queries: Linear | None = None,
        indexer: Compressor | None,
        out_a: nn.Module,
        out_b: nn.Module,
        groups: int,
        sinks: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        window: int,
        top_k: int,
    ) -> None:
        super().__init__()
        self.index, self.groups, self.eps, self.window, self.top_k = index, groups, eps, window, top_k
        self.heads, self.head_dim, self.scale = sinks.shape[0], kv_norm.shape[0], kv_norm.shape[0] ** -0.5
        self.qkv_a, self.q_b, self.out_a, self.out_b = qkv_a, q_b, out_a, out_b
        self._one = queries, q_b, index_q
        self.states, self.compressor, self.index_q, self.indexer = states, compressor, index_q, indexer
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("kv_norm", kv_norm)
        self.register_buffer("sinks", sinks.float())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, cache: Attend) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]; of a rank, which has some groups of heads, its part of the sum."""
        low, kv = self._low(x)
        states = None
        if self.states is None:
            low = rms_norm(low, self.q_norm, self.eps)
        else:
            states, low = linear_beside_norm(x, self.states.weight, low, self.q_norm, self.eps)
        q, index_q = self._queries(low)
        out = cache.attend(self, q, kv, states, index_q)
        result: Tensor = self.out_b(self.out_a(out.unflatten(2, (self.groups, -1)).flatten(3)).flatten(2))
        return result

    def _queries(self, low: Tensor) -> tuple[Tensor, Tensor | None]:
        """What q_b and index_q make of the low rank; of one launch, but where either was exchanged since."""
        queries, q_b, index_q = self._one
        if queries is None or self.q_b is not q_b or self.index_q is not index_q:
            return self.q_b(low), None if self.index_q is None else self.index_q(low)
        width = self.heads * self.head_dim
        q, index = queries(low).split((width, queries.out_features - width), dim=2)
        return q, index

    def _low(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, kv = self.qkv_a(x).split((self.q_norm.shape[0], self.head_dim), dim=2)
        return low, kv
