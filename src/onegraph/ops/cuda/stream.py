"""Linears and routed experts of published formats on a GPU: how `stream_linear.cuh` is tiled and launched.

Few tokens run straight from the codes, in one launch (experts: two). More of them decode the weight once and multiply
through cuBLAS, two launches. What runs how follows from shape, dtype and device alone. A format's own module says what
differs: its kernel, its variants, bytes of its codes and scales, and which calls another kernel takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, aligned, launch

ROWS, PAIRS = 16, 255  # as in stream_linear.cuh, routes.cuh
WARPS = 16  # of a block at most
PASS, FEW_PASS = 16, 8  # tokens of experts that share a reading: where those of an expert are moved together, and not
FEW_TILES = 4  # row tiles of a block, below which activations of more than 8 tokens cost as much as codes
ROUTES = 8 * 1024  # bytes of a block's shared memory that the routes of experts take, rounded up
HALVES = torch.bfloat16, torch.float16  # dtypes of activations
LINEAR, GATE_UP, DOWN = 0, 1, 2  # MODE
GATE, NO_GATE = ("limit", "alpha", "shift"), (0.0, 0.0, 0.0)
SIZES = "tokens", "n", "k", "matrices", "top_k"


@dataclass(frozen=True)
class Variant:
    """What is set when compiled.

    Attributes:
        tiles: column tiles of 8 tokens.
        together: experts of up to 16 tokens.
        ring_x: activations come through the ring.
        slice: columns of a unit.
        warps: counts of a block's warps to try: of each tuple the best, of tuples the first that fits.
        depths: units of a warp under way, to try: the first that fits.
        early: units at most that are requested before the first activations.
    """

    mode: int
    tiles: int = 1
    together: bool = False
    ring_x: bool = False
    slice: int = 256
    warps: tuple[tuple[int, ...], ...] = ((WARPS,),)
    depths: tuple[int, ...] = (2,)
    early: int = 8

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return PASS if self.together else 8 * self.tiles

    @property
    def sums(self) -> int:
        """Bytes of a warp's sums of a row tile."""
        return ROWS * (PASS + 1) * 4 if self.mode == DOWN and self.together else self.tiles * 512

    def defines(self, depth: int) -> dict[str, int]:
        return {
            "MODE": self.mode, "TILES": self.tiles, "TOGETHER": int(self.together), "RING_X": int(self.ring_x),
            "SLICE": self.slice, "DEPTH": depth, "WARPS": self.warps[0][0], "EARLY": min(self.early, depth),
        }  # fmt: skip


class Footprint(NamedTuple):
    """Bytes of shared memory: of a unit in a warp's ring, of a warp's sums of a row tile, of a row tile besides."""

    slot: int
    sums: int
    row_tile: int


@dataclass(frozen=True)
class Tiling:
    """How one shape is cut over the GPU: `blocks` blocks, one on each SM; in each, `across` warps side by side in k,
    `down` times in parallel over the block's row tiles, `hold` of which are added up at a time; `depth` units of
    each warp are under way."""

    blocks: int
    across: int
    down: int
    hold: int
    depth: int

    def shared(self, footprint: Footprint) -> int:
        """Bytes of shared memory of a block."""
        rings = self.across * self.down * self.depth * footprint.slot
        return rings + self.hold * (self.across * footprint.sums + footprint.row_tile)


@cache
def plan(row_tiles: int, slices: int, variant: Variant, footprint: Footprint, blocks: int, room: int) -> Tiling | None:
    """`row_tiles` tiles of 16 rows with `slices` slices of k over at most `blocks` blocks: the first of the variant's
    depths, with the most warps, where all sums fit into `room` bytes of shared memory beside the rings; else what adds
    up as many tiles at a time as fit. None where not one does."""
    blocks = min(row_tiles, blocks)
    each = -(-row_tiles // blocks)
    for counts in variant.warps:
        found = None
        for warps in counts:
            across = -(-slices // -(-slices // warps))
            down = min(warps // across, each)
            for depth in variant.depths:
                empty = Tiling(blocks, across, down, 0, depth)
                fit = (room - empty.shared(footprint)) // (across * footprint.sums + footprint.row_tile)
                if fit < down:
                    continue
                rounds = -(-each // fit)
                if found is None or (rounds == 1 and found.hold < each):
                    found = replace(empty, hold=max(down, -(-each // rounds)))
        if found is not None:
            return found
    return None


class Weight(NamedTuple):
    """Matrices as the kernels of a format are given them."""

    shape: tuple[int, int, int]  # matrices, n, k
    tensors: Mapping[str, Any]  # pointers of Arguments: tensors, or None
    numbers: Mapping[str, int] = {}  # ints of Arguments
    form: Mapping[str, int] = {}  # what is set when compiled


def has_few_tiles(weight: Weight, device: int) -> bool:
    """Whether a block has few row tiles of linears side by side."""
    groups, n, _ = weight.shape
    row_tiles = -(-n // ROWS)
    return row_tiles < FEW_TILES * min(row_tiles, max(1, build.device(device).sms // groups))


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    """x [..., k], weight [n, k] -> [..., n] through cuBLAS, in float32 where asked."""
    if not float32:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    return y if bias is None else y.add_(bias)


def dequantize(source: build.Source, y: Tensor, each: int, defines: Mapping[str, int], **arguments: Any) -> Tensor:
    """Launches a dequantizer: `each` numbers of y a thread at a time."""
    blocks = min(-(-y.numel() // (each * 256)), 16 * build.device(y.device.index).sms)
    launch(source, defines, Launch((blocks, 1, 1), 256), y=y, **arguments)
    return y


class Stream:
    """A format's linears and experts. A subclass says what differs."""

    source: ClassVar[build.Source]
    dequantizer: ClassVar[build.Source]
    max_tokens: ClassVar[int]  # of a linear; above, decoding once is cheaper than reading the codes for every pass
    aligned: ClassVar[tuple[str, ...]] = ("codes",)  # tensors of a weight whose addresses are multiples of 16
    reserved: ClassVar[int] = ROUTES  # bytes of a block's shared memory that no tiling may take

    # ---------------------------------------------------------------------------------------------- of each format

    def weight(
        self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: tuple[int, ...]
    ) -> Weight | None:
        """See `ops.coded.Kernels`."""
        return Weight(shape, tensors)

    def reads(self, weight: Weight) -> bool:
        """Whether the kernel computes from the codes of such a weight."""
        return True

    def linear_variant(self, tokens: int, few: bool, weight: Weight, portable: bool) -> Variant:
        """`few`: a block has few row tiles. `portable`: of the kernel's portable form."""
        raise NotImplementedError

    def experts_variant(self, tokens: int, portable: bool) -> Variant:
        """Of either mode."""
        raise NotImplementedError

    def footprint(self, variant: Variant, weight: Weight) -> Footprint:
        raise NotImplementedError

    def own_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, tokens: int) -> bool:
        """Linears that a kernel of the format's own takes. Whether it did."""
        return False

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
        """Experts that a kernel of the format's own takes; `outputs`: hidden [T * top_k, wide], y. Whether it did."""
        return False

    def defines(self, variant: Variant, depth: int, weight: Weight, x: Tensor, y: Tensor) -> dict[str, int]:
        return {**variant.defines(depth), **weight.form, "HALF": int(x.dtype == torch.float16)}

    def numbers(self, weight: Weight, y: Tensor) -> Mapping[str, int]:
        return weight.numbers

    def decode(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """codes [..., n, :] -> [..., n, k], one launch."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- of all of them

    def takes(self, x: Tensor) -> bool:
        """Whether a kernel computes on `x`."""
        return x.is_cuda and x.numel() > 0 and x.dtype in HALVES and self.source.is_built(x.device.index)

    def takes_codes(self, codes: Tensor) -> bool:
        """Whether `codes` are decoded here."""
        return codes.is_cuda and codes.numel() > 0 and self.dequantizer.is_built(codes.device.index)

    def reads_linear(self, weight: Weight, format: Any, dtype: torch.dtype, device: int) -> bool:
        """See `ops.coded.Kernels`."""
        return self.reads(weight) and dtype in HALVES and self.source.is_built(device)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, float32: bool) -> Tensor:
        """x [..., k] -> [..., n], in float32 where asked."""
        _, n, k = weight.shape
        if x.numel() <= self.max_tokens * k and self.reads(weight):
            y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if float32 else x.dtype)
            if self._linear(x, weight, None if bias is None else bias.float(), y):
                return y
        return dense_linear(x, self.decode(weight, x.dtype), bias, float32)

    def grouped_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [..., G, k] -> [..., G, n]."""
        groups, n, k = weight.shape
        tokens = x.numel() // (groups * k)
        if tokens <= self.max_tokens and self.reads(weight):
            y = x.new_empty(*x.shape[:-1], n)
            if self._linear(x, weight, None, y):
                return y
        dense = self.decode(weight, x.dtype)
        y = torch.bmm(x.reshape(tokens, groups, k).transpose(0, 1), dense.transpose(1, 2))
        return y.transpose(0, 1).reshape(*x.shape[:-1], n)

    def tiling(self, tokens: int, weight: Weight, device: int) -> tuple[Variant, Tiling | None]:
        """How linears side by side run; None where they do not fit."""
        groups, n, k = weight.shape
        row_tiles, blocks = -(-n // ROWS), max(1, build.device(device).sms // groups)
        variant = self.linear_variant(tokens, has_few_tiles(weight, device), weight, self.source.is_portable(device))
        return variant, self._plan(variant, weight, row_tiles, -(-k // variant.slice), blocks, device)

    def _plan(
        self, variant: Variant, weight: Weight, row_tiles: int, slices: int, blocks: int, device: int
    ) -> Tiling | None:
        room = build.device(device).shared - self.reserved
        return plan(row_tiles, slices, variant, self.footprint(variant, weight), blocks, room)

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor) -> bool:
        """Linears side by side; x [..., groups, k] -> y [..., groups, n]. Whether that was done."""
        groups, _, k = weight.shape
        tokens = x.numel() // (groups * k)
        x, weight = aligned(x), self._aligned(weight)
        if self.own_linear(x, weight, bias, y, tokens):
            return True
        variant, tiling = self.tiling(tokens, weight, x.device.index)
        if tiling is None:
            return False
        self.run(variant, weight, x, y, tiling, tokens, bias=bias)
        return True

    def _aligned(self, weight: Weight) -> Weight:
        copies = {name: aligned(tensor) for name in self.aligned if (tensor := weight.tensors[name]) is not None}
        return weight._replace(tensors={**weight.tensors, **copies})

    def experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate: tuple[float, ...],
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor | None:
        """x [T, D] -> [T, D]. Two launches: gate, up and SwiGLU; down, weighted and added up in a fixed order. Of up to
        16 tokens up to eight share one reading of an expert's weights. None where the kernels do not take them."""
        (tokens, top_k), (matrices, dim, wide), device = experts.shape, down.shape, x.device.index
        if top_k * FEW_PASS > PAIRS or not (self.reads(gate_up) and self.reads(down)):
            return None
        # Every copy comes before the first launch: the second reads the experts while the first may still run.
        x, gate_up, down = aligned(x), self._aligned(gate_up), self._aligned(down)
        hidden, y = x.new_empty(tokens * top_k, wide), torch.empty_like(x)
        if self.own_experts(x, experts, weights, (gate_up, down), (hidden, y), gate, biases):
            return y
        together = tokens > FEW_PASS and top_k * PASS <= PAIRS
        most = min(min(tokens, PASS if together else FEW_PASS) * top_k, matrices * (1 + together))  # readings of a pass
        like = replace(self.experts_variant(tokens, self.source.is_portable(device)), together=together)
        first, second = (replace(like, mode=mode) for mode in (GATE_UP, DOWN))
        sms = build.device(device).sms
        tilings = (
            self._plan(first, gate_up, most * (wide // 8), -(-dim // first.slice), sms, device),
            self._plan(second, down, -(-dim // ROWS), most * -(-wide // second.slice), sms, device),
        )
        if tilings[0] is None or tilings[1] is None:
            return None
        chosen: Any = {"top_k": top_k, "experts": experts, "weights": weights}
        self.run(first, gate_up, x, hidden, tilings[0], tokens, bias=biases[0], gate=gate, **chosen)
        self.run(second, down, hidden, y, tilings[1], tokens, bias=biases[1], **chosen)
        return y

    def run(
        self,
        variant: Variant,
        weight: Weight,
        x: Tensor,
        y: Tensor,
        tiling: Tiling,
        tokens: int,
        *,
        top_k: int = 1,
        bias: Tensor | None = None,
        experts: Tensor | None = None,
        weights: Tensor | None = None,
        gate: tuple[float, ...] = NO_GATE,
    ) -> None:
        """Launches one mode."""
        matrices, n, k = weight.shape
        grid = tiling.blocks, matrices if variant.mode == LINEAR else 1, -(-tokens // variant.tokens)
        launch(
            self.source,
            self.defines(variant, tiling.depth, weight, x, y),
            Launch(grid, tiling.across * tiling.down * 32, tiling.shared(self.footprint(variant, weight))),
            x=x,
            **weight.tensors,
            bias=bias,
            experts=experts,
            weights=weights,
            y=y,
            **dict(zip(SIZES, (tokens, n, k, matrices, top_k), strict=True)),
            **self.numbers(weight, y),
            across=tiling.across,
            hold=tiling.hold,
            **dict(zip(GATE, gate, strict=True)),
        )
