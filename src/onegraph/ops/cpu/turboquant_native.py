"""`turboquant.c` on a step: what of it is called with which arguments."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.formats.turboquant import SCALES
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu.build import library

SOURCE = Path(__file__).with_name("turboquant.c")
LEVELS = 16


class _Common(ctypes.Structure):
    _fields_ = (
        ("back", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("kv_heads", "ring_size", "page_size", "kind")),
        *((name, ctypes.c_float) for name in ("scale", "unit")),
        ("edges", ctypes.c_float * (LEVELS - 1)),
        ("levels", ctypes.c_float * LEVELS),
        ("table", ctypes.c_int8 * LEVELS),
        ("codes", ctypes.c_uint8 * LEVELS),
    )


class _Row(ctypes.Structure):
    _fields_ = (("pages", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("slot", "at", "first", "older")))


class Native(NamedTuple):
    """A step's. common, rows: addresses, a row's behind its number in the batch. keeps: what is there."""

    function: Any
    common: int
    rows: list[tuple[int, int]]
    keeps: tuple[Any, ...]

    def run(self, call: TurboQuantDecode, vectors: Tensor) -> Tensor:
        """vectors float32 [B, heads + 2 kv_heads, D], turned -> float32 [B, 1, heads, D]; zeros of other rows."""
        (batch, _, dim), heads = vectors.shape, call.heads
        out = torch.empty if len(self.rows) == batch else torch.zeros
        found = out(batch, 1, heads, dim, device="cpu")
        first, result = vectors.data_ptr(), found.data_ptr()
        state = call.ring.data_ptr(), call.cache.data_ptr()
        for row, argument in self.rows:
            at = first + 4 * dim * row * vectors.shape[1]
            if self.function(self.common, argument, at, *state, result + 4 * dim * heads * row):
                raise MemoryError("no memory for the scores of a row")
        return found


def native(
    call: TurboQuantDecode, back: Tensor, page_size: int, codes: Tensor, levels: Tensor, edges: Tensor,
    eight_bit: Tensor, rows: Sequence[tuple[int, int, int, int, int, list[int]]],
) -> Native | None:  # fmt: skip
    """For keys and values of one codebook of 16 levels: of its ranks `codes` and `levels`, between them `edges`; by
    code `eight_bit`. rows: of each with a token its number, slot and position, the first token that it sees and the
    first one that it does not see from codes, and its pages. None where this takes the form in torch's calls."""
    dim, kv_heads = len(back), call.cache.shape[1]
    plain = call.qkv.dtype == torch.float32 and call.ring.is_contiguous() and call.cache.is_contiguous()
    if not plain or dim % 32 or call.heads // kv_heads > 16:
        return None
    found = library(SOURCE, (("DIM", dim), ("GROUP", call.heads // kv_heads)))
    if found is None:
        return None
    function = found.turboquant_decode
    function.argtypes = [ctypes.c_void_p] * 6
    unit = float(eight_bit.abs().max()) / 255
    table = (((eight_bit / unit) - 1) / 2).round().to(torch.int8).tolist()
    common = _Common(
        back.data_ptr(), kv_heads, call.ring.shape[1], page_size, SCALES.index(call.kind), call.scale, unit,
        tuple(edges.tolist()), tuple(levels.tolist()), tuple(table), tuple(codes.tolist()),
    )  # fmt: skip
    arguments, keeps = list[tuple[int, int]](), [back, common]
    for row, slot, at, first, older, pages in rows:
        held = pages[: at // page_size + 1]
        if min(held) < 0 or max(held) >= len(call.cache) or not 0 <= slot < len(call.ring):
            return None  # torch says what is wrong
        own = (ctypes.c_int32 * len(held))(*held)
        argument = _Row(ctypes.addressof(own), slot, at, first, older)
        keeps += own, argument
        arguments.append((row, ctypes.addressof(argument)))
    return Native(function, ctypes.addressof(common), arguments, tuple(keeps))
