"""Hazard 2: device to host copies."""

from itertools import pairwise

import torch


def _inputs(i):
    return (torch.arange(4.0, device="cuda") + i,)


def factory_bad_cpu():
    def step(x):
        probabilities = torch.softmax(x, 0)
        host = probabilities.cpu()  # expect: CG101
        return probabilities * host.shape[0]

    return step, _inputs


def factory_bad_tolist():
    def step(x):
        values = x.tolist()  # expect: CG101
        return x + values[0]  # expect: CG202

    return step, _inputs


def factory_bad_numpy():
    def step(x):
        y = x * 2
        y.cpu().numpy().sum()  # expect: CG101
        return y

    return step, _inputs


def factory_bad_print():
    def step(x):
        y = x * 2
        print("y", y)  # expect: CG101
        return y

    return step, _inputs


def factory_bad_query_start_loc():
    """As an attention backend of a serving engine did."""
    cache = torch.arange(32.0, device="cuda")

    def step(query_start_loc):
        starts = query_start_loc.tolist()  # expect: CG101
        parts = [cache[a:b].sum() for a, b in pairwise(starts)]  # expect: CG202 optional
        return torch.stack(parts)

    return step, lambda i: (torch.tensor([0, 2 + i, 8], device="cuda"),)


def factory_bad_assert_finite():
    def step(x):
        y = x.exp()
        assert torch.isfinite(y).all()  # expect: CG108|CG101
        return y

    return step, _inputs


def factory_ok_pinned_out():
    host = torch.zeros(4).pin_memory()

    def step(x):
        y = x * 2
        host.copy_(y, non_blocking=True)
        return y

    return step, _inputs


def factory_ok_segment_sum():
    cache = torch.arange(32.0, device="cuda")
    rows = torch.arange(32, device="cuda")

    def step(query_start_loc):
        inside = (rows >= query_start_loc[:-1, None]) & (rows < query_start_loc[1:, None])
        return (cache * inside).sum(1)

    return step, lambda i: (torch.tensor([0, 2 + i, 8], device="cuda"),)
