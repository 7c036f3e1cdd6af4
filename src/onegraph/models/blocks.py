"""The blocks of the Llama kind of decoder, put together from parts: which ones, the config and the files say."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onegraph.formats.dense import DENSE
from onegraph.formats.weight import Part
from onegraph.models.config import PER_LAYER, PER_LAYER_OF_MODEL, LlamaConfig
from onegraph.models.expert_memory import HOST
from onegraph.models.experts import ExpertTensors, read_expert, read_experts, read_stacks
from onegraph.models.latent import build_latent
from onegraph.models.loader import Loader
from onegraph.models.mixers import NoMixer
from onegraph.models.recurrent import build_recurrent
from onegraph.models.rope import Rope
from onegraph.models.routed import BESIDE_NORMS, ROUTED_IN, Routed
from onegraph.models.shares import TPShard, columns, gate_up_parts, qkv_parts, share_of, shared_parts
from onegraph.nn.attention import Attend, Attention
from onegraph.nn.block import MLP, InputLinear, Norm, Normed, ResidualLinear, Scaled, Stream, WholeNorms
from onegraph.nn.embedding import Embedding
from onegraph.nn.latent import LatentAttention, LatentInputs
from onegraph.nn.linear import dense
from onegraph.nn.moe import Beside, MoE
from onegraph.nn.peers import Peer
from onegraph.nn.per_layer import PerLayer, PerLayerEnd
from onegraph.nn.recurrent import Inputs, Recurrent
from onegraph.nn.shared_expert import SharedExpert
from onegraph.ops.activation import GeGLU, ReLU2, SwiGLU

# cos, sin and factors of queries of each rope that a model has, and size of the heads that it turns
Tables = dict[tuple[Rope | None, int], tuple[Tensor | None, Tensor | None, Tensor | None]]


class Block(nn.Module):
    """One layer of the decoder: attention or what stands in its place, then an MLP or experts, each between a norm in
    front and a sum behind, or a norm and a sum behind, or both."""

    scale: Tensor | None

    def __init__(
        self,
        *,
        layer: int,
        qkv: Normed | InputLinear | Inputs | LatentInputs,
        attention: Attention | Recurrent | LatentAttention,
        out: ResidualLinear,
        mlp: MLP | MoE,
        end: PerLayerEnd | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """end: what is done with the block's own embedding of a token. scale: [1], of the stream behind the block, in
        which a norm is the last."""
        super().__init__()
        self.layer, self.qkv, self.attention, self.out, self.mlp = layer, qkv, attention, out, mlp
        self.end = end
        self.register_buffer("scale", scale)

    @property
    def fused(self) -> bool:
        """Whether norms, SwiGLU and sums all run inside the linears."""
        return all(piece.fused for piece in (self.qkv, self.out, self.mlp))

    def forward(self, stream: Stream, cache: Attend, own: Tensor | None = None) -> Stream:
        """The residual stream before the layer -> after it; the argument is left as it was. own: [B, Q, size], the
        block's own embeddings of the tokens."""
        qkv, total = self.qkv(stream)
        inputs = qkv if isinstance(qkv, tuple) else (qkv,)
        result: Stream = self.mlp(self.out(cache.attend(self.attention, *inputs), total))
        if self.end is not None:
            result = self.end(result, own)
        return result if self.scale is None else result.scaled(self.scale)


class Mixing(NamedTuple):
    """What mixes tokens in a block: linears in front, attention or a recurrent layer, the linear behind."""

    qkv: Normed | InputLinear | Inputs | LatentInputs
    attention: Attention | Recurrent | LatentAttention
    out: ResidualLinear


class HalfBlock(nn.Module):
    """A layer of a decoder whose blocks are one or the other (Nemotron-H): what mixes tokens, or an MLP or experts."""

    scale = None
    fused = False

    def __init__(self, *, layer: int, mixing: Mixing | None = None, mlp: MLP | MoE | None = None) -> None:
        super().__init__()
        self.layer, self.mlp = layer, mlp
        self.qkv = None if mixing is None else mixing.qkv
        self.attention = None if mixing is None else mixing.attention
        self.out = None if mixing is None else mixing.out

    def forward(self, stream: Stream, cache: Attend, own: None = None) -> Stream:
        """As `Block`."""
        result = stream
        if self.qkv is not None and self.out is not None:
            qkv, total = self.qkv(stream)
            inputs = qkv if isinstance(qkv, tuple) else (qkv,)
            result = self.out(cache.attend(self.attention, *inputs), total)
        return result if self.mlp is None else self.mlp(result)


def build_block(
    loader: Loader,
    config: LlamaConfig,
    i: int,
    tables: Tables,
    device: torch.device,
    *,
    joined: bool = True,
    fused: bool = True,
    peer: Peer | None = None,
) -> Block | HalfBlock:
    """Block `i` from its checkpoint tensors.

    joined: siblings become one linear where that is exact. fused: norms, SwiGLU and sums run inside the linears that
    can. peer: make the part of this rank, whose results the ranks add up.
    """
    prefix, names, routed = config.prefix(i), config.norms_at(i), config.routed_at(i)
    mixer, share = config.mixers[i], share_of(peer)

    def norm(name: str) -> Tensor:
        return norm_weight(loader, config, f"{prefix}{name}.weight", device)

    def front(
        name: str | None, linears: list[tuple[str, Part]], after: nn.Module | None = None
    ) -> Normed | InputLinear:
        layers, parts = [prefix + each for each, _ in linears], [part for _, part in linears]
        joint = loader.siblings(layers, device, joined=joined, parts=parts)
        if name is None:
            return InputLinear(joint, after=after)
        return Normed(norm(name), joint, config.eps, after=after, fused=fused)

    def behind(name: str | None) -> nn.Module | None:
        if name is not None:
            return Norm(norm(name), config.eps)
        return Scaled(config.residual_scale) if config.residual_scale != 1 else None

    def mlp() -> MLP:
        gate = GeGLU() if config.traits.gelu else ReLU2() if config.traits.relu2 else SwiGLU()
        linear = loader.adapted(prefix + config.traits.names.down, device, columns(share, config.inner_at(i)))
        down = ResidualLinear(linear, gate=gate, after=behind(names.mlp_out), fused=fused, peer=peer)
        return MLP(front(names.mlp_in, gate_up_parts(config, share, i)), down)

    def feed() -> MLP | MoE:
        return mlp() if routed is None else build_experts(loader, config, i, routed, device, joined, peer)

    def whole(*mixing: Any, **more: Any) -> Block | HalfBlock:
        if not config.feeds(i):
            return HalfBlock(layer=i, mixing=Mixing(*mixing))
        return Block(layer=i, **Mixing(*mixing)._asdict(), mlp=feed(), **more)

    if isinstance(mixer, NoMixer):
        return HalfBlock(layer=i, mlp=feed())
    if mixer is not None:
        given = norm(str(names.attention_in)), config.eps
        inputs, recurrent = build_recurrent(loader, mixer, i, *given, device, joined=joined, fused=fused, peer=peer)
        back = loader.linear(prefix + mixer.out, device, columns(share, *mixer.behind_heads))
        out = ResidualLinear(back, after=behind(names.attention_out), fused=fused, peer=peer)
        return whole(inputs, recurrent, out)
    inner = config.attention[i].dim if config.latent is None else config.latent.value
    linear = loader.adapted(prefix + config.traits.names.out, device, columns(share, config.heads, inner))
    out = ResidualLinear(linear, after=behind(names.attention_out), fused=fused, peer=peer)
    if config.latent is not None:
        own = norm(str(names.attention_in)), config.eps
        place = tables[config.ropes[i], config.attention[i].dim], config.scale, device, share
        at = config.attention_index(i)
        heads, latent = build_latent(
            loader, config.latent, i, prefix, own, *place, index=at, joined=joined, fused=fused
        )
        return whole(heads, latent, out)
    attention, after = build_attention(loader, config, i, tables, device, peer)
    qkv = front(names.attention_in, qkv_parts(config, share, i), after)
    scale = loader.tensor(f"{prefix}layer_scalar", device) if config.traits.layer_scale else None
    end = build_end(loader, config, prefix, device) if config.per_layer[0] else None
    return whole(qkv, attention, out, end=end, scale=scale)


def build_end(loader: Loader, config: LlamaConfig, prefix: str, device: torch.device) -> PerLayerEnd:
    """What the block of `prefix` does with its own embedding of a token."""
    gate, projection, norm = (loader.tensor(f"{prefix}{name}.weight", device) for name in PER_LAYER)
    return PerLayerEnd(dense(gate), dense(projection), Norm(norm, config.eps))


def build_per_layer(loader: Loader, config: LlamaConfig, device: torch.device) -> PerLayer | None:
    """What makes the embeddings of all blocks."""
    if not config.per_layer[0]:
        return None
    first, *others = (f"{name}.weight" for name in PER_LAYER_OF_MODEL)
    table = loader.tensor(first, device, loader.info(first).dtype)  # of which a step looks up some rows
    projection, norm = (loader.tensor(name, device) for name in others)
    factor = float(torch.tensor(config.per_layer[0] ** 0.5, dtype=loader.dtype))
    rows = Embedding(DENSE, {"weight": table}, loader.dtype, scale=factor)
    return PerLayer(rows, dense(projection), norm, config.eps)


def build_attention(
    loader: Loader, config: LlamaConfig, i: int, tables: Tables, device: torch.device, peer: Peer | None
) -> tuple[Attention, WholeNorms | None]:
    """The attention of block `i`, a rank's share of its heads, and the norms of all heads together that its queries and
    keys go through before it."""
    prefix, sizes, share = config.prefix(i), config.attention[i], share_of(peer)
    heads, kv_heads = share.span(config.heads), share.span(sizes.kv_heads)
    q_norm = k_norm = whole = None
    if config.head_norm or config.traits.whole_norm:
        q, k = (f"{prefix}{name}.weight" for name in config.traits.names.head_norms)
        k = q if sizes.source is not None else k  # of keys that are another layer's, which has normed them
        q_norm, k_norm = norm_weight(loader, config, q, device), norm_weight(loader, config, k, device)
        if config.traits.whole_norm:
            spans = (q_norm, heads), (k_norm, kv_heads)
            own_q, own_k = (weight.view(-1, sizes.dim)[slice(*span)].flatten() for weight, span in spans)
            whole, q_norm, k_norm = WholeNorms(own_q, own_k, config.eps, peer), None, None
    cos, sin, query_scale = tables[config.ropes[i], sizes.dim]
    attention = Attention(
        index=config.attention_index(i),
        heads=heads[1] - heads[0],
        kv_heads=kv_heads[1] - kv_heads[0],
        head_dim=sizes.dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=config.eps,
        cos=cos,
        sin=sin,
        query_scale=query_scale,
        window=config.windows[i],
        sinks=loader.float32(f"{prefix}self_attn.sinks", device)[slice(*heads)] if config.traits.sinks else None,
        scale=config.scale,
        softcap=config.softcap,
        gated=config.traits.output_gate,
        borrows=sizes.source is not None,
        lends=any(each.source == i for each in config.attention),
        value_norm=config.traits.value_norm and sizes.source is None,
    )
    return attention, whole


def norm_weight(loader: Loader, config: LlamaConfig, name: str, device: torch.device) -> Tensor:
    """The weight [D] of an RMSNorm. Where files hold it less 1, the sum is formed here in float32 and stays float32:
    it is the number that transformers multiplies by, while bfloat16 would round 1 + w to eight bits."""
    return 1.0 + loader.float32(name, device) if config.traits.norm_offset else loader.tensor(name, device)


def build_experts(
    loader: Loader,
    config: LlamaConfig,
    i: int,
    routed: Routed,
    device: torch.device,
    joined: bool,
    peer: Peer | None = None,
) -> MoE:
    """The feed-forward half of block `i`, of routed experts; `joined` and `peer` as for `build_block`."""
    prefix, share = config.prefix(i), share_of(peer)
    factor = config.residual_scale
    last = shared_tensors(loader, routed, prefix, device, share) if joined and factor == 1 else None
    memory = loader.expert_memory
    place = device if memory is None else HOST
    if routed.stacked(prefix, loader.quantization):
        gate_up, down = (prefix + name for name in routed.whole)
        lie = {"interleaved": routed.fused, "transposed": routed.transposed}
        experts = read_stacks(loader, gate_up, down, routed.gate, place, **lie, share=share, last=last)
    else:
        pairs, downs = routed.each
        names = [tuple(prefix + name for name in one) for one in pairs]
        experts = read_experts(loader, names, [prefix + name for name in downs], routed.gate, place, share, last)
    around = [loader.linear(prefix + name, device) for name in routed.around]
    bias = f"{prefix}{routed.router}.bias" if routed.fused else None
    bias = f"{prefix}{routed.correction}" if routed.sigmoid else bias
    return MoE(
        norm=norm_weight(loader, config, f"{prefix}{config.norms_at(i).mlp_in}.weight", device),
        eps=config.eps,
        gate=build_router(loader, routed, prefix, device),
        bias=None if bias is None else loader.float32(bias, device),
        experts=experts if memory is None else memory.cached(experts),
        top_k=routed.top_k,
        normalise=routed.normalise,
        groups=routed.sigmoid,
        shared=SharedExpert.last_of(experts)
        if last
        else build_shared(loader, routed, prefix, device, joined, share, factor),
        factor=factor,
        gated=routed.shared is not None and routed.shared.gated,
        peer=peer,
        beside=build_beside(loader, config, i, device) if routed.beside else None,
        latent=(around[0], around[1]) if around else None,
    )


def build_router(loader: Loader, routed: Routed, prefix: str, device: torch.device) -> Tensor:
    """The router of the block of `prefix` [E, D], and the gate of its shared expert as a row more; never rounded."""
    names = [f"{prefix}{name}.weight" for name in routed.routers]
    wide = loader.dtype
    for name in names:
        wide = torch.promote_types(wide, loader.info(name).dtype)
    return torch.cat([loader.tensor(name, device, wide) for name in names])


def build_beside(loader: Loader, config: LlamaConfig, i: int, device: torch.device) -> Beside:
    """What stands around the MLP and the experts of block `i`."""
    prefix = config.prefix(i)

    def norm(name: str | None) -> Tensor:
        return norm_weight(loader, config, f"{prefix}{name}.weight", device)

    dense_out, routed_out = (norm(name) for name in BESIDE_NORMS)
    return Beside(
        router=loader.float32(f"{prefix}router.scale", device) * config.hidden_size**-0.5,
        routed_in=norm(ROUTED_IN),
        scales=loader.float32(f"{prefix}router.per_expert_scale", device),
        routed_out=routed_out,
        dense_out=dense_out,
        out=norm(config.norms_at(i).mlp_out),
    )


def shared_tensors(
    loader: Loader, routed: Routed, prefix: str, device: torch.device, share: TPShard
) -> ExpertTensors | None:
    """The expert of the block of `prefix` that every token uses, where it may be one more of the routed ones: of their
    width, with as many linears in front, and in their codes. Of its hidden units a share."""
    if routed.shared is None or routed.shared.size != routed.size or routed.beside or routed.latent:
        return None
    if len(routed.shared.front) != routed.parts:
        return None
    stacked = routed.stacked(prefix, loader.quantization)
    format = loader.stack(prefix + routed.whole[1])[0] if stacked else loader.format_of(prefix + routed.names(0)[-1])
    *pair, down = (prefix + name for name in routed.shared.linears)
    return read_expert(loader, format, pair, down, device, share)


def build_shared(
    loader: Loader, routed: Routed, prefix: str, device: torch.device, joined: bool, share: TPShard, factor: float
) -> SharedExpert | None:
    """The expert of the block of `prefix` that every token uses, if there is one; of its hidden units a share."""
    if routed.shared is None:
        return None
    *front, (down, columns) = shared_parts(routed, routed.shared, share)
    names, parts = [prefix + name for name, _ in front], [part for _, part in front]
    half = loader.linear(prefix + down, device, columns)
    return SharedExpert(loader.siblings(names, device, joined=joined, parts=parts), half, routed.gate, factor)


def rotary_tables(config: LlamaConfig, positions: int, device: torch.device) -> Tables:
    """Those that `build_block` takes, of so many positions."""
    found: Tables = {}
    for rope, sizes in zip(config.ropes, config.attention, strict=True):
        if (rope, sizes.dim) in found:
            continue
        if rope is None and config.latent is not None:  # whose op rotates: by nothing
            angles = torch.zeros(positions, sizes.dim // 2, device=device)
            found[rope, sizes.dim] = angles.cos(), angles, None
        elif rope is None:
            found[rope, sizes.dim] = None, None, None
        else:
            factors = rope.query_factors(positions, device)
            found[rope, sizes.dim] = (*rope.tables(sizes.dim, positions, device), factors)
    return found
