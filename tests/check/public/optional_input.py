# TensorRT-LLM#18207: an optional input that a batch leaves out; the static buffer keeps the last batch's values.
import torch

N, D = 4, 8


def bad():
    table = torch.arange(64.0, device="cuda")
    zero = torch.zeros(N, dtype=torch.int64, device="cuda")
    w = torch.eye(D, device="cuda")

    def step(x, positions, delta=None):
        p = positions + (zero if delta is None else delta)
        return (x @ w) * table[p][:, None]

    def inputs(i):
        batch = {"x": torch.full((N, D), 1.0 + i, device="cuda"), "positions": torch.arange(N, device="cuda") + i}
        if i % 2 == 0:  # only multimodal batches have it
            batch["delta"] = torch.full((N,), 3, dtype=torch.int64, device="cuda")
        return batch

    return step, inputs


def bad_late():  # the text-only batch comes first at step 9
    table = torch.arange(64.0, device="cuda")
    zero = torch.zeros(N, dtype=torch.int64, device="cuda")

    def step(x, positions, delta=None):
        p = positions + (zero if delta is None else delta)
        return x * table[p][:, None]

    def inputs(i):
        batch = {"x": torch.full((N, D), 1.0 + i, device="cuda"), "positions": torch.arange(N, device="cuda") + i}
        if i != 9:
            batch["delta"] = torch.full((N,), 3, dtype=torch.int64, device="cuda")
        return batch

    return step, inputs


def good():
    table = torch.arange(64.0, device="cuda")

    def step(x, positions, delta):
        return x * table[positions + delta][:, None]

    def inputs(i):
        d = 3 if i % 2 == 0 else 0
        return {
            "x": torch.full((N, D), 1.0 + i, device="cuda"),
            "positions": torch.arange(N, device="cuda") + i,
            "delta": torch.full((N,), d, dtype=torch.int64, device="cuda"),
        }

    return step, inputs
