"""Hazard 3: host data is copied to the device inside the step."""

import torch
from torch import nn


def _inputs(i):
    return (torch.arange(8.0, device="cuda") + i,)


def factory_bad_tensor_constant():
    def step(x):
        return x * torch.tensor([1.0, 2.0] * 4, device="cuda")  # expect: CG102

    return step, _inputs


def factory_bad_powers_of_two():
    """As a bit-packing helper of a quantization library did: the table of shifts is made in the call."""

    def pack(bits):
        shifts = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=bits.device)  # expect: CG102
        return (bits.long() * shifts).sum(-1)

    def step(x):
        return pack(x > 3)

    return step, _inputs


def factory_bad_to_device():
    table = torch.arange(8.0)

    def step(x):
        return x + table.to("cuda")  # expect: CG102

    return step, _inputs


def factory_bad_cuda_call():
    table = torch.arange(8.0)

    def step(x):
        return x + table.cuda()  # expect: CG102

    return step, _inputs


def factory_bad_norm_weight_to():
    """As a norm did whose weight stayed on the CPU: converted in every call."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            weight = self.weight.to(x.device, x.dtype)  # expect: CG102
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    norm = Norm()

    @torch.no_grad()
    def step(x):
        return norm(x)

    return step, _inputs


def factory_bad_copy_pageable():
    buffer = torch.zeros(8, device="cuda")
    host = torch.arange(8.0)

    def step(x):
        buffer.copy_(host)  # expect: CG102
        return x + buffer

    return step, _inputs


def factory_bad_as_tensor():
    sizes = [1.0] * 8

    def step(x):
        return x / torch.as_tensor(sizes, device="cuda")  # expect: CG102

    return step, _inputs


def factory_bad_new_tensor():
    def step(x):
        return x + x.new_tensor([1.0] * 8)  # expect: CG102

    return step, _inputs


def factory_bad_host_input():
    """The caller's input is a pageable CPU tensor, and the step moves it."""

    def step(x):
        return x.to("cuda") * 2  # expect: CG102

    return step, lambda i: (torch.arange(8.0) + i,)


def factory_ok_buffer():
    table = torch.arange(8.0).to("cuda")

    def step(x):
        return x + table

    return step, _inputs


def factory_ok_full():
    def step(x):
        return x + torch.full((8,), 2.0, device="cuda") + torch.arange(8, device="cuda") + torch.zeros_like(x)

    return step, _inputs


def factory_ok_dtype_conversion():
    weight = torch.ones(8, device="cuda")

    def step(x):
        return (x.to(torch.bfloat16) * weight.to(x.device, torch.bfloat16)).float()

    return step, _inputs


def factory_ok_cached_constant():
    cache = {}

    def step(x):
        if "table" not in cache:
            cache["table"] = torch.tensor([2.0] * 8, device="cuda")
        return x * cache["table"]

    return step, _inputs


def factory_ok_empty_list():
    """As a cache does that begins as nothing: of nothing, nothing is copied."""

    def step(x):
        return torch.cat([torch.tensor([], device="cuda"), x])

    return step, _inputs
