"""Hazard 17: shapes that change, caches that grow."""

import torch


def factory_bad_growing_cache():
    """As a decoder did: the KV cache is grown with torch.cat."""
    state = {"k": torch.zeros(0, 4, device="cuda")}

    def step(x):
        state["k"] = torch.cat([state["k"], x])  # expect: CG208|CG205
        return state["k"].sum(0)

    return step, lambda i: (torch.full((1, 4), 1.0 + i, device="cuda"),)


def factory_bad_input_shape():
    def step(x):
        return x.sum(0)  # expect: CG208

    return step, lambda i: (torch.ones(2 + i, 4, device="cuda"),)


def factory_bad_growing_list():
    rows = []

    def step(x):
        rows.append(x * 1)  # expect: CG210
        return torch.stack(rows).sum(0)  # expect: CG201 optional, CG205|CG208|CG209

    return step, lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)


def factory_ok_preallocated():
    cache = torch.zeros(16, 4, device="cuda")

    def step(x, position):
        cache.index_copy_(0, position, x)
        return cache.sum(0)

    return step, lambda i: (torch.full((1, 4), 1.0 + i, device="cuda"), torch.tensor([i], device="cuda"))


def factory_ok_cat_fixed():
    prefix = torch.ones(2, 4, device="cuda")

    def step(x):
        return torch.cat([prefix, x]).sum(0)

    return step, lambda i: (torch.full((1, 4), 1.0 + i, device="cuda"),)
