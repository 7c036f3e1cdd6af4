"""Gated DeltaNet (Yang et al. 2025) and Kimi Delta Attention: a matrix per head that every token decays and corrects.

Of a head with state S [dv, dk], decay exp(g), key k, query q, value v and rate beta a token makes

    S <- S diag(exp(g));  delta = beta (v - S k);  S <- S + delta k^T;  o = S q

S is applied up to a position `base`; what came after it is a ring of records (k, delta, exp(g)), token t at t mod D. A
step replays the records from `base` to its own first position, so that going back to an earlier position is a move of
the position alone, the same step run again gives the same, and S is written only where more than `limit` records wait.
The replay repeats the operations of the step that made the records, in their order, so that when S is written and how
many tokens a step brings changes no result; of a kernel no bit.

More than `MAX_TOKENS` tokens a row are a chunk of a prompt: solved in blocks of 64 (the WY form), all of it applied
to S, no records. After it no token can be taken back.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from onegraph.ops.calls import MAX_TOKENS, GatedDelta, Mamba2
from onegraph.ops.cases import Draw
from onegraph.ops.checks import FLOATS, Wanted, check_grouped, check_tensors
from onegraph.ops.deepseek_compress import check_rows, ring_rows, write_ring, write_rows
from onegraph.ops.linear import linear, normed_linear
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.short_conv import check_ring, check_stacked, convolve

CHUNK = 64  # tokens that are solved together
EPS = 1e-6  # of the norm of q and k, added to the sum of squares


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def with_rates(call: GatedDelta, *, kernels: bool = False) -> GatedDelta:
    """The call with b and a [B, Q, Hv], computed where it has weights instead; by references, or by `kernels`."""
    if call.x is None or call.rates is None:
        return call
    plain, normed = (linear, normed_linear) if kernels else (linear.reference, normed_linear.reference)
    x = call.x.contiguous()
    both = plain(x, call.rates, False) if call.x_norm is None else normed(x, call.x_norm, call.x_eps, call.rates)
    b, a = both.chunk(2, dim=2)
    return replace(call, b=b, a=a, x=None, rates=None, x_norm=None)


def inputs(call: GatedDelta) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float32 q, k [B, Q, Hk, dk], v [B, Q, Hv, dv], beta [B, Q, Hv], g [B, Q, Hv, 1 or dk]; of padding all are 0, and
    S stays as it is."""
    assert call.b is not None
    assert call.a is not None
    (_, heads, dv, dk), k_heads = call.state.shape, call.keys.shape[2]
    x = convolve(call.qkv, call.weight, None, call.ring, call.slots, call.positions, True)
    step = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    real = (step < call.counts.unsqueeze(1)).unsqueeze(2)
    q, k, v = torch.where(real, x, 0.0).split((k_heads * dk, k_heads * dk, heads * dv), dim=2)
    q, k = (unit(each.unflatten(2, (k_heads, dk))) for each in (q, k))
    beta = torch.where(real, call.beta_scale * call.b.float().sigmoid(), 0.0)
    rate = softplus(call.a.float() + call.dt_bias.flatten()).unflatten(2, (heads, -1))
    g = torch.where(real.unsqueeze(3), -call.a_log.exp().unsqueeze(1) * rate, 0.0)
    return q * dk**-0.5, k, v.unflatten(2, (heads, dv)), beta, g


def replayed(call: GatedDelta | Mamba2, first: Tensor, most: int) -> Tensor:
    """S [B, Hv, dv, dk] at each row's position, from its checkpoint of position first [B] and the records since, of
    which a row has `most` or fewer."""
    depth, heads = call.keys.shape[1], call.state.shape[1]
    state = torch.where((call.positions == 0).view(-1, 1, 1, 1), 0, call.state.index_select(0, call.slots.long()))
    state = state.float()
    for i in range(most):
        token = first + i
        at = (call.slots * depth + token % depth).long()
        key, delta, decay = (t.flatten(0, 1).index_select(0, at) for t in (call.keys, call.deltas, call.decays))
        after = applied(state, repeat(key, heads), delta, decay)
        state = torch.where((token < call.positions).view(-1, 1, 1, 1), after, state)
    return state


def repeat(x: Tensor, heads: int) -> Tensor:
    """[..., Hk, d] -> [..., Hv, d]: a key head serves Hv / Hk heads side by side."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def applied(state: Tensor, key: Tensor, delta: Tensor, decay: Tensor) -> Tensor:
    """S after one token: state [B, Hv, dv, dk], key [B, Hv, dk], delta [B, Hv, dv], decay [B, Hv, 1 or dk]."""
    return torch.addcmul(state * decay.unsqueeze(2), delta.unsqueeze(3), key.unsqueeze(2))


def stepped(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens one after the other -> outputs and deltas [B, Q, Hv, dv]. beta: None where v is the delta."""
    outs, deltas = [], []
    for t in range(v.shape[1]):
        kept = state * decay[:, t].unsqueeze(2)
        delta = v[:, t]
        if beta is not None:
            delta = beta[:, t].unsqueeze(2) * (delta - (kept @ k[:, t].unsqueeze(3)).squeeze(3))
        state = torch.addcmul(kept, delta.unsqueeze(3), k[:, t].unsqueeze(2))
        outs.append((state @ q[:, t].unsqueeze(3)).squeeze(3))
        deltas.append(delta)
    return torch.stack(outs, dim=1), torch.stack(deltas, dim=1)


def chunked(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens in blocks of CHUNK -> outputs [B, Q, Hv, dv] and the last S. Arguments as `stepped`, g in place of its
    exponential."""
    outs: list[Tensor] = []
    rates = () if beta is None else (beta,)
    for parts in zip(*(x.transpose(1, 2).split(CHUNK, dim=2) for x in (q, k, v, g, *rates)), strict=True):
        qc, kc, vc, gc, *rate = parts  # [B, Hv, CHUNK, ...]
        total = gc.cumsum(dim=2)
        size = vc.shape[2]
        later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)

        def decayed(x: Tensor, kc: Tensor = kc, total: Tensor = total, later: Tensor = later) -> Tensor:
            """Products of x with keys, each decayed from the key's token to x's."""
            if total.shape[3] == 1:
                pair = (total - total.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
                return x @ kc.transpose(2, 3) * pair
            pair = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later.unsqueeze(2), -torch.inf).exp()
            return (x.unsqueeze(3) * pair * kc.unsqueeze(2)).sum(4)

        delta = vc
        if beta is not None:
            each = rate[0].unsqueeze(3)
            right = each * torch.cat((vc, kc * total.exp()), dim=3)
            system = (decayed(kc) * each).tril(-1)
            solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            values, keys = solved.split((vc.shape[3], kc.shape[3]), dim=3)
            delta = values - keys @ state.transpose(2, 3)
        outs.append((qc * total.exp()) @ state.transpose(2, 3) + decayed(qc) @ delta)
        last = total[:, :, -1:]
        state = state * last.exp() + delta.transpose(2, 3) @ (kc * (last - total).exp())
    return torch.cat(outs, dim=2).transpose(1, 2), state


def advanced(
    call: GatedDelta | Mamba2, most: int | None, x: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None,
    g: Tensor,
) -> Tensor:  # fmt: skip
    """The tokens' outputs float32 [B, Q, Hv, dv]; all that the call writes is written. most: see `replayed`, None if it
    is not known. x: the convolution's inputs."""
    slots, positions, counts, heads = call.slots, call.positions, call.counts, call.state.shape[1]
    first = first_of(call)
    state = replayed(call, first, call.keys.shape[1] if most is None else most)
    wide = (repeat(q, heads), repeat(k, heads), v, beta)
    live = (counts > 0) & (slots > 0)
    if v.shape[1] > MAX_TOKENS:
        o, state = chunked(state, *wide, g)
        base = positions + counts
    else:
        decay = g.exp()
        o, deltas = stepped(state, *wide, decay)
        row, written = ring_rows(call.keys.shape[1], v.shape[1], slots, positions, counts)
        for ring, value in ((call.keys, k), (call.deltas, deltas), (call.decays, decay)):
            write_rows(ring.view(-1, ring[0, 0].numel()), row, value.flatten(2).flatten(0, 1), written)
        base = positions
        live &= (positions == 0) | (positions + counts - first > call.limit)
    write_rows(call.state.flatten(1), slots.long(), state.to(call.state.dtype).flatten(1), live)
    write_rows(call.base, slots.long(), base.unsqueeze(1).expand(-1, heads), live)
    write_ring(call.ring, x, slots, positions, counts)
    return o


def gated_norm(call: GatedDelta, o: Tensor) -> Tensor:
    """RMSNorm of each head of o [B, Q, Hv, dv], then the gate; zeros where there is no token."""
    z = call.z.float()
    out = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + call.eps) * call.norm.float()
    out = out.flatten(2) * (z.sigmoid() if call.sigmoid else silu(z))
    step = torch.arange(o.shape[1], dtype=torch.int32, device=o.device)
    return out.masked_fill((step >= call.counts.unsqueeze(1)).unsqueeze(2), 0.0).to(call.qkv.dtype)


def first_of(call: GatedDelta | Mamba2) -> Tensor:
    """The position of each row's checkpoint, int32 [B]."""
    return torch.where(call.positions == 0, 0, call.base[:, 0].index_select(0, call.slots.long()))


def most_waiting(call: GatedDelta | Mamba2) -> int:
    """Records of a row at most. A read of the device's memory."""
    waiting = (call.positions - first_of(call)).tolist()
    return min(max(waiting, default=0), call.keys.shape[1])


def _gated_delta(call: GatedDelta, most: int | None = None) -> Tensor:
    call = replace(with_rates(call), counts=torch.where(call.slots > 0, call.counts, 0))
    return gated_norm(call, advanced(call, most, call.qkv, *inputs(call)))


def on_cpu(call: GatedDelta) -> Tensor:
    """The reference, without replays of records that there are not."""
    return _gated_delta(call, most_waiting(call))


def on_gpu(call: GatedDelta) -> Tensor:
    """The kernels, for what they do not take the reference."""
    from onegraph.ops.cuda import gated_delta as kernel

    call = call if kernel.takes_rates(call) else with_rates(call, kernels=True)
    out = kernel.gated_delta(call)
    return _gated_delta(call) if out is None else out


def _check(call: GatedDelta) -> None:
    op, qkv, state, keys = "gated_delta", call.qkv, call.state, call.keys
    given = _given(call)
    check_stacked(op, qkv=qkv, z=call.z, **given)
    for name, tensor, dims in (("state", state, "[slots, Hv, dv, dk]"), ("keys", keys, "[slots, D, Hk, dk]")):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dims}")
    (_, heads, dv, dk), k_heads = state.shape, keys.shape[2]
    check_grouped(op, heads, k_heads)
    channels, (batch, tokens, _) = 2 * k_heads * dk + heads * dv, qkv.shape
    apart = call.decays.shape[-1]
    if apart not in (1, dk):
        raise ValueError(f"{op}: decays has {apart} numbers a head; it must have 1, or {dk}, one for each key channel")
    widths = {"b": heads, "a": heads * apart, "x": given["x"].shape[2] if "x" in given else 0}
    for name, x, width in (("z", call.z, heads * dv), *((name, x, widths[name]) for name, x in given.items())):
        if x.shape != (batch, tokens, width) or x.dtype != qkv.dtype or x.device != qkv.device:
            raise ValueError(
                f"{op}: {name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {qkv.dtype} "
                f"{(batch, tokens, width)} on {qkv.device}"
            )
    if qkv.shape[2] != channels or call.weight.shape[0] != channels:
        raise ValueError(
            f"{op}: qkv has {qkv.shape[2]} columns and weight {call.weight.shape[0]} rows; {k_heads} key heads of {dk} "
            f"and {heads} value heads of {dv} need {channels}"
        )
    check_tensors(
        op, qkv.device, a_log=(call.a_log, torch.float32, (heads,)), norm=(call.norm, call.norm.dtype, (dv,)),
        dt_bias=(call.dt_bias, torch.float32, (heads * apart,)),
    )  # fmt: skip
    if call.rates is not None:
        if apart != 1:
            raise ValueError(
                f"{op}: rates are given beside {apart} decays a head; allowed is 1: compute b and a before"
            )
        check_tensors(op, qkv.device, rates=(call.rates, qkv.dtype, (2 * heads, widths["x"])))
    if call.x_norm is not None:
        kind = call.x_norm.dtype if call.x_norm.dtype in FLOATS else torch.float32
        check_tensors(op, qkv.device, x_norm=(call.x_norm, kind, (widths["x"],)))
    check_records(op, call, qkv, apart)


def _given(call: GatedDelta) -> dict[str, Tensor]:
    """What b and a are computed from, by name: themselves, or x."""
    found = {name: x for name in ("b", "a", "x", "rates") if (x := getattr(call, name)) is not None}
    if set(found) not in ({"b", "a"}, {"x", "rates"}) or (call.x_norm is not None and call.x is None):
        named = [*found, *(["x_norm"] if call.x_norm is not None else [])]
        raise ValueError(
            f"gated_delta: got {', '.join(named) or 'no rates'}; give b and a, or x and rates, and x_norm with x only"
        )
    return {name: x for name, x in found.items() if name != "rates"}


def check_records(op: str, call: GatedDelta | Mamba2, x: Tensor, apart: int) -> None:
    """The state of a call whose convolution takes x; `apart` decays a head."""
    (slots, heads, dv, dk), (_, depth, k_heads, _), float32 = call.state.shape, call.keys.shape, torch.float32
    check_ring(op, x, call.ring, call.weight)
    if call.state.dtype not in (float32, torch.bfloat16):
        raise ValueError(f"{op}: state is {call.state.dtype}; it must be float32 or bfloat16")
    wanted: dict[str, Wanted] = {
        "state": (call.state, call.state.dtype, (slots, heads, dv, dk)),
        "base": (call.base, torch.int32, (slots, heads)),
        "keys": (call.keys, float32, (slots, depth, k_heads, dk)),
        "deltas": (call.deltas, float32, (slots, depth, heads, dv)),
        "decays": (call.decays, float32, (slots, depth, heads, apart)),
        "ring": (call.ring, x.dtype, (slots, call.ring.shape[1], x.shape[2])),
    }
    check_tensors(op, x.device, **wanted)
    check_rows(op, x, slots=call.slots, positions=call.positions, counts=call.counts)
    written = min(x.shape[1], MAX_TOKENS)
    if not 0 <= call.limit <= depth - written:
        raise ValueError(
            f"{op}: limit is {call.limit}; of {depth} records, {written} of which a step may write, from 0 to "
            f"{depth - written} may wait"
        )


def _bytes(call: GatedDelta) -> int:
    tokens, rows = call.qkv.shape[:2].numel(), len(call.slots)
    each = nbytes(call.state[0], call.base[0]) * 2 + call.keys.shape[2] * nbytes(call.keys[0, :1, :1])
    rates = nbytes(call.x, call.rates, call.x_norm)
    return rows * each + 3 * nbytes(call.z) + nbytes(call.qkv) * 2 + nbytes(call.weight) + tokens * 8 + rates


def _case(
    name: str, heads: tuple[int, int], dims: tuple[int, int], positions: list[int], counts: list[int], *,
    waiting: list[int] | None = None, tokens: int = 0, width: int = 4, depth: int = 16, limit: int = 0,
    channels: bool = False, narrow: bool = False, sigmoid: bool = False, beta_scale: float = 1.0, apart: int = 0,
    hidden: int = 0, normed: bool = True,
) -> Case:  # fmt: skip
    """heads: (Hk, Hv). dims: (dk, dv). waiting: records of each row. channels: a decay for each key channel. narrow:
    a state of bfloat16. apart: columns between one token's input and the next one's. hidden: columns of x, 0 where b
    and a are given; normed: whether x's norm is the op's."""
    (k_heads, v_heads), (dk, dv) = heads, dims

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw, plain = Draw(device, dtype, generator), Draw(device, torch.float32, generator)
        rows, length = len(positions), tokens or max(counts)
        slots, wide = rows + 2, 2 * k_heads * dk + v_heads * dv
        each = dk if channels else 1
        joined = draw.randn(rows, length, wide + v_heads * dv + apart)
        rates: tuple[Tensor | None, ...] = None, None
        more: tuple[object, ...] = None, None, None, 0.0
        if hidden:
            more = 3 * draw.randn(rows, length, hidden), draw.randn(2 * v_heads, hidden) * hidden**-0.5
            more += (1 + 0.2 * plain.randn(hidden), 1e-6) if normed else (None, 0.0)
        else:
            rates = draw.randn(rows, length, v_heads), draw.randn(rows, length, v_heads * each)
        base = torch.tensor([0, 0, *(p - w for p, w in zip(positions, waiting or [0] * rows, strict=True))])
        keys = unit(plain.randn(slots, depth, k_heads, dk))
        decays = torch.exp(-0.2 * plain.randn(slots, depth, v_heads, each).abs())
        state = (0.3 * plain.randn(slots, v_heads, dv, dk)).to(torch.bfloat16 if narrow else torch.float32)
        return (
            joined[..., :wide], joined[..., wide : wide + v_heads * dv], *rates, draw.randn(wide, width) * 0.5,
            plain.randn(v_heads) * 0.5 - 1, plain.randn(v_heads * each), 1 + 0.2 * draw.randn(dv), 1e-6,
            draw.randn(slots, width - 1 + max(8, length), wide), state,
            base.to(device, torch.int32).unsqueeze(1).repeat(1, v_heads), keys,
            plain.randn(slots, depth, v_heads, dv), decays, draw.ints(list(range(2, slots))),
            draw.ints(positions), draw.ints(counts), limit, sigmoid, beta_scale, *more,
        )  # fmt: skip

    return Case(name=name, make=make)


gated_delta = register(
    Op(
        name="gated_delta",
        call=GatedDelta,
        schema="-> Tensor",
        reference=_gated_delta,
        fake=lambda call: call.qkv.new_empty(call.z.shape),
        kernel="onegraph.ops.gated_delta:on_gpu",
        cpu="onegraph.ops.gated_delta:on_cpu",
        check=_check,
        cases=(
            _case("qwen", (2, 6), (128, 128), [0, 5, 70, 9], [1, 1, 0, 1], waiting=[0, 1, 1, 3]),
            _case("verify", (2, 4), (128, 128), [0, 6, 70], [4, 4, 2], waiting=[0, 4, 2]),
            _case("deferred", (1, 3), (128, 128), [3, 64, 17, 40], [4, 3, 4, 1], waiting=[3, 8, 9, 2], limit=8),
            _case("equal_heads", (2, 2), (128, 128), [12], [1], waiting=[2], limit=4, narrow=True),
            _case("four", (1, 4), (128, 128), [3, 1], [2, 1], waiting=[2, 1], beta_scale=2.0, apart=24),
            _case("chunk", (2, 4), (128, 128), [0, 37, 128, 9], [75, 65, 9, 0], waiting=[0, 3, 0, 2], tokens=80),
            _case("chunk_of_three", (1, 3), (128, 128), [0, 64], [130, 64], waiting=[0, 1], narrow=True),
            _case("small", (2, 4), (16, 24), [0, 7], [2, 3], waiting=[0, 2], width=3, depth=8, limit=3),
            _case("kda", (2, 2), (128, 128), [0, 8], [1, 3], waiting=[0, 3], channels=True, sigmoid=True),
            _case("kda_chunk", (2, 2), (128, 128), [0, 8], [70, 9], waiting=[0, 3], channels=True, sigmoid=True),
            _case("rates_plain", (2, 4), (128, 128), [0, 9, 3], [1, 1, 0], waiting=[0, 3, 1], hidden=72, normed=False),
            _case("rates_prompt", (1, 2), (128, 128), [0, 64], [70, 9], waiting=[0, 1], hidden=72),
            _case("rates_odd", (1, 2), (128, 128), [0, 6], [2, 3], waiting=[0, 2], hidden=36),
            _case("rates", (2, 4), (128, 128), [0, 6, 70], [4, 4, 2], waiting=[0, 4, 2], hidden=1056),
        ),
        tolerance={torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=_bytes,
        flops=lambda call: 8 * call.qkv.shape[:2].numel() * call.state[0].numel(),
    )
)  # fmt: skip
"""qkv [B, Q, 2 Hk dk + Hv dv], before its convolution, and gates z [B, Q, Hv dv] -> [B, Q, Hv dv]. float32 inside,
rounded once; zeros where a row has no token, or no slot but 0.

Row b's tokens stand at positions[b] + i, the first counts[b] are real; its sequence is in slots[b]; int32 [B]. Slot 0
belongs to no sequence and is never written; a row at position 0 begins a text, whatever its slot holds.

    q | k | v = silu(convolution of width W over qkv), see `short_conv`: weight [channels, W], ring [slots, R, channels]
    q, k of unit length, q times dk^-0.5; a key head serves Hv / Hk value heads side by side
    beta = beta_scale sigmoid(b), b [B, Q, Hv]; in place of b and a, None then, `rates` [2 Hv, D] in qkv's dtype and x
        [B, Q, D]: b | a = RMSNorm(x, x_norm [D], x_eps) rates^t, x as it is where there is no x_norm
    g = -exp(a_log) softplus(a + dt_bias), a [B, Q, Hv], a_log and dt_bias float32 [Hv]; of Kimi Delta Attention
        a decay for each key channel: a [B, Q, Hv dk], dt_bias float32 [Hv dk]
    out = RMSNorm(o, norm [dv], eps) silu(z), or sigmoid(z) where `sigmoid`

state float32 or bfloat16 [slots, Hv, dv, dk]: S of positions below base int32 [slots, Hv] (the same for every head).
Records float32, token t at t mod D: keys [slots, D, Hk, dk], deltas [slots, D, Hv, dv], decays [slots, D, Hv, 1 or dk],
which are exp(g). A step of up to `MAX_TOKENS` tokens a row writes records, and S of its first position where
after it more than `limit` would wait, or where a text begins. Between two steps of a row its position may go back as
far as to where the first of them began; limit + Q <= D of the largest Q. More tokens a row: see above.

A step may run in a captured graph, or after a kernel launched without the programmatic attribute (rule 4 of
`ops/triton/launch.py`): slots, positions and state are read before its wait."""
