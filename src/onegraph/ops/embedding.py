"""Rows of a dense embedding table, in a launch that overlaps its neighbours in a decode step (torch's does not)."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, weight)


def _check(ids: Tensor, weight: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64) or weight.dim() != 2 or weight.dtype not in FLOATS:
        raise ValueError(
            f"embedding: ids are {ids.dtype}, weight is {weight.dtype} {tuple(weight.shape)}; they must be int32 or "
            "int64, and float32, bfloat16 or float16 [vocabulary, width]"
        )
    if ids.device != weight.device:
        raise ValueError(f"embedding: ids are on {ids.device}, weight on {weight.device}; move them to one device")
    if not weight.is_contiguous():
        raise ValueError("embedding: weight must be contiguous; call .contiguous() on it first")


def _case(shape: tuple[int, ...], vocabulary: int, width: int, kind: torch.dtype = torch.int64) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        ids = torch.randint(0, vocabulary, shape, generator=generator).to(kind)
        return ids.to(device), torch.randn(vocabulary, width, generator=generator).to(device, dtype)

    return Case(name=f"{'x'.join(map(str, shape))}of{vocabulary}x{width}", make=make)


embedding = register(
    Op(
        name="embedding",
        schema="(Tensor ids, Tensor weight) -> Tensor",
        reference=_embedding,
        fake=lambda ids, weight: weight.new_empty((*ids.shape, weight.shape[1])),
        kernel="onegraph.ops.triton.embedding:embedding",
        check=_check,
        cases=(_case((1, 1), 1000, 576), _case((3, 7), 99, 80, torch.int32), _case((2, 1), 50, 4096)),
        tolerance={torch.float32: 0.0, torch.bfloat16: 1.7e-3, torch.float16: 2.1e-4},  # of the table's own rounding
        bytes_moved=lambda ids, weight: nbytes(ids) + 2 * ids.numel() * nbytes(weight[0]),
        flops=lambda ids, weight: 0,
    )
)
"""ids int32 or int64 [...], weight [V, D] -> rows [..., D]. An id beyond the table raises on a CPU; on a GPU,
where a step may not stop, it reads the nearest row."""
