"""Rows of an embedding in E8P."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import BITS, codebook
from onegraph.formats.rotated import hadamard_block
from onegraph.ops.e8p import check_codes, check_place, check_scales, e8p_decode, random_codes, random_scales
from onegraph.ops.hadamard import hadamard
from onegraph.ops.registry import Case, Op, nbytes, register


def _embedding(
    ids: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bits: int,
) -> Tensor:
    flat = ids.reshape(-1)
    q = e8p_decode.reference(codes[flat], None if residual is None else residual[flat], codebook, bits).float()
    rows: Tensor = hadamard.reference(q, hadamard_block(q.shape[1])) * in_scale * out_scale[flat].unsqueeze(1)
    return rows.reshape(*ids.shape, -1)


def _check_embedding(
    ids: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bits: int,
) -> None:
    check_codes(codes, residual, codebook, bits)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype}; allowed: int32, int64")
    check_place("ids", ids, codes.device)
    check_scales(in_scale, out_scale, codes.shape[0], codes.shape[1] * 8, codes.device)


def _embedding_case(shape: tuple[int, ...], n: int, k: int, bits: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        ids = torch.randint(0, n, shape, generator=generator).to(device)
        codes, residual = random_codes(n, k, bits, device, generator)
        return ids, codes, residual, codebook(device), *random_scales(n, k, device, generator), bits

    return Case(name=f"{'x'.join(map(str, shape))} of {n}x{k}@{bits}", make=make)


e8p_embedding = register(
    Op(
        name="e8p_embedding",
        schema="(Tensor ids, Tensor codes, Tensor? residual, Tensor codebook, Tensor in_scale, Tensor out_scale, "
        "int bits) -> Tensor",
        reference=_embedding,
        fake=lambda ids, codes, residual, codebook, in_scale, out_scale, bits: in_scale.new_empty(
            (*ids.shape, codes.shape[1] * 8)
        ),
        kernel=None,  # a few rows a step: the reference's gathers are captured with the rest
        check=_check_embedding,
        cases=tuple(_embedding_case((2, 3), 1000, 576, b) for b in BITS),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5},  # the result is float32 always
        bytes_moved=lambda ids, codes, residual, *rest: (
            nbytes(ids) + ids.numel() * (nbytes(codes, residual) // codes.shape[0] + codes.shape[1] * 32)
        ),
        flops=lambda ids, codes, *rest: ids.numel() * codes.shape[1] * 8,
    )
)
"""`e8p_embedding(ids int [...], ...) -> float32 [..., k]`: rows of an embedding, whose output side is not rotated.

row = out_scale[id] * in_scale * H_k(Q[id]); arguments as in `e8p_linear`.
"""
