"""Second held-out set: adapters by row, state-space and recurrent layers."""

import torch
import torch.nn.functional as F
from torch import nn

SLOTS, WIDTH, RANK, STATE = 3, 8, 2, 4


def _x(i, rows=2):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i)).to("cuda")


def _indices(i):
    return torch.tensor([i % SLOTS, -1 if i % 3 == 0 else 1], device="cuda")


def _stacks():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g).to("cuda") for shape in ((SLOTS, RANK, WIDTH), (SLOTS, WIDTH, RANK))]


class Mixer(nn.Module):
    """One Mamba-like layer: a short convolution's state and a diagonal state, both updated in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.dt = nn.Linear(WIDTH, WIDTH)
        self.log_a = nn.Parameter(torch.randn(WIDTH, STATE) * 0.1)
        self.taps = nn.Parameter(torch.randn(WIDTH, 4) * 0.3)
        self.bc = nn.Linear(WIDTH, 2 * STATE, bias=False)
        self.register_buffer("window", torch.zeros(2, WIDTH, 4))
        self.register_buffer("state", torch.zeros(2, WIDTH, STATE))

    def shift(self, x):
        self.window.copy_(torch.roll(self.window, shifts=-1, dims=-1))
        self.window[:, :, -1] = x
        return F.silu((self.window * self.taps).sum(-1))

    def forward(self, x):
        x, gate = self.projection(x).chunk(2, -1)
        x = self.shift(x)
        step = F.softplus(self.dt(x))
        b, c = self.bc(x).chunk(2, -1)
        self.state.mul_(torch.exp(step.unsqueeze(-1) * -self.log_a.exp()))
        self.state.add_(step.unsqueeze(-1) * b.unsqueeze(1) * x.unsqueeze(-1))
        return (self.state * c.unsqueeze(1)).sum(-1) * F.silu(gate)


class CatMixer(Mixer):
    """The same with the window rebuilt by concatenation."""

    def shift(self, x):
        old = self.window[:, :, 1:]  # expect: CG205|CG206|CG209 @window_by_concatenation
        window = torch.cat([old, x.unsqueeze(-1)], -1)  # expect: CG205|CG206|CG209 optional @window_by_concatenation
        self.window = window  # expect: CG205 optional @window_by_concatenation
        return F.silu((window * self.taps).sum(-1))


class InferenceParams:
    def __init__(self):
        self.seqlen_offset = 0


def _run(model):
    model = model.to("cuda")
    return torch.no_grad()(lambda x: model(x))


def factory_ok_mixer():
    return _run(Mixer()), lambda i: (_x(i),)


def factory_bad_window_by_concatenation():  # hazard: 14
    return _run(CatMixer()), lambda i: (_x(i),)


def factory_quiet_offset_after_prefill():
    """`seqlen_offset` tells prefill from decoding: after the warm-up it is decoding for ever."""
    parameters, mixer = InferenceParams(), Mixer().to("cuda")

    @torch.no_grad()
    def step(x):
        out = mixer(x)
        if parameters.seqlen_offset == 0:
            out = out * 1.0
        parameters.seqlen_offset += 1  # expect: CG210
        return out

    return step, lambda i: (_x(i),)


def factory_bad_offset_as_number():  # hazard: 11
    parameters = InferenceParams()
    decay = torch.full((WIDTH,), 0.9, device="cuda")

    def step(x):
        out = x * decay**parameters.seqlen_offset  # expect: CG202
        parameters.seqlen_offset += 1  # expect: CG210
        return out

    return step, lambda i: (_x(i),)


def factory_bad_prefill_every_third():  # hazard: 10
    """A chunk boundary that the host counts."""
    state = torch.zeros(2, WIDTH, device="cuda")

    class Chunks:
        def __init__(self, size):
            self.size, self.at = size, 0

        def boundary(self):
            self.at = (self.at + 1) % self.size  # expect: CG210
            return self.at == 0

    chunks = Chunks(3)

    def step(x):
        if chunks.boundary():  # expect: CG201
            state.zero_()
        state.add_(x)
        return state * 2

    return step, lambda i: (_x(i),)


def factory_bad_token_shift_by_reference():  # hazard: 14
    """RWKV's token shift: the last input itself is kept."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(2, WIDTH, device="cuda")
            self.mix = torch.full((WIDTH,), 0.5, device="cuda")

        def forward(self, x):
            out = x * self.mix + self.last * (1 - self.mix)  # expect: CG205|CG206|CG209
            self.last = x  # expect: CG205 optional
            return out

    shift = Shift()
    return (lambda x: shift(x)), lambda i: (_x(i),)


def factory_ok_token_shift_copied():
    last = torch.zeros(2, WIDTH, device="cuda")

    def step(x):
        out = torch.lerp(last, x, 0.5)
        last.copy_(x)
        return out

    return step, lambda i: (_x(i),)


def factory_bad_reset_rows_from_initial():  # hazard: 5
    state, initial = torch.zeros(4, WIDTH, device="cuda"), torch.ones(4, WIDTH, device="cuda")

    def step(x, fresh):
        state[fresh] = initial[fresh]  # expect: CG104
        state.add_(x.sum(0))
        return state * 1

    return step, lambda i: (_x(i), torch.arange(4, device="cuda") == i % 4)


def factory_ok_reset_rows_to_zero():
    state = torch.zeros(4, WIDTH, device="cuda")

    def step(x, fresh):
        state[fresh] = 0.0
        state.add_(x.sum(0))
        return state * 1

    return step, lambda i: (_x(i), torch.arange(4, device="cuda") == i % 4)


def factory_bad_no_adapter_shortcut():  # hazard: 9
    a, b = _stacks()
    base = torch.full((WIDTH, WIDTH), 0.1, device="cuda")

    class Layer:
        def __call__(self, x, indices):
            y = x @ base
            if (indices == -1).all():  # expect: CG108
                return y
            rows = indices.clamp_min(0)
            return y + torch.einsum("br,bwr->bw", torch.einsum("bw,brw->br", x, a[rows]), b[rows])

    layer = Layer()
    return (lambda x, indices: layer(x, indices)), lambda i: (_x(i), _indices(i))


def factory_bad_loop_over_adapters():  # hazard: 5
    a, b = _stacks()

    def step(x, indices):
        out = torch.zeros_like(x)
        for slot in indices.unique():  # expect: CG104, CG201 optional
            mask = (indices == slot).unsqueeze(1)
            delta = (x @ a[slot].T) @ b[slot].T  # expect: CG101 optional
            out += torch.where(mask, delta, 0)
        return out

    return step, lambda i: (_x(i), _indices(i).clamp_min(0))


def factory_bad_scaling_of_the_request():  # hazard: 11
    """The adapter of the batch is a host object given to the step."""

    class Adapter:
        def __init__(self, alpha):
            self.scaling = alpha / RANK

    a, b = _stacks()
    adapters = [Adapter(1.0 + n) for n in range(8)]

    def step(x, adapter):
        delta = (x @ a[0].T) @ b[0].T
        return x + delta * adapter.scaling  # expect: CG202

    return step, lambda i: (_x(i), adapters[i % 8])


def factory_bad_adapter_loaded_between():  # hazard: 14
    """The weights of a slot replaced, not overwritten, when a new adapter is activated."""
    a, b = _stacks()
    slots = {"a": a[0].clone(), "b": b[0].clone()}

    def step(x):
        return x + (x @ slots["a"].T) @ slots["b"].T  # expect: CG205|CG206

    def inputs(i):
        slots["a"] = a[i % SLOTS].clone()
        return (_x(i),)

    return step, inputs


def factory_ok_adapter_overwritten_between():
    a, b = _stacks()
    slots = {"a": a[0].clone(), "b": b[0].clone()}

    def step(x):
        return x + (x @ slots["a"].T) @ slots["b"].T

    def inputs(i):
        slots["a"].copy_(a[i % SLOTS])
        return (_x(i),)

    return step, inputs


def factory_ok_gathered_adapters():
    a, b = _stacks()

    def step(x, indices):
        rows = indices.clamp_min(0)
        low = torch.bmm(a[rows], x.unsqueeze(-1))
        delta = torch.bmm(b[rows], low).squeeze(-1)
        return x + delta * (indices >= 0).unsqueeze(1)

    return step, lambda i: (_x(i), _indices(i))


def factory_ok_linear_attention_state():
    state = torch.zeros(2, STATE, WIDTH, device="cuda")

    def step(x):
        key = F.elu(x[:, :STATE]) + 1
        state.mul_(0.95).baddbmm_(key.unsqueeze(2), x.unsqueeze(1))
        return torch.bmm(key.unsqueeze(1), state).squeeze(1)

    return step, lambda i: (_x(i),)
