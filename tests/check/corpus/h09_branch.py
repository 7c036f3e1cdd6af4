"""Hazard 9: a host branch on a device value."""

import torch
from torch import nn


def _inputs(i):
    return (torch.full((4,), 1.0 - i, device="cuda"),)


def factory_bad_if():
    def step(x):
        if x.sum() > 0:  # expect: CG108
            return x * 2
        return x * 3

    return step, _inputs


def factory_bad_while():
    def step(x):
        for _ in range(4):
            if (x.abs() < 8).all():  # expect: CG108
                x = x * 2
        return x

    return step, _inputs


def factory_bad_residual_item():
    """As a residual block did: an .item() decides whether a branch is taken."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.gate = nn.Parameter(torch.ones(1))

        def forward(self, x):
            if self.gate.item() != 0:  # expect: CG101
                x = x + self.proj(x)
            return x

    torch.manual_seed(0)
    block = Block().to("cuda")

    @torch.no_grad()
    def step(x):
        return block(x)

    return step, _inputs


def factory_bad_ternary():
    def step(x):
        scale = 2.0 if x[0] > 0 else 3.0  # expect: CG108
        return x * scale  # expect: CG202 optional

    return step, _inputs


def factory_bad_and():
    def step(x):
        done = x[0] > 0 and x[1] > 0  # expect: CG108|CG101
        return torch.logical_not(done)

    return step, _inputs


def factory_ok_where():
    def step(x):
        return torch.where(x.sum() > 0, x * 2, x * 3)

    return step, _inputs


def factory_ok_shape_branch():
    def step(x):
        if x.shape[0] > 2 and x.dtype is torch.float32 and x.is_cuda:
            return x * 2
        return x

    return step, _inputs


def factory_ok_none_branch():
    bias = None

    def step(x):
        if bias is not None:
            return x + bias
        return x

    return step, _inputs
