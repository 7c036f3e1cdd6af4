"""From the tensors of a DeepSeek-V4 checkpoint to layers: names as DeepSeek and as transformers write them."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.nvfp4 import E4M3, GROUP, NVFP4Tensors, is_nvfp4, read_linear, tensor_names
from onegraph.models.deepseek_v4_config import CSA, DeepseekV4Config
from onegraph.models.weights import FLOATS
from onegraph.nn.deepseek_attention import Compressor, DeepseekAttention, GroupedLinear
from onegraph.nn.deepseek_moe import DeepseekMoE, Experts, SharedExpert
from onegraph.nn.linear import Linear, Siblings
from onegraph.nn.nvfp4 import NVFP4Experts, NVFP4GroupedLinear, NVFP4Linear, fuse_nvfp4

# Layers that may be NVFP4: attention's projections and all experts, not the helpers whose rounding selects or weighs.
_PACKED = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|(shared_experts|experts\.\d+)\.w[123])\.weight$"
)
INTEGERS = (torch.int64, torch.int32)

# transformers' names (as modules, and as save_pretrained writes them) -> DeepSeek's, applied from the first to the last
_RENAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.(attn|compressor)\.kv_proj\.", r".\1.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.attn\.([qo])_([ab])_proj\.", r".attn.w\1_\2."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"experts(\.\d+)?\.gate_proj\.", r"experts\1.w1."),
        (r"experts(\.\d+)?\.down_proj\.", r"experts\1.w2."),
        (r"experts(\.\d+)?\.up_proj\.", r"experts\1.w3."),
    )
)


def official(name: str) -> str:
    """DeepSeek's name of a tensor that either of the two wrote."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def may_be_packed(name: str) -> bool:
    """Whether a tensor, by its official name, is the weight of a layer that may be NVFP4."""
    return _PACKED.search(name) is not None


class DeepseekWeights:
    """The tensors of a DeepSeek-V4 checkpoint, read when asked for, each straight to the device of its layer.

    A linear of attention or experts may be stored as NVFP4, each on its own account: the checkpoint is the precision
    map. Embedding, head, router and the helper projections of compressor and indexer are dense.
    """

    def __init__(self, checkpoint: Checkpoint, config: DeepseekV4Config, dtype: torch.dtype) -> None:
        if dtype not in FLOATS:
            raise ValueError(f"dtype is {dtype}; allowed are float32, bfloat16 and float16")
        self.checkpoint, self.config, self.dtype = checkpoint, config, dtype
        self.stored = {official(name): name for name in checkpoint.names}

    def expected(self) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Every tensor of the decoder under its official name: (shape, dtypes allowed)."""
        c = self.config
        found: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}

        def add(prefix: str, **shapes: tuple[int, ...]) -> None:
            found.update({prefix + name.replace("__", "."): (shape, FLOATS) for name, shape in shapes.items()})

        d, h, wide = c.hidden_size, c.streams, c.streams * (c.streams + 2)
        add("", embed__weight=(c.vocab_size, d), head__weight=(c.vocab_size, d), norm__weight=(d,))
        add("", hc_head_fn=(h, h * d), hc_head_base=(h,), hc_head_scale=(1,))
        for i in range(c.layers):
            layer = f"layers.{i}."
            add(layer, attn_norm__weight=(d,), ffn_norm__weight=(d,))
            for part in ("attn", "ffn"):
                add(f"{layer}hc_{part}_", fn=(wide, h * d), base=(wide,), scale=(3,))
            add(
                f"{layer}attn.",
                wq_a__weight=(c.q_rank, d),
                q_norm__weight=(c.q_rank,),
                wq_b__weight=(c.heads * c.head_dim, c.q_rank),
                wkv__weight=(c.head_dim, d),
                kv_norm__weight=(c.head_dim,),
                wo_a__weight=(c.out_groups * c.out_rank, c.heads * c.head_dim // c.out_groups),
                wo_b__weight=(d, c.out_groups * c.out_rank),
                attn_sink=(c.heads,),
            )
            if c.ratios[i]:
                self._add_compressor(add, f"{layer}attn.compressor.", c.ratios[i], c.head_dim, c.kinds[i] == CSA)
            if c.kinds[i] == CSA:
                indexer = f"{layer}attn.indexer."
                self._add_compressor(add, f"{indexer}compressor.", c.ratios[i], c.index_dim, True)
                add(
                    indexer,
                    wq_b__weight=(c.index_heads * c.index_dim, c.q_rank),
                    weights_proj__weight=(c.index_heads, d),
                )
            add(f"{layer}ffn.gate.", weight=(c.experts, d))
            if c.hashed[i]:
                found[f"{layer}ffn.gate.tid2eid"] = (c.vocab_size, c.top_k), INTEGERS
            else:
                add(f"{layer}ffn.gate.", bias=(c.experts,))
            for expert in ("shared_experts", *(f"experts.{e}" for e in range(c.experts))):
                shapes = {"w1": (c.expert_size, d), "w2": (d, c.expert_size), "w3": (c.expert_size, d)}
                add(f"{layer}ffn.{expert}.", **{f"{name}__weight": shape for name, shape in shapes.items()})
        for name in [name for name in found if may_be_packed(name)]:
            layer = self._stored_layer(name.removesuffix(".weight"))
            if is_nvfp4(self.checkpoint, layer):
                (n, k), _ = found.pop(name)
                codes, scale, second, inputs = (official(t) if t else "" for t in tensor_names(self.checkpoint, layer))
                found |= {codes: ((n, k // 2), (torch.uint8,)), scale: ((n, k // GROUP), (E4M3, torch.uint8))}
                found |= {
                    t: (self.checkpoint.shape(self.stored[t]), FLOATS) for t in (second, inputs) if t in self.stored
                }
        return found

    def _stored_layer(self, name: str) -> str:
        """The checkpoint's own name of a layer."""
        for suffix in (".weight", ".weight_packed"):
            if name + suffix in self.stored:
                return self.stored[name + suffix].removesuffix(suffix)
        return name

    def _add_compressor(self, add: Callable[..., None], prefix: str, ratio: int, dim: int, overlap: bool) -> None:
        wide, d = dim * (2 if overlap else 1), self.config.hidden_size
        add(prefix, wkv__weight=(wide, d), wgate__weight=(wide, d), ape=(ratio, wide), norm__weight=(dim,))

    def check(self) -> None:
        """Raises CheckpointError that names each tensor missing, of a wrong shape or dtype, or not asked for. The MTP
        layer's tensors may be there; they are not read."""
        beyond = re.compile(rf"^(mtp\.|layers\.{self.config.layers}\.)")
        mtp = [stored for name, stored in self.stored.items() if beyond.match(name)]
        self.checkpoint.check({self.stored.get(k, k): v for k, v in self.expected().items()}, optional=set(mtp))

    def sizes(self) -> tuple[list[int], tuple[int, int]]:
        """Bytes on the device of each layer, and of the embedding and the head."""
        layers, ends = [0] * self.config.layers, [0, 0]
        for name in self.expected():
            info = self.checkpoint.info(self.stored[name])
            wide = self.dtype.itemsize if info.dtype in FLOATS else info.dtype.itemsize
            nbytes = info.nbytes // info.dtype.itemsize * wide
            where = name.split(".")
            if where[0] == "layers":
                layers[int(where[1])] += nbytes
            else:
                ends[0 if where[0] == "embed" else 1] += nbytes
        return layers, (ends[0], ends[1])

    # --------------------------------------------------------------------------------------------------- making it

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        return self.checkpoint.tensor(self.stored.get(name, name), device=device, dtype=dtype or self.dtype)

    def wide(self, name: str, device: torch.device) -> Tensor:
        """What stays float32 in any model: hyper-connections, norms, sinks, biases."""
        return self.tensor(name, device, torch.float32)

    def packed(self, name: str, n: int, k: int, device: torch.device) -> NVFP4Tensors | None:
        """The NVFP4 tensors of layer `name`, None where it is dense."""
        layer = self._stored_layer(name)
        return read_linear(self.checkpoint, layer, n, k, device) if is_nvfp4(self.checkpoint, layer) else None

    def linear(self, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> nn.Module:
        """One linear with the rows of all the named ones, (n, k) each, which read the same input."""
        packed = {name: self.packed(name, n, k, device) for name, (n, k) in shapes.items()}
        dense = {name: self.tensor(f"{name}.weight", device) for name, tensors in packed.items() if tensors is None}
        coded = {name: NVFP4Linear.of(tensors) for name, tensors in packed.items() if tensors is not None}
        if not coded:
            return Linear(torch.cat(list(dense.values())))
        if not dense:
            return fuse_nvfp4(list(coded.values()))
        return Siblings([coded[name] if name in coded else Linear(dense[name]) for name in shapes])

    def grouped(self, name: str, groups: int, n: int, k: int, device: torch.device) -> nn.Module:
        """`groups` linears (n, k) whose rows are stored one group after the other."""
        tensors = self.packed(name, groups * n, k, device)
        if tensors is None:
            return GroupedLinear(self.tensor(f"{name}.weight", device).unflatten(0, (groups, n)))
        codes, scale = tensors.codes.unflatten(0, (groups, n)), tensors.scale.unflatten(0, (groups, n))
        return NVFP4GroupedLinear(codes=codes, scale=scale, global_scale=tensors.global_scale)

    def experts(self, prefix: str, device: torch.device) -> nn.Module:
        """All routed experts of a layer; NVFP4 where the first one's gate is, and then all of them, with the shared
        expert as one more where it is NVFP4 too."""
        if is_nvfp4(self.checkpoint, self._stored_layer(f"{prefix}0.w1")):
            return self._packed_experts(prefix, device)
        c = self.config
        gate_up = torch.empty(c.experts, 2, c.expert_size, c.hidden_size, device=device, dtype=self.dtype)
        down = torch.empty(c.experts, c.hidden_size, c.expert_size, device=device, dtype=self.dtype)
        for e in range(c.experts):
            gate_up[e, 0] = self.tensor(f"{prefix}{e}.w1.weight", device)
            gate_up[e, 1] = self.tensor(f"{prefix}{e}.w3.weight", device)
            down[e] = self.tensor(f"{prefix}{e}.w2.weight", device)
        return Experts(gate_up.flatten(1, 2), down, c.limit)

    def _packed_experts(self, prefix: str, device: torch.device) -> NVFP4Experts:
        c = self.config
        names = [f"{prefix}{expert}" for expert in range(c.experts)]
        shared = prefix.removesuffix("experts.") + "shared_experts"
        if all(is_nvfp4(self.checkpoint, self._stored_layer(f"{shared}.{part}")) for part in ("w1", "w2", "w3")):
            names.append(shared)
        wide, d, e = c.expert_size, c.hidden_size, len(names)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=torch.uint8)

        gate_up, gate_up_scale = empty(e, 2, wide, d // 2), empty(e, 2, wide, d // GROUP)
        down, down_scale = empty(e, d, wide // 2), empty(e, d, wide // GROUP)
        gate_up_global = torch.empty(e, 2, wide, device=device)
        down_global = torch.empty(e, device=device)
        for expert, stored in enumerate(names):
            for part, name in enumerate(("w1", "w3")):
                codes, scale, factor, _ = self._all_packed(f"{stored}.{name}", wide, d, device)
                gate_up[expert, part], gate_up_scale[expert, part] = codes, scale
                gate_up_global[expert, part] = factor
            down[expert], down_scale[expert], down_global[expert], _ = self._all_packed(f"{stored}.w2", d, wide, device)
        return NVFP4Experts(
            gate_up=gate_up.flatten(1, 2),
            gate_up_scale=gate_up_scale.flatten(1, 2),
            gate_up_global=gate_up_global.flatten(1),
            down=down,
            down_scale=down_scale,
            down_global=down_global,
            limit=c.limit,
        )

    def _all_packed(self, name: str, n: int, k: int, device: torch.device) -> NVFP4Tensors:
        tensors = self.packed(name, n, k, device)
        if tensors is None:
            raise CheckpointError(f"{name} is dense and other experts of its layer are NVFP4; they must be of one kind")
        return tensors

    def attention(self, i: int, tables: tuple[Tensor, Tensor], device: torch.device) -> DeepseekAttention:
        c, d, prefix = self.config, self.config.hidden_size, f"layers.{i}.attn."
        compressed, indexed = c.ratios[i] > 0, c.kinds[i] == CSA
        states = [f"{prefix}compressor.{name}" for name in ("wkv", "wgate") if compressed]
        if indexed:
            states += [f"{prefix}indexer.{name}" for name in ("compressor.wkv", "compressor.wgate", "weights_proj")]
        cos, sin = tables
        return DeepseekAttention(
            index=i,
            qkv_a=self.linear({f"{prefix}wq_a": (c.q_rank, d), f"{prefix}wkv": (c.head_dim, d)}, device),
            q_norm=self.wide(f"{prefix}q_norm.weight", device),
            kv_norm=self.wide(f"{prefix}kv_norm.weight", device),
            q_b=self.linear({f"{prefix}wq_b": (c.heads * c.head_dim, c.q_rank)}, device),
            states=Linear(torch.cat([self.tensor(f"{name}.weight", device) for name in states])) if states else None,
            compressor=self._compressor(f"{prefix}compressor.", device) if compressed else None,
            index_q=self.linear({f"{prefix}indexer.wq_b": (c.index_heads * c.index_dim, c.q_rank)}, device)
            if indexed
            else None,
            indexer=self._compressor(f"{prefix}indexer.compressor.", device) if indexed else None,
            out_a=self.grouped(f"{prefix}wo_a", c.out_groups, c.out_rank, c.heads * c.head_dim // c.out_groups, device),
            out_b=self.linear({f"{prefix}wo_b": (d, c.out_groups * c.out_rank)}, device),
            groups=c.out_groups,
            sinks=self.wide(f"{prefix}attn_sink", device),
            cos=cos,
            sin=sin,
            eps=c.eps,
            window=c.window,
            top_k=c.index_top_k,
        )

    def _compressor(self, prefix: str, device: torch.device) -> Compressor:
        return Compressor(self.wide(f"{prefix}ape", device), self.wide(f"{prefix}norm.weight", device))

    def moe(self, i: int, device: torch.device) -> DeepseekMoE:
        c, prefix = self.config, f"layers.{i}.ffn."
        experts = self.experts(f"{prefix}experts.", device)
        return DeepseekMoE(
            gate=self.tensor(f"{prefix}gate.weight", device),
            bias=None if c.hashed[i] else self.wide(f"{prefix}gate.bias", device),
            table=self.tensor(f"{prefix}gate.tid2eid", device, torch.int32) if c.hashed[i] else None,
            experts=experts,
            shared=self._shared(f"{prefix}shared_experts.", experts, device),
            top_k=c.top_k,
            scale=c.route_scale,
        )

    def _shared(self, prefix: str, experts: nn.Module, device: torch.device) -> SharedExpert:
        """The shared expert: the last of `experts` where that is it, in the same storage."""
        c, d, wide = self.config, self.config.hidden_size, self.config.expert_size
        if isinstance(experts, NVFP4Experts) and experts.down.shape[0] > c.experts:
            up = NVFP4Linear(
                codes=experts.gate_up[-1], scale=experts.gate_up_scale[-1], global_scale=experts.gate_up_global[-1]
            )
            down = NVFP4Linear(
                codes=experts.down[-1], scale=experts.down_scale[-1], global_scale=experts.down_global[-1]
            )
            return SharedExpert(up, down, c.limit)
        return SharedExpert(
            self.linear({f"{prefix}w1": (wide, d), f"{prefix}w3": (wide, d)}, device),
            self.linear({f"{prefix}w2": (d, wide)}, device),
            c.limit,
        )
