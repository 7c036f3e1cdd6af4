"""What is done to logits before a token is drawn from them: penalties, a constraint, min-p.

The order of all that chooses a token is transformers': repetition penalty, presence and frequency penalties, what a
constraint allows, then temperature, top-k, top-p, min-p. `sample` does the temperature, top-k and top-p; min-p comes
before it here and gives the same tokens as behind it would: see `min_p`.

Arithmetic is float64 and rounded once, so that each device gives the same bits.
"""

import torch
from torch import Tensor

from onegraph.ops.calls import AdjustLogits
from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.sampling import UNIT

PROMPT = 1  # a bit of `seen`
OUTPUT = 2  # what one more time in the answer adds to `seen`
WORD = 32  # tokens in a word of `allowed`


def mask_words(vocabulary: int) -> int:
    """Words in a row of `allowed`."""
    return -(-vocabulary // WORD)


def _adjust(call: AdjustLogits) -> Tensor:
    width = call.logits.shape[1]
    slots = call.slots.long()
    at = slots * width + call.last.clamp(min=0)
    call.seen.view(-1).scatter_add_(0, at, (call.last >= 0).int() * OUTPUT)
    seen = call.seen[slots]
    count = (seen >> 1).double()
    repetition, presence, frequency = (t.double()[:, None] for t in (call.repetition, call.presence, call.frequency))
    x = call.logits.double()
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * count - presence * (count > 0)
    token = torch.arange(width, device=x.device)
    open_ = (call.allowed[slots][:, token // WORD] >> (token % WORD)) & 1
    return x.float().masked_fill((call.constrained != 0)[:, None] & (open_ == 0), float("-inf"))


def _check_rows(op: str, logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point() or not logits.is_contiguous():
        raise ValueError(
            f"{op}: logits is {logits.dtype} {tuple(logits.shape)}; it must be contiguous floats [rows, vocabulary]"
        )


def _check_adjust(call: AdjustLogits) -> None:
    _check_rows("adjust_logits", call.logits)
    rows, width = call.logits.shape
    one = (rows,)
    check_tensors(
        "adjust_logits", call.logits.device, last=(call.last, torch.int64, one), slots=(call.slots, torch.int32, one),
        seen=(call.seen, torch.int32, (-1, width)), allowed=(call.allowed, torch.int32, (-1, mask_words(width))),
        repetition=(call.repetition, torch.float32, one), presence=(call.presence, torch.float32, one),
        frequency=(call.frequency, torch.float32, one), constrained=(call.constrained, torch.int32, one),
    )  # fmt: skip
    if len(call.seen) != len(call.allowed):
        raise ValueError(f"adjust_logits: seen has {len(call.seen)} slots, allowed {len(call.allowed)}; give the same")


def _min_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    width = logits.shape[1]
    scale = temperature.masked_fill(temperature <= 0, 1.0).double()[:, None]
    least = torch.where(temperature > 0, min_p, 0.0).double()[:, None]
    x = logits.double()
    weights = ((x - x.amax(dim=1, keepdim=True)) / scale).exp()
    dropped = weights < least
    logits.masked_fill_(dropped, float("-inf"))
    units = (weights * UNIT).long()
    mass = units.masked_fill(dropped, 0).sum(dim=1)
    rank = torch.arange(width, device=logits.device)
    limit = top_k.masked_fill(top_k <= 0, width)[:, None]
    of_all = units.sort(dim=1, descending=True).values.masked_fill(rank >= limit, 0).sum(dim=1)
    # Where top-k keeps fewer than min-p does, top-p's mass is as it was.
    fewer = (~dropped).sum(dim=1) < limit[:, 0]
    wider = (top_p.double() * (of_all.double() / mass.double())).clamp(max=1.0).float()
    return torch.where(fewer & (least[:, 0] > 0) & (top_p < 1), wider, top_p)


def _check_min_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    _check_rows("min_p", logits)
    rows = logits.shape[:1]
    check_tensors(
        "min_p", logits.device, logits=(logits, torch.float32, tuple(logits.shape)),
        temperature=(temperature, torch.float32, rows), top_k=(top_k, torch.int32, rows),
        top_p=(top_p, torch.float32, rows), min_p=(min_p, torch.float32, rows),
    )  # fmt: skip


def _adjust_case(name: str, batch: int, vocabulary: int) -> Case:
    """Rows with and without each penalty, a constraint, and a token to count; slots in another order than rows."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
        def uniform(low: float, high: float, off: float, every: int) -> Tensor:
            drawn = torch.rand(batch, generator=generator) * (high - low) + low
            return drawn.masked_fill(torch.arange(batch) % every == every - 1, off)

        slots = batch + 3
        times = torch.randint(0, 8, (slots, vocabulary), generator=generator)
        tensors = (
            (torch.randn(batch, vocabulary, generator=generator) * 3).to(dtype),
            torch.randint(-1, vocabulary, (batch,), generator=generator),
            torch.randperm(slots, generator=generator)[:batch].int(),
            times.masked_fill(torch.rand(slots, vocabulary, generator=generator) < 0.5, 0).int(),
            torch.randint(-(2**31), 2**31, (slots, mask_words(vocabulary)), generator=generator).int(),
            uniform(0.5, 2.0, 1.0, 3),
            uniform(-2.0, 2.0, 0.0, 4),
            uniform(-2.0, 2.0, 0.0, 5),
            (torch.arange(batch) % 2).int(),
        )
        return tuple(tensor.to(device) for tensor in tensors)

    return Case(name=name, make=make)


def _min_p_case(name: str, batch: int, vocabulary: int) -> Case:
    """Rows that are greedy, without min-p, with top-k above, below and off, with top-p and without."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
        row = torch.arange(batch)
        some = torch.rand(3, batch, generator=generator)
        tensors = (
            torch.randn(batch, vocabulary, generator=generator) * 3,
            (some[0] * 1.5 + 0.3).masked_fill(row % 7 == 6, 0.0),
            torch.where(row % 3 == 0, 0, torch.where(row % 3 == 1, 1 + 9 * some[0], 1 + vocabulary * some[1])).int(),
            some[1].masked_fill(row % 4 == 3, 1.0).clamp(min=0.01),
            (some[2] * 0.5).masked_fill(row % 5 == 4, 0.0),
        )
        return tuple(tensor.to(device) for tensor in tensors)

    return Case(name=name, make=make)


adjust_logits = register(
    Op(
        name="adjust_logits",
        schema="-> Tensor",
        call=AdjustLogits,
        reference=_adjust,
        fake=lambda call: torch.empty_like(call.logits, dtype=torch.float32),
        kernel="onegraph.ops.triton.shaping:adjust_logits",
        check=_check_adjust,
        cases=(
            _adjust_case("one-row", 1, 4999),
            _adjust_case("odd-vocabulary", 12, 101),
        ),
        tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
        bytes_moved=lambda call: (
            nbytes(call.logits, call.last, call.slots) + call.logits.numel() * 8 + call.logits.numel() // 8
        ),
        flops=lambda call: 8 * call.logits.numel(),
    )
)
"""Logits [B, V], any float -> float32 [B, V], under the penalties and the constraint of each row.

Row b owns `slots[b]` (int32 [B], each at most once but for rows that count nothing) of the state: `seen` int32 [S, V]
has bit 0 for a token of the prompt and the times that the answer has it above that; `allowed` int32 [S, ceil(V / 32)]
a bit a token, the lowest first. `last` int64 [B]: a token that `seen` counts once more before anything else, or -1.
`repetition` float32 [B] as transformers' RepetitionPenaltyLogitsProcessor has it (over prompt and answer), `presence`
and `frequency` float32 [B] as OpenAI's API (over the answer). `constrained` int32 [B]: 0 ignores `allowed`, else tokens
without their bit get -inf."""

min_p = register(
    Op(
        name="min_p",
        schema="(Tensor(a!) logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
        reference=_min_p,
        fake=lambda logits, temperature, top_k, top_p, min_p: torch.empty_like(top_p),
        kernel="onegraph.ops.triton.shaping:min_p",
        check=_check_min_p,
        cases=(_min_p_case("one-row", 1, 4999), _min_p_case("odd-vocabulary", 24, 1009)),
        tolerance={torch.float32: 1e-6},
        bytes_moved=lambda logits, *rows: 2 * nbytes(logits) + nbytes(*rows) + 4 * logits.shape[0],
        flops=lambda logits, *rows: 40 * logits.numel(),
    )
)
"""-inf into logits float32 [B, V] where a token is less than `min_p` float32 [B] (0 is off) times as likely as the
row's likeliest at its temperature; returns the top_p float32 [B] that `sample` then needs.

What min-p keeps and what top-p keeps are both the likeliest tokens down to some one, so which of the two cuts first
matters only to the mass that top_p is a fraction of: it is that of what top-k keeps, and min-p would take of it. The
top_p returned is the same mass as a fraction of what min-p leaves. Rows without min_p, and greedy ones, stay as they
are. Other arguments as `sample`."""
