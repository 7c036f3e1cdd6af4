"""Hazard 16: the pinned source of a captured copy is freed.

One that is written again within the step is a race in eager mode too, so no twin of it can be measured.
"""

import torch


def _inputs(i):
    return (torch.arange(4.0, device="cuda") + i,)


def factory_quiet_pinned_temporary():
    """The pinned source dies with the step. torch 2.11 keeps it for the graph: measured, and so a warning."""
    buffer = torch.zeros(4, device="cuda")

    def step(x):
        source = torch.tensor([1.0, 2.0, 3.0, 4.0]).pin_memory()  # expect: CG107
        buffer.copy_(source, non_blocking=True)  # expect: CG207
        return x + buffer

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
