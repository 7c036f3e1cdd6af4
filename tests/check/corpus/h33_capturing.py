"""Hazard 33: the step looks whether it is being captured."""

import torch


def _inputs(i):
    return (torch.full((4,), 1.0 + i, device="cuda"),)


def factory_bad_other_path():
    def step(x):
        if torch.cuda.is_current_stream_capturing():  # expect: CG211
            return x * 2
        return x * 3

    return step, _inputs


def factory_bad_swizzle():
    """As a scale swizzle did: it takes a simpler path while capturing, with another layout."""
    scales = torch.arange(8.0, device="cuda").view(2, 4)

    def swizzle(s):
        if torch.cuda.is_current_stream_capturing():  # expect: CG211
            return s
        return s.t().contiguous().view(2, 4)

    def step(x):
        return x * swizzle(scales)

    return step, _inputs


def factory_ok_same_path():
    seen = {"capturing": None}

    def step(x):
        seen["capturing"] = bool(torch.cuda.is_current_stream_capturing())
        return x * 2

    return step, _inputs


def factory_ok_guarded_check():
    """A check that reads the device runs in eager mode alone; the result is the same."""

    def step(x):
        if not torch.cuda.is_current_stream_capturing():  # expect: CG211 optional
            assert torch.isfinite(x).all()
        return x * 2

    return step, _inputs
