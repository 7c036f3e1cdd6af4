"""The likeliest token of each row, in launches whose grids depend on the shape only: the row in chunks, then the
chunks' winners."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

CHUNK = 2048  # logits a program reads: 49152 (SmolLM2) makes 24 programs a row, 128256 (Llama 3) 63


@triton.jit
def _ordered(x):
    """What torch.argmax compares by: NaN above everything. (A NaN ties with +inf here.)"""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _best_of_chunk(logits, best, where, width, CHUNK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    x = _ordered(tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32))
    winner = tl.argmax(x, axis=0, tie_break_left=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at, tl.max(x, axis=0))
    tl.store(where + at, tl.program_id(1) * CHUNK + winner)


@triton.jit
def _best_of_row(best, where, out, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    x = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    winner = tl.argmax(x, axis=0, tie_break_left=True)  # chunks are in order, so ties stay with the lowest index
    tl.store(out + row, tl.load(where + row * chunks + winner).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """See `onegraph.ops.sampling.greedy`."""
    logits = logits.contiguous()
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    with on_device(logits):
        opts = options(logits)
        _best_of_chunk[(rows, chunks)](logits, best, where, width, CHUNK=CHUNK, num_warps=4, **opts)
        _best_of_row[(rows,)](best, where, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **opts)
    return out
