"""Hazard 16: the pinned source of a captured copy is freed or written again."""

import torch


def _inputs(i):
    return (torch.arange(4.0, device="cuda") + i,)


def factory_bad_pinned_reused():
    pinned = torch.zeros(4).pin_memory()
    first = torch.zeros(4, device="cuda")
    second = torch.zeros(4, device="cuda")

    def step(x):
        pinned.fill_(1.0)
        first.copy_(pinned, non_blocking=True)  # expect: CG207
        torch.cuda.current_stream()
        pinned.fill_(2.0)
        second.copy_(pinned, non_blocking=True)
        return x + first, x + second

    return step, _inputs


def factory_ok_two_pinned():
    one, two = torch.full((4,), 1.0).pin_memory(), torch.full((4,), 2.0).pin_memory()
    first = torch.zeros(4, device="cuda")
    second = torch.zeros(4, device="cuda")

    def step(x):
        first.copy_(one, non_blocking=True)
        second.copy_(two, non_blocking=True)
        return x + first, x + second

    return step, _inputs
