"""Serving runtime: late LoRA adapters, weight swaps, autotuners, early exit, steering hooks, delayed scaling."""
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 24
B, D = 4, 16


def rnd(index, *shape, salt=0):
    g = torch.Generator().manual_seed(7919 * salt + index)
    return torch.randn(*shape, generator=g).to("cuda")


def weight(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) / D**0.5).to("cuda")


# --------------------------------------------------------------- LoRA adapters first used in a late batch

class LoraManager:
    FIRST_USE = {1: 0, 2: 13, 3: 18}

    def __init__(self):
        self.base = weight(41, D, D)
        self.a = {s: weight(42 + s, D, 2) for s in self.FIRST_USE}
        self.b = {s: weight(52 + s, 2, D) for s in self.FIRST_USE}
        self.active = []

    def ids_for(self, index):
        ids = [1, 0, 1, 0]
        if index >= 13:
            ids[1] = 2
        if index >= 18:
            ids[2] = 3
        self.active = sorted({i for i in ids if i})
        return torch.tensor([[i] for i in ids]).to("cuda")

    def apply(self, x, ids):
        y = x @ self.base
        for slot in self.active:  # expect: CG201 @late_adapter
            y = y + (ids == slot) * (3.0 * (x @ self.a[slot]) @ self.b[slot])
        return y


class LoraSlots:
    """Slots are zero until an adapter is loaded into them; rows gather their slot."""

    def __init__(self):
        self.base = weight(41, D, D)
        self.a = torch.zeros(4, D, 2, device="cuda")
        self.b = torch.zeros(4, 2, D, device="cuda")
        self.loaded = set()

    def load(self, slot):
        if slot in self.loaded:
            return
        self.a[slot].copy_(weight(42 + slot, D, 2))
        self.b[slot].copy_(weight(52 + slot, 2, D))
        self.loaded.add(slot)

    def apply(self, x, ids):
        rows = ids[:, 0]
        delta = torch.bmm(torch.bmm(x[:, None], self.a[rows]), self.b[rows])
        return x @ self.base + 3.0 * delta[:, 0]


def factory_bad_late_adapter():
    mgr = LoraManager()

    def step(x, ids):
        return mgr.apply(x, ids)

    def inputs(index):
        return rnd(index, B, D, salt=1), mgr.ids_for(index)

    return step, inputs


def factory_ok_adapter_slots():
    slots = LoraSlots()

    def step(x, ids):
        return slots.apply(x, ids)

    def inputs(index):
        ids = [1, 2 if index >= 13 else 0, 3 if index >= 18 else 1, 0]
        for slot in ids:
            if slot:
                slots.load(slot)
        return rnd(index, B, D, salt=1), torch.tensor([[i] for i in ids]).to("cuda")

    return step, inputs


# --------------------------------------------------------------- weights refreshed by the trainer (RL rollouts)

class Rollout(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(weight(61, D, D), requires_grad=False)
        self.version = 0
        self.retired = []

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight))  # expect: CG205 @weights_rebound

    def rebind(self, fresh):
        self.retired.append(self.weight)
        self.weight = nn.Parameter(fresh, requires_grad=False)  # expect: CG205 optional @weights_rebound
        self.version += 1

    def load_in_place(self, fresh):
        self.weight.data.copy_(fresh)
        self.version += 1


def factory_bad_weights_rebound():
    policy = Rollout()

    def step(x):
        return policy(x)

    def inputs(index):
        if index >= 10 and policy.version == 0:
            policy.rebind(weight(62, D, D))
        return (rnd(index, B, D, salt=2),)

    return step, inputs


def factory_ok_weights_in_place():
    policy = Rollout()

    def step(x):
        return policy(x)

    def inputs(index):
        if index >= 10 and policy.version == 0:
            policy.load_in_place(weight(62, D, D))
        return (rnd(index, B, D, salt=2),)

    return step, inputs


# --------------------------------------------------------------- autotuner

def exact_mlp(x, w):
    return F.gelu(x @ w)


def coarse_mlp(x, w):
    """Quantised weights and a cheap activation: what the tuner prefers for a loaded server."""
    h = x @ (torch.round(w * 4) / 4)
    return h * torch.sigmoid(1.702 * h)


class Autotuner:
    def __init__(self):
        self.table = {}
        self.stats = Counter()

    def tune(self, key):
        self.table[key] = coarse_mlp if key[-1] >= 2 else exact_mlp
        return self.table[key]

    def loaded(self, x, w, running):
        key = (x.shape[-1], running // 16)  # expect: CG201 optional @autotune_new_key
        impl = self.table.get(key)
        if impl is None:  # expect: CG201|CG307 @autotune_new_key
            impl = self.tune(key)
        return impl(x, w)  # expect: CG201 optional @autotune_new_key

    def by_shape(self, x, w, running):
        key = (x.shape[0], x.shape[-1], 0)
        self.stats[running // 16] += 1
        impl = self.table.get(key)
        if impl is None:
            impl = self.tune(key)
        return impl(x, w)


class Server:
    def __init__(self):
        self.running = 0

    def tick(self, index):
        self.running = 20 + (index // 6) * 6


def factory_bad_autotune_new_key():
    tuner, server, w = Autotuner(), Server(), weight(63, D, D)

    def step(x):
        return tuner.loaded(x, w, server.running)

    def inputs(index):
        server.tick(index)
        return (rnd(index, B, D, salt=3),)

    return step, inputs


def factory_ok_autotune_by_shape():
    tuner, server, w = Autotuner(), Server(), weight(63, D, D)

    def step(x):
        return tuner.by_shape(x, w, server.running)

    def inputs(index):
        server.tick(index)
        return (rnd(index, B, D, salt=3),)

    return step, inputs


# --------------------------------------------------------------- early exit under load

class ExitController:
    def __init__(self, layers):
        self.exit_after = None
        self.depth = torch.full((), layers, device="cuda")

    def load_changed(self, index):
        if 10 <= index < 20:
            self.exit_after = 1
            self.depth.fill_(2)
        else:
            self.exit_after = None
            self.depth.fill_(4)


class ExitStack:
    def __init__(self):
        self.layers = [weight(70 + i, D, D) for i in range(4)]
        self.ctl = ExitController(len(self.layers))

    def run_break(self, h):
        for i, w in enumerate(self.layers):
            h = h + torch.tanh(h @ w)
            if self.ctl.exit_after is not None and i >= self.ctl.exit_after:  # expect: CG201 @early_exit
                break
        return h

    def run_masked(self, h):
        for i, w in enumerate(self.layers):
            h = torch.where(self.ctl.depth > i, h + torch.tanh(h @ w), h)
        return h


def factory_bad_early_exit():
    stack = ExitStack()

    def step(x):
        return stack.run_break(x)

    def inputs(index):
        stack.ctl.load_changed(index)
        return (rnd(index, B, D, salt=4),)

    return step, inputs


def factory_ok_exit_masked():
    stack = ExitStack()

    def step(x):
        return stack.run_masked(x)

    def inputs(index):
        stack.ctl.load_changed(index)
        return (rnd(index, B, D, salt=4),)

    return step, inputs


# --------------------------------------------------------------- activation steering through hooks

def steered_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D)).to("cuda").requires_grad_(False)


def factory_bad_hook_registered_late():
    net = steered_net(80)
    direction = weight(81, D) * 4
    handles = []

    def steer(module, args, output):
        return output + direction

    def client_enables_steering(index):
        if index >= 8 and not handles:
            handles.append(net[0].register_forward_hook(steer))

    def step(x):
        return net(x)  # expect: CG201|CG311

    def inputs(index):
        client_enables_steering(index)
        return (rnd(index, B, D, salt=5),)

    return step, inputs


def factory_ok_hook_with_buffer():
    net = steered_net(80)
    direction = weight(81, D) * 4
    steering = torch.zeros(D, device="cuda")
    net[0].register_forward_hook(lambda module, args, output: output + steering)
    enabled = []

    def client_enables_steering(index):
        if index >= 8 and not enabled:
            enabled.append("client-7")
            steering.copy_(direction)

    def step(x):
        return net(x)

    def inputs(index):
        client_enables_steering(index)
        return (rnd(index, B, D, salt=5),)

    return step, inputs


# --------------------------------------------------------------- delayed scaling, refreshed every K steps

class AmaxScaler:
    INTERVAL = 8

    def __init__(self):
        self.amax = torch.zeros(1, device="cuda")
        self.scale = torch.full((1,), 2.0, device="cuda")
        self.calls = 0
        self.tick = torch.zeros(1, dtype=torch.long, device="cuda")
        self.lines = []

    def track(self, x):
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax()))

    def fake_quant(self, x):
        return torch.round(x * self.scale).clamp(-15, 15) / self.scale

    def interval_refresh(self, x):
        out = self.fake_quant(x)
        self.track(x)
        self.calls += 1  # expect: CG210 optional @scale_interval
        if not self.calls % self.INTERVAL:  # expect: CG201 @scale_interval
            self.scale.copy_(15.0 / self.amax)
            self.amax.zero_()
        return out

    def device_refresh(self, x):
        out = self.fake_quant(x)
        self.track(x)
        self.tick += 1
        due = self.tick % self.INTERVAL == 0
        self.scale.copy_(torch.where(due, 15.0 / self.amax, self.scale))
        self.amax.copy_(self.amax * ~due)
        self.calls += 1
        if not self.calls % self.INTERVAL:
            self.lines.append(f"call {self.calls}: scales refreshed, next in {self.INTERVAL}")
        return out


def factory_bad_scale_interval():
    scaler = AmaxScaler()

    def step(x):
        return scaler.interval_refresh(x)

    def inputs(index):
        return (rnd(index, B, D, salt=6) * (1 + index / 8),)

    return step, inputs


def factory_ok_scale_device_logged():
    scaler = AmaxScaler()

    def step(x):
        return scaler.device_refresh(x)

    def inputs(index):
        return (rnd(index, B, D, salt=6) * (1 + index / 8),)

    return step, inputs
