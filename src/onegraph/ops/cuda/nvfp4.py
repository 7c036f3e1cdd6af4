"""NVFP4 and MXFP4 linears and routed experts on a GPU: variants of `nvfp4.cu`, and which calls other kernels take.

A single token runs on `nvfp4_one.cu`, and up to 32 on `nvfp4_short.cu` where that measured better. Widths that are no
multiple of 64 decode the weight once and multiply through cuBLAS.

The two formats differ in scales alone: one source serves both (GROUP), and a weight without global_scale is MXFP4.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build, nvfp4_one, stream
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.stream import (
    DOWN,
    GATE,
    GATE_UP,
    LINEAR,
    ROWS,
    SIZES,
    WARPS,
    Footprint,
    Stream,
    Variant,
    Weight,
)

SLICE, SLOT = 256, 2304  # as in nvfp4.cu
PLAIN_WARPS = 12  # of a block at most where the portable form runs
COLUMNS = 64  # of k, whose scales one copy of four bytes brings: k comes in multiples
MAX_TOKENS = 32

LAYER = "x", "codes", "scale", "global_scale", "bias"
SHORT = build.Source(
    "nvfp4_short",
    ops=("nvfp4_linear", "mxfp4_linear"),
    functions=("nvfp4_short",),
    arguments=build.Arguments(pointers=(*LAYER, "y"), ints=("tokens", "n", "k", "matrices")),
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example={"HALF": 0, "TILES": 2, "WARPS": 8, "GROUP": 16, "FLOAT": 0},
)


def _warps(portable: bool) -> tuple[tuple[int, ...], ...]:
    return ((PLAIN_WARPS if portable else WARPS,),)


class NVFP4(Stream):
    source = build.Source(
        "nvfp4",
        ops=tuple(f"{name}_{op}" for name in ("nvfp4", "mxfp4") for op in ("linear", "grouped_linear", "experts")),
        functions=("nvfp4_linear",),
        arguments=build.Arguments(
            pointers=(*LAYER, "experts", "weights", "y"), ints=(*SIZES, "across", "hold"), floats=GATE
        ),
        capabilities=build.PORTABLE,
        families=("hopper", "portable"),
        own=build.CLUSTERS,
        otherwise="torch computes NVFP4 and MXFP4 linears",
        example={**Variant(LINEAR).defines(2), "HALF": 0, "GROUP": 16, "FLOAT": 0},
    )
    dequantizer = build.Source(
        "nvfp4_dequantize",
        ops=("nvfp4_linear", "mxfp4_linear"),
        functions=("nvfp4_dequantize",),
        arguments=build.Arguments(pointers=("codes", "scale", "global_scale", "y"), ints=("n", "k")),
        capabilities=build.PORTABLE,
        families=("hopper", "portable"),
        own=build.CLUSTERS,
        example={"HALF": 0, "GROUP": 16},
    )
    max_tokens = MAX_TOKENS
    aligned = "codes", "scale"

    def weight(self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]) -> Weight:
        return Weight(shape, tensors, {}, {"GROUP": 16})

    def reads(self, weight: Weight) -> bool:
        """Scales of MXFP4 are copied by the word, also the last ones of a matrix."""
        _, n, k = weight.shape
        return k % COLUMNS == 0 and (weight.form["GROUP"] == 16 or n * k % (4 * 32) == 0)

    def linear_variant(self, tokens: int, few: bool, weight: Weight, portable: bool) -> Variant:
        return Variant(LINEAR, 1 if tokens <= 8 else 2, warps=_warps(portable))

    def experts_variant(self, tokens: int, portable: bool) -> Variant:
        return Variant(GATE_UP, warps=_warps(portable), depths=(4, 3, 2))

    def footprint(self, variant: Variant, weight: Weight) -> Footprint:
        return Footprint(SLOT, variant.sums, ROWS * 4)

    def defines(self, variant: Variant, depth: int, weight: Weight, x: Tensor, y: Tensor) -> dict[str, int]:
        return {**super().defines(variant, depth, weight, x, y), "FLOAT": int(y.dtype == torch.float32)}

    def own_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, tokens: int) -> bool:
        (groups, n, k), device, group = weight.shape, x.device.index, weight.form["GROUP"]
        codes, scale, global_scale = weight.tensors.values()
        about = build.device(device)
        if (
            tokens == 1
            and nvfp4_one.KERNEL.is_built(device)
            and (one := nvfp4_one.linear_plan(n, k, groups, about, group))
        ):
            nvfp4_one.run(LINEAR, codes, scale, (x, global_scale, bias, None, None), y, (1, n, k, groups, 1), one)
            return True
        if tokens <= 8 or not stream.has_few_tiles(weight, device):
            return False
        warps = 8 if k >= 8 * SLICE else 4 if k >= 4 * SLICE else 2
        defines = {"HALF": int(x.dtype == torch.float16), "TILES": 2, "WARPS": warps, "GROUP": group}
        defines["FLOAT"] = int(y.dtype == torch.float32)
        grid, sizes = (-(-n // ROWS), groups, -(-tokens // 16)), {"tokens": tokens, "n": n, "k": k, "matrices": groups}
        launch(SHORT, defines, Launch(grid, warps * 32, warps * 1024), x=x, **weight.tensors, bias=bias, y=y, **sizes)
        return True

    def own_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        layers: tuple[Weight, Weight],
        outputs: tuple[Tensor, Tensor],
        gate: tuple[float, ...],
        biases: tuple[Tensor | None, Tensor | None],
    ) -> bool:
        (tokens, top_k), (matrices, dim, wide), device = experts.shape, layers[1].shape, x.device.index
        if tokens != 1 or not nvfp4_one.KERNEL.is_built(device):
            return False
        plans = nvfp4_one.experts_plans(tokens, dim, wide, top_k, build.device(device), layers[0].form["GROUP"])
        if plans is None:
            return False
        gates, inputs = (gate, stream.NO_GATE), (x, outputs[0])
        for i, mode in enumerate((GATE_UP, DOWN)):
            codes, scale, global_scale = layers[i].tensors.values()
            given = inputs[i], global_scale, biases[i], experts, weights
            sizes = tokens, *layers[i].shape[1:], matrices, top_k
            nvfp4_one.run(mode, codes, scale, given, outputs[i], sizes, plans[i], gates[i])
        return True

    def decode(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        (matrices, n, k), tensors = weight.shape, self._aligned(weight).tensors
        codes, defines = tensors["codes"], {"HALF": int(dtype == torch.float16), **weight.form}
        y = torch.empty(*codes.shape[:-1], k, dtype=dtype, device=codes.device)
        return stream.dequantize(self.dequantizer, y, 8, defines, **tensors, n=matrices * n, k=k)


class MXFP4(NVFP4):
    def weight(self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]) -> Weight:
        return Weight(shape, {**tensors, "global_scale": None}, {}, {"GROUP": 32})


STREAM, MX_STREAM = NVFP4(), MXFP4()
