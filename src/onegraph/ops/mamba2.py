"""Mamba2 (Dao and Gu, 2024), as Nemotron-H has it: a state per head that every token decays and adds to.

Of a head with state S [P, N], input x, step dt, and B and C that its group shares, a token makes

    S <- exp(dt A) S + (dt x) B^T;  y = S C + D x

which is the gated delta rule's without the correction: key B, query C, delta dt x. State, records and how a step is
taken back are those of `ops/gated_delta.py`.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from onegraph.ops.calls import Mamba2
from onegraph.ops.cases import Draw
from onegraph.ops.checks import check_grouped, check_tensors
from onegraph.ops.gated_delta import advanced, check_records, most_waiting
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.short_conv import check_stacked, convolve


def inputs(call: Mamba2) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float32 C, B [B, Q, G, N], x, dt x [B, Q, H, P] and dt A [B, Q, H, 1]; zeros of padding."""
    (_, heads, size, n), groups = call.state.shape, call.keys.shape[2]
    mixed = convolve(call.xbc, call.weight, call.bias, call.ring, call.slots, call.positions, True)
    step = torch.arange(mixed.shape[1], dtype=torch.int32, device=mixed.device)
    real = (step < call.counts.unsqueeze(1)).unsqueeze(2)
    x, b, c = torch.where(real, mixed, 0.0).split((heads * size, groups * n, groups * n), dim=2)
    dt = torch.where(real, softplus(call.dt.float() + call.dt_bias).clamp(min=call.dt_min), 0.0).unsqueeze(3)
    x, b, c = x.unflatten(2, (heads, size)), b.unflatten(2, (groups, n)), c.unflatten(2, (groups, n))
    return c, b, x, dt * x, -call.a_log.exp().unsqueeze(1) * dt


def gated_norm(call: Mamba2, y: Tensor) -> Tensor:
    """The gate, then RMSNorm of each group's columns of y [B, Q, H, P], if there is one; zeros where there is no
    token."""
    groups = call.keys.shape[2]
    out = y.flatten(2) * silu(call.z.float())
    if call.norm is not None:
        out = out.unflatten(2, (groups, -1))
        out = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + call.eps)).flatten(2) * call.norm.float()
    step = torch.arange(y.shape[1], dtype=torch.int32, device=y.device)
    real = (step < call.counts.unsqueeze(1)).unsqueeze(2)
    return torch.where(real, out, 0.0).to(call.xbc.dtype)


def _mamba2(call: Mamba2, most: int | None = None) -> Tensor:
    call = replace(call, counts=torch.where(call.slots > 0, call.counts, 0))
    c, b, x, v, g = inputs(call)
    return gated_norm(call, advanced(call, most, call.xbc, c, b, v, None, g) + call.skip.unsqueeze(1) * x)


def on_cpu(call: Mamba2) -> Tensor:
    """The reference, without replays of records that there are not."""
    return _mamba2(call, most_waiting(call))


def on_gpu(call: Mamba2) -> Tensor:
    """The kernels, for what they do not take the reference."""
    from onegraph.ops.cuda.gated_delta import mamba2 as kernel

    out = kernel(call)
    return _mamba2(call) if out is None else out


def _check(call: Mamba2) -> None:
    op, xbc, state, keys = "mamba2", call.xbc, call.state, call.keys
    check_stacked(op, xbc=xbc, z=call.z, dt=call.dt)
    for name, tensor, dims in (("state", state, "[slots, H, P, N]"), ("keys", keys, "[slots, D, G, N]")):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dims}")
    (_, heads, size, n), groups = state.shape, keys.shape[2]
    check_grouped(op, heads, groups)
    inner, (batch, tokens, _) = heads * size, xbc.shape
    for name, x, width in (("z", call.z, inner), ("dt", call.dt, heads)):
        if x.shape != (batch, tokens, width) or x.dtype != xbc.dtype or x.device != xbc.device:
            raise ValueError(
                f"{op}: {name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {xbc.dtype} "
                f"{(batch, tokens, width)} on {xbc.device}"
            )
    channels = inner + 2 * groups * n
    if xbc.shape[2] != channels or call.weight.shape[0] != channels:
        raise ValueError(
            f"{op}: xbc has {xbc.shape[2]} columns and weight {call.weight.shape[0]} rows; {heads} heads of {size} and "
            f"{groups} groups of {n} need {channels}"
        )
    each, norm = (torch.float32, (heads,)), xbc.dtype if call.norm is None else call.norm.dtype
    check_tensors(
        op, xbc.device, a_log=(call.a_log, *each), dt_bias=(call.dt_bias, *each), skip=(call.skip, *each),
        norm=(call.norm, norm, (inner,)), bias=(call.bias, call.weight.dtype, (channels,)),
    )  # fmt: skip
    check_records(op, call, xbc, 1)


def _bytes(call: Mamba2) -> int:
    each = nbytes(call.state[0], call.base[0]) * 2 + nbytes(call.keys[0, :1])
    return len(call.slots) * each + 3 * nbytes(call.z) + nbytes(call.xbc) * 2 + nbytes(call.weight)


def _case(
    name: str, heads: int, groups: int, dims: tuple[int, int], positions: list[int], counts: list[int], *,
    waiting: list[int] | None = None, tokens: int = 0, depth: int = 16, limit: int = 0, bias: bool = True,
    dt_min: float = 0.0, apart: int = 0, normed: bool = True,
) -> Case:  # fmt: skip
    """dims: (P, N). waiting: records of each row. apart: columns between one token's input and the next one's."""
    size, n = dims

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, plain = Draw(device, dtype, generator), Draw(device, torch.float32, generator)
        rows, length = len(positions), tokens or max(counts)
        slots, inner = rows + 2, heads * size
        wide = inner + 2 * groups * n
        joined = draw.randn(rows, length, inner + wide + heads + apart)
        z, xbc, dt, _ = joined.split((inner, wide, heads, apart), dim=2)
        base = torch.tensor([0, 0, *(p - w for p, w in zip(positions, waiting or [0] * rows, strict=True))])
        return (
            xbc, z, dt, draw.randn(wide, 4) * 0.5, draw.randn(wide) if bias else None, plain.randn(heads) * 0.5,
            plain.randn(heads) - 2, plain.randn(heads), 1 + 0.2 * draw.randn(inner) if normed else None, 1e-5,
            draw.randn(slots, 3 + max(8, length), wide), plain.randn(slots, heads, size, n) * 0.3,
            base.to(device, torch.int32).unsqueeze(1).repeat(1, heads), plain.randn(slots, depth, groups, n),
            0.2 * plain.randn(slots, depth, heads, size), torch.exp(-0.2 * plain.randn(slots, depth, heads, 1).abs()),
            draw.ints(list(range(2, slots))), draw.ints(positions), draw.ints(counts), limit, dt_min,
        )  # fmt: skip

    return Case(name=name, make=make)


mamba2 = register(
    Op(
        name="mamba2",
        call=Mamba2,
        schema="-> Tensor",
        reference=_mamba2,
        fake=lambda call: call.xbc.new_empty(call.z.shape),
        kernel="onegraph.ops.mamba2:on_gpu",
        cpu="onegraph.ops.mamba2:on_cpu",
        check=_check,
        cases=(
            _case("nemotron", 8, 2, (64, 128), [0, 5, 70, 9], [1, 1, 0, 1], waiting=[0, 1, 1, 3], dt_min=1e-3),
            _case("verify", 4, 1, (64, 128), [0, 6, 70], [4, 4, 2], waiting=[0, 4, 2], limit=8, apart=4),
            _case("small", 4, 2, (16, 24), [0, 7], [2, 3], waiting=[0, 2], depth=8, limit=3, bias=False),
            _case("rank", 3, 1, (64, 128), [0, 6], [1, 3], waiting=[0, 2], normed=False),
            _case("rank_chunk", 3, 1, (64, 128), [0, 20], [18, 0], waiting=[0, 3], normed=False),
            _case("chunk", 4, 2, (64, 128), [0, 37, 9], [75, 65, 0], waiting=[0, 3, 2], tokens=80),
        ),
        tolerance={torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=_bytes,
        flops=lambda call: 6 * call.xbc.shape[:2].numel() * call.state[0].numel(),
    )
)  # fmt: skip
"""xbc [B, Q, H P + 2 G N], before its convolution, gates z [B, Q, H P] and steps dt [B, Q, H] -> [B, Q, H P]. float32
inside, rounded once; zeros where a row has no token, or no slot but 0.

    x | B | C = silu(convolution over xbc), see `short_conv`: weight [channels, W], bias [channels]
    dt = max(softplus(dt + dt_bias), dt_min); A = -exp(a_log); float32 [H]
    out = RMSNorm(y silu(z), norm [H P], eps) over each group's H P / G columns; skip float32 [H] is D
    without norm y silu(z), for heads that ranks share out within a group

B and C of a group serve H / G heads side by side. Rows, slots, ring, state [slots, H, P, N], base, limit and records
keys [slots, D, G, N], deltas [slots, D, H, P], decays [slots, D, H, 1] are those of `gated_delta`."""
