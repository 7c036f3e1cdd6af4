"""Attention of DSpark's draft stages: a block of tokens that see one another, behind a window that others fill.

The window holds keys of the decoder's tokens, which never ask anything here; the block's own keys are forgotten. Few
tokens pass: the references run on GPUs too.
"""

import torch
from torch import Tensor

from onegraph.ops.checks import check_query, check_tensors
from onegraph.ops.deepseek_attention import attend_to
from onegraph.ops.deepseek_compress import (
    INT32,
    angles,
    as_rows,
    check_rows,
    check_tables,
    check_width,
    rotate,
    write_ring,
)
from onegraph.ops.registry import Case, Op, nbytes, register


def _block_attention(
    q: Tensor, kv: Tensor, ring: Tensor, sinks: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, positions: Tensor,
    window: int, scale: float,
) -> Tensor:  # fmt: skip
    length = q.shape[1]
    place = torch.arange(ring.shape[1], dtype=INT32, device=q.device)
    last = positions.unsqueeze(1) - 1
    held = last - (last - place) % ring.shape[1]
    seen = torch.nn.functional.pad((held >= 0) & (held > last - window), (0, length), value=True)
    keys = torch.cat((ring.index_select(0, slots), kv), dim=1)
    out = attend_to(q, keys, seen.unsqueeze(1).expand(-1, length, -1), sinks, 2 * cos.shape[1], scale)
    token = positions.unsqueeze(1) + torch.arange(length, dtype=INT32, device=q.device)
    return rotate(out, cos, -sin, token).to(q.dtype)


def _remember(kv: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, counts: Tensor) -> None:
    write_ring(ring, kv, slots, positions, counts)


def _check_block(
    q: Tensor, kv: Tensor, ring: Tensor, sinks: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, positions: Tensor,
    window: int, scale: float,
) -> None:  # fmt: skip
    op = "deepseek_block_attention"
    check_query(op, q)
    batch, length, heads, dim = q.shape
    for what, tensor, shape in (("kv", kv, (batch, length, -1)), ("ring", ring, (-1, -1, -1))):
        check_width(op, what, tensor, dim, 2 * cos.shape[1], q.dtype)
        check_tensors(op, q.device, **{what: (tensor, kv.dtype, shape)})
    check_rows(op, q, slots=slots, positions=positions)
    check_tables(op, dim, cos, sin)
    check_tensors(op, q.device, sinks=(sinks, torch.float32, (heads,)))
    if not 1 <= window <= ring.shape[1]:
        raise ValueError(f"{op}: window is {window}; it must be 1 to {ring.shape[1]}, the places of the ring")


def _check_remember(kv: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, counts: Tensor) -> None:
    op = "deepseek_remember"
    if kv.dim() != 3:
        raise ValueError(f"{op}: kv is {tuple(kv.shape)}; it must be [B, Q, D]")
    check_tensors(op, kv.device, ring=(ring, kv.dtype, (-1, -1, kv.shape[2])))
    check_rows(op, kv, slots=slots, positions=positions, counts=counts)


def _block_case(name: str, heads: int, dim: int, half: int, window: int, spare: int, fp8: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        positions, kind = torch.tensor([0, 3, 70], dtype=INT32), torch.uint8 if fp8 else dtype

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        angle = angles(80, half)
        args = (
            randn(3, 5, heads, dim).to(dtype),
            as_rows(randn(3, 5, dim), kind, 2 * half),
            as_rows(randn(4, window + spare, dim), kind, 2 * half),
            randn(heads),
            angle.cos(),
            angle.sin(),
            torch.tensor([2, 3, 1], dtype=INT32),
            positions,
            window,
            dim**-0.5,
        )
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


def _remember_case(name: str, tokens: int, dim: int, size: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        args = (
            torch.randn(3, tokens, dim, generator=generator).to(dtype),
            torch.randn(4, size, dim, generator=generator).to(dtype),
            torch.tensor([2, 3, 0], dtype=INT32),
            torch.tensor([0, 7, 5], dtype=INT32),
            torch.tensor([tokens, 1, 2], dtype=INT32),
        )
        return tuple(a.to(device) for a in args)

    return Case(name=name, make=make)


deepseek_block_attention = register(
    Op(
        name="deepseek_block_attention",
        schema=(
            "(Tensor q, Tensor kv, Tensor ring, Tensor sinks, Tensor cos, Tensor sin, Tensor slots, Tensor positions, "
            "int window, float scale) -> Tensor"
        ),
        reference=_block_attention,
        fake=lambda q, *rest: torch.empty_like(q),
        check=_check_block,
        cases=(
            _block_case("flash", 64, 512, 32, 128, 8),
            _block_case("spare", 3, 48, 8, 16, 5),
            _block_case("fp8", 3, 96, 8, 16, 0, fp8=True),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda q, kv, ring, *rest: 2 * nbytes(q, kv) + q.shape[0] * nbytes(ring[0]),
        flops=lambda q, kv, ring, *rest: 4 * q.numel() * (ring.shape[1] + kv.shape[1]),
    )
)
"""q [B, Q, H, D], kv [B, Q, D], both as `deepseek_qkv` gives them -> [B, Q, H, D]. Query i of row b stands at
positions[b] + i and sees the tokens from positions[b] - window up to positions[b] - 1 (ring [slots, R, D] holds the
sequence of slots[b], token j at j mod R) and all Q of its row, in front of it and behind. Softmax in float32 with
sinks[h] in the denominator; the trailing dimensions are rotated back. All may be rows of FP8."""

deepseek_remember = register(
    Op(
        name="deepseek_remember",
        schema="(Tensor kv, Tensor(a!) ring, Tensor slots, Tensor positions, Tensor counts) -> ()",
        reference=_remember,
        fake=lambda kv, ring, slots, positions, counts: None,
        check=_check_remember,
        cases=(_remember_case("decode", 1, 48, 9), _remember_case("chunk", 13, 40, 8)),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda kv, *rest: 2 * nbytes(kv),
        flops=lambda kv, *rest: 0,
    )
)
"""kv [B, Q, D], of which the first counts[b] are real, into ring [slots, R, D]: the token at positions[b] + i at place
(positions[b] + i) mod R of slots[b]. Slot 0 is never written. D may be the bytes of rows of FP8."""
