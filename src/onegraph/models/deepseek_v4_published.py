"""Every tensor of a published DeepSeek-V4 checkpoint, from its config.json alone.

DeepSeek writes its linears in FP8 (blocks of 128 x 128, E8M0 scales) and its routed experts in MXFP4 or, as `*-Base`,
in FP8 with float32 scales; NVIDIA's NVFP4 form exchanges the decoder's routed experts. What the loader asks of a file
is recognised by the file's own tensors: this table is for knowing what will come, and for making files of that layout.

Counts and bytes of the tables equal those of the published indexes (`tests/models/test_deepseek_published.py`).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onegraph.formats.weight import Shape
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_parts import Others, decoder_parts, draft_parts

Table = dict[str, tuple[torch.dtype, Shape]]  # name in the files -> what it is

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCK = 128
_ROUTED = re.compile(r"\.ffn\.experts\.\d+\.w[123]$")
_FLOAT32 = re.compile(r"(\.|^)hc_\w+$|\.(ape|attn_sink|gate\.bias)$")


def published(config: Mapping[str, Any]) -> Table:
    """The tensors of the checkpoint with this config.json, draft stages (`mtp.*`) among them.

    Raises ValueError for a config that is no DeepSeek-V4's, or whose experts are in no published form.
    """
    given = config.get("quantization_config") or {}
    c = DeepseekV4Config.from_dict({key: value for key, value in config.items() if key != "quantization_config"})
    experts = _experts(config.get("expert_dtype"))
    decoder, draft = decoder_parts(c), draft_parts(c)
    names = [decoder.embedding[0], decoder.head]
    sizes = {decoder.embedding[0]: decoder.embedding[1]}
    sizes |= {name: (n, k) for name, (n, k, _) in (decoder.linears | draft.linears).items()}
    table: Table = {}
    for name, (n, k) in sizes.items():
        if name in names:
            found: Table = {"weight": (torch.bfloat16, (n, k))}
        elif not _ROUTED.search(name):
            found = _fp8(n, k, E8M0)
        elif given.get("moe_quant_algo") == "NVFP4" and name in decoder.linears:
            found = _nvfp4(n, k)
        else:
            found = experts(n, k)
        table |= {f"{name}.{suffix}": what for suffix, what in found.items()}
    return table | _others(dict(decoder.tensors) | dict(draft.tensors))


def nbytes(table: Table) -> int:
    """Bytes of all tensors, headers not counted: `metadata.total_size` of an index."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in table.values())


def _experts(kind: object) -> Callable[[int, int], Table]:
    if kind == "fp4":
        return _mxfp4
    if kind == "fp8":
        return lambda n, k: _fp8(n, k, torch.float32)
    raise ValueError(f"config.json: expert_dtype is {kind!r}; published are 'fp4' and 'fp8'")


def _fp8(n: int, k: int, scale: torch.dtype) -> Table:
    return {"weight": (E4M3, (n, k)), "scale": (scale, (-(-n // BLOCK), -(-k // BLOCK)))}


def _mxfp4(n: int, k: int) -> Table:
    return {"weight": (torch.int8, (n, k // 2)), "scale": (E8M0, (n, k // 32))}


def _nvfp4(n: int, k: int) -> Table:
    factors: Table = dict.fromkeys(("weight_scale_2", "input_scale"), (torch.float32, ()))
    return {"weight": (torch.uint8, (n, k // 2)), "weight_scale": (E4M3, (n, k // 16))} | factors


def _others(tensors: Others) -> Table:
    def kind(name: str) -> torch.dtype:
        if name.endswith("tid2eid"):
            return torch.int64
        return torch.float32 if _FLOAT32.search(name) else torch.bfloat16

    return {name: (kind(name), shape) for name, (shape, _) in tensors.items()}
