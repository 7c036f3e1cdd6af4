"""Hazards 23, 24 and 25: other streams, the default stream, forks that do not come back."""

import torch


def _inputs(i):
    return (torch.full((256,), 1.0 + i, device="cuda"),)


def factory_bad_unjoined_fork():
    side = torch.cuda.Stream()
    buffer = torch.zeros(256, device="cuda")

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffer.copy_(x * 3)  # expect: CG305
        return x * 2

    return step, _inputs


def factory_bad_side_stream_without_wait():
    side = torch.cuda.Stream()
    buffer = torch.zeros(256, device="cuda")
    weight = torch.full((256,), 3.0, device="cuda")

    def step(x):
        with torch.cuda.stream(side):
            buffer.add_(weight)  # expect: CG303
        torch.cuda.current_stream().wait_stream(side)
        return x + buffer

    return step, _inputs


def factory_bad_default_stream():
    buffer = torch.zeros(256, device="cuda")

    def step(x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            buffer.add_(1)  # expect: CG304
        return x + buffer

    return step, _inputs


def factory_ok_fork_join():
    side = torch.cuda.Stream()

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 3
        z = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + z

    return step, _inputs


def factory_ok_event_join():
    side = torch.cuda.Stream()
    fork, join = torch.cuda.Event(), torch.cuda.Event()

    def step(x):
        fork.record()
        side.wait_event(fork)
        with torch.cuda.stream(side):
            y = x * 3
            join.record(side)
        torch.cuda.current_stream().wait_event(join)
        return y + x

    return step, _inputs


def factory_ok_current_stream():
    def step(x):
        with torch.cuda.stream(torch.cuda.current_stream()):
            return x * 2

    return step, _inputs
