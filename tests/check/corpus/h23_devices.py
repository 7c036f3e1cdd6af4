"""Hazard 23 on several GPUs: work on another device than the one that is captured. Needs two GPUs."""

import torch

GPUS = 2


def factory_bad_second_gpu():
    weight = torch.full((256,), 2.0, device="cuda:1")

    def step(x):
        return x * weight  # expect: CG303

    return step, lambda i: (torch.full((256,), 1.0 + i, device="cuda:1"),)


def factory_ok_first_gpu():
    weight = torch.full((256,), 2.0, device="cuda:0")

    def step(x):
        return x * weight

    return step, lambda i: (torch.full((256,), 1.0 + i, device="cuda:0"),)
