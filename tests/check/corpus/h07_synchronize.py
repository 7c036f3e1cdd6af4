"""Hazards 7 and 8: explicit synchronization, queries and pinned allocation."""

import torch


def _inputs(i):
    return (torch.arange(8.0, device="cuda") + i,)


def factory_bad_synchronize():
    def step(x):
        y = x * 2
        torch.cuda.synchronize()  # expect: CG106
        return y

    return step, _inputs


def factory_bad_stream_synchronize():
    def step(x):
        y = x * 2
        torch.cuda.current_stream().synchronize()  # expect: CG106
        return y

    return step, _inputs


def factory_bad_event_synchronize():
    def step(x):
        event = torch.cuda.Event()
        y = x * 2
        event.record()
        event.synchronize()  # expect: CG106
        return y

    return step, _inputs


def factory_bad_timing():
    def step(x):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y = x * 2
        end.record()
        end.synchronize()  # expect: CG106
        start.elapsed_time(end)  # expect: CG107
        return y

    return step, _inputs


def factory_bad_event_query():
    def step(x):
        event = torch.cuda.Event()
        y = x * 2
        event.record()
        event.query()  # expect: CG107
        return y

    return step, _inputs


def factory_bad_stream_query():
    def step(x):
        y = x * 2
        torch.cuda.current_stream().query()  # expect: CG107
        return y

    return step, _inputs


def factory_ok_event_order():
    def step(x):
        event = torch.cuda.Event()
        y = x * 2
        event.record()
        event.wait()
        return y + 1

    return step, _inputs


def factory_ok_synchronize_outside():
    def step(x):
        return x * 2

    def inputs(i):
        torch.cuda.synchronize()
        return _inputs(i)

    return step, inputs
