"""Launches of Triton kernels, ops that nothing looks into, addresses: CG401, and numbers that a launch is given."""

import torch
import triton
import triton.language as tl

from onegraph.check import declare

N = 8


def with_count(i):
    return torch.arange(float(N), device="cuda") + i, torch.full((1,), i % 3 + 1, device="cuda")


def ones(i):
    return (torch.full((4,), float(i + 1), device="cuda"),)


@triton.jit
def double(x, y, n: tl.constexpr):
    i = tl.program_id(0)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def double_some(x, y, count, n: tl.constexpr):
    i = tl.program_id(0)
    inside = i < tl.load(count)
    tl.store(y + i, tl.load(x + i, mask=inside) * 2, mask=inside)


@triton.jit
def keep(x, y, count, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.where(i < count, tl.load(x + i), 0.0))


@triton.jit
def keep_some(x, y, count, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.where(i < tl.load(count), tl.load(x + i), 0.0))


def bad_CG101_launch():
    def step(x, count):
        y = torch.zeros_like(x)
        double[(count.item(),)](x, y, N)
        return y

    return step, with_count


def good_CG101_launch():
    def step(x, count):
        y = torch.zeros_like(x)
        double_some[(N,)](x, y, count, N)
        return y

    return step, with_count


def bad_CG202_launch():
    position = 0

    def step(x, count):
        nonlocal position
        position += 1
        y = torch.empty_like(x)
        keep[(1,)](x, y, position % 3, N)
        return y

    return step, with_count


def good_CG202_launch():
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step(x, count):
        position.add_(1).remainder_(3)
        y = torch.empty_like(x)
        keep_some[(1,)](x, y, position, N)
        return y

    return step, with_count


@triton.jit
def assembled(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    v = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
    tl.store(y + i, v)


@triton.jit
def vouched_for(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    v = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
    tl.store(y + i, v)


declare(vouched_for)


def launching(kernel):
    y = torch.zeros(4, device="cuda")

    def step(x):
        kernel[(1,)](x, y, 4)
        return y

    return step, ones


def bad_CG401_kernel():
    return launching(assembled)


def good_CG401_kernel():
    return launching(vouched_for)


LIBRARY = torch.library.Library("onegraph_advice", "FRAGMENT")
for name in ("opaque", "declared", "refused"):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    torch.library.register_fake(f"onegraph_advice::{name}", torch.empty_like)
declare("onegraph_advice::declared")
declare("onegraph_advice::refused", capturable=False)


def bad_CG401():
    return lambda x: torch.ops.onegraph_advice.opaque(x), ones


def good_CG401():
    return lambda x: torch.ops.onegraph_advice.declared(x), ones


def bad_CG401_declared():
    return lambda x: torch.ops.onegraph_advice.refused(x) * 2, ones


def good_CG401_declared():
    return lambda x: x * 2, ones


def bad_CG401_address():
    addresses = []

    def step(x):
        addresses[:] = [x.data_ptr()]
        return x * 2

    return step, ones


@torch.library.custom_op("onegraph_advice::by_address", mutates_args=(), device_types="cuda")
def by_address(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"launches a kernel on {x.data_ptr()}, which takes a GPU")


by_address.register_fake(torch.empty_like)
declare(by_address)


def good_CG401_address():
    return lambda x: by_address(x) * 2, ones
