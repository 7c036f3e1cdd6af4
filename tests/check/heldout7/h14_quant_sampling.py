"""Quantisation helpers behind custom operators, bit packing, sampling kernels with seeds."""
import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton


def _normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- int8 activations
@triton.jit
def _round_clip(x):
    r = tl.floor(x + 0.5)
    return tl.minimum(tl.maximum(r, -127.0), 127.0).to(tl.int8)


@triton.jit
def _quant_scalar_kernel(x_ptr, q_ptr, inv_scale, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.store(q_ptr + o, _round_clip(x * inv_scale), mask=o < n)


@triton.jit
def _absmax_kernel(x_ptr, amax_ptr, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=0.0)
    tl.store(amax_ptr + r, tl.max(tl.abs(x), 0))


@triton.jit
def _quant_rows_kernel(x_ptr, amax_ptr, q_ptr, s_ptr, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    s = tl.maximum(tl.load(amax_ptr + r), 1e-6) / 127.0
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=0.0)
    tl.store(q_ptr + r * N + c, _round_clip(x / s), mask=c < N)
    tl.store(s_ptr + r, s)


def _tensor_scale(x, bits=8):
    top = x.abs().amax()
    return max(float(top), 1e-6) / (2 ** (bits - 1) - 1)  # expect: CG101 @int8_linear_tensor_scale


@triton_op("blindtr::quant_per_tensor", mutates_args={})
def quant_per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _tensor_scale(x)
    q = torch.empty_like(x, dtype=torch.int8)
    wrap_triton(_quant_scalar_kernel)[(triton.cdiv(x.numel(), 64),)](x, q, 1.0 / scale, x.numel(), BLOCK=64)
    return q, torch.full((), scale, device=x.device)


@torch.library.custom_op("blindtr::quant_per_row", mutates_args=())
def quant_per_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = x.shape
    amax = x.new_empty(rows)
    q, s = torch.empty_like(x, dtype=torch.int8), x.new_empty(rows)
    block = triton.next_power_of_2(n)
    _absmax_kernel[(rows,)](x, amax, n, BLOCK=block)
    _quant_rows_kernel[(rows,)](x, amax, q, s, n, BLOCK=block)
    return q, s


@quant_per_row.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0])


class Int8Linear(torch.nn.Module):
    def __init__(self, k, n, quant):
        super().__init__()
        w = _normal(1, n, k)
        self.register_buffer("ws", w.abs().amax(1) / 127)
        self.register_buffer("wq", (w / self.ws[:, None]).round().to(torch.int8))
        self.quant = quant

    def forward(self, x):
        q, s = self.quant(x)
        acc = q.float() @ self.wq.float().t()
        return acc * s.view(-1, 1) * self.ws


def factory_bad_int8_linear_tensor_scale():  # hazard: 1
    layer = Int8Linear(32, 24, quant_per_tensor)
    return (lambda x: layer(x)), lambda i: (_normal(50 + i, 3, 32) * (i + 1),)


def factory_ok_int8_linear_row_scale():  # hazard: 1
    net = torch.nn.Sequential(Int8Linear(32, 24, quant_per_row), torch.nn.SiLU(), Int8Linear(24, 32, quant_per_row))
    return (lambda x: {"logits": net(x)}), lambda i: (_normal(60 + i, 3, 32) * (i + 1),)


# --------------------------------------------------------------------------- a table of levels
_LEVELS = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)


@triton.jit
def _lut_dequant_kernel(p_ptr, lut_ptr, absmax_ptr, out_ptr, n_bytes, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n_bytes
    byte = tl.load(p_ptr + o, mask=m, other=0).to(tl.int32)
    lo = tl.load(lut_ptr + (byte & 15))
    hi = tl.load(lut_ptr + ((byte >> 4) & 15))
    s = tl.load(absmax_ptr + 2 * o // GROUP, mask=m, other=0.0)
    tl.store(out_ptr + 2 * o, lo * s, mask=m)
    tl.store(out_ptr + 2 * o + 1, hi * s, mask=m)


def _dequant(packed, absmax, lut):
    out = torch.empty(packed.numel() * 2, device=packed.device)
    grid = lambda meta: (triton.cdiv(packed.numel(), meta["BLOCK"]),)
    _lut_dequant_kernel[grid](packed, lut, absmax, out, packed.numel(), GROUP=16, BLOCK=32)
    return out


@torch.library.custom_op("blindtr::dequant_nf4", mutates_args=())
def dequant_nf4(packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    lut = torch.tensor(_LEVELS, dtype=torch.float32, device=packed.device)  # expect: CG102 @nf4_levels_in_op
    return _dequant(packed, absmax, lut)


@functools.lru_cache(maxsize=8)
def _levels_on(device):
    return torch.tensor(_LEVELS, dtype=torch.float32).to(device)


class PackedWeight(NamedTuple):
    packed: torch.Tensor
    absmax: torch.Tensor
    shape: tuple

    @classmethod
    def random(cls, seed, k, n):
        g = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 256, (k * n // 2,), generator=g, dtype=torch.uint8)
        return cls(packed.to("cuda"), (torch.rand(k * n // 16, generator=g) + 0.1).to("cuda"), (k, n))


def factory_bad_nf4_levels_in_op():  # hazard: 3
    w = [PackedWeight.random(s, 16, 16) for s in (2, 3)]

    def step(x):
        for p in w:
            x = torch.tanh(x @ dequant_nf4(p.packed, p.absmax).view(p.shape))
        return x

    return step, lambda i: (_normal(70 + i, 2, 16),)


def factory_ok_nf4_levels_cached():  # hazard: 3
    weights = {name: PackedWeight.random(s, 16, 16) for s, name in enumerate(("up", "gate", "down"), 4)}

    def linear(x, name):
        p = weights[name]
        return x @ _dequant(p.packed, p.absmax, _levels_on(str(x.device))).view(p.shape)

    def step(x):
        return linear(torch.nn.functional.silu(linear(x, "gate")) * linear(x, "up"), "down")

    return step, lambda i: (_normal(80 + i, 2, 16),)


# --------------------------------------------------------------------------- outliers
@triton.jit
def _zero_columns_kernel(x_ptr, amax_ptr, y_ptr, thr, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    hot = tl.load(amax_ptr + c, mask=m, other=0.0) > thr
    x = tl.load(x_ptr + r * N + c, mask=m, other=0.0)
    tl.store(y_ptr + r * N + c, tl.where(hot, 0.0, x), mask=m)


@torch.library.custom_op("blindtr::split_outliers", mutates_args=())
def split_outliers(x: torch.Tensor, w: torch.Tensor, thr: float) -> tuple[torch.Tensor, torch.Tensor]:
    amax = x.abs().amax(0)
    rest = torch.empty_like(x)
    _zero_columns_kernel[(x.shape[0],)](x, amax, rest, thr, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    cols = torch.nonzero(amax > thr).flatten()  # expect: CG104 @outlier_columns
    hot = x[:, cols] @ w[cols]
    return rest, hot


@split_outliers.register_fake
def _(x, w, thr):
    return torch.empty_like(x), x.new_empty(x.shape[0], w.shape[1])


def factory_bad_outlier_columns():  # hazard: 5
    w = _normal(7, 20, 12)

    def step(x):
        rest, hot = split_outliers(x, w, 2.0)
        q = (rest * 32).round() / 32
        return q @ w + hot

    return step, lambda i: (_normal(90 + i, 4, 20),)


@triton.jit
def _pack_sign_kernel(x_ptr, out_ptr, N, WORDS: tl.constexpr):
    r = tl.program_id(0)
    w = tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    c = w[:, None] * 32 + bit[None, :]
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=-1.0)
    bits = (x > 0).to(tl.int64) << bit[None, :].to(tl.int64)
    tl.store(out_ptr + r * WORDS + w, tl.sum(bits, 1))


@triton.jit
def _popcount(v):
    n = tl.zeros_like(v)
    for b in tl.static_range(32):
        n += (v >> b) & 1
    return n


@triton.jit
def _hamming_kernel(q_ptr, db_ptr, dist_ptr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    r = tl.program_id(0)
    j = tl.arange(0, ROWS)
    w = tl.arange(0, WORDS)
    a = tl.load(q_ptr + r * WORDS + w)
    b = tl.load(db_ptr + j[:, None] * WORDS + w[None, :])
    tl.store(dist_ptr + r * ROWS + j, tl.sum(_popcount(a[None, :] ^ b), 1))


def factory_ok_sign_hash_lookup():  # hazard: 5
    class SignIndex:
        def __init__(self, rows, dim):
            self.proj = _normal(8, dim, 64)
            self.db = torch.empty(rows, 2, dtype=torch.int64, device="cuda")
            self.values = _normal(9, rows, dim)
            self.pack(self.values @ self.proj, self.db)

        @staticmethod
        def pack(x, out):
            _pack_sign_kernel[(x.shape[0],)](x, out, x.shape[1], WORDS=2)
            return out

        def nearest(self, x):
            code = self.pack(x @ self.proj, torch.empty(x.shape[0], 2, dtype=torch.int64, device=x.device))
            dist = torch.empty(x.shape[0], self.db.shape[0], dtype=torch.int64, device=x.device)
            _hamming_kernel[(x.shape[0],)](code, self.db, dist, ROWS=self.db.shape[0], WORDS=2)
            near = torch.where(dist <= dist.amin(1, keepdim=True) + 2, 1.0, 0.0)
            return (near / near.sum(1, keepdim=True)) @ self.values, dist

    index = SignIndex(16, 12)
    return (lambda x: index.nearest(x)), lambda i: (_normal(100 + i, 3, 12),)


# --------------------------------------------------------------------------- sampling
@triton.jit
def _gumbel(u):
    return -tl.log(-tl.log(tl.minimum(tl.maximum(u, 1e-6), 0.999999)))


@triton.jit
def _gumbel_sample_kernel(logits_ptr, tok_ptr, best_ptr, seed, V, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + r * V + c, mask=c < V, other=-float("inf"))
    y = x + _gumbel(tl.rand(seed, r * V + c))
    tl.store(tok_ptr + r, tl.argmax(y, 0))
    tl.store(best_ptr + r, tl.max(y, 0))


@triton.jit
def _gumbel_sample_dev_kernel(logits_ptr, tok_ptr, best_ptr, state_ptr, V, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    seed = tl.load(state_ptr)
    offset = tl.load(state_ptr + 1).to(tl.int32)
    c = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + r * V + c, mask=c < V, other=-float("inf"))
    y = x + _gumbel(tl.rand(seed, offset + r * V + c))
    tl.store(tok_ptr + r, tl.argmax(y, 0))
    tl.store(best_ptr + r, tl.max(y, 0))


@dataclass
class SampleOutput:
    tokens: torch.Tensor
    score: torch.Tensor


def _sampler_seeds(base):
    for n in itertools.count():
        yield (base * 2654435761 + n * 40503) % (2 ** 31)


class GumbelSampler:
    def __init__(self, base_seed):
        self.seeds = _sampler_seeds(base_seed)

    def __call__(self, logits):
        rows, v = logits.shape
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
        best = logits.new_empty(rows)
        _gumbel_sample_kernel[(rows,)](logits, tokens, best, next(self.seeds), v, BLOCK=triton.next_power_of_2(v))  # expect: CG202 @gumbel_seed_stream
        return SampleOutput(tokens, best)


def factory_bad_gumbel_seed_stream():  # hazard: 11
    sampler = GumbelSampler(1234)
    emb, head = _normal(10, 24, 16), _normal(11, 16, 24)

    def step(ids):
        return sampler(torch.tanh(emb[ids]) @ head)

    return step, lambda i: ((torch.arange(3) * 5 + i * 7).remainder(24).to("cuda"),)


def factory_ok_gumbel_device_offset():  # hazard: 11
    class PhiloxSampler:
        def __init__(self, seed):
            self.state = torch.tensor([seed, 0], dtype=torch.int64, device="cuda")
            self.bump = torch.tensor([0, 1], dtype=torch.int64, device="cuda")

        def __call__(self, logits):
            rows, v = logits.shape
            tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
            best = logits.new_empty(rows)
            _gumbel_sample_dev_kernel[(rows,)](logits, tokens, best, self.state, v, BLOCK=triton.next_power_of_2(v))
            self.state.add_(self.bump, alpha=rows * v)
            return SampleOutput(tokens, best)

    sampler = PhiloxSampler(99)
    emb, head = _normal(12, 24, 16), _normal(13, 16, 24)
    last = torch.zeros(3, dtype=torch.int32, device="cuda")

    def step(bias):
        out = sampler(torch.tanh(emb[last.long()]) @ head + bias)
        last.copy_(out.tokens)
        return out

    return step, lambda i: (_normal(110 + i, 3, 24),)


@triton.jit
def _bernoulli_mix_kernel(a_ptr, b_ptr, y_ptr, seed, p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    keep = tl.rand(seed, o) < p
    a = tl.load(a_ptr + o, mask=m)
    b = tl.load(b_ptr + o, mask=m)
    tl.store(y_ptr + o, tl.where(keep, a, b), mask=m)


def factory_bad_mixup_host_generator():  # hazard: 11
    class Mixer(torch.nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p
            self.rng = torch.Generator()
            self.rng.manual_seed(5)

        def draw(self):
            # a CPU generator: nothing waits for the device
            return int(torch.randint(0, 2 ** 31 - 1, (1,), generator=self.rng))  # expect: CG301 optional

        def forward(self, a, b):
            y = torch.empty_like(a)
            _bernoulli_mix_kernel[(triton.cdiv(a.numel(), 32),)](a, b, y, self.draw(), self.p, a.numel(), BLOCK=32)  # expect: CG202
            return y

    mix = Mixer(0.7)
    w = _normal(14, 20, 20)

    def step(x):
        return mix(x @ w, x.flip(0).contiguous())

    return step, lambda i: (_normal(120 + i, 4, 20),)


# --------------------------------------------------------------------------- temperature
@triton.jit
def _min_p_kernel(x_ptr, minp_ptr, y_ptr, V, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * V + c, mask=c < V, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    e = tl.where(e >= tl.load(minp_ptr + r), e, 0.0)
    tl.store(y_ptr + r * V + c, e / tl.sum(e, 0), mask=c < V)


class MinP:
    def __init__(self, temperature, min_p):
        self.temperature = temperature
        self.min_p = min_p

    def cool(self):
        self.temperature.mul_(0.8).clamp_(min=0.2)

    def __call__(self, logits):
        scaled = logits / self.temperature  # expect: CG203 @cpu_temperature
        probs = torch.empty_like(scaled)
        _min_p_kernel[(probs.shape[0],)](scaled, self.min_p, probs, probs.shape[1], BLOCK=triton.next_power_of_2(probs.shape[1]))
        self.cool()
        return probs


def factory_bad_cpu_temperature():  # hazard: 12
    proc = MinP(torch.tensor(2.0), torch.full((3,), 0.05, device="cuda"))
    head = _normal(15, 16, 20)
    return (lambda h: proc(h @ head)), lambda i: (_normal(130 + i, 3, 16),)


def factory_ok_device_temperature():  # hazard: 12
    class PerRow(MinP):
        def cool(self):
            super().cool()
            self.min_p.mul_(1.1)

    proc = PerRow(torch.tensor([[2.0], [1.0], [0.5]], device="cuda"), torch.tensor([0.01, 0.1, 0.2], device="cuda"))
    half = torch.tensor(0.5)  # stays on the host and stays as it is
    head = _normal(16, 16, 20)
    return (lambda h: proc(h @ head * half)), lambda i: (_normal(140 + i, 3, 16),)


# --------------------------------------------------------------------------- metadata staged through pinned memory
@triton.jit
def _segment_mean_kernel(x_ptr, cu_ptr, out_ptr, D: tl.constexpr, MAX: tl.constexpr):
    s = tl.program_id(0)
    lo = tl.load(cu_ptr + s)
    hi = tl.load(cu_ptr + s + 1)
    t = lo + tl.arange(0, MAX)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=(t < hi)[:, None], other=0.0)
    tl.store(out_ptr + s * D + d, tl.sum(x, 0) / tl.maximum(hi - lo, 1))


class SegmentPlanner:
    """Sequence bounds are planned on the host and copied without waiting, from a slot that is not reused soon."""

    def __init__(self, segments, total, slots=8):
        self.total = total
        self.host = [torch.zeros(segments + 1, dtype=torch.int32, pin_memory=True) for _ in range(slots)]
        self.device = torch.zeros(segments + 1, dtype=torch.int32, device="cuda")
        self.round = 0

    def cuts(self):
        n = self.host[0].numel() - 1
        inner = sorted((self.round * 3 + 5 * j) % (self.total - 1) + 1 for j in range(n - 1))
        return [0, *inner, self.total]

    def publish(self):
        slot = self.host[self.round % len(self.host)]
        slot.numpy()[:] = self.cuts()
        self.round += 1  # expect: CG210|CG204 optional @segment_planner
        self.device.copy_(slot, non_blocking=True)  # expect: CG204|CG205|CG207 @segment_planner
        return self.device


def factory_bad_segment_planner():  # hazard: 13
    plan = SegmentPlanner(3, 16)

    def step(x):
        cu = plan.publish()
        out = x.new_empty(3, x.shape[1])
        _segment_mean_kernel[(3,)](x, cu, out, D=x.shape[1], MAX=16)
        return out

    return step, lambda i: (_normal(150 + i, 16, 16),)


def factory_ok_segment_bounds_on_device():  # hazard: 13
    def bounds(lens):
        cu = torch.zeros(lens.numel() + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=cu[1:])
        return cu

    wide = _normal(17, 16, 16)

    def step(x, lens):
        out = x.new_empty(lens.numel(), x.shape[1])
        _segment_mean_kernel[(lens.numel(),)](x @ wide, bounds(lens), out, D=x.shape[1], MAX=16)
        return out

    def inputs(i):
        a, b = 1 + (3 * i) % 7, 1 + (5 * i) % 7
        return _normal(160 + i, 16, 16), torch.tensor([a, b, 16 - a - b], dtype=torch.int32).to("cuda")

    return step, inputs
