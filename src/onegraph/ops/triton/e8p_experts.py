"""Routed experts in E8P, for any number of tokens: the portable path, and the one of what no CUDA kernel takes.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, so that the grid depends on the
shapes alone: a program is a tile of rows of one expert, whichever it is, and ends at once where nobody chose it. It
decodes its codes once for up to `MAX_COLUMNS` pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import E8PExperts
from onegraph.ops.triton.activation import swiglu
from onegraph.ops.triton.e8p import MIN_TILE, _as_rows, _block, _rotate, _weights
from onegraph.ops.triton.hadamard import hadamard_matrix
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

# Pairs that share a decoding; more of an expert decode again. From 64 on Triton would multiply by wgmma, which it got
# wrong in the linear (`MAX_TILES` of e8p.py tells how).
MAX_COLUMNS = 32
ROWS = 16  # pairs that are rotated together


@triton.jit
def _rotate_pairs(
    x, in_scale, experts, hi, lo, pairs, per_row, last, k, norm, IN_BLOCK: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, HAS_LO: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hi (+ lo) = H_k (in_scale * x), [pairs, k]: in_scale of the pair's expert, x of row pair / per_row."""
    let_next_start(PDL)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pair = tl.program_id(1) * LINES + tl.arange(0, LINES)
    inside = (pair < pairs)[:, None] & (i < k)[None, :]
    matrix = hadamard_matrix(0, TILE, TILE, IN_BLOCK, tl.float32 if EXACT else tl.bfloat16)
    wait_for_previous(PDL)
    expert = tl.load(experts + pair, mask=pair < pairs, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), last).to(tl.int64)
    scale = tl.load(in_scale + expert[:, None] * k + i[None, :], mask=inside, other=0.0) * norm
    row = (pair // per_row).to(tl.int64)
    v = tl.load(x + row[:, None] * k + i[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = _rotate(v * scale, matrix, EXACT)
    upper = rotated.to(hi.dtype.element_ty)
    at = pair.to(tl.int64)[:, None] * k + i[None, :]
    tl.store(hi + at, upper, mask=inside)
    if HAS_LO:
        tl.store(lo + at, (rotated - upper.to(tl.float32)).to(lo.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    hi, lo, codes, residual, codebook, out_scale, bias, order, bounds, out, n, k, norm, BITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr, COLUMNS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [pairs, n] = out_scale * H_n(Q (hi + lo)) + bias, of the pairs of one expert."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(bounds + expert)
    end = tl.load(bounds + expert + 1)
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    own = expert * n * (k // 8)
    DTYPE: tl.constexpr = tl.float32 if EXACT else tl.bfloat16
    matrix = hadamard_matrix(0, TILE_N, TILE_N, OUT_BLOCK, DTYPE)
    scale = tl.load(out_scale + expert * n + row, mask=row < n, other=0.0) * norm
    while first < end:
        line = first + tl.arange(0, COLUMNS)
        pair = tl.load(order + line, mask=line < end, other=0).to(tl.int64)
        acc = tl.zeros((COLUMNS, TILE_N), dtype=tl.float32)
        for at in range(0, k, TILE_K):
            q = _weights(codes + own, residual + own, codebook, row, at, n, k, BITS, TILE_K, TILE_N)
            q = tl.trans(q.to(DTYPE))
            i = at + tl.arange(0, TILE_K)
            place = pair[:, None] * k + i[None, :]
            inside = (line < end)[:, None] & (i < k)[None, :]
            operand = tl.load(hi + place, mask=inside, other=0.0)
            acc = tl.dot(operand, q, acc, input_precision="ieee")
            if HAS_LO:
                acc = tl.dot(tl.load(lo + place, mask=inside, other=0.0), q, acc)
        y = _rotate(acc, matrix, EXACT) * scale[None, :]
        if HAS_BIAS:
            y += tl.load(bias + expert * n + row, mask=row < n, other=0.0)[None, :]
        tl.store(out + pair[:, None] * n + row[None, :], y, mask=(line < end)[:, None] & (row < n)[None, :])
        first += COLUMNS


@triton.jit
def _combine(y, weights, add, out, d, TOP_K: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """out [T, d]: the weighted sum of each token's pairs, in their order, and what is to be added."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        total += tl.load(weights + pair) * tl.load(y + pair * d + i, mask=i < d, other=0.0)
    if ADD:
        total += tl.load(add + token * d + i, mask=i < d, other=0.0).to(tl.float32)
    tl.store(out + token * d + i, total.to(out.dtype.element_ty), mask=i < d)


class _Routes:
    """Pairs by expert: `order` int64 [P], those of expert e at bounds[e] to bounds[e + 1]."""

    def __init__(self, experts: Tensor, count: int) -> None:
        self.experts = experts.view(-1)
        found, self.order = self.experts.clamp(0, count - 1).sort(stable=True)
        every = torch.arange(count + 1, dtype=found.dtype, device=found.device)
        self.bounds = torch.searchsorted(found, every, out_int32=True)


def _linear(
    x: Tensor, per_row: int, codes: Tensor, residual: Tensor | None, in_scale: Tensor, out_scale: Tensor,
    bias: Tensor | None, call: E8PExperts, routes: _Routes,
) -> Tensor:  # fmt: skip
    """x [pairs / per_row, k] -> float32 [pairs, n]: each pair times its expert's matrix."""
    (count, n, groups), pairs = codes.shape, routes.experts.numel()
    k, exact = groups * 8, call.x.dtype == torch.float32
    in_block, out_block = _block(k), _block(n)
    hi = torch.empty((pairs, k), dtype=torch.float32 if exact else torch.bfloat16, device=x.device)
    lo = hi if exact else torch.empty_like(hi)
    tile = max(in_block, MIN_TILE)
    opts = options(x)
    _rotate_pairs[(triton.cdiv(k, tile), triton.cdiv(pairs, ROWS))](
        x, in_scale, routes.experts, hi, lo, pairs, per_row, count - 1, k, in_block**-0.5, IN_BLOCK=in_block, TILE=tile,
        LINES=ROWS, HAS_LO=not exact, EXACT=exact, num_warps=4, **opts,
    )  # fmt: skip
    out = torch.empty((pairs, n), dtype=torch.float32, device=x.device)
    tile_n = max(out_block, MIN_TILE)
    tokens = call.x.shape[0]
    _product[(triton.cdiv(n, tile_n), count)](
        hi, lo, codes, codes if residual is None else residual, _as_rows(call.codebook), out_scale,
        out_scale if bias is None else bias, routes.order, routes.bounds, out, n, k, out_block**-0.5, BITS=call.bits,
        OUT_BLOCK=out_block, TILE_K=tile, TILE_N=tile_n,
        COLUMNS=min(MAX_COLUMNS, max(16, triton.next_power_of_2(tokens))), HAS_LO=not exact, HAS_BIAS=bias is not None,
        EXACT=exact, num_warps=4, num_stages=1, **opts,
    )  # fmt: skip
    return out


def experts(call: E8PExperts) -> Tensor:
    """See `onegraph.ops.e8p_experts.e8p_experts`."""
    x, (tokens, top_k), dim = call.x, call.experts.shape, call.x.shape[1]
    out = torch.empty_like(x)
    if call.experts.numel() == 0:
        return out.zero_() if call.add is None else out.copy_(call.add)
    with on_device(x):
        routes = _Routes(call.experts, call.gate_up.shape[0])
        hidden = _linear(
            x, top_k, call.gate_up, call.gate_up_residual, call.gate_up_in_scale, call.gate_up_out_scale,
            call.gate_up_bias, call, routes,
        )  # fmt: skip
        limit = None if call.limit == float("inf") else call.limit
        plain = call.alpha < 0  # `ReLU2`: two small ops of torch
        hidden = hidden.relu().square_() if plain else swiglu(hidden, limit, call.alpha, call.shift)
        y = _linear(
            hidden, 1, call.down, call.down_residual, call.down_in_scale, call.down_out_scale, call.down_bias, call,
            routes,
        )  # fmt: skip
        _combine[(triton.cdiv(dim, 1024), tokens)](
            y, call.weights, out if call.add is None else call.add, out, dim, TOP_K=top_k, TILE=1024,
            ADD=call.add is not None, num_warps=4, **options(x),
        )  # fmt: skip
    return out
