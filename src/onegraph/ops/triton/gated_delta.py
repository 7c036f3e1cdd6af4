"""A chunk of a prompt of gated delta layers, in four launches, of which Mamba2's (mamba2.py) have the first three.

`_prepare` convolves, norms q and k and computes gates. `_solve` takes blocks of SIZE tokens, each head and block on its
own: T = (I + A)^-1, with A = beta k k^T decayed, strictly lower; and q k^T decayed. `_scan` goes over a head's blocks
in order, S in registers: delta = T beta (v - exp(G) k S), outputs, S. `_end` norms and gates. Padding is zeros from
the first launch on. Mamba2, without the rule (not DELTA), has dt in place of beta and dt v for delta.

float32 is kept everywhere; products of 16-bit models take it as TF32, whose rounding is an eighth of bfloat16's.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import GatedDelta, Mamba2
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous
from onegraph.ops.triton.short_conv import convolved, keep_inputs

SIZE = 64  # tokens of a block
PART = 16  # tokens whose own products are taken one by one, since their decays have no common factor
TOKENS = 32  # of a program of the first and the last launch


@triton.jit(do_not_specialize=["length"])
def _prepare(
    qkv, weight, bias, b, a, a_log, dt_bias, ring, slots, positions, counts, q, k, v, beta, total, length, stride,
    b_stride, a_stride, beta_scale, dt_min,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, EACH: tl.constexpr,
    DELTA: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program has some tokens of a key head's q or k, or of a head's v and gates."""
    let_next_start(PDL)
    part, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    C: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    wait_for_previous(PDL)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    count = tl.where(slot > 0, tl.minimum(tl.load(counts + row), length), 0)
    real = token < count
    place = row * length + token
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, DK)
        # q | k | v, of Mamba2 v | k | q
        first = part * DK if DELTA else HEADS * DV + (part + KEY_HEADS) % (2 * KEY_HEADS) * DK
        channel = first + key
        x = convolved(
            qkv, weight, bias, ring, row, slot, position, count, length, stride, token, channel, key < DK, C,
            WIDTH, RING, True, False, BIAS,
        )  # fmt: skip
        x = tl.where(real[:, None], x, 0.0)
        if DELTA:
            x *= tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
        there = (token < length)[:, None] & (key < DK)[None, :]
        if part < KEY_HEADS:
            if DELTA:
                x *= DK**-0.5
            tl.store(q + ((place * KEY_HEADS + part) * DK)[:, None] + key[None, :], x, mask=there)
        else:
            tl.store(k + ((place * KEY_HEADS + part - KEY_HEADS) * DK)[:, None] + key[None, :], x, mask=there)
        if tile == 0:
            keep_inputs(qkv, ring, row, slot, position, count, length, stride, channel, key < DK, C, WIDTH, RING,
                        False, BLOCK)  # fmt: skip
    else:
        head = part - 2 * KEY_HEADS
        value = tl.arange(0, DV)
        columns = (2 * KEY_HEADS * DK if DELTA else 0) + head * DV + value
        given = convolved(
            qkv, weight, bias, ring, row, slot, position, count, length, stride, token, columns, value < DV, C,
            WIDTH, RING, True, False, BIAS,
        )  # fmt: skip
        inside = (token < length)[:, None] & (value < DV)[None, :]
        to = (place * HEADS + head) * DV
        tl.store(v + to[:, None] + value[None, :], tl.where(real[:, None], given, 0.0), mask=inside)
        each = tl.arange(0, EACH)
        at = (place * a_stride + head * EACH)[:, None] + each[None, :]
        offset = tl.load(dt_bias + head * EACH + each)
        g = tl.load(a + at, mask=real[:, None], other=0.0).to(tl.float32) + offset[None, :]
        g = tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(tl.minimum(g, 20.0))))
        if DELTA:
            rate = tl.load(b + place * b_stride + head, mask=real, other=0.0).to(tl.float32)
            rate = beta_scale / (1.0 + tl.exp(-rate))
        else:
            g = tl.maximum(g, dt_min)
            rate = tl.sum(g, axis=1)
        tl.store(beta + place * HEADS + head, tl.where(real, rate, 0.0), mask=token < length)
        g = tl.where(real[:, None], -tl.exp(tl.load(a_log + head)) * g, 0.0)
        to = ((place * HEADS + head) * EACH)[:, None] + each[None, :]
        tl.store(total + to, g, mask=(token < length)[:, None])
        if tile == 0:
            keep_inputs(qkv, ring, row, slot, position, count, length, stride, columns, value < DV, C, WIDTH, RING,
                        False, BLOCK)  # fmt: skip


@triton.jit
def rows(at, place, width, real, column):
    """[K, N] at rows `place` [K] of `width` numbers each, zeros where not `real`."""
    return tl.load(at + (place * width)[:, None] + column[None, :], mask=real[:, None], other=0.0)


@triton.jit
def nearest(x):
    """float32 rounded to TF32, a NaN as it is."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b. Tensor cores cut float32 to TF32, which makes each factor smaller by 0.03 % on average: rounded, none is."""
    if PRECISION == "tf32":
        a = nearest(a)
        b = nearest(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["length"])
def _solve(
    q, k, beta, total, slots, counts, inverse, common, length,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, EACH: tl.constexpr,
    DELTA: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`total` becomes, from decays, their sums from the block's first token on."""
    let_next_start(PDL)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_previous(PDL)
    count = tl.where(tl.load(slots + row) > 0, tl.minimum(tl.load(counts + row), length), 0)
    if block * SIZE < count:
        i = tl.arange(0, SIZE)
        token = block * SIZE + i
        there = token < length
        place = row * length + token
        key, each = tl.arange(0, DK), tl.arange(0, EACH)
        at_key = place * KEY_HEADS + head // (HEADS // KEY_HEADS)
        at = place * HEADS + head
        keys = rows(k, at_key, DK, there, key)
        if EACH == 1:  # the compiler has no scan of a single column
            sums = tl.cumsum(tl.load(total + at, mask=there, other=0.0), axis=0)[:, None]
        else:
            sums = tl.cumsum(rows(total, at, EACH, there, each), axis=0)
        tl.store(total + (at * EACH)[:, None] + each[None, :], sums, mask=there[:, None])
        query = rows(q, at_key, DK, there, key)
        if EACH == 1:
            level = tl.sum(sums, axis=1)
            pair = level[:, None] - level[None, :]
            pair = tl.where(i[:, None] >= i[None, :], tl.exp(tl.where(i[:, None] >= i[None, :], pair, 0.0)), 0.0)
            across = product(query, tl.trans(keys), PRECISION) * pair
            if DELTA:
                among = product(keys, tl.trans(keys), PRECISION) * pair
        else:
            # From the part's first token's level both factors are at most 1, of tokens before the part.
            across = tl.zeros((SIZE, SIZE), dtype=tl.float32)
            among = tl.zeros((SIZE, SIZE), dtype=tl.float32)
            for part in tl.static_range(SIZE // PART):
                level = tl.sum(tl.where(i[:, None] == part * PART, sums, 0.0), axis=0)[None, :]
                mine = (i >= part * PART) & (i < part * PART + PART)
                before = keys * tl.exp(tl.where((i < part * PART)[:, None], level - sums, float("-inf")))
                after = tl.exp(tl.where(mine[:, None], sums - level, float("-inf")))
                across += product(query * after, tl.trans(before), PRECISION)
                among += product(keys * after, tl.trans(before), PRECISION)
            for step in range(PART):  # the step-th token of every part with those of its part behind it, and itself
                for part in tl.static_range(SIZE // PART):
                    j = part * PART + step
                    mine = (i >= j) & (i < part * PART + PART)
                    its_key = tl.sum(tl.where((i == j)[:, None], keys, 0.0), axis=0)[None, :]
                    its_sum = tl.sum(tl.where((i == j)[:, None], sums, 0.0), axis=0)[None, :]
                    weighed = its_key * tl.exp(tl.where(mine[:, None], sums - its_sum, float("-inf")))
                    column = (i == j)[None, :]
                    across += tl.where(column, tl.sum(query * weighed, axis=1)[:, None], 0.0)
                    among += tl.where(column, tl.sum(keys * weighed, axis=1)[:, None], 0.0)
        to = (at * SIZE)[:, None] + i[None, :]
        tl.store(common + to, across, mask=there[:, None])
        if DELTA:
            # (I + A)^-1 by products alone, where powers stay small even if all keys are one: first of the blocks of 8
            # on A's diagonal, whose eighth power is 0, then with N = D times what is below them, whose eighth is too.
            tl.static_assert(SIZE == 64)
            rate = tl.load(beta + at, mask=there, other=0.0)
            system = tl.where(i[:, None] > i[None, :], among * rate[:, None], 0.0)
            one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            same = i[:, None] // 8 == i[None, :] // 8
            power = tl.where(same, system, 0.0)
            solved = one - power
            power = product(power, power, "tf32x3")
            solved += product(solved, power, "tf32x3")
            power = product(power, power, "tf32x3")
            solved += product(solved, power, "tf32x3")
            power = product(solved, tl.where(same, 0.0, system), "tf32x3")
            factor = one - power
            power = product(power, power, "tf32x3")
            factor += product(factor, power, "tf32x3")
            power = product(power, power, "tf32x3")
            factor += product(factor, power, "tf32x3")
            tl.store(inverse + to, product(factor, solved, "tf32x3"), mask=there[:, None])


@triton.jit(do_not_specialize=["length"])
def _scan(
    q, k, v, beta, total, inverse, common, state, base, key_ring, delta_ring, decay_ring, slots, positions, counts,
    skip, length,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, EACH: tl.constexpr,
    DELTA: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, MINE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """MINE columns of a head's values; v becomes the outputs."""
    let_next_start(PDL)
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_previous(PDL)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    count = tl.where(slot > 0, tl.minimum(tl.load(counts + row), length), 0)
    if count > 0:
        i, key, each = tl.arange(0, SIZE), tl.arange(0, DK), tl.arange(0, EACH)
        value = part * MINE + tl.arange(0, MINE)
        key_head = head // (HEADS // KEY_HEADS)
        kept = state + (slot * HEADS + head) * DV * DK + (value * DK)[None, :] + key[:, None]  # [DK, MINE]
        s = tl.load(kept, mask=(key >= 0)[:, None] & (position > 0), other=0.0).to(tl.float32)
        first = tl.where(position > 0, tl.load(base + slot * HEADS + head), 0)
        first = tl.maximum(first, position - DEPTH)
        for n in range(first, position):
            record = slot * DEPTH + n % DEPTH
            old = tl.load(key_ring + (record * KEY_HEADS + key_head) * DK + key)
            delta = tl.load(delta_ring + (record * HEADS + head) * DV + value)
            decay = tl.load(decay_ring + (record * HEADS + head) * EACH + (key if EACH > 1 else 0 * key))
            s = s * decay[:, None] + old[:, None] * delta[None, :]
        for start in range(0, count, SIZE):
            token = start + i
            there = token < count
            place = row * length + token
            at, at_key = place * HEADS + head, place * KEY_HEADS + key_head
            sums = rows(total, at, EACH, there, each)  # [SIZE, EACH]
            last = tl.min(tl.where(there[:, None], sums, 0.0), axis=0)[None, :]  # decays only add up
            query, keys = rows(q, at_key, DK, there, key), rows(k, at_key, DK, there, key)
            since = tl.exp(tl.where(there[:, None], last - sums, float("-inf")))  # of a token to the block's end
            to = v + (at * DV)[:, None] + value[None, :]
            given = tl.load(to, mask=there[:, None], other=0.0)
            rate = tl.load(beta + at, mask=there, other=0.0)[:, None]
            if DELTA:
                if EACH == 1:
                    held = product(keys, s, PRECISION) * tl.exp(sums)
                else:
                    held = product(keys * tl.exp(sums), s, PRECISION)
                solved = rows(inverse, at, SIZE, there, i)
                delta = product(solved, rate * (given - held), PRECISION)
            else:
                delta = rate * given
            if EACH == 1:  # a factor of a token may stand on either side of a product
                out = product(query, s, PRECISION) * tl.exp(sums)
                late = product(tl.trans(keys), delta * since, PRECISION)
                s = s * tl.exp(last) + late
            else:
                out = product(query * tl.exp(sums), s, PRECISION)
                late = product(tl.trans(keys * since), delta, PRECISION)
                s = s * tl.trans(tl.exp(last)) + late
            out += product(rows(common, at, SIZE, there, i), delta, PRECISION)
            if not DELTA:
                out += given * tl.load(skip + head)
            tl.store(to, out, mask=there[:, None])
        tl.store(kept, s.to(state.dtype.element_ty))


@triton.jit(do_not_specialize=["length"])
def _end(
    o, z, norm, base, slots, positions, counts, out, length, stride, eps,
    HEADS: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    head, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, value = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DV)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.where(slot > 0, tl.minimum(tl.load(counts + row), length), 0)
    real, place = token < count, row * length + token
    x = rows(o, place * HEADS + head, DV, real, value)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / DV + eps)[:, None] * tl.load(norm + value).to(tl.float32)[None, :]
    gate = tl.load(z + (place * stride + head * DV)[:, None] + value[None, :], mask=real[:, None], other=0.0)
    gate = gate.to(tl.float32)
    x /= 1.0 + tl.exp(-gate)
    if not SIGMOID:
        x *= gate
    to = ((place * HEADS + head) * DV)[:, None] + value[None, :]
    tl.store(out + to, x.to(out.dtype.element_ty), mask=(token < length)[:, None])
    if (tile == 0) & (count > 0):
        tl.store(base + slot * HEADS + head, tl.load(positions + row) + count)


def has_large_blocks(x: Tensor) -> bool:
    """Whether a block can have more than 99 KB of shared memory on x's GPU."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) in ((9, 0), (10, 0), (10, 3))


def supports(call: GatedDelta | Mamba2) -> bool:
    """Whether these kernels run the chunk: sizes of heads that they multiply; with decays of each key channel float32
    takes 131 KB a block."""
    sizes = all(size in (16, 32, 64, 128) for size in call.state.shape[2:])
    wide = call.decays.shape[3] > 1 and call.z.dtype == torch.float32
    return sizes and call.z.numel() > 0 and not (call.z.is_cuda and wide and not has_large_blocks(call.z))


def columns_of(x: Tensor, heads: int, dv: int) -> int:
    """Columns of a head's values that a program of `_scan` has: more where programs would come in a second wave, and
    blocks can have their 147 KB."""
    if not has_large_blocks(x):
        return min(dv, 32)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(dv, 32 if heads * (dv // 32) <= sms else 64)


def scanned(call: GatedDelta | Mamba2) -> Tensor:
    """The outputs of a chunk float32 [B, Q, Hv, dv], without norm and gate; rings and S are written, `base` is not."""
    x, a, b, bias, skip, scale, dt_min = (
        (call.qkv, call.a, call.b, None, None, call.beta_scale, 0.0)
        if isinstance(call, GatedDelta)
        else (call.xbc, call.dt, call.dt, call.bias, call.skip, 0.0, call.dt_min)
    )
    (_, heads, dv, dk), (_, depth, key_heads, _), each = call.state.shape, call.keys.shape, call.decays.shape[3]
    batch, length, _ = x.shape
    delta = isinstance(call, GatedDelta)

    def made(*shape: int) -> Tensor:
        return x.new_empty((batch, length, *shape), dtype=torch.float32)

    q, k, v, beta = made(key_heads, dk), made(key_heads, dk), made(heads, dv), made(heads)
    total, common, inverse = made(heads, each), made(heads, SIZE), made(heads, SIZE) if delta else None
    row = call.slots, call.positions, call.counts
    sizes: dict[str, Any] = {
        "KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "EACH": each, "DELTA": delta,
    }  # fmt: skip
    how = {"PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32", "SIZE": SIZE, **options(x)}
    mine = columns_of(x, batch * heads, dv)
    with on_device(x):
        _prepare[(2 * key_heads + heads, triton.cdiv(length, TOKENS), batch)](
            x, call.weight, bias, b, a, call.a_log, call.dt_bias, call.ring, *row, q, k, v, beta, total, length,
            x.stride(1), b.stride(1), a.stride(1), scale, dt_min, **sizes, WIDTH=call.weight.shape[1],
            RING=call.ring.shape[1], BIAS=bias is not None, BLOCK=TOKENS, num_warps=4, **options(x),
        )  # fmt: skip
        _solve[(triton.cdiv(length, SIZE), heads, batch)](
            q, k, beta, total, call.slots, call.counts, inverse, common, length, **sizes, PART=PART, num_warps=4, **how
        )
        _scan[(dv // mine, heads, batch)](
            q, k, v, beta, total, inverse, common, call.state, call.base, call.keys, call.deltas, call.decays, *row,
            skip, length, **sizes, DEPTH=depth, MINE=mine, num_warps=8, num_stages=1, **how,
        )  # fmt: skip
    return v


def chunk(call: GatedDelta) -> Tensor:
    """More tokens a row than a step has, see `onegraph.ops.gated_delta.gated_delta`."""
    (batch, length, _), (_, heads, dv, _) = call.qkv.shape, call.state.shape
    o, out = scanned(call), call.qkv.new_empty(batch, length, heads * dv)
    with on_device(out):
        _end[(heads, triton.cdiv(length, TOKENS), batch)](
            o, call.z, call.norm, call.base, call.slots, call.positions, call.counts, out, length, call.z.stride(1),
            call.eps, HEADS=heads, DV=dv, SIGMOID=call.sigmoid, BLOCK=TOKENS, num_warps=4, **options(out),
        )  # fmt: skip
    return out
