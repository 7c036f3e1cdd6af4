"""Held out: written after the simulation, which was not changed for it. Layers, quantization, state."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def factory_bad_scale_from_amax():
    def quantize(x):
        amax = float(x.abs().amax())  # expect: CG101
        return (x * (127 / amax)).round() * (amax / 127)  # expect: CG202

    def step(x):
        return quantize(x)

    return step, lambda i: (torch.linspace(-1, 1, 16, device="cuda") * (i + 1),)


def factory_bad_numpy_schedule():
    schedule = np.linspace(1.0, 0.1, 16)
    state = {"i": 0}

    def step(x):
        value = schedule[state["i"]]
        state["i"] += 1  # expect: CG210
        return x * float(value)  # expect: CG202

    return step, lambda i: (torch.ones(4, device="cuda") * (i + 1),)


def factory_bad_rotary_table_on_demand():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 0
            self.table = None

        def forward(self, x):
            self.seen += 1  # expect: CG210
            if self.table is None or self.table.shape[0] < self.seen + 1:  # expect: CG201 optional
                self.table = torch.arange(self.seen + 1, device=x.device).float()  # expect: CG202|CG205
            return x + self.table.sum()  # expect: CG205|CG208 optional

    return Rotary(), lambda i: (torch.ones(4, device="cuda") * i,)


def factory_bad_linear_state():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(4, 4, device="cuda")

        def forward(self, k, v):
            self.state = self.state * 0.9 + torch.outer(k, v)  # expect: CG205
            return self.state.sum(0)

    return Recurrent(), lambda i: (torch.ones(4, device="cuda") * (i + 1), torch.arange(4.0, device="cuda"))


def factory_bad_position_bias_list():
    biases = [0.1, 0.2, 0.3, 0.4]

    def step(scores):
        return scores + scores.new_tensor(biases)  # expect: CG102

    return step, lambda i: (torch.ones(4, device="cuda") * i,)


def factory_bad_expert_sizes():
    weights = torch.arange(32.0, device="cuda").view(4, 8)

    def step(x, chosen):
        counts = torch.bincount(chosen, minlength=4)  # expect: CG104|CG105
        parts = torch.split(x, counts.tolist())  # expect: CG101, CG202 optional
        return torch.cat([p @ w for p, w in zip(parts, weights, strict=True)])  # expect: CG208 optional

    return step, lambda i: (torch.ones(4, 8, device="cuda") * (i + 1), torch.tensor([0, 1, 2, 3], device="cuda"))


def factory_bad_warmup_counter():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:  # expect: CG108
                return x
            return self.linear(x)

    torch.manual_seed(0)
    gate = Gate().to("cuda")

    @torch.no_grad()
    def step(x):
        return gate(x)

    return step, lambda i: (torch.ones(2, 4, device="cuda") * i,)


def factory_bad_dropout_rate():
    state = {"rate": 0.0}

    def step(x):
        state["rate"] += 0.1  # expect: CG210
        return x * (1 - state["rate"])  # expect: CG202

    return step, lambda i: (torch.ones(4, device="cuda"),)


def factory_bad_tensor_times_host_tensor():
    step_number = torch.zeros(())

    def step(x):
        step_number.add_(1)
        return x * step_number + torch.sqrt(step_number).to("cuda")  # expect: CG203, CG102

    return step, lambda i: (torch.ones(4, device="cuda"),)


def factory_bad_inverse_rotation():
    def step(basis, x):
        return torch.linalg.inv(basis) @ x  # expect: CG105|CG101

    return step, lambda i: (torch.eye(4, device="cuda") * (i + 1), torch.ones(4, device="cuda"))


def factory_ok_determinant_sign():
    def step(a):
        return torch.where(torch.linalg.det(a) > 0, a, -a)

    return step, lambda i: (torch.eye(3, device="cuda") * (i + 1),)


def factory_ok_histogram():
    def step(x):
        return torch.histc(x, bins=4, min=0.0, max=8.0)

    return step, lambda i: (torch.arange(8.0, device="cuda") * (i + 1) % 8,)


def factory_ok_running_amax():
    amax = torch.ones(1, device="cuda")

    def step(x):
        torch.maximum(amax, x.abs().amax(), out=amax)
        return (x * (127 / amax)).round() * (amax / 127)

    return step, lambda i: (torch.linspace(-1, 1, 16, device="cuda") * (i + 1),)


def factory_ok_group_norm_bf16():
    torch.manual_seed(0)
    norm = nn.LayerNorm(8).to("cuda", torch.bfloat16)
    proj = nn.Linear(8, 8).to("cuda", torch.bfloat16)

    @torch.no_grad()
    def step(x):
        return F.gelu(proj(norm(x.to(torch.bfloat16)))).float()

    return step, lambda i: (torch.linspace(-1, 1, 16, device="cuda").view(2, 8) * (i + 1),)


def factory_ok_unpack_bits():
    shifts = torch.arange(8, device="cuda", dtype=torch.int32)

    def step(packed):
        return ((packed.unsqueeze(-1) >> shifts) & 1).float().sum(-1)

    return step, lambda i: (torch.tensor([i, 255 - i, 17], device="cuda", dtype=torch.int32),)


def factory_ok_ring_buffer():
    ring = torch.zeros(4, 2, device="cuda")
    head = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step(x):
        ring.index_copy_(0, head, x)
        head.add_(1).remainder_(4)
        return ring.mean(0)

    return step, lambda i: (torch.full((1, 2), float(i), device="cuda"),)


def factory_ok_gumbel():
    def step(logits):
        noise = torch.empty_like(logits).exponential_()
        return (logits.softmax(-1) / noise).argmax(-1)

    return step, lambda i: (torch.arange(8.0, device="cuda").view(2, 4) * (i + 1),)


def factory_ok_einsum_attention():
    torch.manual_seed(0)
    w = torch.randn(3, 8, 8, device="cuda")

    def step(x):
        q, k, v = torch.einsum("td,ndk->ntk", x, w)
        causal = torch.ones(4, 4, dtype=torch.bool, device="cuda").tril()
        scores = (q @ k.t() / 8**0.5).masked_fill(~causal, float("-inf"))
        return scores.softmax(-1) @ v

    return step, lambda i: (torch.linspace(-1, 1, 32, device="cuda").view(4, 8) * (i + 1),)


def factory_ok_count_in_python_unused():
    """Host state that is read by nobody in the step."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.name = "block"

        def forward(self, x):
            label = f"{self.name}-{x.shape[0]}"
            return self.linear(x) if label else x

    torch.manual_seed(0)
    block = Block().to("cuda")

    @torch.no_grad()
    def step(x):
        return block(x)

    return step, lambda i: (torch.ones(2, 4, device="cuda") * i,)


def factory_ok_dataclass_config():
    from dataclasses import dataclass

    @dataclass
    class Config:
        width: int = 4
        eps: float = 1e-6

    config = Config()

    def step(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.eps) * config.width

    return step, lambda i: (torch.ones(2, config.width, device="cuda") * (i + 1),)


def factory_ok_out_of_place_views():
    state = torch.zeros(2, 8, device="cuda")

    def step(x):
        left, right = state.chunk(2, dim=1)
        left.add_(x)
        right.mul_(0.5).add_(left)
        return state.view(-1).clone().unflatten(0, (4, 4)).transpose(0, 1)

    return step, lambda i: (torch.ones(2, 4, device="cuda") * i,)
