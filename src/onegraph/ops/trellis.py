"""Trellis-coded weights: the linear on them, and rows of an embedding. `formats/trellis.py` tells the layout."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.rotated import hadamard_block
from onegraph.formats.trellis import BITS, CODES, OWN, TILE, UNIT, decode, decode_rows
from onegraph.ops.calls import TrellisLinear
from onegraph.ops.e8p import (
    check_place,
    check_rotated,
    check_scales,
    fake_linear,
    linear_bytes,
    random_scales,
    rotated_linear,
)
from onegraph.ops.hadamard import hadamard
from onegraph.ops.registry import Case, Op, nbytes, register


def check_codes(codes: Tensor, bits: int, dims: int = 2, name: str = "codes") -> None:
    """Raises ValueError for codes that are none of a rate, of `dims` dimensions."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; allowed: {', '.join(map(str, BITS))}")
    if codes.dtype != torch.int16 or codes.dim() != dims or codes.shape[-1] % (TILE * bits):
        lead = "E, " * (dims - 2)
        raise ValueError(
            f"{name} is {codes.dtype} {tuple(codes.shape)}; at {bits} bits it must be int16 "
            f"[{lead}n/16, k*{bits}] with k % 16 == 0"
        )
    check_place(name, codes, codes.device)


def check_code(code: int) -> None:
    """Raises ValueError for a number that is none of the trellis's codes."""
    if code not in CODES:
        raise ValueError(f"code is {code}; allowed: {', '.join(map(str, CODES))} (onegraph.formats.trellis)")


def _check_linear(call: TrellisLinear) -> None:
    check_codes(call.codes, call.bits)
    check_code(call.code)
    check_rotated(call)


def random_codes(n: int, k: int, bits: int, device: torch.device | str, g: torch.Generator) -> Tensor:
    return torch.randint(-(2**15), 2**15, (n // TILE, k * bits), generator=g, dtype=torch.int16).to(device)


def _scales(n: int, k: int, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor]:
    in_scale, out_scale = random_scales(n, k, device, g)
    return in_scale, out_scale * (10 / UNIT)


def _linear_case(
    batch: tuple[int, ...], n: int, k: int, bits: int, *with_: str, eps: float | None = None, code: int = OWN
) -> Case:
    """`with_`: "bias", "add", "silu", "wide"."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        silu, wide = "silu" in with_, "wide" in with_
        x = torch.randn(*batch, 2 * k if silu else k, generator=generator).to(device, dtype)
        codes = random_codes(n, k, bits, device, generator)
        in_scale, out_scale = _scales(n, k, device, generator)
        scales = in_scale, out_scale * (UNIT if code != OWN else 1)
        bias = torch.randn(n, generator=generator).to(device, dtype) if "bias" in with_ else None
        add = None
        if "add" in with_:
            add = torch.randn(*batch, n, generator=generator).to(device, torch.float32 if wide else dtype)
        return x, codes, *scales, bias, bits, add, eps, silu, wide, code

    name = f"{'x'.join(map(str, batch))}x{k}->{n}@{bits}" + f" in code {code}" * (code != OWN)
    return Case(name="+".join([name, *with_, *(["norm"] if eps is not None else [])]), make=make)


def _linear(call: TrellisLinear) -> Tensor:
    return rotated_linear(call, decode(call.codes, call.bits, call.code))


def linear_on_gpu(call: TrellisLinear) -> Tensor:
    from onegraph.ops.cuda import trellis

    y = trellis.linear(call)
    return _linear(call) if y is None else y


trellis_linear = register(
    Op(
        name="trellis_linear",
        call=TrellisLinear,
        schema="-> Tensor",
        reference=_linear,
        fake=fake_linear,
        kernel="onegraph.ops.trellis:linear_on_gpu",
        check=_check_linear,
        cases=(
            *(_linear_case((1,), 192, 576, b) for b in BITS),
            *(_linear_case((2,), 1536, 192, b, "bias") for b in (2, 3, 4)),
            _linear_case((5,), 320, 576, 4, "bias"),
            _linear_case((1,), 256, 4096, 2),
            _linear_case((2, 3), 48, 208, 3),
            _linear_case((33,), 128, 128, 4),
            _linear_case((0,), 128, 128, 4),
            _linear_case((2,), 192, 576, 2, eps=1e-5),
            _linear_case((17,), 192, 576, 5, "bias", eps=1e-5),
            _linear_case((3,), 576, 1536, 4, "add", "silu"),
            _linear_case((9,), 48, 208, 2, "add", "silu"),
            _linear_case((2,), 1088, 576, 8, "wide", eps=1e-5),
            _linear_case((130,), 192, 576, 3, "bias", "add", "wide", eps=1e-5),
            _linear_case((64,), 576, 192, 4, "bias", "add", "wide", eps=1e-5),
            _linear_case((70,), 128, 256, 2, "add", "silu"),
            *(_linear_case((2,), 128, 256, 2 + code, "bias", eps=1e-5, code=code) for code in CODES if code != OWN),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=linear_bytes,
        flops=lambda call: 2 * call.tokens * call.n * call.k,
    )
)
"""`trellis_linear(x [..., k], codes int16 [n/16, k bits], in_scale float32 [k], out_scale float32 [n],
bias [n] or None, bits, add=None, eps=None, silu=False, wide=False, code=OWN) -> [..., n]`

y = out_scale * H_n(Q H_k(in_scale * v)) + bias + add, Q as `formats.trellis.decode` has it in that code. v is x; with
`silu`, of x [..., 2k] silu(x[..., :k]) * x[..., k:]; with `eps`, x over its root mean square (RMSNorm whose weight is
in in_scale). The result, and `add`, have the dtype of x, or float32 with `wide`.
"""


def _embedding(ids: Tensor, codes: Tensor, in_scale: Tensor, out_scale: Tensor, bits: int) -> Tensor:
    flat = ids.reshape(-1)
    q = decode_rows(codes, bits, flat).float()
    rows: Tensor = hadamard.reference(q, hadamard_block(q.shape[1])) * in_scale * out_scale[flat].unsqueeze(1)
    return rows.reshape(*ids.shape, q.shape[1])


def _check_embedding(ids: Tensor, codes: Tensor, in_scale: Tensor, out_scale: Tensor, bits: int) -> None:
    check_codes(codes, bits)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype}; allowed: int32, int64")
    check_place("ids", ids, codes.device)
    check_scales(in_scale, out_scale, codes.shape[0] * TILE, codes.shape[1] // bits, codes.device)


def _embedding_case(shape: tuple[int, ...], n: int, k: int, bits: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        ids = torch.randint(0, n, shape, generator=generator).to(device)
        return ids, random_codes(n, k, bits, device, generator), *_scales(n, k, device, generator), bits

    return Case(name=f"{'x'.join(map(str, shape))} of {n}x{k}@{bits}", make=make)


trellis_embedding = register(
    Op(
        name="trellis_embedding",
        schema="(Tensor ids, Tensor codes, Tensor in_scale, Tensor out_scale, int bits) -> Tensor",
        reference=_embedding,
        fake=lambda ids, codes, in_scale, out_scale, bits: in_scale.new_empty((*ids.shape, codes.shape[1] // bits)),
        kernel=None,  # a few rows a step: the reference's gathers are captured with the rest
        check=_check_embedding,
        cases=(*(_embedding_case((2, 3), 1008, 576, b) for b in BITS), _embedding_case((0,), 48, 64, 3)),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5},  # the result is float32 always
        bytes_moved=lambda ids, codes, *rest: (
            nbytes(ids) + ids.numel() * (nbytes(codes) // codes.shape[0] + codes.shape[1] // rest[-1] * 4)
        ),
        flops=lambda ids, codes, *rest: ids.numel() * codes.shape[1] // rest[-1],
    )
)
"""`trellis_embedding(ids int [...], ...) -> float32 [..., k]`: rows of an embedding, whose output side is not rotated.

row = out_scale[id] * in_scale * H_k(Q[id]); arguments as in `trellis_linear`.
"""
