"""Hazards 12 and 13: CPU scalars passed by value, host contents that change."""

import torch


def _inputs(i):
    return (torch.arange(4.0, device="cuda") + i,)


def factory_bad_cpu_scalar():
    scale = torch.tensor(1.0)

    def step(x):
        scale.add_(1.0)
        return x * scale  # expect: CG203

    return step, _inputs


def factory_bad_cpu_scalar_argument():
    def step(x, temperature):
        return x / temperature  # expect: CG203

    def inputs(i):
        return (*_inputs(i), torch.tensor(1.0 + i))

    return step, inputs


def factory_bad_pinned_contents():
    pinned = torch.zeros(4).pin_memory()
    buffer = torch.zeros(4, device="cuda")
    state = {"n": 0}

    def step(x):
        state["n"] += 1  # expect: CG210
        pinned.fill_(state["n"])
        buffer.copy_(pinned, non_blocking=True)  # expect: CG204
        return x + buffer

    return step, _inputs


def factory_bad_numpy_contents():
    pinned = torch.zeros(4).pin_memory()
    rows = pinned.numpy()
    buffer = torch.zeros(4, device="cuda")

    def step(x, i):
        rows[:] = i
        buffer.copy_(pinned, non_blocking=True)  # expect: CG204
        return x + buffer

    return step, lambda i: (*_inputs(i), i)


def factory_ok_cpu_constant():
    scale = torch.tensor(2.0)

    def step(x):
        return x * scale

    return step, _inputs


def factory_ok_pinned_by_caller():
    pinned = torch.zeros(4).pin_memory()
    buffer = torch.zeros(4, device="cuda")

    def step(x):
        buffer.copy_(pinned, non_blocking=True)
        return x + buffer

    def inputs(i):
        torch.cuda.synchronize()
        pinned.fill_(float(i))
        return _inputs(i)

    return step, inputs


def factory_ok_device_scalar():
    def step(x, temperature):
        return x / temperature

    return step, lambda i: (*_inputs(i), torch.tensor(1.0 + i, device="cuda"))
