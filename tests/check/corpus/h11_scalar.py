"""Hazard 11: a Python number that changes from step to step is baked into the graph."""

import torch


def factory_bad_position():
    """As a decoder did: token id and position are Python numbers."""
    table = torch.arange(64.0, device="cuda").view(16, 4)
    state = {"position": 0}

    def step(x):
        position = state["position"]
        state["position"] += 1  # expect: CG210
        return x + table[position]  # expect: CG202

    return step, lambda i: (torch.ones(4, device="cuda"),)


def factory_bad_fill_position():
    positions = torch.zeros(1, device="cuda", dtype=torch.int64)
    table = torch.arange(64.0, device="cuda").view(16, 4)
    state = {"position": 0}

    def step(x):
        positions.fill_(state["position"])  # expect: CG202
        state["position"] += 1  # expect: CG210
        return x + table[positions]

    return step, lambda i: (torch.ones(4, device="cuda"),)


def factory_bad_temperature():
    def step(x, temperature):
        return torch.softmax(x / temperature, -1)  # expect: CG202

    return step, lambda i: (torch.arange(4.0, device="cuda"), 1.0 + i)


def factory_bad_length():
    cache = torch.arange(64.0, device="cuda").view(16, 4)

    def step(x, length):
        return x + cache[:length].sum(0)  # expect: CG202|CG208

    return step, lambda i: (torch.ones(4, device="cuda"), i + 1)


def factory_bad_arange():
    def step(x, length):
        positions = torch.arange(length, length + 4, device="cuda")  # expect: CG202
        return x + positions

    return step, lambda i: (torch.ones(4, device="cuda"), i)


def factory_bad_cache_write():
    cache = torch.zeros(16, 4, device="cuda")

    def step(x, position):
        cache[position].copy_(x)  # expect: CG202
        return cache.sum(0)

    return step, lambda i: (torch.ones(4, device="cuda") * (i + 1), i)


def factory_bad_decay():
    class Average:
        def __init__(self):
            self.steps = 0
            self.value = torch.zeros(4, device="cuda")

        def __call__(self, x):
            self.steps += 1  # expect: CG210
            self.value.lerp_(x, 1.0 / self.steps)  # expect: CG202
            return self.value.clone()

    return Average(), lambda i: (torch.ones(4, device="cuda") * i,)


def factory_ok_device_position():
    table = torch.arange(64.0, device="cuda").view(16, 4)

    def step(x, position):
        return x + table[position]

    return step, lambda i: (torch.ones(4, device="cuda"), torch.tensor([i], device="cuda"))


def factory_ok_constant_scalar():
    def step(x, scale):
        return x * scale + 3.0

    return step, lambda i: (torch.ones(4, device="cuda") * i, 0.5)


def factory_ok_device_write():
    cache = torch.zeros(16, 4, device="cuda")

    def step(x, position):
        cache.index_copy_(0, position, x)
        return cache.sum(0)

    return step, lambda i: (torch.ones(1, 4, device="cuda") * (i + 1), torch.tensor([i], device="cuda"))
