"""Multi-head latent attention as config.json says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.models.fields import Fields, short
from onegraph.models.rope import Rope

EPS = 1e-6  # of the norms of the two low ranks, whatever rms_norm_eps says
Q, Q_A, Q_B = "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"
KV_A, KV_B, OUT = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj"
Q_NORM, KV_NORM = "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of the latent attention of all layers; counts of numbers.

    Args:
        q_rank: of the queries' low rank, 0 without one. rank: of the latent. nope, rope: the parts of a query and key
            that do not rotate and that do. value: of a head's value.
        bias: of the linears of x, and of the output. interleaved: pairs of the rotation are neighbours.
    """

    heads: int
    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    bias: bool
    interleaved: bool

    @classmethod
    def parse(cls, fields: Fields, heads: int, kv_heads: int) -> Latent:
        """Raises ValueError for sizes that make no sense or contradict each other."""
        size = {"high": 2**14}
        nope, rope = fields.integer("qk_nope_head_dim", **size), fields.integer("qk_rope_head_dim", **size)
        if kv_heads != heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}; with latent attention it is num_attention_heads {heads}"
            )
        if rope % 2:
            raise ValueError(f"qk_rope_head_dim is {rope}; rotary embeddings need an even one")
        for key, allowed in (("head_dim", (rope, nope + rope)), ("qk_head_dim", (nope + rope,))):
            if fields.get(key) not in (None, *allowed):
                raise ValueError(
                    f"{key} is {short(fields.get(key))}; qk_nope_head_dim and qk_rope_head_dim say {nope} + {rope}"
                )
        return cls(
            heads=heads,
            q_rank=0 if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank", **size),
            rank=fields.integer("kv_lora_rank", **size),
            nope=nope,
            rope=rope,
            value=fields.integer("v_head_dim", **size),
            bias=fields.flag("attention_bias"),
            interleaved=fields.flag("rope_interleave"),
        )

    def scale(self, rope: Rope | None) -> float:
        """Of scores, YaRN's factor for all dimensions in it."""
        factor = 1.0 if rope is None else rope.score_factor
        return float((self.nope + self.rope) ** -0.5) * factor

    @property
    def width(self) -> int:
        """Numbers that a token leaves in a layer's cache."""
        return self.rank + self.rope

    @property
    def front(self) -> tuple[str, ...]:
        """Linears of x."""
        return (Q_A if self.q_rank else Q), KV_A

    @property
    def behind(self) -> tuple[str, ...]:
        """Linears of the low ranks."""
        return (Q_B, KV_B) if self.q_rank else (KV_B,)

    def linears(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Name within a block and (outputs, inputs, has a bias)."""
        queries = self.heads * (self.nope + self.rope)
        if self.q_rank:
            yield Q_A, (self.q_rank, hidden, self.bias)
            yield Q_B, (queries, self.q_rank, False)
        else:
            yield Q, (queries, hidden, False)
        yield KV_A, (self.width, hidden, self.bias)
        yield KV_B, (self.heads * (self.nope + self.value), self.rank, False)
        yield OUT, (hidden, self.heads * self.value, self.bias)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        found: dict[str, tuple[Shape, Dtypes]] = {KV_NORM: ((self.rank,), FLOATS)}
        return found | ({Q_NORM: ((self.q_rank,), FLOATS)} if self.q_rank else {})
