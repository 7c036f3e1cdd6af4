"""Hazard 27: something is made for the first time inside the capture."""

import torch


def _inputs(i):
    return (torch.full((8, 8), 1.0 + i, device="cuda"),)


def factory_bad_late_constant():
    """Warm-up takes another path: the constant is first made while capturing."""
    state = {"n": 0}

    def step(x):
        state["n"] += 1  # expect: CG210
        if state["n"] == 2:  # expect: CG201
            state["table"] = torch.tensor([1.0] * 8, device="cuda")  # expect: CG102
            x = x + state["table"]
        return x * 2

    return step, _inputs


def factory_bad_free_and_collect():
    """A measurement of free memory asks the driver for a synchronous answer."""
    state = {"low": False}

    def step(x):
        y = x @ x
        torch.cuda.synchronize()  # expect: CG106
        state["low"] = torch.cuda.mem_get_info()[0] < 1
        return y

    return step, _inputs


def factory_ok_matmul_warm():
    def step(x):
        return x @ x

    return step, _inputs


def factory_ok_first_call_builds():
    state = {}

    def step(x):
        if "table" not in state:
            state["table"] = torch.tensor([2.0] * 8, device="cuda")
        return x * state["table"]

    return step, _inputs
