"""Hazard 10: a branch or loop count that depends on host state which changes from step to step."""

import torch


def _inputs(i):
    return (torch.arange(4.0, device="cuda") + i,)


def factory_bad_every_second():
    state = {"n": 0}

    def step(x):
        state["n"] += 1  # expect: CG210
        if state["n"] % 2:  # expect: CG201
            return x * 2
        return x * 3

    return step, _inputs


def factory_bad_loop_count():
    state = {"n": 0}

    def step(x):
        state["n"] += 1  # expect: CG210
        for _ in range(state["n"]):  # expect: CG201
            x = x * 2
        return x

    return step, _inputs


def factory_bad_host_argument():
    def step(x, i):
        if i > 1:  # expect: CG201
            x = x + 1
        return x * 2

    return step, lambda i: (*_inputs(i), i)


def factory_bad_compressor_returns_none():
    """As a KV compressor does: most steps give None, every second one gives a row."""

    class Compressor:
        def __init__(self):
            self.seen = 0

        def __call__(self, x):
            self.seen += 1  # expect: CG210
            if self.seen % 2 == 0:  # expect: CG201
                return None
            return x.mean()

    compress = Compressor()

    def step(x):
        row = compress(x)
        return x if row is None else x + row  # expect: CG201 optional

    return step, _inputs


def factory_ok_constant_branch():
    mode = {"fast": True}

    def step(x):
        if mode["fast"]:
            x = x * 2
        for _ in range(3):
            x = x + 1
        return x

    return step, _inputs


def factory_ok_lazy_init():
    cache = []

    def step(x):
        if not cache:
            cache.append(torch.ones(4, device="cuda"))
        return x + cache[0]

    return step, _inputs


def factory_ok_device_counter():
    count = torch.zeros(1, device="cuda")

    def step(x):
        count.add_(1)
        return torch.where(count % 2 == 1, x * 2, x * 3)

    return step, _inputs
