"""Hazards 14 and 15: storages that are replaced or freed while the graph still refers to them."""

import torch
from torch import nn


def _inputs(i):
    return (torch.full((4,), 1.0 + i, device="cuda"),)


def factory_bad_rebound_state():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x * 0.1  # expect: CG205
            return self.mean + 0

    return Average().to("cuda"), _inputs


def factory_bad_previous_hidden():
    state = {"h": torch.zeros(4, device="cuda")}

    def step(x):
        h = 0.5 * state["h"] + x  # expect: CG205|CG209
        state["h"] = h
        return h * 2

    return step, _inputs


def factory_bad_parameter_swapped():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to("cuda")

    @torch.no_grad()
    def step(x):
        return layer(x)  # expect: CG205|CG206

    def inputs(i):
        layer.weight = nn.Parameter(torch.full((4, 4), 0.1 * (i + 1), device="cuda"))
        return _inputs(i)

    return step, inputs


def factory_bad_data_swapped():
    layer = nn.Linear(4, 4, bias=False).to("cuda")

    @torch.no_grad()
    def step(x):
        return layer(x)  # expect: CG205|CG206

    def inputs(i):
        layer.weight.data = torch.full((4, 4), 0.1 * (i + 1), device="cuda")
        return _inputs(i)

    return step, inputs


def factory_bad_stage_resized():
    """As a residual-stage buffer did: registered at one size, replaced by another at the first calls."""

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(1, device="cuda"))
            self.calls = 0

        def forward(self, x):
            self.calls += 1  # expect: CG210
            self.codes = torch.full((4,), 0.5, device="cuda") * self.calls  # expect: CG202
            return x + self.codes

    return Stage(), _inputs


def factory_bad_batch_object():
    """The caller passes an object: its tensor is no input that anyone copies, and dies after the step."""

    class Batch:
        def __init__(self, x):
            self.x = x

    def step(batch):
        return batch.x * 2  # expect: CG205|CG206

    return step, lambda i: (Batch(torch.full((4,), 1.0 + i, device="cuda")),)


def factory_bad_freed_queue():
    queue = [torch.full((4,), float(i), device="cuda") for i in range(16)]

    def step(x):
        bias = queue.pop()  # expect: CG210
        return x + bias  # expect: CG205|CG206

    return step, _inputs


def factory_bad_scale_set_to_none():
    """As a linear layer did whose scale buffers were dropped after allocation and made again on demand."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(4, device="cuda")

        def forward(self, x):
            if self.scale is None:
                self.scale = x.abs() + 1
            y = x / self.scale  # expect: CG205|CG209
            self.scale = y + 2
            return y + 0

    return Scaled(), _inputs


def factory_ok_in_place():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x * 0.1)
            return self.mean + 0

    return Average().to("cuda"), _inputs


def factory_ok_copied_state():
    state = torch.zeros(4, device="cuda")

    def step(x):
        state.copy_(torch.tanh(state + x))
        return state * 2

    return step, _inputs


def factory_ok_weights_updated_in_place():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to("cuda")

    @torch.no_grad()
    def step(x):
        return layer(x)

    def inputs(i):
        with torch.no_grad():
            layer.weight.fill_(0.1 * (i + 1))
        return _inputs(i)

    return step, inputs


def factory_ok_nested_inputs():
    def step(batch):
        return batch["x"] * 2 + batch["rest"][0]

    return step, lambda i: ({"x": _inputs(i)[0], "rest": [_inputs(i)[0]]},)


def factory_ok_workspace_made_inside():
    def step(x):
        workspace = torch.zeros(4, device="cuda")
        workspace += x
        return workspace * 2

    return step, _inputs
