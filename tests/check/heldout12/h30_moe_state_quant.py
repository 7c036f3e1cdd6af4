"""Experts, recurrent state slots, adapters and quantized caches."""
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F

STEPS = 12

HID = 32
FP8_MAX = 448.0


def _rand(shape, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to("cuda")


# ---------------------------------------------------------------- MoE: sort, grouped product, combine
class Router:
    def __init__(self, experts, top_k, seed):
        self.w = _rand((HID, experts), seed, 0.5)
        self.top_k = top_k

    def __call__(self, x):
        weight, ids = (x @ self.w).softmax(-1).topk(self.top_k)
        return weight / weight.sum(-1, keepdim=True), ids


class SortedExperts:
    """Tokens sorted by expert; each sorted row is multiplied by its expert's weights."""

    def __init__(self, experts=4, top_k=2, seed=1):
        self.router = Router(experts, top_k, seed)
        self.up = _rand((experts, HID, 2 * HID), seed + 1, 1 / math.sqrt(HID))
        self.down = _rand((experts, 2 * HID, HID), seed + 2, 1 / math.sqrt(2 * HID))
        self.ids = torch.arange(experts, device="cuda")
        self.load = torch.zeros(experts, dtype=torch.int64, device="cuda")
        self.top_k = top_k

    def rows_of_experts(self, counts, total):
        raise NotImplementedError

    def __call__(self, x):
        weight, ids = self.router(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros_like(self.load).scatter_add_(0, flat, torch.ones_like(flat))
        self.load.add_(counts)
        expert = self.rows_of_experts(counts, flat.shape[0])
        rows = x[order // self.top_k][:, None]
        y = torch.bmm(F.silu(torch.bmm(rows, self.up[expert])), self.down[expert])[:, 0]
        back = torch.empty_like(y).index_copy_(0, order, y)
        return (back.view(x.shape[0], self.top_k, HID) * weight[..., None]).sum(1)


class RaggedExperts(SortedExperts):
    def rows_of_experts(self, counts, total):
        return torch.repeat_interleave(self.ids, counts)  # expect: CG104 @moe_ragged_rows


class SizedExperts(SortedExperts):
    """The number of sorted rows is tokens x top_k whatever the routing is."""

    def rows_of_experts(self, counts, total):
        return torch.repeat_interleave(self.ids, counts, output_size=total)


def _moe_loop(cls):
    layers = [cls(seed=1), cls(seed=11)]

    def step(x):
        for layer in layers:
            x = x + layer(x)
        return x, torch.stack([layer.load for layer in layers])

    def inputs(index):
        return (_rand((6, HID), 40 + index),)

    return step, inputs


def factory_bad_moe_ragged_rows():
    return _moe_loop(RaggedExperts)


def factory_ok_moe_sized_rows():
    return _moe_loop(SizedExperts)


# ---------------------------------------------------------------- mamba state slots
class MambaPool:
    """conv: the last inputs of each slot; ssm: the scan state. The last slot is for padding."""

    WIDTH, STATE = 4, 8

    def __init__(self, slots):
        self.conv = torch.zeros(slots + 1, HID, self.WIDTH, device="cuda")
        self.ssm = torch.zeros(slots + 1, HID, self.STATE, device="cuda")


class MambaMixer:
    def __init__(self, pool, seed):
        self.pool = pool
        self.taps = _rand((HID, pool.WIDTH), seed, 0.5)
        self.b = _rand((HID, pool.STATE), seed + 1, 0.2)
        self.c = _rand((HID, pool.STATE), seed + 2, 0.2)
        self.decay = torch.sigmoid(_rand((HID, 1), seed + 3)) * 0.5 + 0.4

    def write(self, slots, conv, ssm):
        raise NotImplementedError

    def forward(self, x, slots, fresh):
        pool = self.pool
        keep = (~fresh).to(x.dtype)[:, None, None]
        conv = pool.conv[slots] * keep
        ssm = pool.ssm[slots] * keep
        conv = torch.cat([conv[..., 1:], x[..., None]], dim=-1)
        u = F.silu((conv * self.taps).sum(-1))
        ssm = ssm * self.decay + u[..., None] * (u @ self.b)[:, None]
        self.write(slots, conv, ssm)
        y = (ssm * self.c).sum(-1) + x
        pad = slots == pool.conv.shape[0] - 1
        return y.masked_fill(pad[:, None], 0.0)


class FunctionalMixer(MambaMixer):
    def write(self, slots, conv, ssm):
        self.pool.ssm.index_copy_(0, slots, ssm)
        self.pool.conv = self.pool.conv.index_copy(0, slots, conv)  # expect: CG205|CG206 @mamba_conv_functional_write


class InPlaceMixer(MambaMixer):
    def write(self, slots, conv, ssm):
        self.pool.ssm.index_copy_(0, slots, ssm)
        self.pool.conv.index_copy_(0, slots, conv)


def _mamba_loop(cls):
    mixer = cls(MambaPool(5), 21)

    def step(x, slots, fresh):
        return mixer.forward(x, slots, fresh)

    def inputs(index):
        table = ([0, 1, 2, 5], [0, 1, 2, 3], [4, 1, 5, 5])  # 5 pads, 4 replaces the finished 0
        phase = 0 if index < 3 else (1 if index < 7 else 2)
        fresh = [index in (0, 7), index == 0, index == 0, index == 3]
        slots = torch.tensor(table[phase], device="cuda")
        return _rand((4, HID), 80 + index), slots, torch.tensor(fresh, device="cuda")

    return step, inputs


def factory_bad_mamba_conv_functional_write():
    return _mamba_loop(FunctionalMixer)


def factory_ok_mamba_slots_recycled():
    return _mamba_loop(InPlaceMixer)


# ---------------------------------------------------------------- LoRA slot pools
class Adapter:
    def __init__(self, seed, rank=4):
        g = torch.Generator().manual_seed(seed)
        self.a = (torch.randn(HID, rank, generator=g) * 0.3).pin_memory()
        self.b = (torch.randn(rank, HID, generator=g) * 0.3).pin_memory()


class LRULoraManager:
    """A few device slots for many host adapters."""

    def __init__(self, slots, adapters, rank=4):
        self.adapters = adapters
        self.a = torch.zeros(slots, HID, rank, device="cuda")
        self.b = torch.zeros(slots, rank, HID, device="cuda")
        self.resident = OrderedDict()
        self.free = list(range(slots))

    def activate(self, name):
        if name not in self.resident:  # expect: CG201 @lora_lru_load
            slot = self.free.pop() if self.free else self.resident.popitem(last=False)[1]
            self.a[slot].copy_(self.adapters[name].a, non_blocking=True)
            self.b[slot].copy_(self.adapters[name].b, non_blocking=True)
            self.resident[name] = slot
        self.resident.move_to_end(name)
        return self.resident[name]


class RequestFeed:
    """Which adapter the next batch wants: the scheduler's decision, made on the host."""

    def __init__(self, names):
        self.names, self.at = names, 0

    def next(self):
        pair = self.names[min(self.at // 4, len(self.names) - 1)]
        self.at += 1
        return pair


def factory_bad_lora_lru_load():
    adapters = {n: Adapter(60 + i) for i, n in enumerate("abc")}
    manager = LRULoraManager(2, adapters)
    feed = RequestFeed([("a", "b"), ("b", "c"), ("c", "a")])
    base = _rand((HID, HID), 63, 0.2)

    def step(x):
        deltas = []
        for rows, name in zip(x.chunk(2), feed.next()):
            slot = manager.activate(name)
            deltas.append(rows @ manager.a[slot] @ manager.b[slot])  # expect: CG202 optional
        y = x @ base + torch.cat(deltas)
        return y

    def inputs(index):
        return (_rand((4, HID), 140 + index),)

    return step, inputs


class DeviceLoraBank:
    """All adapters resident; id 0 is the null adapter. Rows may change adapters at any step."""

    def __init__(self, adapters, rank=4):
        self.a = torch.zeros(len(adapters) + 1, HID, rank, device="cuda")
        self.b = torch.zeros(len(adapters) + 1, rank, HID, device="cuda")
        for i, ad in enumerate(adapters):
            self.a[i + 1].copy_(ad.a)
            self.b[i + 1].copy_(ad.b)
        self.scale = torch.tensor([0.0] + [1.0 / (i + 1) for i in range(len(adapters))], device="cuda")

    def delta(self, x, ids):
        ranks = torch.bmm(x[:, None], self.a[ids])
        return torch.bmm(ranks, self.b[ids])[:, 0] * self.scale[ids, None]


def factory_ok_lora_bank_by_ids():
    bank = DeviceLoraBank([Adapter(60 + i) for i in range(3)])
    base = _rand((HID, HID), 63, 0.2)

    def step(x, ids):
        return x @ base + bank.delta(x, ids)

    def inputs(index):
        ids = torch.tensor([index % 4, (index // 4 + 1) % 4, 0, 3], device="cuda")
        return _rand((4, HID), 140 + index), ids

    return step, inputs


# ---------------------------------------------------------------- quantized KV cache with scales
class Fp8KVLayer:
    """Keys in FP8 with one scale per layer, found from the first batches."""

    def __init__(self, slots, seed):
        self.cache = torch.zeros(slots, HID, dtype=torch.float8_e4m3fn, device="cuda")
        self.k_scale = torch.ones((), device="cuda")
        self.k_scale_float = 1.0
        self.w = _rand((HID, HID), seed, 0.3)
        self.fill = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.pos = torch.arange(slots, device="cuda")

    def maybe_calibrate(self, k):
        raise NotImplementedError

    def forward(self, x):
        k = x @ self.w
        self.maybe_calibrate(k)
        q8 = (k / self.k_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        raw = self.cache.view(torch.uint8)
        raw.index_copy_(0, self.fill + torch.arange(k.shape[0], device=k.device), q8.view(torch.uint8))
        self.fill.add_(k.shape[0])
        keys = self.cache.to(torch.float32) * self.k_scale_float
        s = (x @ keys.mT) / math.sqrt(HID)
        s = s.masked_fill(self.pos >= self.fill, -1e9)
        return s.softmax(-1) @ keys


class RunningCalibration(Fp8KVLayer):
    def __init__(self, slots, seed, batches=4):
        super().__init__(slots, seed)
        self.batches_left = batches

    def maybe_calibrate(self, k):
        if self.batches_left > 0:  # expect: CG201 optional @kv_scale_four_batches
            self.batches_left -= 1
            torch.maximum(self.k_scale, k.abs().amax() / 300.0, out=self.k_scale)
            self.k_scale_float = float(self.k_scale)  # expect: CG101 @kv_scale_four_batches


class FirstBatchCalibration(Fp8KVLayer):
    """Calibrates in the very first forward (the warm-up) and keeps a Python float from then on."""

    def __init__(self, slots, seed):
        super().__init__(slots, seed)
        self.calculate_kv_scales = True

    def maybe_calibrate(self, k):
        if self.calculate_kv_scales:
            self.k_scale.copy_(k.abs().amax() / 200.0)
            self.k_scale_float = self.k_scale.item()
            self.calculate_kv_scales = False


def _kv_loop(cls):
    layer = cls(64, 71)

    def step(x):
        return layer.forward(x)

    def inputs(index):
        return (_rand((4, HID), 180 + index),)

    return step, inputs


def factory_bad_kv_scale_four_batches():
    return _kv_loop(RunningCalibration)


def factory_ok_kv_scale_first_batch():
    return _kv_loop(FirstBatchCalibration)


# ---------------------------------------------------------------- FP8 activations, delayed scaling
class DelayedScaling:
    """The activation scale is the largest amax of the last few steps."""

    def __init__(self, window=4):
        self.window = window
        self.history = torch.full((window,), 0.5, device="cuda")

    def record(self, amax):
        raise NotImplementedError

    def quantize(self, x):
        scale = self.history.amax() / FP8_MAX
        q = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        self.record(x.abs().amax())
        return q, scale


class RingScaling(DelayedScaling):
    def __init__(self, window=4):
        super().__init__(window)
        self.cursor = 0

    def record(self, amax):
        self.history[self.cursor].copy_(amax)  # expect: CG202 @fp8_amax_ring_cursor
        self.cursor = (self.cursor + 1) % self.window


class RolledScaling(DelayedScaling):
    def record(self, amax):
        self.history.copy_(self.history.roll(-1))
        self.history[-1].copy_(amax)


class Fp8Linear:
    def __init__(self, scaling, seed):
        w = _rand((HID, HID), seed, 0.3)
        self.w_scale = w.abs().amax(0) / FP8_MAX
        self.w8 = (w / self.w_scale).to(torch.float8_e4m3fn)
        self.scaling = scaling

    def __call__(self, x):
        q, scale = self.scaling.quantize(x)
        return (q.to(torch.float32) @ self.w8.to(torch.float32)) * (scale * self.w_scale)


def _fp8_loop(cls):
    layers = [Fp8Linear(cls(), 81), Fp8Linear(cls(window=3), 82)]

    def step(x):
        for layer in layers:
            x = F.silu(layer(x)) + x
        return x, layers[0].scaling.history.amax()

    def inputs(index):
        return (_rand((5, HID), 220 + index, 0.3 + 0.6 * ((index * 5) % 7)),)

    return step, inputs


def factory_bad_fp8_amax_ring_cursor():
    return _fp8_loop(RingScaling)


def factory_ok_fp8_amax_rolled():
    return _fp8_loop(RolledScaling)
