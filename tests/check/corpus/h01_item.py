"""Hazard 1: a device value is read on the host. Line comments say what must be found there."""

import torch
from torch import nn


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to("cuda")
    return model, lambda i: (torch.full((2, 16), 0.1 * (i + 1), device="cuda"),)


def factory_bad_item():
    model, inputs = _model()

    @torch.no_grad()
    def step(x):
        y = model(x)
        scale = y.abs().max().item()  # expect: CG101
        return y / scale  # expect: CG202

    return step, inputs


def factory_bad_int():
    model, inputs = _model()
    table = torch.arange(32.0, device="cuda")

    @torch.no_grad()
    def step(x):
        y = model(x)
        index = int(y.argmax())  # expect: CG101
        return y + table[index]  # expect: CG202 optional

    return step, inputs


def factory_bad_float():
    model, inputs = _model()

    @torch.no_grad()
    def step(x):
        y = model(x)
        return y * float(y.mean())  # expect: CG101

    return step, inputs


def factory_bad_slice_bound():
    table = torch.arange(64.0, device="cuda").view(8, 8)

    def step(n):
        return table[: n[0]].sum(0)  # expect: CG101, CG202 optional

    return step, lambda i: (torch.tensor([2 + i], device="cuda"),)


def factory_bad_python_max():
    def step(x):
        return x - max(x)  # expect: CG101|CG108

    return step, lambda i: (torch.arange(4.0, device="cuda") + i,)


def factory_bad_contains():
    def step(tokens):
        stop = 3 in tokens  # expect: CG101|CG108
        return tokens * (2 if stop else 1)  # expect: CG202 optional, CG201 optional

    return step, lambda i: (torch.tensor([i, i + 1], device="cuda"),)


def factory_bad_allclose():
    def step(x):
        close = torch.allclose(x, x.round())  # expect: CG101
        return x * (2.0 if close else 3.0)  # expect: CG202 optional, CG201 optional

    return step, lambda i: (torch.full((4,), 0.5 * i, device="cuda"),)


def factory_ok_device_scale():
    model, inputs = _model()

    @torch.no_grad()
    def step(x):
        y = model(x)
        return y / y.abs().max()

    return step, inputs


def factory_ok_gather():
    model, inputs = _model()
    table = torch.arange(32.0, device="cuda")

    @torch.no_grad()
    def step(x):
        y = model(x)
        return y + table.index_select(0, y.argmax().view(1))

    return step, inputs


def factory_ok_masked_rows():
    table = torch.arange(64.0, device="cuda").view(8, 8)
    rows = torch.arange(8, device="cuda")

    def step(n):
        return (table * (rows < n[0]).unsqueeze(1)).sum(0)

    return step, lambda i: (torch.tensor([2 + i], device="cuda"),)


def factory_ok_item_in_inputs():
    table = torch.zeros(8, device="cuda")

    def step(x):
        return x + table

    def inputs(i):
        assert torch.tensor([i], device="cuda").item() == i
        return (torch.full((8,), float(i), device="cuda"),)

    return step, inputs
