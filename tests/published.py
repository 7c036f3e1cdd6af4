"""Tiny random checkpoints in the layouts that others publish, and transformers' model of the numbers that they hold.

The dense numbers are made here with torch's own conversions and tables of the formats' definitions; nothing of
onegraph decodes them.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models import hf_model
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLOAT8 = {"num_bits": 8, "type": "float", "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "dynamic": False}
Coded = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the dense weight that they stand for
Coder = Callable[[Tensor], Coded]


def _spread(scale: Tensor, rows: int, columns: int, n: int, k: int) -> Tensor:
    """Each number's scale, by the number's own place."""
    wide = scale.float().repeat_interleave(rows, 0)[:n]
    return wide.repeat_interleave(columns, 1)[:, :k]


def _largest(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each block, [ceil(n/rows), ceil(k/columns)]."""
    n, k = weight.shape
    whole = nn.functional.pad(weight.abs(), (0, -k % columns, 0, -n % rows))  # zeros are no block's largest
    return whole.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))


def _power(scale: Tensor) -> Tensor:
    """The next power of two, as the byte of E8M0."""
    return (scale.log2().ceil() + 127).to(torch.uint8)


def fp8(rows: int, columns: int, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Coder:
    """E4M3 in blocks; `rows` and `columns` 0: all there are. `shape`: of the scales, where it is not the blocks'."""

    def code(weight: Tensor) -> Coded:
        n, k = weight.shape
        r, c = rows or n, columns or k
        scale = _largest(weight, r, c) / 448
        if dtype in (E8M0, torch.uint8):
            stored = _power(scale)
            scale = torch.exp2(stored.float() - 127)
            stored = stored.view(dtype)
        else:
            stored = scale.to(dtype)
        wide = _spread(stored if stored.dtype.itemsize > 1 else scale, r, c, n, k)
        codes = (weight / wide).clamp(-448, 448).to(E4M3)
        if shape is not None:
            stored = stored.reshape(shape)
        return {"weight": codes, name: stored}, codes.float() * wide

    return code


def pb_wo(weight: Tensor) -> Coded:
    """ModelOpt's FP8_PB_WO: the scales have two dimensions of one besides."""
    tensors, dense = fp8(128, 128, "weight_scale", torch.float32)(weight)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None].contiguous()}, dense


def with_inputs(coder: Coder, name: str = "input_scale", shape: tuple[int, ...] = ()) -> Coder:
    """And a static scale of activations."""

    def code(weight: Tensor) -> Coded:
        tensors, dense = coder(weight)
        return tensors | {name: torch.full(shape, 0.02)}, dense

    return code


def _fp4(weight: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Codes packed two in a byte, the even column in the low half, and their numbers."""
    wanted = weight / wide
    codes = torch.bucketize(wanted.abs(), (FP4[1:8] + FP4[:7]) / 2)
    codes = codes + 8 * (wanted.lt(0) & codes.gt(0))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), FP4[codes] * wide


def nvfp4(weight: Tensor, *, compressed: bool = False, inputs: bool = True) -> Coded:
    """ModelOpt's names, or those of compressed-tensors, whose global scales divide."""
    gain = weight.abs().amax() / (6 * 448)
    scale = (_largest(weight, 1, 16) / 6 / gain).clamp(2**-9, 448).to(E4M3)
    wide = _spread(scale.float(), 1, 16, *weight.shape)
    if compressed:
        factor = (1 / gain).reshape(1)
        codes, dense = _fp4(weight, wide / factor)
        made = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": factor}
        return made | {"input_global_scale": torch.tensor([50.0])}, dense
    codes, dense = _fp4(weight, wide * gain)
    more = {"input_scale": torch.tensor(0.02)} if inputs else {}
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": gain} | more, dense


def w4a16(weight: Tensor) -> Coded:
    return nvfp4(weight, inputs=False)


def compressed_nvfp4(weight: Tensor) -> Coded:
    return nvfp4(weight, compressed=True)


def mxfp4(weight: Tensor) -> Coded:
    scale = _power(_largest(weight, 1, 32) / 6)
    codes, dense = _fp4(weight, _spread(torch.exp2(scale.float() - 127), 1, 32, *weight.shape))
    return {"weight_packed": codes, "weight_scale": scale}, dense


def packed_int4(weight: Tensor) -> Coded:
    """compressed-tensors' pack-quantized: eight codes to a word, lowest first, counted from -8; groups of 32."""
    scale = (_largest(weight, 1, 32) / 7).half()
    wide = _spread(scale.float(), 1, 32, *weight.shape)
    codes = (weight / wide).round().clamp(-8, 7)
    words = (codes.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    shape = torch.tensor(weight.shape)
    packed = words.sum(-1).to(torch.uint32).view(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, codes * wide


def deepseek_fp4(weight: Tensor) -> Coded:
    tensors, dense = mxfp4(weight)
    return {
        "weight": tensors["weight_packed"].view(torch.int8),
        "scale": tensors["weight_scale"].view(E8M0),
    }, dense


def exl3_values(codebook: str) -> "np.ndarray[Any, np.dtype[np.float16]]":
    """The float16 of each of the 65,536 states, as exllamav3's kernels compute it."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        total = (state * np.uint32(0x83DCD12D)).view(np.uint8).reshape(-1, 4).sum(1) + 1024
        unit, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return (total * unit + offset).astype(np.float16)
    product = (
        state * np.uint32(89226354) + np.uint32(64248484) if codebook == "3inst" else state * np.uint32(0xCBAC1FED)
    )
    halves = (product & np.uint32(0x8FFF8FFF) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return halves[:, 0] + halves[:, 1]


# of weight p of a tile [inputs, outputs]: its place, row by row
EXL3_PLACES = np.array(
    [16 * (t % 4 * 2 + e // 2 % 2 * 8 + e % 2) + t // 4 + e // 4 * 8 for t in range(32) for e in range(8)]
)


def exl3_tiles(bits: int, codebook: str, tiles: "np.ndarray[Any, Any]") -> "tuple[np.ndarray[Any, Any], ...]":
    """Tiles [T, 256] of inputs by outputs as rings int16 [T, 16 bits], and the numbers that those hold.

    Each weight takes the best of the 2^bits states that may follow; the bits over the end of the ring are zeros.
    """
    values, count = exl3_values(codebook), len(tiles)
    rest = -(-16 // bits)  # weights whose new bits the first ones see again
    state, choice = np.zeros(count, np.int64), np.arange(1 << bits)
    new, numbers = np.zeros((count, 256), np.int64), np.zeros((count, 256), np.float16)
    for p in range(256):
        following = (state[:, None] << bits & 0xFFFF) | (choice if p < 256 - rest else choice[:1])
        best = np.abs(values[following] - tiles[:, EXL3_PLACES[p], None]).argmin(1)
        state = following[np.arange(count), best]
        new[:, p], numbers[:, EXL3_PLACES[p]] = state & (1 << bits) - 1, values[state]
    ring = (new[:, :, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8).reshape(count, -1)
    words = np.packbits(ring, axis=1).view(">u2").astype(np.int16)  # highest bit first; two words are one number
    return words.reshape(count, -1, 2)[:, :, ::-1].reshape(count, -1), numbers


def exl3(bits: int, codebook: str, *, old: bool = False) -> Coder:
    """exllamav3's tensors; `old`: with scales that are packed signs."""

    def code(weight: Tensor) -> Coded:
        n, k = weight.shape
        g = torch.Generator().manual_seed(n + k)
        suh, svh = (torch.randn(size, generator=g).sign().half() for size in (k, n))
        if not old:
            gain = float(weight.std()) / float(exl3_values(codebook).astype(np.float32).std())
            suh, svh = suh * (gain / 1.25) * (0.8 + 0.4 * torch.rand(k, generator=g).half()), svh * 1.25
        sides = [_hadamard(size) for size in (k, n)]
        wanted = (sides[0] @ (weight.t().double() / suh[:, None] / svh) @ sides[1]).reshape(k // 16, 16, n // 16, 16)
        rings, numbers = exl3_tiles(bits, codebook, wanted.transpose(1, 2).reshape(-1, 256).numpy())
        inner = torch.from_numpy(numbers).double().view(k // 16, n // 16, 16, 16).transpose(1, 2).reshape(k, n)
        dense = (sides[0] @ inner @ sides[1]) * suh[:, None] * svh
        made = {"trellis": torch.from_numpy(rings).view(k // 16, n // 16, -1)}
        for name, scale in (("su", suh), ("sv", svh)):
            bits_ = (scale.view(-1, 16) < 0).long() << torch.arange(16)
            made |= {name: bits_.sum(1).to(torch.int16)} if old else {f"{name}h": scale}
        if codebook != "3inst":
            made[codebook] = torch.tensor({"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook] - 2**32, dtype=torch.int32)
        return made, dense.t().float()

    return code


def padded(coder: Coder) -> Coder:
    """A layer of any size as exllamav3 has it: with zeros, to multiples of 128."""

    def code(weight: Tensor) -> Coded:
        n, k = weight.shape
        made, dense = coder(nn.functional.pad(weight, (0, -k % 128, 0, -n % 128)))
        return made, dense[:n, :k].contiguous()

    return code


def _hadamard(size: int) -> Tensor:
    """Blocks of 128 on the diagonal, float64."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < 128:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / 128**0.5] * (size // 128))


@dataclass(frozen=True)
class Layout:
    """Args:
    coders: the end of a linear's name -> how it is stored; others stay dense.
    config: `quantization_config`; apart: hf_quant_config.json.
    extra: tensors that a KV cache would have, by suffix of the module.
    listed: whether the index lists scales.
    """

    coders: Mapping[str, Coder]
    config: dict[str, Any] | None = None
    apart: dict[str, Any] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    listed: bool = True
    variant: str = "llama"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def coder(self, layer: str) -> Coder | None:
        return next((coder for end, coder in self.coders.items() if layer.endswith(end)), None)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# no multiples of 128: blocks at both ends are cut short
LAYERS = 2  # of DeepSeek and Qwen3-MoE one is dense, the other one has experts
ODD = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
ODD |= {"num_hidden_layers": LAYERS}
# transformers divides the sizes by those of the scales, so it needs multiples
# gate and up of an expert are one matrix: each ends with a block
MOE = ODD | {"moe_intermediate_size": 128, "mlp_only_layers": [0]}
DEEPSEEK = ODD | {"moe_intermediate_size": 128, "num_key_value_heads": 6, "head_dim": 8}
EVEN = ODD | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
# exllamav3 pads others
WHOLE = EVEN | {"vocab_size": 256, "head_dim": 64}
KV = {"self_attn.k_proj.k_scale": torch.tensor(0.5), "self_attn.v_proj.v_scale": torch.tensor(0.25)}


def all_of(coder: Coder) -> dict[str, Coder]:
    return dict.fromkeys((*ATTENTION, *MLP), coder)


def exllama(codebook: str, attention: Coder, variant: str = "qwen3", pads: bool = False) -> Layout:
    coders = (
        dict.fromkeys(ATTENTION, attention) | dict.fromkeys(MLP, exl3(4, codebook)) | {"lm_head": exl3(6, codebook)}
    )
    coders = {name: padded(coder) for name, coder in coders.items()} if pads else coders
    config = {"quant_method": "exl3", "version": "1.4.1", "bits": 3.5, "head_bits": 6, "codebook": codebook}
    more = {"calibration": {"rows": 250, "cols": 2048}, "out_scales": "auto"}
    return Layout(coders, config | more, variant=variant, sizes=ODD if pads else WHOLE)


def modelopt(algorithm: str, kept: list[str], **more: Any) -> dict[str, Any]:
    inside = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": kept}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": inside | more}


def mixed(attention: str, mlp: dict[str, Any]) -> dict[str, Any]:
    layers = {
        f"model.layers.{i}.self_attn.{name}": {"quant_algo": attention} for i in range(LAYERS) for name in ATTENTION
    }
    return layers | {f"model.layers.{i}.mlp.{name}": mlp for i in range(LAYERS) for name in MLP} | {"lm_head": mlp}


def compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    common = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}} | common | more


def deepseek(**more: Any) -> dict[str, Any]:
    block = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return block | more


def qwen(dtype: torch.dtype, sizes: Mapping[str, Any] = ODD) -> Layout:
    kept = ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]
    return Layout(
        all_of(fp8(128, 128, "weight_scale_inv", dtype)),
        deepseek(modules_to_not_convert=kept),
        variant="qwen3",
        sizes=sizes,
    )


_MX = fp8(1, 32, "weight_scale", torch.uint8)
_CHANNEL = fp8(1, 0, "weight_scale", torch.bfloat16)
_GROUP_FORMATS = {
    "group_0": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": FLOAT8 | {"strategy": "channel"}},
    "group_1": {"format": "nvfp4-pack-quantized", "targets": ["re:.*mlp.*"], "weights": FLOAT4 | {"group_size": 16}},
    "group_2": {"format": "mxfp8-quantized", "targets": ["lm_head"], "weights": FLOAT8 | {"group_size": 32}},
}
_INT4 = {
    "format": "pack-quantized",
    "targets": ["re:.*mlp.*"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
}
LAYOUTS: dict[str, Layout] = {
    "Qwen3-FP8, bfloat16 scales": qwen(torch.bfloat16),
    "Qwen3-FP8, float16 scales": qwen(torch.float16),
    "Qwen3-FP8, float32 scales": qwen(torch.float32),
    "MiniMax's config": Layout(
        all_of(fp8(128, 128, "weight_scale_inv", torch.float32)),
        deepseek(fmt="float8_e4m3fn", ignored_layers=["lm_head"]),
    ),
    "DeepSeek's scales": Layout(all_of(fp8(128, 128, "scale", E8M0)), deepseek(scale_fmt="ue8m0")),
    "blocks of 32": Layout(all_of(fp8(32, 32, "scale", E8M0)), deepseek(weight_block_size=[32, 32])),
    "DeepSeek's FP4 beside FP8": Layout(
        dict.fromkeys(ATTENTION, fp8(128, 128, "scale", E8M0)) | dict.fromkeys(MLP, deepseek_fp4),
        deepseek(scale_fmt="ue8m0"),
    ),
    "transformers' MXFP8": Layout(
        all_of(fp8(1, 32, "weight_scale_inv", torch.uint8)), deepseek(weight_block_size=[1, 32])
    ),
    "NVIDIA FP8": Layout(
        all_of(with_inputs(fp8(0, 0, "weight_scale", torch.float32, ()))),
        apart=modelopt("FP8", ["lm_head"]),
        extra=KV,
    ),
    "NVIDIA FP8 without a method": Layout(
        all_of(with_inputs(fp8(0, 0, "weight_scale", torch.float32, ()))),
        {
            "config_groups": {"group_0": {"weights": FLOAT8}},
            "ignore": ["lm_head"],
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
        },
        extra=KV,
        variant="qwen3",
    ),
    "FP8_PB_WO": Layout(all_of(pb_wo), apart=modelopt("FP8_PB_WO", ["lm_head"])),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout(
        all_of(fp8(1, 0, "weight_scale", torch.float32, (-1,))), apart=modelopt("FP8_PER_CHANNEL_PER_TOKEN", [])
    ),
    "NVIDIA NVFP4": Layout(
        all_of(nvfp4), apart=modelopt("NVFP4", ["lm_head"], group_size=16), extra=KV, listed=False, variant="qwen3"
    ),
    "NVIDIA NVFP4 in config.json": Layout(
        dict.fromkeys(MLP, nvfp4),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": FLOAT4 | {"group_size": 16}, "targets": ["Linear"]}},
            "ignore": ["lm_head", "model.layers.0.self_attn*"],  # narrower than the truth
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        extra=KV,
    ),
    "NVIDIA MIXED": Layout(
        dict.fromkeys(ATTENTION, with_inputs(fp8(0, 0, "weight_scale", torch.float32, ())))
        | dict.fromkeys((*MLP, "lm_head"), w4a16),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": mixed("FP8", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
        },
        extra=KV,
        variant="qwen3",
    ),
    "NVIDIA MIXED of MXFP8": Layout(
        dict.fromkeys(ATTENTION, _MX) | dict.fromkeys(MLP, nvfp4),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "exclude_modules": ["vision_tower"],
            "quantized_layers": mixed("MXFP8", {"quant_algo": "NVFP4", "group_size": 16}),
        },
    ),
    "compressed-tensors FP8 per channel": Layout(
        all_of(_CHANNEL), compressed("float-quantized", FLOAT8 | {"strategy": "channel"})
    ),
    "compressed-tensors FP8 per tensor": Layout(
        all_of(with_inputs(fp8(0, 0, "weight_scale", torch.bfloat16, (1,)), shape=(1,))),
        compressed("float-quantized", FLOAT8 | {"strategy": "tensor"}),
        variant="qwen3",
    ),
    "compressed-tensors FP8 blocks": Layout(
        all_of(fp8(128, 128, "weight_scale", torch.bfloat16)),
        compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}),
    ),
    "compressed-tensors naive": Layout(
        all_of(_CHANNEL), compressed("naive-quantized", FLOAT8 | {"strategy": "channel"})
    ),
    "compressed-tensors NVFP4": Layout(
        all_of(compressed_nvfp4),
        compressed("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}),
    ),
    "compressed-tensors MXFP4": Layout(
        all_of(mxfp4), compressed("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32})
    ),
    "compressed-tensors mixed": Layout(
        dict.fromkeys(ATTENTION, _CHANNEL) | dict.fromkeys(MLP, compressed_nvfp4) | {"lm_head": _MX},
        compressed("mixed-precision", {}, config_groups=_GROUP_FORMATS, ignore=[]),
        variant="qwen3",
    ),
    "compressed-tensors mixed with INT4": Layout(
        dict.fromkeys(ATTENTION, _CHANNEL) | dict.fromkeys(MLP, packed_int4),
        compressed("mixed-precision", {}, config_groups={"group_0": _GROUP_FORMATS["group_0"], "group_1": _INT4}),
    ),
    "Qwen3-MoE FP8": dataclasses.replace(qwen(torch.bfloat16), variant="qwen3_moe", sizes=MOE),
    "DeepSeek-V3 FP8": Layout(
        dict.fromkeys((*LATENT, *MLP), fp8(128, 128, "weight_scale_inv", torch.float32)),
        deepseek(),
        variant="deepseek_v3",
        sizes=DEEPSEEK,
    ),
    "Kimi-K2 INT4 experts": Layout(
        {f".experts.{e}.{name}": packed_int4 for e in range(12) for name in MLP},
        compressed("pack-quantized", {}, config_groups={"group_0": _INT4 | {"targets": ["Linear"]}}),
        variant="deepseek_v3",
        sizes=DEEPSEEK,
    ),
    "NVIDIA DeepSeek-R1 NVFP4": Layout(
        dict.fromkeys(MLP, nvfp4) | dict.fromkeys(LATENT, fp8(128, 128, "weight_scale_inv", torch.float32)),
        apart=modelopt("MIXED_PRECISION", ["lm_head"]),
        variant="deepseek_v3",
        sizes=DEEPSEEK,
    ),
    "NVIDIA Qwen3-MoE NVFP4": Layout(
        all_of(nvfp4),
        apart=modelopt("NVFP4", [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)] + ["lm_head"], group_size=16),
        extra=KV,
        variant="qwen3_moe",
        sizes=MOE,
    ),
    "NVIDIA Qwen3-MoE MIXED": Layout(
        dict.fromkeys(ATTENTION, with_inputs(fp8(0, 0, "weight_scale", torch.float32, ())))
        | dict.fromkeys((*MLP, "lm_head"), w4a16),
        apart=modelopt(
            "MIXED_PRECISION",
            [],
            quantized_layers={
                "model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},  # one key for all
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        ),
        variant="qwen3_moe",
        sizes=MOE,
    ),
    "compressed-tensors Qwen3-MoE MXFP4": Layout(
        dict.fromkeys(MLP, mxfp4),
        compressed(
            "mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32}, ignore=["re:.*self_attn.*"]
        ),
        variant="qwen3_moe",
        sizes=MOE,
    ),
    "EXL3": exllama("3inst", exl3(8, "3inst", old=True)),
    "EXL3 padded": exllama("mul1", exl3(5, "mul1"), pads=True),
    "EXL3 mcg": exllama("mcg", exl3(3, "mcg")),
    "EXL3 mul1": exllama("mul1", exl3(1, "mul1"), "qwen2"),
    "NVIDIA Mixtral FP8": Layout(
        dict.fromkeys((*ATTENTION, "w1", "w2", "w3"), with_inputs(fp8(0, 0, "weight_scale", torch.float32, ()))),
        apart=modelopt("FP8", ["lm_head", "*block_sparse_moe.gate"]),
        extra=KV,
        variant="mixtral",
    ),
}


def save(layout: Layout, path: Path, seed: int = 0) -> Any:
    """Writes the checkpoint, in several shards; transformers' model in float32 with the numbers that it holds."""
    untied = {} if layout.variant == "llama" else {"tie_word_embeddings": False}
    hf = hf_model(layout.variant, seed, **(ODD | dict(layout.sizes) | untied))
    tensors: dict[str, Tensor] = {}
    for name, parameter in _as_published(hf):
        layer, _, kind = name.rpartition(".")
        coder = layout.coder(layer) if kind == "weight" else None
        if coder is None:
            tensors[name] = parameter
            continue
        made, dense = coder(parameter)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in made.items()}
        parameter.copy_(dense)
    tensors |= {f"model.layers.{i}.{name}": t for i in range(LAYERS) for name, t in layout.extra.items()}
    config = hf.config.to_dict()
    if layout.config is not None:
        config["quantization_config"] = layout.config
    write_checkpoint(path, config, tensors.items(), shard_bytes=200_000)
    (path / "SHA256SUMS").unlink()  # as nobody else writes
    if layout.apart is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(layout.apart))
    if not layout.listed:
        unlist(path, ("scale", "scale_2"))
    return hf


def _as_published(hf: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's own storage under the names of files, where each expert has three matrices of its own."""
    mixtral = hf.config.model_type == "mixtral"
    first, second, third = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield from ((name, buffer) for name, buffer in hf.named_buffers() if name.endswith("e_score_correction_bias"))
    for name, parameter in hf.named_parameters():
        name, value = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name, parameter.detach()
        stack, _, kind = name.rpartition(".")
        if not stack.endswith(".experts"):
            yield name, value
            continue
        for e, matrix in enumerate(value):
            parts = zip((first, second), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [(third, matrix)]
            for own, part in parts:
                yield f"{stack}.{e}.{own}.weight", part


def code(source: Path, to: Path, coder: Coder, config: dict[str, Any], endings: tuple[str, ...]) -> Path:
    """A copy of a dense checkpoint of ours, its linears of these endings coded."""
    with Checkpoint.open(source) as dense:
        tensors = {name: dense.tensor(name) for name in dense.names}
        for name in [name for name in tensors if name.removesuffix(".weight").endswith(endings)]:
            made = coder(tensors.pop(name))[0]
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in made.items()}
        write_checkpoint(to, dense.config | {"quantization_config": config}, tensors.items(), copy_from=dense)
    return to


def unlist(path: Path, endings: tuple[str, ...]) -> None:
    """Takes tensors out of the index, as some recipes do; they stay in their shards."""
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if not name.endswith(endings)}
    index.write_text(json.dumps(content))


def list_all(path: Path) -> None:
    """Puts every tensor of the shards into the index."""
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for shard in set(content["weight_map"].values()):
        with safe_open(path / shard, "pt") as tensors:
            content["weight_map"] |= dict.fromkeys(tensors.keys(), shard)
    index.write_text(json.dumps(content))


def change(path: Path, name: str, made: Tensor | None) -> None:
    """Puts another tensor in the place of one, or takes it away."""
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = path / content["weight_map"].get(name, next(iter(content["weight_map"].values())))
    tensors = {key: tensor for key, tensor in load_file(shard).items() if key != name}
    content["weight_map"].pop(name, None)
    if made is not None:
        tensors[name] = made
        content["weight_map"][name] = shard.name
    save_file(tensors, shard)
    index.write_text(json.dumps(content))
