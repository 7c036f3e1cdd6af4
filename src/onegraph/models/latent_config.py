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
INDEX_Q, INDEX_K = "self_attn.indexer.wq_b", "self_attn.indexer.wk"
INDEX_NORM, INDEX_GAINS = "self_attn.indexer.k_norm", "self_attn.indexer.weights_proj.weight"
DSA = "deepseek_sparse_attention"
Q_NORM, KV_NORM = "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class Index:
    """The sparse indexer (DSA): `heads` of `dim` numbers choose the `top_k` tokens of a query. full: for each layer
    whether it has an indexer of its own; one without takes what the last one before it chose."""

    heads: int
    dim: int
    top_k: int
    full: tuple[bool, ...]
    interleaved: bool

    @classmethod
    def parse(cls, fields: Fields, rope: int, layers: int) -> Index:
        size = {"high": 2**14}
        dim, kinds = fields.integer("index_head_dim", **size), fields.get("layer_types")
        if dim < rope:
            raise ValueError(f"index_head_dim is {dim}, of which qk_rope_head_dim {rope} rotate; it must be no less")
        if kinds is not None and (not isinstance(kinds, list) or set(kinds) != {DSA} or len(kinds) != layers):
            raise ValueError(f"layer_types is {short(kinds)}; it must list {DSA} for each of {layers} layers")
        full = _full(fields, layers)
        if not full[0]:
            raise ValueError("indexer_types begins with a shared indexer, and no layer is before it")
        return cls(
            heads=fields.integer("index_n_heads", **size),
            dim=dim,
            top_k=fields.integer("index_topk", high=2**20),
            full=full,
            interleaved=fields.flag("indexer_rope_interleave"),
        )


def _full(fields: Fields, layers: int) -> tuple[bool, ...]:
    """indexer_types, or the pattern or schedule that it is made of (GLM-5)."""
    keys = "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
    if "indexer_types" not in fields.defaults:
        return (True,) * layers
    kinds, pattern = fields.get("indexer_types"), fields.get(keys[0])
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    if kinds is None:
        freq = 1 if fields.get(keys[1]) is None else max(1, fields.integer(keys[1], low=0, high=4096))
        offset = 2 if fields.get(keys[2]) is None else fields.integer(keys[2], low=0, high=4096)
        return tuple(max(i - offset + 1, 0) % freq == 0 for i in range(layers))
    fields.read(*keys)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("full", "shared") for kind in kinds):
        raise ValueError(f"indexer_types is {short(kinds)}; it must list full or shared for each of {layers} layers")
    return tuple(kind == "full" for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of the latent attention of all layers; counts of numbers.

    Args:
        q_rank: of the queries' low rank, 0 without one. rank: of the latent. nope, rope: the parts of a query and key
            that do not rotate and that do. value: of a head's value.
        index: the sparse indexer; None where a query attends to all tokens.
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
    index: Index | None = None

    @classmethod
    def parse(cls, fields: Fields, heads: int, kv_heads: int, layers: int) -> Latent:
        """Raises ValueError for sizes that make no sense or contradict each other."""
        size = {"high": 2**14}
        nope, rope = fields.integer("qk_nope_head_dim", **size), fields.integer("qk_rope_head_dim", **size)
        if kv_heads != heads:
            raise ValueError(
                f"num_key_value_heads is {kv_heads}; with latent attention it is num_attention_heads {heads}"
            )
        if rope % 2:
            raise ValueError(f"qk_rope_head_dim is {rope}; rotary embeddings need an even one")
        for key, allowed in (("head_dim", (rope, nope, nope + rope)), ("qk_head_dim", (nope + rope,))):
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
            index=Index.parse(fields, rope, layers) if "index_topk" in fields.defaults else None,
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
    def products(self) -> int:
        """Numbers of the up-projection of a layer, of all heads."""
        return self.heads * (self.nope + self.value) * self.rank

    @property
    def front(self) -> tuple[str, ...]:
        """Linears of x."""
        return (Q_A if self.q_rank else Q), KV_A

    @property
    def behind(self) -> tuple[str, ...]:
        """Linears of the low ranks."""
        return (Q_B, KV_B) if self.q_rank else (KV_B,)

    def indexed(self, layer: int) -> Index | None:
        """The indexer of a layer, if it has one."""
        return self.index if self.index is not None and self.index.full[layer] else None

    def index_linears(self, layer: int, hidden: int) -> dict[str, tuple[int, int, bool]]:
        """Of the layer's indexer, as `linears`."""
        if (index := self.indexed(layer)) is None:
            return {}
        return {INDEX_Q: (index.heads * index.dim, self.q_rank, False), INDEX_K: (index.dim, hidden, False)}

    def index_tensors(self, layer: int, hidden: int) -> dict[str, tuple[Shape, Dtypes]]:
        """Of the layer's indexer, what is always dense."""
        if (index := self.indexed(layer)) is None:
            return {}
        norm: Shape = (index.dim,)
        found: dict[str, tuple[Shape, Dtypes]] = {f"{INDEX_NORM}.{part}": (norm, FLOATS) for part in ("weight", "bias")}
        return found | {INDEX_GAINS: ((index.heads, hidden), FLOATS)}

    def linears(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Name within a block and (outputs, inputs, has a bias)."""
        queries = self.heads * (self.nope + self.rope)
        if self.q_rank:
            yield Q_A, (self.q_rank, hidden, self.bias)
            yield Q_B, (queries, self.q_rank, False)
        else:
            yield Q, (queries, hidden, False)
        yield KV_A, (self.width, hidden, self.bias)
        yield KV_B, (self.products // self.rank, self.rank, False)
        yield OUT, (hidden, self.heads * self.value, self.bias)

    @property
    def tensors(self) -> dict[str, tuple[Shape, Dtypes]]:
        found: dict[str, tuple[Shape, Dtypes]] = {KV_NORM: ((self.rank,), FLOATS)}
        return found | ({Q_NORM: ((self.q_rank,), FLOATS)} if self.q_rank else {})
