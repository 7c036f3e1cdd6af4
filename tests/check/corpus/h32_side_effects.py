"""Hazard 32: Python that runs once, at capture. The results agree, the side effects do not happen."""

import torch


def _inputs(i):
    return (torch.full((4,), 1.0 + i, device="cuda"),)


def factory_quiet_counter():
    class Step:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1  # expect: CG210
            return x * 2

    return Step(), _inputs


def factory_quiet_log():
    log = []

    def step(x):
        log.append("step")  # expect: CG210
        return x * 2

    return step, _inputs


def factory_quiet_print():
    def step(x):
        print("stepping")  # expect: CG210
        return x * 2

    return step, _inputs


def factory_ok_effects_outside():
    log = []

    def step(x):
        local = []
        local.append(x * 2)
        return local[0]

    def inputs(i):
        log.append(i)
        return _inputs(i)

    return step, inputs
