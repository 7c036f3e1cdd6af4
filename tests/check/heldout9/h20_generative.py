"""Diffusion, quantizers, flows, contrastive queues."""
import random
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEV = "cuda"


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEV)


class Denoiser(nn.Module):
    def __init__(self, dim=16, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.time = nn.Linear(1, dim)
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))

    def forward(self, x, t):
        return self.net(x + self.time(t.reshape(-1, 1).expand(x.shape[0], 1)))


@dataclass
class SchedulerOutput:
    prev_sample: torch.Tensor
    pred_original_sample: Optional[torch.Tensor] = None


class EulerDiscrete:
    """After diffusers: the sigmas are kept on the CPU "to avoid too much CPU/GPU communication"."""

    def __init__(self, steps=10, smin=0.05, smax=4.0, rho=7.0):
        ramp = np.linspace(0, 1, steps)
        sigmas = (smax ** (1 / rho) + ramp * (smin ** (1 / rho) - smax ** (1 / rho))) ** rho
        self.sigmas = torch.from_numpy(np.append(sigmas, 0.0).astype(np.float32)).to("cpu")
        self.timesteps = torch.from_numpy((0.25 * np.log(sigmas)).astype(np.float32)).to(DEV)
        self._step_index = None

    def scale_model_input(self, sample):
        if self._step_index is None:
            self._step_index = 0
        sigma = self.sigmas[self._step_index]
        return sample / (sigma ** 2 + 1) ** 0.5  # expect: CG203|CG202 @euler_cpu_sigmas

    def step(self, eps, sample):
        sigma, sigma_next = self.sigmas[self._step_index], self.sigmas[self._step_index + 1]
        pred_original = sample - sigma * eps  # expect: CG203|CG202 optional @euler_cpu_sigmas
        prev = sample + eps * (sigma_next - sigma)  # expect: CG203|CG202 optional @euler_cpu_sigmas
        self._step_index += 1  # expect: CG210 optional @euler_cpu_sigmas
        return SchedulerOutput(prev, pred_original)


def factory_bad_euler_cpu_sigmas():  # hazard: 12
    model, scheduler = Denoiser().to(DEV), EulerDiscrete()

    @torch.no_grad()
    def step(x, t):
        eps = model(scheduler.scale_model_input(x), t)
        return scheduler.step(eps, x)

    return step, lambda i: (noise(i, 4, 16), scheduler_time(i))


def scheduler_time(i):
    return torch.full((1,), 1.0 - 0.1 * i, device=DEV)


class DeviceSampler(nn.Module):
    """The same table, read by a counter that lives on the device."""

    def __init__(self, model, steps=10):
        super().__init__()
        self.model = model
        sigmas = torch.linspace(3.0, 0.0, steps + 1)
        self.register_buffer("sigmas", sigmas)
        self.register_buffer("cursor", torch.zeros(1, dtype=torch.long))
        self.register_buffer("latent", torch.randn(4, 16, generator=torch.Generator().manual_seed(5)) * 3.0)

    def current(self, offset=0):
        return self.sigmas.index_select(0, (self.cursor + offset).clamp_(max=self.sigmas.numel() - 1))

    @torch.no_grad()
    def forward(self, cond):
        s, s_next = self.current(), self.current(1)
        x = self.latent / torch.sqrt(s * s + 1)
        d = self.model(x + 0.1 * cond, s.log1p())
        mid = self.latent + d * (s_next - s)
        d2 = self.model(mid / torch.sqrt(s_next ** 2 + 1) + 0.1 * cond, s_next.log1p())
        heun = self.latent + 0.5 * (d + d2) * (s_next - s)
        self.latent.copy_(torch.where(s_next > 0, heun, mid))
        self.cursor.add_(1)
        return self.latent.clone()


def factory_ok_heun_device_cursor():  # hazard: 11
    return DeviceSampler(Denoiser(seed=1)).to(DEV), lambda i: (noise(40 + i, 4, 16),)


@dataclass
class GuidanceConfig:
    scale: float = 3.0
    lo: float = 0.3
    hi: float = 1.6

    def active(self, sigma):
        return self.lo < sigma <= self.hi


def factory_bad_cfg_limited_interval():  # hazard: 10
    model, guidance = Denoiser(seed=2).to(DEV), GuidanceConfig()
    null = noise(77, 1, 16)

    def denoise(x, cond, sigma):
        t = torch.full((1,), float(np.log(sigma)), device=x.device)  # expect: CG202 optional
        if guidance.active(sigma):  # expect: CG201
            both = model(torch.cat([x + cond, x + null.expand_as(cond)]), t)  # expect: CG201 optional
            c, u = both.chunk(2)
            return u + guidance.scale * (c - u)
        return model(x + cond, t)  # expect: CG201 optional

    @torch.no_grad()
    def step(x, cond, sigma: float):
        d = denoise(x, cond, sigma)
        return x - 0.3 * d * sigma  # expect: CG202

    sigmas = [2.0, 1.8, 1.5, 1.0, 0.5, 0.2]
    return step, lambda i: (noise(60 + i, 4, 16), noise(70 + i, 4, 16), sigmas[i % 6])


class Ladder:
    """A whole sampler in one step: floats of a table that was made once, so the same for each call."""

    def __init__(self, model, n=4):
        self.model = model
        self.alphas = np.cos(np.linspace(0.05, 1.4, n + 1)) ** 2
        self.order = list(reversed(range(n)))
        self.times = [torch.full((1,), float(i), device=DEV) for i in range(n)]

    @torch.no_grad()
    def sample(self, x, cond, scale):
        for i in self.order:
            a, a_prev = float(self.alphas[i + 1]), float(self.alphas[i])
            c, u = self.model(torch.cat([x + cond, x]), self.times[i]).chunk(2)
            w = scale if i % 2 == 0 else torch.ones_like(scale)
            eps = u + w[:, None] * (c - u)
            rescale = c.std(dim=1, keepdim=True) / eps.std(dim=1, keepdim=True).clamp_min(1e-4)
            eps = eps * (0.7 * rescale + 0.3)
            x0 = (x - (1 - a) ** 0.5 * eps) / a ** 0.5
            x = a_prev ** 0.5 * x0.clamp(-3, 3) + (1 - a_prev) ** 0.5 * eps
        return x


def factory_ok_whole_ddim_loop():  # hazard: 11
    ladder = Ladder(Denoiser(seed=3).to(DEV))
    return ladder.sample, lambda i: (noise(80 + i, 3, 16), noise(90 + i, 3, 16), torch.full((3,), 1.0 + 0.5 * i, device=DEV))


def factory_bad_ancestral_own_generator():  # hazard: 21
    model = Denoiser(seed=4).to(DEV)
    generator = torch.Generator(device=DEV)
    generator.manual_seed(11)

    def noise_like(x):
        return torch.empty_like(x).normal_(generator=generator)  # expect: CG301

    @torch.no_grad()
    def step(x, sigma):
        denoised = x - sigma * model(x, sigma.log())
        up = 0.5 * sigma
        down = (sigma ** 2 - up ** 2).sqrt()
        x = x + (x - denoised) / sigma * (down - sigma)
        return x + noise_like(x) * up

    return step, lambda i: (noise(110 + i, 4, 16), torch.full((1,), 2.0 - 0.3 * i, device=DEV))


class EMACodebook(nn.Module):
    def __init__(self, size=12, dim=8, decay=0.8, threshold=0.3, seed=0):
        super().__init__()
        embed = torch.randn(size, dim, generator=torch.Generator().manual_seed(seed))
        embed[-2:] += 50.0
        self.decay, self.threshold, self.size = decay, threshold, size
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(size))

    def quantize(self, x):
        dist = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed.t() + self.embed.pow(2).sum(1)
        return dist.argmin(dim=-1)

    def ema_update(self, x, codes):
        onehot = F.one_hot(codes, num_classes=self.size).type(x.dtype)
        self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(onehot.t() @ x, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        smoothed = (self.cluster_size + 1e-5) / (n + self.size * 1e-5) * n
        self.embed.copy_(self.embed_avg / smoothed[:, None])

    def expire(self, x):
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, x):
        codes = self.quantize(x)
        quantized = F.embedding(codes, self.embed)
        self.ema_update(x, codes)
        self.expire(x)
        return quantized, codes


class ReplacingCodebook(EMACodebook):
    def replace(self, samples, mask):
        picked = samples[: self.size]
        self.embed.data.copy_(torch.where(mask[..., None], picked, self.embed))

    def expire(self, x):
        expired = self.cluster_size < self.threshold
        if not torch.any(expired):  # expect: CG108|CG101 @vq_expire_codes
            return
        self.replace(x, expired)


class RestartingCodebook(EMACodebook):
    """Dead codes take the batch's first rows: always computed, kept by a mask."""

    def expire(self, x):
        dead = (self.cluster_size < self.threshold)[:, None]
        fresh = x[: self.size]
        self.embed.copy_(torch.where(dead, fresh, self.embed))
        self.embed_avg.copy_(torch.where(dead, fresh * self.threshold, self.embed_avg))
        self.cluster_size.clamp_(min=self.threshold)


def factory_bad_vq_expire_codes():  # hazard: 9
    return ReplacingCodebook().to(DEV), lambda i: (noise(130 + i, 24, 8),)


def factory_ok_vq_masked_restart():  # hazard: 9
    return RestartingCodebook(seed=3).to(DEV), lambda i: (noise(150 + i, 24, 8),)


class LazyCodebook(nn.Module):
    """Encodec's: `inited` is a buffer, so that it comes with the checkpoint."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("inited", torch.zeros(1))
        self.register_buffer("embed", torch.zeros(size, dim))

    def init_embed_(self, x):
        if self.inited:  # expect: CG101|CG108 @rvq_inited_buffer
            return
        self.embed.copy_(x[: self.embed.shape[0]])
        self.inited.fill_(1)

    def forward(self, x):
        self.init_embed_(x)
        codes = torch.cdist(x, self.embed).argmin(-1)
        return self.embed[codes], codes


class ResidualVQ(nn.Module):
    def __init__(self, n_q, size, dim):
        super().__init__()
        self.layers = nn.ModuleList(LazyCodebook(size, dim) for _ in range(n_q))

    @torch.no_grad()
    def forward(self, x):
        residual, out, codes = x, torch.zeros_like(x), []
        for layer in self.layers:
            q, c = layer(residual)
            residual, out = residual - q, out + q
            codes.append(c)
        return out, torch.stack(codes)


def factory_bad_rvq_inited_buffer():  # hazard: 1
    return ResidualVQ(3, 6, 8).to(DEV), lambda i: (noise(170 + i, 10, 8),)


class MaskedRVQ(nn.Module):
    """Quantizer dropout whose depth is a tensor (one for each row): the loop always runs to the end."""

    def __init__(self, n_q=4, size=8, dim=8):
        super().__init__()
        g = torch.Generator().manual_seed(17)
        self.books = nn.ParameterList(torch.randn(size, dim, generator=g) * 0.7 ** k for k in range(n_q))

    def forward(self, x, depth):
        residual, out, losses = x, torch.zeros_like(x), []
        for k, book in enumerate(self.books):
            keep = (depth > k)[:, None]
            q = book[torch.cdist(residual, book).argmin(-1)].masked_fill(~keep, 0.0)
            losses.append(F.mse_loss(q, residual.detach()))
            residual, out = residual - q.detach(), out + q
        return x + (out - x).detach(), torch.stack(losses).sum()


def factory_ok_rvq_masked_depth():  # hazard: 10
    model = MaskedRVQ().to(DEV)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x, depth):
        opt.zero_grad()
        y, loss = model(x, depth)
        loss.backward()
        opt.step()
        return y.detach(), loss.detach()

    return step, lambda i: (noise(190 + i, 12, 8), (torch.arange(12) * (i + 1) % 4 + 1).to(DEV))


class LFQ(nn.Module):
    """Lookup-free quantizer: signs packed to an integer."""

    def __init__(self, dim, bits):
        super().__init__()
        torch.manual_seed(19)
        self.proj = nn.Linear(dim, bits)
        self.bits = bits

    def pack(self, signs):
        weights = torch.tensor([1 << b for b in range(self.bits)], device=signs.device)  # expect: CG102 @lfq_pack_bits
        return (signs.long() * weights).sum(-1)

    @torch.no_grad()
    def forward(self, x):
        z = self.proj(x)
        codes = torch.where(z > 0, torch.ones_like(z), -torch.ones_like(z))
        return codes, self.pack(z > 0)


def factory_bad_lfq_pack_bits():  # hazard: 3
    return LFQ(16, 9).to(DEV), lambda i: (noise(210 + i, 6, 16),)


class BitCodec(nn.Module):
    def __init__(self, dim=16, bits=9):
        super().__init__()
        torch.manual_seed(20)
        self.proj = nn.Linear(dim, bits)
        self.register_buffer("basis", torch.tensor([1 << b for b in range(bits)]), persistent=False)

    def unpack(self, index):
        shifts = torch.arange(self.basis.numel(), device=index.device)
        return ((index[:, None] >> shifts) & 1).float() * 2 - 1

    @torch.no_grad()
    def forward(self, x):
        index = ((self.proj(x) > 0) * self.basis).sum(-1)
        return index, self.unpack(index ^ (index >> 1))


def factory_ok_bits_by_shifts():  # hazard: 3
    return BitCodec().to(DEV), lambda i: (noise(230 + i, 6, 16),)


class ActNorm(nn.Module):
    """Glow's data dependent initialisation. `warm_batches` batches are used for the statistics."""

    def __init__(self, dim, warm_batches):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.warm_batches, self.seen = warm_batches, 0

    @property
    def needs_init(self):
        return self.seen < self.warm_batches

    @torch.no_grad()
    def initialise(self, x):
        self.loc.copy_(x.mean(0))
        self.log_scale.copy_(-x.std(0).clamp_min(1e-3).log())
        self.seen += 1

    def forward(self, x):
        if self.needs_init:  # expect: CG201 @actnorm_three_batches
            self.initialise(x)  # expect: CG201 optional @actnorm_three_batches
        return (x - self.loc) * self.log_scale.exp(), self.log_scale.sum()


def factory_bad_actnorm_three_batches():  # hazard: 10
    layer = ActNorm(8, warm_batches=3).to(DEV)

    @torch.no_grad()
    def step(x):
        return layer(x)

    return step, lambda i: (noise(250 + i, 16, 8) * (1 + i) + i,)


class GlowActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(dim))
        self.scale = nn.Parameter(torch.ones(dim))
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
            self.initialised = True
        return self.scale * (x + self.loc), torch.log(self.scale.abs()).sum()


def factory_ok_actnorm_first_batch_only():  # hazard: 10
    torch.manual_seed(21)
    layers = nn.ModuleList(GlowActNorm(8) for _ in range(2)).to(DEV)
    mixers = [torch.linalg.qr(torch.randn(8, 8))[0].to(DEV) for _ in range(2)]
    opt = torch.optim.SGD(layers.parameters(), lr=0.02)

    def step(x):
        logdet = 0.0
        for layer, w in zip(layers, mixers):
            x, ld = layer(x)
            x, logdet = x @ w, logdet + ld
        nll = 0.5 * x.pow(2).sum(-1).mean() - logdet
        opt.zero_grad()
        nll.backward()
        opt.step()
        return nll.detach()

    return step, lambda i: (noise(270 + i, 16, 8) * 2 + 1,)


class ResidualFlowBlock(nn.Module):
    """log det of x + g(x) by a power series cut at a random place (Russian roulette)."""

    def __init__(self, dim, seed):
        super().__init__()
        w = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))
        self.w = nn.Parameter(0.6 * w / torch.linalg.matrix_norm(w, 2))
        self.rng = np.random.RandomState(seed)

    def n_terms(self, p=0.4):
        n = int(self.rng.geometric(p)) + 1
        return n, lambda k: 1.0 / (1 - p) ** max(k - 2, 0)

    def forward(self, x, v):
        y = x + torch.tanh(x @ self.w)
        jac = (1 - torch.tanh(x @ self.w) ** 2)
        n, coefficient = self.n_terms()
        vj, logdet = v, 0.0
        for k in range(1, n + 1):  # expect: CG201 @residual_flow_roulette
            vj = (vj * jac) @ self.w.t()  # expect: CG201 optional @residual_flow_roulette
            logdet = logdet + (-1) ** (k + 1) / k * coefficient(k) * (vj * v).sum(-1)  # expect: CG201|CG202 optional @residual_flow_roulette
        return y, logdet


def factory_bad_residual_flow_roulette():  # hazard: 10
    block = ResidualFlowBlock(8, 3).to(DEV)
    run = torch.no_grad()(lambda x, v: block(x, v))
    return run, lambda i: (noise(290 + i, 6, 8), noise(310 + i, 6, 8))


class MoCoQueue(nn.Module):
    def __init__(self, dim=8, size=24):
        super().__init__()
        self.size = size
        self.register_buffer("queue", F.normalize(torch.randn(dim, size, generator=torch.Generator().manual_seed(23)), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def logits(self, q, k):
        pos = (q * k).sum(-1, keepdim=True)
        return torch.cat([pos, q @ self.queue.clone().detach()], dim=1) / 0.2


class MoCo(MoCoQueue):
    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)  # expect: CG101 @moco_int_pointer
        assert self.size % keys.shape[0] == 0
        self.queue[:, ptr:ptr + keys.shape[0]] = keys.T  # expect: CG202 optional @moco_int_pointer
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.size  # expect: CG103|CG102|CG202 optional @moco_int_pointer

    def forward(self, q, k):
        out = self.logits(q, k)
        self.dequeue_and_enqueue(k)
        return F.cross_entropy(out, torch.zeros(out.shape[0], dtype=torch.long, device=out.device))


class RingMoCo(MoCoQueue):
    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        n = keys.shape[0]
        slots = (self.queue_ptr + torch.arange(n, device=keys.device)) % self.size
        self.queue.index_copy_(1, slots, keys.T)
        self.queue_ptr.add_(n).remainder_(self.size)

    def forward(self, q, k):
        out = self.logits(q, k)
        self.dequeue_and_enqueue(k)
        return F.cross_entropy(out, out.new_zeros(out.shape[0], dtype=torch.long)), out


def unit_pair(i):
    return F.normalize(noise(330 + i, 6, 8), dim=-1), F.normalize(noise(350 + i, 6, 8), dim=-1)


def factory_bad_moco_int_pointer():  # hazard: 1
    return MoCo().to(DEV), unit_pair


def factory_ok_moco_ring():  # hazard: 1
    return RingMoCo().to(DEV), unit_pair


class BarfEncoding(nn.Module):
    """Coarse-to-fine positional encoding: `progress` is a Parameter filled from the trainer's iteration."""

    def __init__(self, levels=4):
        super().__init__()
        torch.manual_seed(25)
        self.levels = levels
        self.progress = nn.Parameter(torch.tensor(0.0), requires_grad=False)
        self.register_buffer("freq", 2.0 ** torch.arange(levels))
        self.mlp = nn.Sequential(nn.Linear(4 * levels, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, xy):
        enc = (xy[..., None] * self.freq).flatten(1)
        alpha = self.progress * self.levels - torch.arange(self.levels, device=xy.device)
        weight = (1 - torch.cos(alpha.clamp(0, 1) * torch.pi)) / 2
        feats = torch.stack([enc.sin(), enc.cos()], 1).view(xy.shape[0], -1, self.levels) * weight
        return self.mlp(feats.flatten(1))


class Runner:
    def __init__(self, field, max_iter=6):
        self.field, self.it, self.max_iter = field, 0, max_iter
        self.rng = random.Random(0)

    @torch.no_grad()
    def __call__(self, xy):
        self.it += 1
        self.field.progress.data.fill_(self.it / self.max_iter)  # expect: CG202 @barf_progress_fill
        return self.field(xy)


def factory_bad_barf_progress_fill():  # hazard: 11
    return Runner(BarfEncoding().to(DEV)), lambda i: (noise(370 + i, 10, 2),)
