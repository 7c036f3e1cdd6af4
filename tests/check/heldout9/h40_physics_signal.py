"""Solvers, filters, streaming signal processing, state-space and spiking models."""
import math
from dataclasses import dataclass, field
from typing import Dict

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda"


def rn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class ODEFunc(nn.Module):
    def __init__(self, dim=6, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, dim))

    def forward(self, t, y):
        return self.net(y) - 0.5 * y * (1 + 0.1 * t)


class AdaptiveHeun:
    order = 2

    def __init__(self, func, rtol=1e-2, atol=1e-3):
        self.func, self.rtol, self.atol = func, rtol, atol

    def attempt(self, t, y, dt):
        k1 = self.func(t, y)
        k2 = self.func(t + dt, y + dt * k1)
        y1 = y + dt * 0.5 * (k1 + k2)
        tol = self.atol + self.rtol * torch.maximum(y.abs(), y1.abs())
        ratio = ((dt * 0.5 * (k2 - k1)) / tol).pow(2).mean().sqrt()
        return y1, ratio

    def next_dt(self, dt, ratio):
        return dt * (0.9 * ratio.clamp_min(1e-4) ** (-1 / self.order)).clamp(0.2, 4.0)


class TorchdiffeqLike(AdaptiveHeun):
    @torch.no_grad()
    def integrate(self, y):
        t, dt = torch.zeros((), device=y.device), torch.full((), 0.3, device=y.device)
        while t < 1.0:  # expect: CG108|CG101 @adaptive_heun_while
            dt = torch.minimum(dt, 1.0 - t)
            y1, ratio = self.attempt(t, y, dt)
            if ratio <= 1:  # expect: CG108|CG101 @adaptive_heun_while
                t, y = t + dt, y1
            dt = self.next_dt(dt, ratio)
        return y


class BoundedSteps(AdaptiveHeun):
    """At most `budget` trials; what comes after the end is a step of length zero."""

    budget = 12

    @torch.no_grad()
    def integrate(self, y):
        t, dt = torch.zeros((), device=y.device), torch.full((), 0.3, device=y.device)
        for _ in range(self.budget):
            h = torch.minimum(dt, 1.0 - t)
            y1, ratio = self.attempt(t, y, h)
            accept = ratio <= 1
            y = torch.where(accept, y1, y)
            t = t + h * accept
            dt = self.next_dt(dt, ratio)
        return {"y": y, "t": t}


def factory_bad_adaptive_heun_while():  # hazard: 9
    return TorchdiffeqLike(ODEFunc().to(DEVICE)).integrate, lambda i: (rn(i, 3, 6) * (1 + i),)


def factory_ok_adaptive_heun_masked():  # hazard: 9
    return BoundedSteps(ODEFunc(seed=1).to(DEVICE)).integrate, lambda i: (rn(20 + i, 3, 6) * (1 + i),)


class WaveGrid:
    """Leap-frog on two buffers which change their roles."""

    def __init__(self, n=16, c=0.4):
        x = torch.linspace(-1, 1, n)
        bump = torch.exp(-20 * (x[:, None] ** 2 + x[None] ** 2)).to(DEVICE)
        self.now, self.before = bump.clone(), bump.clone()
        self.c2 = c * c

    def laplacian(self, u):
        return F.conv2d(F.pad(u[None, None], (1, 1, 1, 1), mode="circular"), self.kernel)[0, 0]

    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]

    def advance(self, source):
        nxt = self.before  # the oldest one is written over
        nxt.mul_(-1).add_(self.now, alpha=2).add_(self.laplacian(self.now), alpha=self.c2).add_(source, alpha=0.01)  # expect: CG205 @wave_ping_pong
        self.before, self.now = self.now, nxt  # expect: CG205 optional @wave_ping_pong


class DeviceWaveGrid(WaveGrid):
    def __init__(self, n=16):
        super().__init__(n)
        self.kernel = WaveGrid.kernel.to(DEVICE)


def factory_bad_wave_ping_pong():  # hazard: 14
    grid = DeviceWaveGrid()

    @torch.no_grad()
    def step(source):
        grid.advance(source)
        return grid.now.clone()  # expect: CG205 optional

    return step, lambda i: (rn(40 + i, 16, 16),)


def factory_ok_wave_even_substeps():  # hazard: 14
    grid = DeviceWaveGrid(12)

    @torch.no_grad()
    def step(source):
        for _ in range(4):
            grid.advance(source)
        return grid.now.clone(), grid.now.square().sum()

    return step, lambda i: (rn(60 + i, 12, 12),)


@dataclass
class Clock:
    dt: float = 0.25
    t: float = 0.0

    def tick(self):
        self.t += self.dt
        return self.t


class DrivenOscillators:
    def __init__(self, n, clock):
        self.q, self.p = rn(80, n), rn(81, n)
        self.k = rn(82, n).abs() + 0.5
        self.clock = clock

    def force(self, q, t):
        drive = torch.cos(self.k * t)  # expect: CG202 @driven_oscillators_host_clock
        return drive - self.k * q - 0.1 * q ** 3


def factory_bad_driven_oscillators_host_clock():  # hazard: 11
    system = DrivenOscillators(8, Clock())

    @torch.no_grad()
    def step(kick):
        dt = system.clock.dt
        system.p.add_(system.force(system.q, system.clock.t) + kick, alpha=dt)
        system.q.add_(system.p, alpha=dt)
        system.clock.tick()
        return torch.stack([system.q, system.p])

    return step, lambda i: (0.1 * rn(90 + i, 8),)


class DeviceClock(Clock):
    """t is a tensor; the `+=` of the dataclass goes on working in place."""

    def __init__(self, dt):
        super().__init__(dt, torch.zeros((), device=DEVICE))

    def tick(self):
        self.t.add_(self.dt)
        return self.t


def factory_ok_driven_oscillators_device_clock():  # hazard: 11
    system = DrivenOscillators(8, DeviceClock(0.25))

    @torch.no_grad()
    def step(kick):
        dt = system.clock.dt
        half = system.p + 0.5 * dt * (system.force(system.q, system.clock.t) + kick)
        system.q.add_(half, alpha=dt)
        system.p.copy_(half + 0.5 * dt * system.force(system.q, system.clock.tick()))
        return torch.stack([system.q, system.p]), system.clock.t.clone()

    return step, lambda i: (0.1 * rn(100 + i, 8),)


class VerletList:
    """Lennard-Jones with a neighbour table which is remade each `every` steps."""

    def __init__(self, n=8, k=3, every=4):
        self.x, self.v = rn(110, n, 2) * 2, rn(111, n, 2) * 0.3
        self.k, self.every, self.age = k, every, 0
        self.neighbours = torch.zeros(n, k, dtype=torch.long, device=DEVICE)

    def rebuild(self):
        d = torch.cdist(self.x, self.x) + 1e3 * torch.eye(len(self.x), device=self.x.device)
        self.neighbours.copy_(d.topk(self.k, largest=False).indices)

    def forces(self):
        r = self.x[:, None] - self.x[self.neighbours]
        d2 = r.pow(2).sum(-1, keepdim=True) + 0.5
        return (r * (1 / d2 ** 2 - 0.5 / d2)).sum(1)

    @torch.no_grad()
    def step(self, push):
        if self.age % self.every == 0:  # expect: CG201 @verlet_rebuild_period
            self.rebuild()
        self.age += 1  # expect: CG210 optional @verlet_rebuild_period
        self.v.add_(self.forces() + push, alpha=0.4)
        self.x.add_(self.v, alpha=0.4)
        return self.x.clone(), self.neighbours.clone()


def factory_bad_verlet_rebuild_period():  # hazard: 10
    return VerletList().step, lambda i: (rn(120 + i, 8, 2),)


class BootstrapFilter:
    def __init__(self, n, seed):
        self.particles, self.n = rn(seed, n, 2), n
        self.logw = torch.full((n,), -math.log(n), device=DEVICE)

    def predict(self, eps):
        rot = torch.stack([self.particles[:, 0] - 0.1 * self.particles[:, 1], self.particles[:, 1] + 0.1 * self.particles[:, 0]], -1)
        self.particles.copy_(rot + 0.2 * eps)

    def weigh(self, z):
        self.logw.sub_(0.5 * ((self.particles - z) ** 2).sum(-1) / 0.4)
        self.logw.sub_(torch.logsumexp(self.logw, 0))
        return 1.0 / self.logw.exp().square().sum()

    def systematic(self):
        u = (torch.arange(self.n, device=self.logw.device) + 0.5) / self.n
        return torch.searchsorted(self.logw.exp().cumsum(0), u).clamp_(max=self.n - 1)

    def estimate(self):
        return (self.logw.exp()[:, None] * self.particles).sum(0)


class ESSFilter(BootstrapFilter):
    @torch.no_grad()
    def step(self, z, eps):
        self.predict(eps)
        ess = self.weigh(z)
        if ess < 0.5 * self.n:  # expect: CG108|CG101 @particle_filter_ess
            self.particles.copy_(self.particles[self.systematic()])
            self.logw.fill_(-math.log(self.n))
        return self.estimate(), ess


class MaskedESSFilter(BootstrapFilter):
    @torch.no_grad()
    def step(self, z, eps):
        self.predict(eps)
        ess = self.weigh(z)
        low = ess < 0.5 * self.n
        parents = torch.where(low, self.systematic(), torch.arange(self.n, device=z.device))
        self.particles.copy_(self.particles[parents])
        self.logw.copy_(torch.where(low, torch.full_like(self.logw, -math.log(self.n)), self.logw))
        return self.estimate(), ess


def observation(i):
    return torch.full((2,), 0.2 * i, device=DEVICE), rn(140 + i, 32, 2)


def factory_bad_particle_filter_ess():  # hazard: 9
    return ESSFilter(32, 130).step, observation


def factory_ok_particle_filter_always():  # hazard: 9
    return MaskedESSFilter(32, 131).step, observation


class Kalman(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("F", torch.tensor([[1.0, 0.1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.1], [0, 0, 0, 1]]))
        self.register_buffer("H", torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]]))
        self.register_buffer("Q", 0.05 * torch.eye(4))
        self.register_buffer("R", 0.2 * torch.eye(2))
        self.register_buffer("m", torch.zeros(4))
        self.register_buffer("P", torch.eye(4))

    def inverse(self, S):
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, z):
        m, P = self.F @ self.m, self.F @ self.P @ self.F.T + self.Q
        K = P @ self.H.T @ self.inverse(self.H @ P @ self.H.T + self.R)
        self.m.copy_(m + K @ (z - self.H @ m))
        A = torch.eye(4, device=z.device) - K @ self.H
        self.P.copy_(A @ P @ A.T + K @ self.R @ K.T)
        return self.m.clone(), self.P.diagonal().sum()


class FilterPyKalman(Kalman):
    def inverse(self, S):
        return torch.linalg.inv(S)  # expect: CG105 @kalman_linalg_inv


class AdjugateKalman(Kalman):
    def inverse(self, S):
        (a, b), (c, d) = S.unbind(0)[0].unbind(), S.unbind(0)[1].unbind()
        return torch.stack([torch.stack([d, -b]), torch.stack([-c, a])]) / (a * d - b * c)


def factory_bad_kalman_linalg_inv():  # hazard: 6
    return FilterPyKalman().to(DEVICE), lambda i: (rn(160 + i, 2),)


def factory_ok_kalman_adjugate():  # hazard: 6
    return AdjugateKalman().to(DEVICE), lambda i: (rn(180 + i, 2),)


_WINDOWS: Dict[str, torch.Tensor] = {}


def hann(n, like):
    key = f"{n}_{like.dtype}_{like.device}"
    if key not in _WINDOWS:
        _WINDOWS[key] = torch.hann_window(n).to(dtype=like.dtype, device=like.device)
    return _WINDOWS[key]


def spectrogram(x, n_fft, hop):
    return torch.stft(x, n_fft, hop, n_fft, window=hann(n_fft, x), center=True, return_complex=True)


def factory_ok_multi_resolution_stft_loss():  # hazard: 3
    scales = [(32, 8), (64, 16)]
    torch.manual_seed(2)
    vocoder = nn.Conv1d(1, 1, 9, padding=4).to(DEVICE)
    opt = torch.optim.SGD(vocoder.parameters(), lr=1e-2)

    def step(x, y):
        opt.zero_grad()
        x_hat, loss = vocoder(x[:, None]).squeeze(1), 0.0
        for n_fft, hop in scales:
            a, b = spectrogram(x_hat, n_fft, hop).abs().clamp_min(1e-4), spectrogram(y, n_fft, hop).abs().clamp_min(1e-4)
            loss = loss + (a - b).norm() / b.norm() + F.l1_loss(a.log(), b.log())
        loss.backward()
        opt.step()
        return loss.detach()

    return step, lambda i: (rn(200 + i, 2, 256), rn(210 + i, 2, 256))


class MaskingEnhancer(nn.Module):
    def __init__(self, n_fft=32, hop=8):
        super().__init__()
        torch.manual_seed(3)
        self.n_fft, self.hop = n_fft, hop
        self.gru = nn.Sequential(nn.Linear(n_fft // 2 + 1, 16), nn.ReLU(), nn.Linear(16, n_fft // 2 + 1), nn.Sigmoid())

    @torch.no_grad()
    def forward(self, x):
        spec = spectrogram(x, self.n_fft, self.hop)
        mask = self.gru(spec.abs().transpose(1, 2)).transpose(1, 2)
        return torch.istft(spec * mask, self.n_fft, self.hop, window=hann(self.n_fft, x), length=x.shape[-1])  # expect: CG101 @enhancer_istft


def factory_bad_enhancer_istft():  # hazard: 6
    return MaskingEnhancer().to(DEVICE), lambda i: (rn(220 + i, 2, 128),)


class CausalConv(nn.Module):
    """Streaming convolution: keeps the last samples of what came before."""

    def __init__(self, channels, kernel, dilation, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv1d(channels, channels, kernel, dilation=dilation)
        self.pad = (kernel - 1) * dilation
        self.register_buffer("tail", torch.zeros(2, channels, self.pad), persistent=False)

    def forward(self, x):
        padded = torch.cat([self.tail, x], dim=-1)  # expect: CG205|CG206 @streaming_tail_rebound
        self.keep(padded[..., -self.pad:])
        return x + torch.tanh(self.conv(padded))

    def keep(self, tail):
        self.tail = tail.contiguous()  # expect: CG205 optional @streaming_tail_rebound


class InPlaceCausalConv(CausalConv):
    def keep(self, tail):
        self.tail.copy_(tail)


def factory_bad_streaming_tail_rebound():  # hazard: 14
    stack = nn.Sequential(*(CausalConv(4, 3, d, 230 + d) for d in (1, 2))).to(DEVICE)
    return torch.no_grad()(lambda x: stack(x)), lambda i: (rn(240 + i, 2, 4, 8),)


def factory_ok_streaming_tail_in_place():  # hazard: 14
    stack = nn.Sequential(*(InPlaceCausalConv(4, 3, d, 250 + d) for d in (1, 2))).to(DEVICE)
    return torch.no_grad()(lambda x: stack(x)), lambda i: (rn(260 + i, 2, 4, 8),)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + 10 * v.abs()) ** 2


class LIF(nn.Module):
    """spikingjelly-like: `v` is 0. until the first input gives it a shape."""

    def __init__(self, tau=2.0):
        super().__init__()
        self.tau, self.v = tau, 0.0

    def reset(self):
        self.v = 0.0

    def forward(self, x):
        if isinstance(self.v, float):
            self.v = torch.full_like(x, self.v)
        self.v = self.v + (x - self.v) / self.tau
        s = Spike.apply(self.v - 0.5)
        self.v = self.v * (1 - s.detach())
        return s


def snn(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), LIF(), nn.Linear(24, 4), LIF()).to(DEVICE)


def reset_net(net):
    for m in net.modules():
        if hasattr(m, "reset"):
            m.reset()


def factory_ok_spiking_net_reset_each_step():  # hazard: 14
    net = snn(4)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)

    def step(x, y):
        opt.zero_grad()
        rate = 0.0
        for t in range(5):
            rate = rate + net(x * (0.6 + 0.2 * t))
        loss = F.mse_loss(rate / 5, y)
        loss.backward()
        opt.step()
        reset_net(net)
        return loss.detach()

    return step, lambda i: (rn(280 + i, 6, 8) * 2, rn(290 + i, 6, 4).sigmoid())


class PersistentLIF(nn.Module):
    def __init__(self, n, beta=0.8):
        super().__init__()
        self.beta = beta
        self.state = {"mem": torch.zeros(n, device=DEVICE), "spk": torch.zeros(n, device=DEVICE)}

    def forward(self, cur):
        s = self.state
        mem = self.beta * s["mem"] + cur - s["spk"]  # expect: CG205|CG206|CG209 @snn_state_dict_rebound
        self.state = {"mem": mem, "spk": (mem > 1).float()}  # expect: CG205 optional @snn_state_dict_rebound
        return self.state["spk"], mem


def factory_bad_snn_state_dict_rebound():  # hazard: 14
    torch.manual_seed(5)
    fc, lif = nn.Linear(8, 16).to(DEVICE), PersistentLIF(16)

    @torch.no_grad()
    def step(x):
        spikes, mem = lif(fc(x))  # expect: CG205 optional
        return {"spikes": spikes, "mem": mem}

    return step, lambda i: (rn(300 + i, 8) * 3,)


@dataclass
class InferenceParams:
    seqlen_offset: int = 0
    states: dict = field(default_factory=dict)


class SSMLayer(nn.Module):
    """Diagonal recurrence with a short convolution, as Mamba's step()."""

    def __init__(self, idx, dim=8, n=4, width=3):
        super().__init__()
        torch.manual_seed(310 + idx)
        self.idx, self.width = idx, width
        self.in_proj, self.bc = nn.Linear(dim, dim), nn.Linear(dim, 2 * n)
        self.conv_w = nn.Parameter(torch.randn(dim, width) * 0.4)
        self.log_a = nn.Parameter(torch.rand(dim, n))
        self.dim, self.n = dim, n

    def allocate(self, batch):
        return torch.zeros(batch, self.dim, self.width, device=DEVICE), torch.zeros(batch, self.dim, self.n, device=DEVICE)

    def forward(self, x, params):
        if self.idx not in params.states:
            params.states[self.idx] = self.allocate(x.shape[0])
        conv, ssm = params.states[self.idx]
        u = self.in_proj(x)
        conv.copy_(conv.roll(-1, dims=-1))
        conv[:, :, -1] = u
        u = F.silu((conv * self.conv_w).sum(-1))
        b, c = self.bc(u).chunk(2, -1)
        dt = F.softplus(u)
        ssm.copy_(ssm * torch.exp(-dt[..., None] * self.log_a.exp()) + dt[..., None] * u[..., None] * b[:, None])
        return x + (ssm * c[:, None]).sum(-1)


class SSM(nn.Module):
    def __init__(self, positional):
        super().__init__()
        self.layers = nn.ModuleList(SSMLayer(i) for i in range(2))
        self.positional = positional

    def position(self, x, params):
        freq = torch.arange(x.shape[-1], device=x.device) / x.shape[-1]
        return torch.sin(params.seqlen_offset * freq)  # expect: CG202 @ssm_seqlen_offset

    @torch.no_grad()
    def forward(self, x, params):
        if self.positional:
            x = x + self.position(x, params)
        for layer in self.layers:
            x = layer(x, params)
        if self.positional:
            params.seqlen_offset += 1  # expect: CG210 optional @ssm_seqlen_offset
        return x


def decode(positional):
    model, params = SSM(positional).to(DEVICE), InferenceParams()
    return lambda x: model(x, params)


def factory_bad_ssm_seqlen_offset():  # hazard: 11
    return decode(True), lambda i: (rn(320 + i, 2, 8),)


def factory_ok_ssm_states_in_place():  # hazard: 11
    return decode(False), lambda i: (rn(340 + i, 2, 8),)
