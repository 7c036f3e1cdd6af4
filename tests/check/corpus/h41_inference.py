"""Hazards inside of `torch.inference_mode`, in which torch hands ops over as a whole that it takes apart elsewhere."""

import torch


def _inputs(i):
    return (torch.full((2, 4), 1.0 + i, device="cuda"),)


def factory_bad_item():  # hazard: 1
    @torch.inference_mode()
    def step(x):
        return x / x.max().item()  # expect: CG101

    return step, _inputs


def factory_bad_branch():  # hazard: 9
    @torch.inference_mode()
    def step(x):
        if x.isnan().any():  # expect: CG108
            return x * 2
        return x

    return step, _inputs


def factory_bad_tensor_constant():  # hazard: 3
    @torch.inference_mode()
    def step(x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")  # expect: CG102

    return step, _inputs


def factory_bad_where():  # hazard: 5
    @torch.inference_mode()
    def step(x):
        rows = torch.where(x > 2)[0]  # expect: CG104
        return x[rows].sum()

    return step, _inputs


def factory_bad_position():  # hazard: 11
    cache, state = torch.zeros(8, 4, device="cuda"), {"at": 0}

    @torch.inference_mode()
    def step(x):
        cache[state["at"]].copy_(x[0])  # expect: CG202
        state["at"] += 1  # expect: CG210
        return cache.cumsum(0)

    return step, _inputs


def factory_ok_views_and_writes():
    cache, rows = torch.zeros(8, 2, 2, device="cuda"), torch.arange(2, device="cuda")

    @torch.inference_mode()
    def step(x):
        first, second = x.view(2, 2, 2).chunk(2, dim=1)
        cache.index_copy_(0, rows, first + second.expand(2, 2, 2))
        rows.add_(1)
        return cache.flatten(1).sum(0), torch.where(x > 1, x, 0.0).reshape(4, 2).T.contiguous()

    return step, _inputs
