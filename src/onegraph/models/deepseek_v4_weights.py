"""From the tensors of a DeepSeek-V4 checkpoint to its layers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from onegraph.models.deepseek_v4_config import DeepseekV4Config, Layer
from onegraph.models.experts import read_experts
from onegraph.models.loader import Loader
from onegraph.models.shares import Share, check_shares, columns, refusal, rows, share_of
from onegraph.nn.deepseek_attention import Compressor, DeepseekAttention
from onegraph.nn.deepseek_moe import DeepseekMoE
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Linear, dense
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
    return DeepseekAttention(
        index=layer.index,
        qkv_a=loader.siblings([f"{prefix}wq_a", f"{prefix}wkv"], device),
        q_norm=loader.float32(f"{prefix}q_norm.weight", device),
        kv_norm=loader.float32(f"{prefix}kv_norm.weight", device),
        q_b=loader.linear(f"{prefix}wq_b", device, rows(share, c.heads, c.head_dim)),
        states=dense(torch.cat([loader.tensor(f"{name}.weight", device) for name in states])) if states else None,
        compressor=compressor("compressor") if compressed else None,
        index_q=loader.linear(f"{prefix}indexer.wq_b", device) if indexed else None,
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
        peer=peer,
    )


def build_moe(
    loader: Loader, c: DeepseekV4Config, layer: Layer, device: torch.device, peer: Peer | None = None
) -> DeepseekMoE:
    """In codes of one kind, the shared expert is one more of the routed ones, in the same storage: few tokens run all
    together. peer: make this rank's part: of every expert's hidden units, or some experts whole, of which the last
    rank's then go on with the shared one where that is in the same storage."""
    prefix, gate, share = f"{layer.prefix}ffn.", SwiGLU(c.limit), share_of(peer)
    (first, last), unit = share.experts(c.experts)
    names, shared = [f"{prefix}experts.{e}" for e in range(first, last)], f"{prefix}shared_experts"
    one = _one_storage(loader, prefix)
    together = one and last == c.experts
    names += [shared] if together else []
    pairs = [(f"{e}.w1", f"{e}.w3") for e in names]
    experts = read_experts(loader, pairs, [f"{e}.w2" for e in names], gate, device, unit)
    part = rows(share, c.expert_size)
    return DeepseekMoE(
        gate=loader.tensor(f"{prefix}gate.weight", device),
        bias=None if layer.hashed else loader.float32(f"{prefix}gate.bias", device),
        table=loader.tensor(f"{prefix}gate.tid2eid", device, torch.int32) if layer.hashed else None,
        experts=experts,
        shared=_last(experts)
        if together
        else None
        if one
        else SharedExpert(
            loader.siblings([f"{shared}.w1", f"{shared}.w3"], device, parts=[part, part]),
            loader.linear(f"{shared}.w2", device, columns(share, c.expert_size)),
            gate,
        ),
        top_k=c.top_k,
        scale=c.route_scale,
        first=first,
        peer=peer,
    )


def _one_storage(loader: Loader, prefix: str) -> bool:
    """Whether the shared expert is in codes of the routed ones' kind."""
    format = loader.format_of(f"{prefix}experts.0.w1")
    return format.coded and all(loader.format_of(f"{prefix}shared_experts.{w}") is format for w in ("w1", "w2", "w3"))


def check_ranks(loader: Loader, c: DeepseekV4Config, peer: Peer, layers: Iterable[int]) -> None:
    """Raises ValueError where so many ranks cannot share these layers, with the counts that can."""
    check_shares(lambda count: _obstacle(loader, c, Share(1, count, peer.whole_experts), layers), peer.count)


def _obstacle(loader: Loader, c: DeepseekV4Config, share: Share, layers: Iterable[int]) -> str:
    ranks = share.ranks
    if c.out_groups % ranks:
        return f"{c.out_groups} groups of heads cannot be shared evenly"
    if share.whole_experts and c.experts % ranks:
        return f"{c.experts} experts cannot be shared evenly"
    sizes = loader.layers()
    for i in layers:
        prefix = c.layer(i).prefix
        cut = ["shared_experts", "experts.0"]  # by hidden units
        if share.whole_experts:
            cut = [] if _one_storage(loader, f"{prefix}ffn.") else cut[:1]
        if cut and c.expert_size % ranks:
            return f"{c.expert_size} hidden units of an expert cannot be shared evenly"
        up, down = rows(share, c.expert_size), columns(share, c.expert_size)
        parts = {f"{prefix}ffn.{e}.{w}": part for e in cut for w, part in
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


def _last(experts: Experts) -> SharedExpert:
    format = experts.down.format
    return SharedExpert(Linear(format, experts.gate_up.at(-1)), Linear(format, experts.down.at(-1)), experts.gate)
