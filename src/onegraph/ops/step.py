"""The bookkeeping of a step, on the device: how far each row goes, and what it leaves behind for the next."""

import torch
from torch import Tensor

from onegraph.ops.calls import NAN_TOKEN
from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _begin(positions: Tensor, limits: Tensor, length: int) -> tuple[Tensor, Tensor]:
    counts = (limits - positions).clamp(0, length)
    return counts, positions + counts


def _finish(tokens: Tensor, logits: Tensor, after: Tensor, drawn: Tensor, positions: Tensor) -> Tensor:
    drawn.copy_(tokens)
    positions.copy_(after)
    best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.masked_fill(best.isnan() | best.isposinf(), NAN_TOKEN)


def _check_begin(positions: Tensor, limits: Tensor, length: int) -> None:
    rows = (positions.numel(),)
    check_tensors(
        "begin_step", positions.device, positions=(positions, torch.int32, rows), limits=(limits, torch.int32, rows)
    )
    if length < 1:
        raise ValueError(f"begin_step: length is {length}; a step brings 1 token or more")


def _check_finish(tokens: Tensor, logits: Tensor, after: Tensor, drawn: Tensor, positions: Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or not logits.is_contiguous():
        raise ValueError(
            f"finish_step: logits is {logits.dtype} {tuple(logits.shape)}; it must be contiguous floats [rows, "
            "vocabulary]"
        )
    rows = logits.shape[:1]
    check_tensors(
        "finish_step", logits.device, tokens=(tokens, torch.int64, rows), after=(after, torch.int32, rows),
        drawn=(drawn, torch.int64, rows), positions=(positions, torch.int32, rows),
    )  # fmt: skip


def _begin_case(rows: int, length: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        positions = torch.randint(0, 50, (rows,), generator=generator).int()
        limits = positions + torch.randint(-20, 2 * length + 1, (rows,), generator=generator).int()
        return positions.to(device), limits.to(device), length

    return Case(name=f"{rows}x{length}", make=make)


def _finish_case(rows: int, vocabulary: int, damage: float | None = None) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        logits = torch.randn(rows, vocabulary, generator=generator)
        tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
        if damage is not None:
            logits[::2].scatter_(1, tokens[::2, None], damage)
        after, positions = (torch.randint(0, 99, (rows,), generator=generator).int() for _ in range(2))
        rest = tokens, logits.to(dtype), after, torch.zeros_like(tokens), positions
        return tuple(t.to(device) for t in rest)

    return Case(name=f"{rows}x{vocabulary}{'' if damage is None else f'+{damage}'}", make=make)


_EXACT = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

begin_step = register(
    Op(
        name="begin_step",
        schema="(Tensor positions, Tensor limits, int length) -> (Tensor, Tensor)",
        reference=_begin,
        fake=lambda positions, limits, length: (torch.empty_like(positions), torch.empty_like(positions)),
        kernel="onegraph.ops.triton.step:begin_step",
        check=_check_begin,
        cases=(_begin_case(1, 1), _begin_case(5, 24), _begin_case(300, 1)),
        tolerance=_EXACT,
        bytes_moved=lambda positions, limits, length: 2 * nbytes(positions, limits),
        flops=lambda positions, limits, length: 3 * positions.numel(),
    )
)
"""positions, limits int32 [B] -> (counts, after) int32 [B]: how many of the row's `length` tokens are real, which is as
far as its limit allows, and where its next token stands then."""

finish_step = register(
    Op(
        name="finish_step",
        schema="(Tensor tokens, Tensor logits, Tensor after, Tensor(a!) drawn, Tensor(b!) positions) -> Tensor",
        reference=_finish,
        fake=lambda tokens, *rest: torch.empty_like(tokens),
        kernel="onegraph.ops.triton.step:finish_step",
        check=_check_finish,
        cases=(_finish_case(1, 99), _finish_case(5, 1009), _finish_case(3, 8, float("inf")),
               _finish_case(130, 7)),
        tolerance=_EXACT,
        bytes_moved=lambda tokens, logits, after, drawn, positions: 3 * nbytes(tokens, after),
        flops=lambda tokens, *rest: tokens.numel(),
    )
)  # fmt: skip
"""drawn <- tokens, positions <- after, and what the host is told: tokens int64 [B], with -1 where the token's own logit
is NaN or infinite: a NaN reaches all logits of a row and wins every comparison (`greedy`, `sample`), so the token that
was drawn then is none. logits [B, V]; after, positions int32 [B]; drawn int64 [B]."""
