"""Serving steps that come near to a hazard and are right."""
import itertools
import weakref
from collections import ChainMap
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F


def draw(seed, *shape, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda")


def draw_ids(seed, *shape, high):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- varlen batches without host lengths
@dataclass
class PackedBatch:
    x: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def total(self):
        return self.x.shape[0]

    def segment_ids(self):
        lens = self.cu_seqlens.diff()
        return torch.arange(len(lens), device=lens.device).repeat_interleave(lens, output_size=self.total)


class BlockDiagonalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Parameter(draw(1, dim, 3 * dim, scale=0.4), requires_grad=False)

    def forward(self, batch):
        q, k, v = (batch.x @ self.qkv).chunk(3, -1)
        seg = batch.segment_ids()
        pos = torch.arange(batch.total, device=q.device)
        mask = (seg[:, None] == seg[None]) & (pos[:, None] >= pos[None])
        out = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], attn_mask=mask[None, None])
        return replace(batch, x=out[0, 0])


def factory_ok_varlen_output_size():  # hazard: 5
    layers = nn.Sequential(BlockDiagonalAttention(8), BlockDiagonalAttention(8))

    def inputs(i):
        a = 1 + i % 3
        return (PackedBatch(draw(100 + i, 8, 8), torch.tensor([0, a, a + 2, 8]).to("cuda")),)

    return layers, inputs


# --------------------------------------------------------------------------- multi-step decode unrolled in one graph
class SlidingCounters:
    """The period is handled with arithmetic on the device."""

    def __init__(self, batch, period):
        self.tick = torch.zeros((), dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.period = period

    def advance(self, scheduled):
        fresh = self.tick % self.period == 0
        torch.where(fresh, scheduled, self.positions + 1, out=self.positions)
        self.tick.add_(1)
        return self.positions


def factory_ok_unrolled_multi_step():  # hazard: 10
    counters = SlidingCounters(3, period=4)
    emb, head = draw(11, 24, 16), draw(12, 16, 24)

    @torch.inference_mode()
    def step(ids, scheduled):
        outs = []
        for inner in range(3):  # the number of inner steps is the engine's configuration
            pos = counters.advance(scheduled)
            h = emb[ids] * torch.cos(pos[:, None] * (0.2 + inner))
            ids = (h @ head).argmax(-1)
            outs.append(ids)
        return outs, h

    return step, lambda i: (draw_ids(110 + i, 3, high=24), torch.full((3,), 5 * i, device="cuda"))


# --------------------------------------------------------------------------- pinned upload of constants
class StaticSamplingConfig:
    """Temperatures stay with their slots for the life of the batch; they are uploaded again each step, which costs little."""

    def __init__(self, temps):
        self.cpu = torch.tensor(temps, pin_memory=True)
        self.gpu = torch.empty(len(temps), device="cuda")
        self.dirty = True

    def upload(self):
        self.gpu.copy_(self.cpu, non_blocking=True)
        self.dirty = False
        return self.gpu


def factory_ok_constant_pinned_upload():  # hazard: 13
    config = StaticSamplingConfig([0.7, 1.0, 1.4])
    bias = ChainMap({"eos": -2.0}, {"eos": 0.0, "pad": -9.0})
    onehot = torch.zeros(16)
    onehot[2], onehot[0] = bias["eos"], bias["pad"]
    onehot = onehot.to("cuda")

    def step(logits):
        logits = (logits + onehot) / config.upload()[:, None]
        return logits.softmax(-1), logits.argmax(-1)

    return step, lambda i: (draw(120 + i, 3, 16),)


# --------------------------------------------------------------------------- NTK with the base on the device
class DeviceNTKRotary:
    def __init__(self, dim, trained):
        self.exponent = -torch.arange(0, dim, 2, device="cuda") / dim
        self.trained = float(trained)
        self.kv_len = torch.full((1,), trained - 2.0, device="cuda")

    def inv_freq(self):
        ratio = (self.kv_len / self.trained).clamp_min(1.0)
        return (10000.0 * ratio.square()).pow(self.exponent)

    def __call__(self, q):
        ang = (self.kv_len - 1) * self.inv_freq()
        self.kv_len += 1
        a, b = q.chunk(2, -1)
        return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


def factory_ok_ntk_base_on_device():  # hazard: 10
    rotary = DeviceNTKRotary(8, trained=6)
    return rotary, lambda i: (draw(130 + i, 2, 8),)


# --------------------------------------------------------------------------- hooks and caches that settle in the first step
class WeightCache:
    """Dequantised weights are kept after the first use, by module."""

    def __init__(self):
        self.kept = weakref.WeakKeyDictionary()

    def get(self, module):
        if module not in self.kept:
            self.kept[module] = module.codes.float().sub(8).mul(module.scale[:, None])
        return self.kept[module]


class CachedDequantLinear(nn.Module):
    cache = None

    def __init__(self, dim, seed):
        super().__init__()
        self.register_buffer("codes", draw_ids(seed, dim, dim, high=16).to(torch.uint8))
        self.register_buffer("scale", draw(seed + 1, dim).abs() * 0.1)

    def forward(self, x):
        return F.linear(x, self.cache.get(self))


def factory_ok_dequant_cached_first_use():  # hazard: 14
    net = nn.Sequential(CachedDequantLinear(16, 21), nn.SiLU(), CachedDequantLinear(16, 23))
    cache = WeightCache()
    residuals = draw(25, 16)
    for m in net:
        if isinstance(m, CachedDequantLinear):
            m.cache = cache
            m.register_forward_hook(lambda mod, args, out: out + residuals)
    return net, lambda i: (draw(140 + i, 3, 16),)


# --------------------------------------------------------------------------- double buffers within one step
class TwoSlotPipeline:
    """Layers write to one buffer and read from the other; an even number of layers leaves them as they were."""

    def __init__(self, layers=4):
        self.ws = [draw(31 + j, 16, 16, scale=0.4) for j in range(layers)]
        self.front, self.back = torch.zeros(4, 16, device="cuda"), torch.zeros(4, 16, device="cuda")
        self.adapters = itertools.cycle(self.ws)

    def step(self, x):
        self.front.mul_(0.3).add_(x)
        for _ in self.ws:
            torch.tanh(self.front @ next(self.adapters), out=self.back)
            self.front, self.back = self.back, self.front
        return self.front.clone()


def factory_ok_double_buffer_even_layers():  # hazard: 14
    pipe = TwoSlotPipeline(4)
    return pipe.step, lambda i: (draw(150 + i, 4, 16),)


# --------------------------------------------------------------------------- adaptive drafting with a mask
class MaskedDrafter:
    """Drafts the most there can be; how many of them count follows the acceptance, on the device."""

    def __init__(self, most, dim=16):
        self.most, self.w = most, draw(41, dim, dim, scale=0.4)
        self.k = torch.full((), most, dtype=torch.int64, device="cuda")
        self.ema = torch.full((), 0.9, device="cuda")

    def observe(self, rate):
        self.ema.lerp_(rate, 0.5)
        self.k.sub_((self.ema < 0.6).long()).clamp_(1, self.most)

    @torch.no_grad()
    def __call__(self, hidden, rate):
        h, drafts = hidden, []
        while len(drafts) < self.most:
            h = torch.tanh(h @ self.w)
            drafts.append(h)
        live = torch.arange(self.most, device=h.device) < self.k
        pooled = (torch.stack(drafts) * live[:, None, None]).sum(0) / self.k
        self.observe(rate)
        return {"pooled": pooled, "k": self.k.clone()}


def factory_ok_masked_adaptive_drafts():  # hazard: 10
    return MaskedDrafter(4), lambda i: (draw(160 + i, 4, 16), torch.full((), [0.5, 0.4, 0.3][i % 3], device="cuda"))
