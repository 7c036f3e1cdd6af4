"""From the tensors of a DeepSeek-V4 checkpoint to its layers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from onegraph.models.deepseek_v4_config import DeepseekV4Config, Layer
from onegraph.models.experts import read_expert, read_experts
from onegraph.models.loader import Loader
from onegraph.models.shares import TPShard, check_shares, columns, refusal, rows, share_of
from onegraph.nn.deepseek_attention import Compressor, DeepseekAttention
from onegraph.nn.deepseek_moe import DeepseekMoE
from onegraph.nn.linear import dense, fuse
from onegraph.nn.peers import Peer
from onegraph.nn.shared_expert import SharedExpert
from onegraph.ops.activation import SwiGLU


def build_attention(
    loader: Loader,
    c: DeepseekV4Config,
    layer: Layer,
    tables: tuple[Tensor, Tensor],
    device: torch.device,
    peer: Peer | None = None,
) -> DeepseekAttention:
    """peer: make the part of this rank: its groups of heads; what makes keys, entries and the indexer's choice is on
    every rank whole."""
    prefix, share = f"{layer.prefix}attn.", share_of(peer)
    heads, groups = share.span(c.heads), share.span(c.out_groups)
    compressed, indexed = layer.ratio > 0, layer.indexed
    states = [f"{prefix}compressor.{name}" for name in ("wkv", "wgate") if compressed]
    if indexed:
        states += [f"{prefix}indexer.{name}" for name in ("compressor.wkv", "compressor.wgate", "weights_proj")]

    def compressor(name: str) -> Compressor:
        bias, norm = (loader.float32(f"{prefix}{name}.{part}", device) for part in ("ape", "norm.weight"))
        return Compressor(bias, norm)

    cos, sin = tables
    q_b = loader.linear(f"{prefix}wq_b", device, rows(share, c.heads, c.head_dim))
    index_q = loader.linear(f"{prefix}indexer.wq_b", device) if indexed else None
    queries = None if index_q is None else fuse([q_b, index_q])
    if queries is not None:
        q_b, index_q = queries[1]
    return DeepseekAttention(
        index=layer.index,
        qkv_a=loader.siblings([f"{prefix}wq_a", f"{prefix}wkv"], device),
        q_norm=loader.float32(f"{prefix}q_norm.weight", device),
        kv_norm=loader.float32(f"{prefix}kv_norm.weight", device),
        q_b=q_b,
        states=dense(torch.cat([loader.tensor(f"{name}.weight", device) for name in states])) if states else None,
        compressor=compressor("compressor") if compressed else None,
        index_q=index_q,
        queries=None if queries is None else queries[0],
        indexer=compressor("indexer.compressor") if indexed else None,
        out_a=loader.grouped(f"{prefix}wo_a", c.out_groups, device, None if share.whole else groups),
        out_b=loader.linear(f"{prefix}wo_b", device, columns(share, c.out_groups, c.out_rank)),
        groups=groups[1] - groups[0],
        sinks=loader.float32(f"{prefix}attn_sink", device)[slice(*heads)],
        cos=cos,
        sin=sin,
        eps=c.eps,
        window=c.window,
        top_k=c.index_top_k,
    )


def build_moe(
    loader: Loader, c: DeepseekV4Config, layer: Layer, device: torch.device, peer: Peer | None = None
) -> DeepseekMoE:
    """In codes of one kind, the shared expert is one more of the routed ones, in the same storage: few tokens run all
    together. peer: make this rank's part of every expert's hidden units."""
    prefix, gate, share = f"{layer.prefix}ffn.", SwiGLU(c.limit), share_of(peer)
    routed, shared = [f"{prefix}experts.{e}" for e in range(c.experts)], f"{prefix}shared_experts"
    format = loader.format_of(f"{routed[0]}.w1")
    last = read_expert(loader, format, (f"{shared}.w1", f"{shared}.w3"), f"{shared}.w2", device, share)
    pairs = [(f"{e}.w1", f"{e}.w3") for e in routed]
    experts = read_experts(loader, pairs, [f"{e}.w2" for e in routed], gate, device, share, last)
    part = rows(share, c.expert_size)
    return DeepseekMoE(
        gate=loader.tensor(f"{prefix}gate.weight", device),
        bias=None if layer.hashed else loader.float32(f"{prefix}gate.bias", device),
        table=loader.tensor(f"{prefix}gate.tid2eid", device, torch.int32) if layer.hashed else None,
        experts=experts,
        shared=SharedExpert.last_of(experts)
        if last
        else SharedExpert(
            loader.siblings([f"{shared}.w1", f"{shared}.w3"], device, parts=[part, part]),
            loader.linear(f"{shared}.w2", device, columns(share, c.expert_size)),
            gate,
        ),
        top_k=c.top_k,
        scale=c.route_scale,
    )


def check_ranks(loader: Loader, c: DeepseekV4Config, ranks: int, layers: Iterable[int]) -> None:
    """Raises ValueError where so many ranks cannot share these layers, with the counts that can."""
    check_shares(lambda count: _obstacle(loader, c, count, layers), ranks)


def _obstacle(loader: Loader, c: DeepseekV4Config, ranks: int, layers: Iterable[int]) -> str:
    if c.out_groups % ranks:
        return f"{c.out_groups} groups of heads cannot be split evenly"
    if c.expert_size % ranks:
        return f"{c.expert_size} hidden units of an expert cannot be split evenly"
    share, sizes = TPShard(1, ranks), loader.layers()
    for i in layers:
        prefix = c.layer(i).prefix
        up, down = rows(share, c.expert_size), columns(share, c.expert_size)
        parts = {f"{prefix}ffn.{e}.{w}": part for e in ("shared_experts", "experts.0") for w, part in
                 (("w1", up), ("w3", up), ("w2", down))}  # fmt: skip
        parts |= {
            f"{prefix}attn.wq_b": rows(share, c.heads, c.head_dim),
            f"{prefix}attn.wo_a": rows(share, c.out_groups, c.out_rank),
            f"{prefix}attn.wo_b": columns(share, c.out_groups, c.out_rank),
        }
        for name, part in parts.items():
            if why := refusal(loader.format_of(name), *sizes[name][:2], part):
                return f"{name} in {loader.format_of(name)}: {why}"
    return ""
