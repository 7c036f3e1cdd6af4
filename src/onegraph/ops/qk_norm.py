"""RMSNorm of all queries of a token together, and of all keys (OLMo, MiniMax-M2), also where ranks share the heads.
There may be no keys: of heads of Mamba-2 that ranks share out within a group.

Two ops, between which ranks add up what each has of the mean squares.
"""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _mean_squares(qkv: Tensor, q_size: int, k_size: int, ranks: int) -> Tensor:
    parts = qkv[..., : q_size + k_size].float().square().split((q_size, k_size), dim=-1)
    return torch.stack([part.sum(-1) / max(1, part.shape[-1]) for part in parts], dim=-1) / ranks


def _qk_norm(qkv: Tensor, weight: Tensor, mean_squares: Tensor, q_size: int, eps: float) -> Tensor:
    q, k, v = qkv.split((q_size, len(weight) - q_size, qkv.shape[-1] - len(weight)), dim=-1)
    factors = torch.rsqrt(mean_squares + eps).unbind(-1)
    normed = torch.cat([x.float() * factor.unsqueeze(-1) for x, factor in zip((q, k), factors, strict=True)], dim=-1)
    return torch.cat(((normed * weight.float()).to(qkv.dtype), v), dim=-1)


def _check_qkv(op: str, qkv: Tensor, q_size: int, k_size: int) -> None:
    if qkv.dim() == 0 or qkv.dtype not in FLOATS or not qkv.is_contiguous():
        raise ValueError(
            f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[..., numbers]"
        )
    if q_size < 1 or k_size < 0 or q_size + k_size > qkv.shape[-1]:
        raise ValueError(
            f"{op}: queries take {q_size} and keys {k_size} of {qkv.shape[-1]} numbers; queries need 1 or more, keys 0 "
            "or more, and together no more than there are"
        )


def _check_mean_squares(qkv: Tensor, q_size: int, k_size: int, ranks: int) -> None:
    _check_qkv("qk_mean_squares", qkv, q_size, k_size)
    if ranks < 1:
        raise ValueError(f"qk_mean_squares: ranks is {ranks}; it must be 1 or more")


def _check_norm(qkv: Tensor, weight: Tensor, mean_squares: Tensor, q_size: int, eps: float) -> None:
    op = "qk_norm"
    if weight.dtype not in FLOATS or weight.dim() != 1 or not weight.is_contiguous():
        raise ValueError(
            f"{op}: weight is {tuple(weight.shape)} {weight.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[numbers of queries and keys]"
        )
    _check_qkv(op, qkv, q_size, len(weight) - q_size)
    wanted = (*qkv.shape[:-1], 2)
    if mean_squares.shape != wanted or mean_squares.dtype != torch.float32 or not mean_squares.is_contiguous():
        raise ValueError(
            f"{op}: mean_squares is {tuple(mean_squares.shape)} {mean_squares.dtype}; it must be contiguous float32 "
            f"{wanted}"
        )
    if not qkv.device == weight.device == mean_squares.device:
        raise ValueError(
            f"{op}: weight is on {weight.device}, mean_squares on {mean_squares.device} and qkv on {qkv.device}; move "
            "them to one device"
        )
    if not eps >= 0.0:
        raise ValueError(f"{op}: eps is {eps}; it must be 0 or more")


# Rows, queries, keys, ranks: MiniMax-M2 on one of two GPUs, OLMo 2 7B, and sizes that are no powers of two.
_SIZES = {"minimax": ((1, 1), 3072, 512, 2), "olmo2": ((5,), 4096, 4096, 1), "small": ((2, 3), 96, 40, 3)}
_SIZES |= {"mamba": ((3,), 192, 0, 2)}


def _case(name: str, rows: tuple[int, ...], q_size: int, k_size: int, ranks: int, *, norm: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        qkv = torch.randn(*rows, q_size + 2 * k_size, generator=generator).to(device, dtype)
        if not norm:
            return qkv, q_size, k_size, ranks
        weight = 1 + 0.2 * torch.randn(q_size + k_size, generator=generator)
        mean_squares = 0.5 + torch.rand(*rows, 2, generator=generator)
        return qkv, weight.to(device, dtype), mean_squares.to(device), q_size, 1e-6

    return Case(name=name, make=make)


qk_mean_squares = register(
    Op(
        name="qk_mean_squares",
        schema="(Tensor qkv, int q_size, int k_size, int ranks) -> Tensor",
        reference=_mean_squares,
        fake=lambda qkv, *_: qkv.new_empty((*qkv.shape[:-1], 2), dtype=torch.float32),
        kernel="onegraph.ops.triton.qk_norm:qk_mean_squares",
        check=_check_mean_squares,
        cases=tuple(_case(name, *sizes, norm=False) for name, sizes in _SIZES.items()),
        tolerance=dict.fromkeys(FLOATS, 1e-6),
        bytes_moved=lambda qkv, q_size, k_size, ranks: (q_size + k_size) * nbytes(qkv) // qkv.shape[-1],
        flops=lambda qkv, q_size, k_size, ranks: 2 * (q_size + k_size) * qkv.numel() // qkv.shape[-1],
    )
)
"""qkv [..., n], first `q_size` numbers of queries, then `k_size` of keys -> float32 [..., 2]: what this rank adds to
the mean squares of all queries and of all keys. Ranks have equally many of both, and as many ranks one head of keys as
another: heads that several ranks have change no mean."""

qk_norm = register(
    Op(
        name="qk_norm",
        schema="(Tensor qkv, Tensor weight, Tensor mean_squares, int q_size, float eps) -> Tensor",
        reference=_qk_norm,
        fake=lambda qkv, *_: torch.empty_like(qkv),
        kernel="onegraph.ops.triton.qk_norm:qk_norm",
        check=_check_norm,
        cases=tuple(_case(name, *sizes, norm=True) for name, sizes in _SIZES.items()),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda qkv, weight, mean_squares, *_: 2 * nbytes(qkv) + nbytes(weight, mean_squares),
        flops=lambda qkv, weight, *_: 2 * len(weight) * qkv.numel() // qkv.shape[-1],
    )
)
"""qkv [..., n], weight [queries, then keys], mean_squares float32 [..., 2] of both -> [..., n]: weight * x /
sqrt(mean_square + eps), float32 inside, rounded once to qkv's dtype; what lies behind the keys stays as it is."""
