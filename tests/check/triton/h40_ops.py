"""Kernels behind torch ops: `triton_op`, custom ops of the GPU alone, `torch.library.impl`."""

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton


@triton.jit
def mix(x, y, by, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * by + 1.0, mask=at < n)


@triton_op("checktriton::mixed", mutates_args={})
def mixed(x: torch.Tensor, by: float) -> torch.Tensor:
    y = torch.empty_like(x)
    wrap_triton(mix)[(triton.cdiv(x.numel(), 16),)](x, y, by, x.numel(), BLOCK=16)  # expect: CG202 @triton_op
    return y


@torch.library.custom_op("checktriton::mixes", mutates_args=("y",), device_types="cuda")
def mixes(x: torch.Tensor, y: torch.Tensor, by: float) -> None:
    mix[(triton.cdiv(x.numel(), 16),)](x, y, by, x.numel(), BLOCK=16)  # expect: CG202 @custom_op


_LIBRARY = torch.library.Library("checktriton_lib", "DEF")
_LIBRARY.define("mixed(Tensor x, float by) -> Tensor")


def _mixed(x, by):
    y = torch.empty_like(x)
    mix[(triton.cdiv(x.numel(), 16),)](x, y, by, x.numel(), BLOCK=16)  # expect: CG202 @library
    return y


_LIBRARY.impl("mixed", _mixed, "CUDA")
_LIBRARY.impl("mixed", lambda x, by: torch.empty_like(x), "Meta")


def _row(i):
    return (torch.linspace(-1.0, 1.0, 48).to("cuda") * (i + 1),)


class Decay:
    """A number that changes from step to step, outside of every op."""

    def __init__(self):
        self.by = 1.0

    def next(self):
        self.by *= 0.5
        return self.by


def factory_bad_triton_op():
    decay = Decay()
    return lambda x: mixed(x, decay.next()), _row


def factory_ok_triton_op_of_constants():
    return lambda x: mixed(x, 2.0), _row


def factory_bad_custom_op():
    decay = Decay()

    def step(x):
        y = torch.zeros_like(x)
        mixes(x, y, decay.next())
        return y

    return step, _row


def factory_ok_custom_op_of_constants():
    def step(x):
        y = torch.zeros_like(x)
        mixes(x, y, 3.0)
        return y

    return step, _row


def factory_bad_library():
    decay = Decay()
    return lambda x: torch.ops.checktriton_lib.mixed(x, decay.next()), _row


def factory_ok_library_of_constants():
    return lambda x: torch.ops.checktriton_lib.mixed(x, 3.0), _row
