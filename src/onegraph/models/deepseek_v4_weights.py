"""From the tensors of a DeepSeek-V4 checkpoint to its layers."""

import torch
from torch import Tensor

from onegraph.formats.weight import WeightFormat
from onegraph.models.deepseek_v4_config import DeepseekV4Config, Layer
from onegraph.models.experts import read_experts
from onegraph.models.loader import Loader
from onegraph.nn.deepseek_attention import Compressor, DeepseekAttention
from onegraph.nn.deepseek_moe import DeepseekMoE
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Linear, dense
from onegraph.nn.shared_expert import SharedExpert
from onegraph.ops.activation import SwiGLU


def build_attention(
    loader: Loader, c: DeepseekV4Config, layer: Layer, tables: tuple[Tensor, Tensor], device: torch.device
) -> DeepseekAttention:
    prefix = f"{layer.prefix}attn."
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
        q_b=loader.linear(f"{prefix}wq_b", device),
        states=dense(torch.cat([loader.tensor(f"{name}.weight", device) for name in states])) if states else None,
        compressor=compressor("compressor") if compressed else None,
        index_q=loader.linear(f"{prefix}indexer.wq_b", device) if indexed else None,
        indexer=compressor("indexer.compressor") if indexed else None,
        out_a=loader.grouped(f"{prefix}wo_a", c.out_groups, device),
        out_b=loader.linear(f"{prefix}wo_b", device),
        groups=c.out_groups,
        sinks=loader.float32(f"{prefix}attn_sink", device),
        cos=cos,
        sin=sin,
        eps=c.eps,
        window=c.window,
        top_k=c.index_top_k,
    )


def build_moe(loader: Loader, c: DeepseekV4Config, layer: Layer, device: torch.device) -> DeepseekMoE:
    """In codes of one kind, the shared expert is one more of the routed ones, in the same storage: few tokens run all
    together."""
    prefix, gate = f"{layer.prefix}ffn.", SwiGLU(c.limit)
    routed, shared = [f"{prefix}experts.{e}" for e in range(c.experts)], f"{prefix}shared_experts"
    format = loader.format_of(f"{routed[0]}.w1")
    together = format.coded and all(loader.format_of(f"{shared}.{w}") is format for w in ("w1", "w2", "w3"))
    names = [*routed, shared] if together else routed
    experts = read_experts(loader, [(f"{e}.w1", f"{e}.w3") for e in names], [f"{e}.w2" for e in names], gate, device)
    return DeepseekMoE(
        gate=loader.tensor(f"{prefix}gate.weight", device),
        bias=None if layer.hashed else loader.float32(f"{prefix}gate.bias", device),
        table=loader.tensor(f"{prefix}gate.tid2eid", device, torch.int32) if layer.hashed else None,
        experts=experts,
        shared=_last(experts, format)
        if together
        else SharedExpert(
            loader.siblings([f"{shared}.w1", f"{shared}.w3"], device), loader.linear(f"{shared}.w2", device), gate
        ),
        top_k=c.top_k,
        scale=c.route_scale,
    )


def _last(experts: Experts, format: WeightFormat) -> SharedExpert:
    return SharedExpert(Linear(format, experts.gate_up.at(-1)), Linear(format, experts.down.at(-1)), experts.gate)
