"""Hyper-connections of ranks: `hyper_update_mix` of a sublayer's result that is summed over ranks (`ops/exchange.py`).

The mixing matrix passes from one sublayer to the next as logits, so that Sinkhorn's iterations run while the others'
parts are on their way.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.deepseek_hyper import _hyper_mix, _hyper_update, check_update_mix, mix_arguments
from onegraph.ops.exchange import all_reduce, alone, check_group
from onegraph.ops.registry import Case, Op, nbytes, register

MAX_TOKENS = 16  # the kernel takes no more


def _run(
    streams: Tensor, x: Tensor, post: Tensor, logits: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = all_reduce.reference(x, None, inboxes, state, alarm, rank)
    _hyper_update(streams, total, post, logits, floor, iterations)
    return _hyper_mix(streams, fn, base, scale, norm, eps, floor, 0)


def _check(
    streams: Tensor, x: Tensor, post: Tensor, logits: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int,
) -> None:  # fmt: skip
    op = "hyper_all_reduce"
    check_update_mix(streams, x, post, logits, fn, base, scale, norm, eps, floor, iterations)
    if (tokens := streams.shape[:-2].numel()) > MAX_TOKENS:
        raise ValueError(
            f"{op}: streams are of {tokens} tokens; allowed are up to {MAX_TOKENS}: run all_reduce, hyper_update_mix"
        )
    if x.numel() * x.element_size() % 4:
        raise ValueError(f"{op}: x is {tuple(x.shape)} {x.dtype}; the communication is whole words of 4 bytes")
    check_group(op, x.numel() * x.element_size() // 4, inboxes, state, alarm, rank)


def _case(lead: tuple[int, ...], h: int, d: int, *, wide: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        streams, x, post, _, *rest = mix_arguments(lead, h, d, wide, device, dtype, generator)
        logits = torch.randn((*lead, h, h), generator=generator).to(device)
        return streams, x, post, logits, *rest, *alone(device, 32 * 1024), 0

    return Case(name="x".join(map(str, (*lead, h, d))), make=make)


hyper_all_reduce = register(
    Op(
        name="hyper_all_reduce",
        schema=(
            "(Tensor(a!) streams, Tensor x, Tensor post, Tensor logits, Tensor fn, Tensor base, Tensor scale, "
            "Tensor norm, float eps, float floor, int iterations, Tensor(b!)[] inboxes, Tensor(c!) state, "
            "Tensor(d!) alarm, int rank) -> (Tensor, Tensor, Tensor)"
        ),
        reference=_run,
        fake=lambda streams, x, post, logits, *rest: (
            torch.empty_like(x),
            torch.empty_like(post),
            torch.empty_like(logits),
        ),
        kernel="onegraph.ops.cuda.deepseek_hyper_ranks:hyper_all_reduce",
        sole=True,
        check=_check,
        cases=(
            _case((1, 1), 4, 1024),
            _case((3, 2), 4, 80),
            _case((13,), 4, 1024),
            _case((2, 1), 4, 4096, wide=True),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4},
        bytes_moved=lambda streams, x, post, logits, fn, *rest: (
            3 * nbytes(streams) + (2 + 4 * (len(rest[6]) - 1)) * nbytes(x) + 2 * nbytes(post, logits) + nbytes(fn)
        ),
        flops=lambda streams, x, post, logits, fn, *rest: (
            (2 * fn.shape[0] + 2 * streams.shape[-2] + 2) * streams.numel()
        ),
    )
)  # fmt: skip
"""`hyper_update_mix(streams, the sum of all ranks' x, post, comb, ...)` with the mixing matrix before and behind it as
logits float32 [..., H, H] (`hyper_mix` without iterations gives such), of up to 16 tokens. The sum is rounded to x's
dtype, as that of `all_reduce`, whose last four arguments these are. Each rank gets the same bits."""
