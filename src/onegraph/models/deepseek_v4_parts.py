"""What a DeepSeek-V4 is made of, by DeepSeek's names: the decoder, and the draft stages that lie behind it.

What selects or weighs (compressors, router, the indexer's head weights) is no linear that may be quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.models.deepseek_v4_names import beyond
from onegraph.models.parts import Component, Parts

if TYPE_CHECKING:
    from onegraph.models.deepseek_v4_config import DeepseekV4Config, Layer

Linears = dict[str, tuple[int, int, bool]]
Others = dict[str, tuple[Shape, Dtypes]]

_COMPONENTS = {
    "embedding": Component(("embed",), r"^embed$"),
    "attention qkv": Component(("blocks.*.attention.qkv_a", "blocks.*.attention.q_b"), r"\.attn\.(wq_a|wq_b|wkv)$"),
    "attention out": Component(("blocks.*.attention.out_a", "blocks.*.attention.out_b"), r"\.attn\.wo_[ab]$"),
    # One linear makes them: keys and gates of both compressors, and the indexer's weights.
    "compressor, indexer": Component(("blocks.*.attention.states",), r"(compressor\.(wkv|wgate)|weights_proj)$"),
    "indexer query": Component(("blocks.*.attention.index_q",), r"\.indexer\.wq_b$"),
    "router gate": Component(("blocks.*.moe.gate",), r"\.ffn\.gate$"),
    "routed experts": Component(("blocks.*.moe.experts",), r"\.experts\.\d+\.w[123]$"),
    "shared expert": Component(
        ("blocks.*.moe.shared.gate_up", "blocks.*.moe.shared.down"), r"\.shared_experts\.w[123]$"
    ),
    "lm_head": Component(("lm_head",), r"^head$"),
}


def decoder_parts(c: DeepseekV4Config) -> Parts:
    """Embedding, blocks, and the head with the norm and the mixture of streams in front of it."""
    linears, others = _ends(c), _head(c, "")
    for i in range(c.layers):
        block = _block(c, c.layer(i))
        linears |= block[0]
        others |= block[1]
    return Parts(
        linears=linears,
        embedding=("embed", (c.vocab_size, c.hidden_size)),
        head="head",
        tensors=others,
        components=_COMPONENTS,
        ignored=beyond(c.layers),
    )


def draft_parts(c: DeepseekV4Config) -> Parts:
    """The draft stages, and of the decoder what they share: embedding and head."""
    linears, others = _ends(c), Others()
    d = c.hidden_size
    for stage in range(c.drafts):
        layer = c.layer(c.layers + stage)
        block, prefix = _block(c, layer), layer.prefix
        linears |= block[0]
        others |= block[1]
        first, last = stage == 0, stage == c.drafts - 1
        if c.dspark is None:
            linears |= {f"{prefix}{name}": (d, d, False) for name in ("e_proj", "h_proj")}
            others |= {f"{prefix}{name}.weight": ((d,), FLOATS) for name in ("enorm", "hnorm")}
        elif first:
            linears[f"{prefix}main_proj"] = d, d * len(c.dspark.layers), False
            others[f"{prefix}main_norm.weight"] = (d,), FLOATS
        if c.dspark is not None and last:
            rank = c.dspark.rank
            others |= {f"{prefix}markov_head.markov_w{i}.weight": ((c.vocab_size, rank), FLOATS) for i in (1, 2)}
            others[f"{prefix}confidence_head.proj.weight"] = (1, d + rank), FLOATS
        if c.dspark is None or last:
            others |= _head(c, prefix)
    return Parts(
        linears=linears,
        embedding=("embed", (c.vocab_size, d)),
        head="head",
        tensors=others,
        ignored=lambda name: not name.startswith("mtp."),
    )


def _ends(c: DeepseekV4Config) -> Linears:
    return {"head": (c.vocab_size, c.hidden_size, False)}


def _head(c: DeepseekV4Config, prefix: str) -> Others:
    """What turns streams into what the head reads."""
    h, d = c.streams, c.hidden_size
    shapes: dict[str, Shape] = {"norm.weight": (d,), "hc_head_fn": (h, h * d), "hc_head_base": (h,)}
    return {prefix + name: (shape, FLOATS) for name, shape in (shapes | {"hc_head_scale": (1,)}).items()}


def _block(c: DeepseekV4Config, layer: Layer) -> tuple[Linears, Others]:
    d, mix, heads = c.hidden_size, c.streams * (c.streams + 2), c.heads * c.head_dim
    linears, others = Linears(), Others()

    def matrices(prefix: str, **sizes: tuple[int, int]) -> None:
        linears.update({f"{layer.prefix}{prefix}.{name}": (n, k, False) for name, (n, k) in sizes.items()})

    def floats(**shapes: Shape) -> None:
        names = {name.replace("__", "."): shape for name, shape in shapes.items()}
        others.update({layer.prefix + name: (shape, FLOATS) for name, shape in names.items()})

    def compressor(prefix: str, dim: int, overlap: bool) -> None:
        wide = dim * (2 if overlap else 1)
        shapes = {"wkv.weight": (wide, d), "wgate.weight": (wide, d), "ape": (layer.ratio, wide), "norm.weight": (dim,)}
        others.update({f"{layer.prefix}{prefix}.{name}": (shape, FLOATS) for name, shape in shapes.items()})

    floats(attn_norm__weight=(d,), ffn_norm__weight=(d,))
    for part in ("attn", "ffn"):
        floats(**{f"hc_{part}_fn": (mix, c.streams * d), f"hc_{part}_base": (mix,), f"hc_{part}_scale": (3,)})
    out = c.out_groups * c.out_rank
    matrices(
        "attn",
        wq_a=(c.q_rank, d),
        wq_b=(heads, c.q_rank),
        wkv=(c.head_dim, d),
        wo_a=(out, heads // c.out_groups),
        wo_b=(d, out),
    )
    floats(attn__q_norm__weight=(c.q_rank,), attn__kv_norm__weight=(c.head_dim,), attn__attn_sink=(c.heads,))
    if layer.ratio:
        compressor("attn.compressor", c.head_dim, layer.indexed)
    if layer.indexed:
        compressor("attn.indexer.compressor", c.index_dim, True)
        matrices("attn.indexer", wq_b=(c.index_heads * c.index_dim, c.q_rank))
        floats(attn__indexer__weights_proj__weight=(c.index_heads, d))
    floats(ffn__gate__weight=(c.experts, d))
    if layer.hashed:
        others[f"{layer.prefix}ffn.gate.tid2eid"] = (c.vocab_size, c.top_k), (torch.int64, torch.int32)
    else:
        floats(ffn__gate__bias=(c.experts,))
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(c.experts))):
        matrices(f"ffn.{expert}", w1=(c.expert_size, d), w2=(d, c.expert_size), w3=(c.expert_size, d))
    return linears, others
