"""The E8P linear of a rank's inputs, whose results are summed over ranks: `ops/e8p.py` and `ops/exchange.py` in one."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import codebook
from onegraph.ops.calls import E8PAllReduce
from onegraph.ops.e8p import check_linear, e8p_linear, linear_bytes, random_codes, random_scales
from onegraph.ops.exchange import alone, check_group, swap
from onegraph.ops.registry import Case, Op, register

MAX_TOKENS = 4  # the kernel takes more, which nobody has measured beside a launch of their own


def _run(call: E8PAllReduce) -> Tensor:
    own = e8p_linear.reference(*call.product(wide=True))
    words = own.flatten().view(torch.int32)
    total = torch.zeros_like(own)
    for part in swap(words, [len(words)] * len(call.inboxes), *call.group):
        total += part.view(torch.float32).view_as(own)
    return (total if call.add is None else total + call.add.float()).to(call.x.dtype)


def _check(call: E8PAllReduce) -> None:
    check_linear(call.product(add=call.add))
    tokens, n, words = call.tokens, call.n, call.inboxes[call.rank].shape[2]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(
            f"e8p_all_reduce: x has {tokens} tokens; allowed are 1 to {MAX_TOKENS}: run e8p_linear, then all_reduce"
        )
    check_group("e8p_all_reduce", tokens * n, *call.group)
    if words % 4 or tokens * n * call.x.element_size() % 4:
        raise ValueError(
            f"e8p_all_reduce: a peer buffer takes {words} words and {tokens} x {n} results of "
            f"{call.x.dtype} cross; kernels write whole words, four at a time: give room in fours and an even number"
        )


def _case(tokens: int, n: int, k: int, bits: int, *with_: str) -> Case:
    """`with_`: "bias", "add", "silu"."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, 2 * k if "silu" in with_ else k, generator=generator).to(device, dtype)
        codes = random_codes(n, k, bits, device, generator)
        scales = random_scales(n, k, device, generator)
        bias = torch.randn(n, generator=generator).to(device, dtype) if "bias" in with_ else None
        add = torch.randn(tokens, n, generator=generator).to(device, dtype) if "add" in with_ else None
        return x, *codes, codebook(device), *scales, bias, bits, add, "silu" in with_, *alone(device), 0

    return Case(name="+".join([f"{tokens}x{k}->{n}@{bits}", *with_]), make=make)


e8p_all_reduce = register(
    Op(
        name="e8p_all_reduce",
        call=E8PAllReduce,
        schema="-> Tensor",
        reference=_run,
        fake=lambda call: call.x.new_empty(*call.x.shape[:-1], call.n),
        kernel="onegraph.ops.cuda.e8p:linear_all_reduce",
        sole=True,
        check=_check,
        cases=(
            _case(1, 256, 1024, 2, "add"),
            _case(3, 192, 576, 3, "bias", "add"),
            _case(4, 128, 512, 4, "silu", "add"),
            _case(2, 49, 200, 2),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: linear_bytes(call.product(add=call.add))
        + 16 * (len(call.inboxes) - 1) * call.tokens * call.n,
        flops=lambda call: 16 * call.tokens * call.codes.numel(),
    )
)  # fmt: skip
"""The sum of all ranks' `e8p_linear(x, ..., bias, bits, silu=silu)`, plus `add`, rounded once: what crosses is float32.

x of 1 to 4 tokens; add [..., n] as x, the same on all ranks; bias is one rank's alone. The rest of a rank as of
`ops.exchange.all_reduce`. Where the launch of a linear cannot hold the exchange (`ops/cuda/e8p_decode.cu`), results of
x's dtype are exchanged in one of its own."""
