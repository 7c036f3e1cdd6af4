"""E8P weights: codes to integers, and the linear on them. The layout of the codes is told in `formats/e8p.py`."""

import math
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import BITS, STAGE_RATIO, codebook, residual_dtype, sign_masks
from onegraph.formats.rotated import hadamard_block
from onegraph.ops.calls import E8PLinear
from onegraph.ops.checks import FLOATS
from onegraph.ops.hadamard import hadamard
from onegraph.ops.registry import Case, Op, nbytes, register


def _decode_e8p(codes: Tensor, table: Tensor) -> Tensor:
    """int16 [...] -> int8 [..., 8]. The eight bytes of a row, and of its signs, are looked up as one number."""
    c = codes.int().reshape(-1)
    rows, masks = (bytes.view(torch.int64).squeeze(-1) for bytes in (table, sign_masks(codes.device)))
    # index_select looks up a vector of numbers four times as fast as indexing does
    found = rows.index_select(0, (c >> 8) & 0xFF).bitwise_xor_(masks.index_select(0, c & 0xFF))
    return found.view(torch.int8).view(*codes.shape, 8)


def _decode(codes: Tensor, residual: Tensor | None, codebook: Tensor, bits: int) -> Tensor:
    q = _decode_e8p(codes, codebook[:256])
    if bits == 3:
        assert residual is not None
        q = q + codebook[256:][residual.int()]
    elif bits == 4:
        assert residual is not None
        q = q.mul_(STAGE_RATIO[4]).add_(_decode_e8p(residual, codebook[:256]))
    return q.reshape(codes.shape[0], -1)


def _linear(call: E8PLinear) -> Tensor:
    return rotated_linear(call, _decode(call.codes, call.residual, call.codebook, call.bits))


def rotated_linear(call: Any, q: Tensor) -> Tensor:
    """An `E8PLinear` or `TrellisLinear` whose integers are q [n, k]."""
    v = call.x.float()
    if call.silu:
        gate, up = v.chunk(2, dim=-1)
        v = torch.nn.functional.silu(gate) * up
    if call.eps is not None:
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + call.eps)
    y: Tensor = hadamard.reference(v * call.in_scale, hadamard_block(call.k)) @ q.float().T
    y = hadamard.reference(y, hadamard_block(call.n)) * call.out_scale
    for more in (call.bias, call.add):
        if more is not None:
            y = y + more.float()
    return y if call.wide else y.to(call.x.dtype)


def check_codes(codes: Tensor, residual: Tensor | None, codebook: Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; allowed: 2, 3, 4")
    if codes.dtype != torch.int16 or codes.dim() != 2:
        raise ValueError(f"codes is {codes.dtype} {tuple(codes.shape)}; it must be int16 [n, k/8]")
    wanted = residual_dtype(bits)
    if wanted is None:
        if residual is not None:
            raise ValueError("residual is given at 2 bits, which has one stage; pass None")
    elif residual is None or residual.dtype != wanted or residual.shape != codes.shape:
        got = "None" if residual is None else f"{residual.dtype} {tuple(residual.shape)}"
        raise ValueError(f"residual is {got}; at {bits} bits it must be {wanted} {tuple(codes.shape)}, as codes")
    if codebook.dtype != torch.int8 or tuple(codebook.shape) != (512, 8):
        raise ValueError(
            f"codebook is {codebook.dtype} {tuple(codebook.shape)}; it must be int8 (512, 8): formats.e8p.codebook()"
        )
    for name, tensor in (("codes", codes), ("residual", residual), ("codebook", codebook)):
        check_place(name, tensor, codes.device)


def check_place(name: str, tensor: Tensor | None, device: torch.device) -> None:
    if tensor is None:
        return
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and codes on {device}; move them to one device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous: call {name}.contiguous()")


def check_scales(in_scale: Tensor, out_scale: Tensor, n: int, k: int, device: torch.device) -> None:
    for name, tensor, size in (("in_scale", in_scale, k), ("out_scale", out_scale, n)):
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != (size,):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; codes need float32 ({size},)")
        check_place(name, tensor, device)


def check_linear(call: E8PLinear) -> None:
    check_codes(call.codes, call.residual, call.codebook, call.bits)
    check_rotated(call)


def check_rotated(call: Any) -> None:
    """An `E8PLinear` or `TrellisLinear`, all but its codes."""
    x, codes, n, k = call.x, call.codes, call.n, call.k
    width = 2 * k if call.silu else k
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype}; allowed: float32, bfloat16, float16")
    if x.dim() == 0 or x.shape[-1] != width:
        of = "gate and up of " if call.silu else ""
        raise ValueError(
            f"x has shape {tuple(x.shape)}; {of}codes {tuple(codes.shape)} need a last dimension of {width}"
        )
    check_place("x", x, codes.device)
    if call.eps is not None and not (call.eps >= 0 and not call.silu):
        raise ValueError(
            f"eps is {call.eps} and silu {call.silu}; eps must be 0 or more, and a linear has one of the two in front"
        )
    if (add := call.add) is not None:
        shape, dtype = call.result
        if tuple(add.shape) != shape or add.dtype != dtype:
            raise ValueError(f"add is {add.dtype} {tuple(add.shape)}; it must be as the result, {dtype} {shape}")
        check_place("add", add, codes.device)
    check_scales(call.in_scale, call.out_scale, n, k, codes.device)
    if (bias := call.bias) is not None:
        if bias.dtype not in FLOATS or tuple(bias.shape) != (n,):
            raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be a float tensor ({n},)")
        check_place("bias", bias, codes.device)


def random_codes(n: int, k: int, bits: int, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    codes = torch.randint(-(2**15), 2**15, (n, k // 8), generator=g).to(device, torch.int16)
    dtype = residual_dtype(bits)
    if dtype is None:
        return codes, None
    info = torch.iinfo(dtype)
    return codes, torch.randint(info.min, info.max + 1, (n, k // 8), generator=g).to(device, dtype)


def random_scales(n: int, k: int, device: torch.device, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scales of both signs whose product keeps y near 1."""
    in_scale = (0.5 + torch.rand(k, generator=g)) * torch.randn(k, generator=g).sign()
    out_scale = (0.5 + torch.rand(n, generator=g)) * torch.randn(n, generator=g).sign() * (0.1 * k**-0.5)
    return in_scale.to(device), out_scale.to(device)


def _decode_case(n: int, k: int, bits: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        return *random_codes(n, k, bits, device, generator), codebook(device), bits

    return Case(name=f"{n}x{k}@{bits}", make=make)


def _linear_case(batch: tuple[int, ...], n: int, k: int, bits: int, *with_: str, eps: float | None = None) -> Case:
    """`with_`: "bias", "add", "silu", "wide"."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        silu, wide = "silu" in with_, "wide" in with_
        x = torch.randn(*batch, 2 * k if silu else k, generator=generator).to(device, dtype)
        codes, residual = random_codes(n, k, bits, device, generator)
        scales = random_scales(n, k, device, generator)
        bias = torch.randn(n, generator=generator).to(device, dtype) if "bias" in with_ else None
        add = None
        if "add" in with_:
            add = torch.randn(*batch, n, generator=generator).to(device, torch.float32 if wide else dtype)
        return x, codes, residual, codebook(device), *scales, bias, bits, add, eps, silu, wide

    name = f"{'x'.join(map(str, batch))}x{k}->{n}@{bits}"
    return Case(name="+".join([name, *with_, *(["norm"] if eps is not None else [])]), make=make)


def fake_linear(call: Any) -> Tensor:
    shape, dtype = call.result
    made: Tensor = call.x.new_empty(shape, dtype=dtype)
    return made


def linear_bytes(call: Any) -> int:
    shape, dtype = call.result
    count: int = math.prod(shape) * dtype.itemsize
    return nbytes(*(each for each in call if isinstance(each, Tensor))) + count


e8p_decode = register(
    Op(
        name="e8p_decode",
        schema="(Tensor codes, Tensor? residual, Tensor codebook, int bits) -> Tensor",
        reference=_decode,
        fake=lambda codes, residual, codebook, bits: codes.new_empty(
            (codes.shape[0], codes.shape[1] * 8), dtype=torch.int8
        ),
        kernel="onegraph.ops.triton.e8p:decode",
        check=check_codes,
        cases=(
            *(_decode_case(n, k, b) for n, k in ((576, 576), (192, 1536), (49, 200), (1, 8)) for b in BITS),
            _decode_case(130, 11008, 4),
        ),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},  # integers: exact
        bytes_moved=lambda codes, residual, codebook, bits: nbytes(codes, residual, codebook) + codes.numel() * 8,
        flops=lambda codes, residual, codebook, bits: codes.numel() * 8 * (1 if residual is None else 2),
    )
)
"""`e8p_decode(codes, residual, codebook, bits) -> int8 [n, k]`: the exact integers Q, 4w at 2 and 3 bits, 16w at 4.

codes int16 [n, k/8]; residual None, uint8 or int16 [n, k/8]; codebook int8 [512, 8],
`formats.e8p.codebook()` (the CUDA kernels read a GPU's first once).
"""

e8p_linear = register(
    Op(
        name="e8p_linear",
        call=E8PLinear,
        schema="-> Tensor",
        reference=_linear,
        fake=fake_linear,
        kernel="onegraph.ops.cuda.e8p:linear",
        check=check_linear,
        cases=(
            *(_linear_case((1,), 576, 576, b) for b in BITS),
            *(_linear_case((2,), 192, 1536, b) for b in BITS),
            *(_linear_case((3,), 1000, 576, b, "bias") for b in BITS),
            _linear_case((4,), 1536, 192, 4),
            _linear_case((5,), 3072, 576, 4, "bias"),
            _linear_case((1,), 256, 11008, 4),
            _linear_case((2, 3), 49, 200, 3),
            _linear_case((33,), 128, 128, 4),
            _linear_case((0,), 128, 128, 4),
            _linear_case((2,), 192, 576, 2, eps=1e-5),
            _linear_case((17,), 192, 576, 4, "bias", eps=1e-5),
            _linear_case((2, 1), 192, 576, 3, "add"),
            _linear_case((3,), 576, 1536, 4, "add", "silu"),
            _linear_case((9,), 49, 200, 2, "add", "silu"),
            _linear_case((2,), 1000, 576, 4, "wide", eps=1e-5),
            _linear_case((70,), 192, 576, 3, "bias", "add", "wide", eps=1e-5),
            _linear_case((70,), 128, 256, 2, "add", "silu"),
        ),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=linear_bytes,
        flops=lambda call: 16 * call.tokens * call.codes.numel(),
    )
)
"""`e8p_linear(x, ...) -> [..., n]`: y = out_scale * H_n(Q(H_k(in_scale * x))) + bias, with what stands around it.

x [..., k] float32, bfloat16 or float16; codes, residual, codebook as in `e8p_decode`; in_scale float32 [k] (sign times
channel scale); out_scale float32 [n] (the checkpoint's out_scale times its scale); bias None or floating point [n].

In front, one of two: `eps` makes it RMSNorm(x) (the norm's weight is in in_scale: `WeightFormat.after_norm`), `silu`
makes it silu(gate) * up with x [..., 2k] = gate | up. Behind: `add` [..., n] of the result's dtype is added before the
result is rounded, once. The result has x's dtype, with `wide` float32.
"""
