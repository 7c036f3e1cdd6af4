"""Hazard 18: an output is read after the next replay has overwritten it."""

import torch


def factory_bad_two_steps_back():
    outputs = []

    def step(x):
        y = x * 2
        if len(outputs) > 1:
            y = y + outputs[-2]  # expect: CG209|CG205
        outputs.append(y)  # expect: CG210
        return y

    def inputs(i):
        return (torch.full((4,), 1.0 + i, device="cuda"),)

    outputs.extend(torch.zeros(4, device="cuda") for _ in range(2))
    return step, inputs


def factory_ok_ring():
    ring = torch.zeros(2, 4, device="cuda")

    def step(x):
        y = x * 2 + ring[0]
        ring[0].copy_(ring[1])
        ring[1].copy_(y)
        return y

    return step, lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)
