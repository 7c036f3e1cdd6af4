"""Routing to experts, autograd functions around kernels, penalties and bookkeeping."""
import functools
import random
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl


def _gen(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to("cuda")


# --------------------------------------------------------------------------- routing
@triton.jit
def _count_experts_kernel(ids_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids_ptr + o, mask=o < n, other=0)
    tl.atomic_add(counts_ptr + e, 1, mask=o < n)


@triton.jit
def _rows_times_weight_kernel(x_ptr, rows_ptr, w_ptr, y_ptr, TOPK: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0)
    slot = tl.load(rows_ptr + i)
    k = tl.arange(0, K)
    n = tl.arange(0, N)
    x = tl.load(x_ptr + (slot // TOPK) * K + k)
    w = tl.load(w_ptr + k[:, None] * N + n[None, :])
    tl.store(y_ptr + slot * N + n, tl.sum(x[:, None] * w, 0))


class Experts(torch.nn.Module):
    def __init__(self, n, k, f, topk, seed):
        super().__init__()
        self.router = _gen(seed, k, n)
        self.w = _gen(seed + 1, n, k, f, scale=0.3)
        self.topk = topk

    def route(self, x):
        p, ids = torch.topk(torch.softmax(x @ self.router, -1), self.topk, dim=-1)
        return p / p.sum(-1, keepdim=True), ids

    def merge(self, y, p):
        return (y.view(p.shape[0], self.topk, -1) * p[..., None]).sum(1)


class SegmentedExperts(Experts):
    """One launch an expert over its own run of the sorted slots."""

    def segments(self, ids):
        flat = ids.flatten().to(torch.int32)
        counts = torch.zeros(self.w.shape[0], dtype=torch.int32, device=ids.device)
        _count_experts_kernel[(triton.cdiv(flat.numel(), 32),)](flat, counts, flat.numel(), BLOCK=32)
        order = torch.argsort(flat, stable=True)
        lo = 0
        for e, c in enumerate(counts.tolist()):  # expect: CG101 @expert_segments
            yield e, order[lo:lo + c]
            lo += c

    def forward(self, x):
        p, ids = self.route(x)
        y = x.new_zeros(ids.numel(), self.w.shape[2])
        for e, rows in self.segments(ids):
            if rows.numel():
                _rows_times_weight_kernel[(rows.numel(),)](x, rows, self.w[e], y, TOPK=self.topk, K=x.shape[1], N=y.shape[1])  # expect: CG201|CG202|CG208 optional @expert_segments
        return self.merge(y, p)


def factory_bad_expert_segments():  # hazard: 2
    moe = SegmentedExperts(4, 16, 32, 2, seed=1)
    return (lambda x: x + moe(x)[:, :16]), lambda i: (_gen(50 + i, 5, 16),)


@triton.jit
def _aligned_gemm_kernel(x_ptr, w_ptr, sorted_ptr, expert_ptr, total_ptr, y_ptr, n_slots,
                         TOPK: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    blk = tl.program_id(0)
    if blk * BM >= tl.load(total_ptr):
        return
    e = tl.load(expert_ptr + blk)
    slot = tl.load(sorted_ptr + blk * BM + tl.arange(0, BM))
    live = slot < n_slots
    k = tl.arange(0, K)
    n = tl.arange(0, N)
    x = tl.load(x_ptr + (slot // TOPK)[:, None] * K + k[None, :], mask=live[:, None], other=0.0)
    w = tl.load(w_ptr + e * K * N + k[:, None] * N + n[None, :])
    y = tl.sum(x[:, :, None] * w[None, :, :], 1)
    tl.store(y_ptr + slot[:, None] * N + n[None, :], y, mask=live[:, None])


@dataclass
class Alignment:
    sorted_slots: torch.Tensor
    block_expert: torch.Tensor
    padded_total: torch.Tensor


def align_blocks(ids, n_experts, bm):
    """Every expert's run is padded to whole blocks. All sizes are the worst case; the true total stays on the device."""
    flat = ids.flatten()
    slots = flat.numel()
    worst = triton.cdiv(slots + n_experts * (bm - 1), bm) * bm
    onehot = torch.nn.functional.one_hot(flat, n_experts)
    counts = onehot.sum(0)
    padded = (counts + bm - 1) // bm * bm
    ends = padded.cumsum(0)
    rank = (onehot.cumsum(0) - 1).gather(1, flat[:, None])[:, 0]
    where = (ends - padded)[flat] + rank
    sorted_slots = torch.full((worst,), slots, dtype=torch.int32, device=ids.device)
    sorted_slots.scatter_(0, where, torch.arange(slots, dtype=torch.int32, device=ids.device))
    starts = torch.arange(0, worst, bm, device=ids.device)
    expert = torch.searchsorted(ends, starts, right=True).clamp_(max=n_experts - 1)
    return Alignment(sorted_slots, expert.to(torch.int32), ends[-1:].to(torch.int32))


def factory_ok_block_aligned_experts():  # hazard: 2
    class Aligned(Experts):
        BM = 4

        def forward(self, x):
            p, ids = self.route(x)
            a = align_blocks(ids, self.w.shape[0], self.BM)
            y = x.new_empty(ids.numel(), self.w.shape[2])
            grid = (a.block_expert.numel(),)
            _aligned_gemm_kernel[grid](x, self.w, a.sorted_slots, a.block_expert, a.padded_total, y, ids.numel(),
                                       TOPK=self.topk, K=x.shape[1], N=y.shape[1], BM=self.BM)
            return self.merge(y, p)

    layers = [Aligned(4, 16, 16, 2, seed=3), Aligned(6, 16, 16, 1, seed=5)]

    def step(x):
        for layer in layers:
            x = torch.nn.functional.rms_norm(x + layer(x), (16,))
        return x

    return step, lambda i: (_gen(60 + i, 5, 16),)


@triton.jit
def _masked_expert_kernel(x_ptr, id_ptr, gate_ptr, w_ptr, y_ptr, e, K: tl.constexpr):
    t = tl.program_id(0)
    if tl.load(id_ptr + t) != e:
        return
    k = tl.arange(0, K)
    x = tl.load(x_ptr + t * K + k)
    w = tl.load(w_ptr + k[:, None] * K + k[None, :])
    y = tl.sum(x[:, None] * w, 0) * tl.load(gate_ptr + t)
    tl.store(y_ptr + t * K + k, tl.load(y_ptr + t * K + k) + y)


class SwitchLayer(torch.nn.Module):
    def __init__(self, n, k, seed, skip_idle):
        super().__init__()
        self.router = _gen(seed, k, n)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(k, k, bias=False, device="cuda") for _ in range(n)])
        for j, e in enumerate(self.experts):
            e.weight.data.copy_(_gen(seed + j, k, k, scale=0.3))
        self.skip_idle = skip_idle

    def idle(self, ids, e):
        return self.skip_idle and not (ids == e).any()  # expect: CG101|CG108 @switch_idle_experts

    @torch.no_grad()
    def forward(self, x):
        gate, ids = torch.softmax(x @ self.router, -1).max(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.idle(ids, e):
                continue
            _masked_expert_kernel[(x.shape[0],)](x, ids, gate, expert.weight, y, e, K=x.shape[1])
        return x + y


def factory_bad_switch_idle_experts():  # hazard: 9
    layer = SwitchLayer(4, 16, 10, skip_idle=True)
    return (lambda x: layer(x)), lambda i: (_gen(70 + i, 3, 16),)


def factory_ok_switch_all_experts():  # hazard: 9
    net = torch.nn.Sequential(SwitchLayer(3, 16, 20, skip_idle=False), SwitchLayer(4, 16, 30, skip_idle=False))
    usage = torch.zeros(3, device="cuda")

    def step(x):
        ids = (x @ net[0].router).argmax(-1)
        usage.scatter_add_(0, ids, torch.ones_like(ids, dtype=usage.dtype))
        return {"h": net(x), "usage": usage / usage.sum()}

    return step, lambda i: (_gen(80 + i, 4, 16),)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _swiglu_valid_kernel(x_ptr, n_valid_ptr, y_ptr, F, BM: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BLOCK)
    m = (r < tl.load(n_valid_ptr))[:, None] & (c < F)[None, :]
    g = tl.load(x_ptr + r[:, None] * 2 * F + c[None, :], mask=m, other=0.0)
    u = tl.load(x_ptr + r[:, None] * 2 * F + F + c[None, :], mask=m, other=0.0)
    tl.store(y_ptr + r[:, None] * F + c[None, :], _silu(g) * u, mask=m)


def _swiglu(x, n_valid, grid):
    f = x.shape[1] // 2
    y = x.new_zeros(x.shape[0], f)
    _swiglu_valid_kernel[grid](x, n_valid, y, f, BM=2, BLOCK=triton.next_power_of_2(f))
    return y


def factory_bad_swiglu_grid_reads_count():  # hazard: 1
    w = _gen(40, 16, 40, scale=0.4)

    def step(x, active):
        n_valid = active.sum(dtype=torch.int32)
        order = torch.argsort(active.to(torch.int8), descending=True, stable=True)
        h = x.index_select(0, order) @ w
        y = _swiglu(h, n_valid, lambda meta: (triton.cdiv(int(n_valid), meta["BM"]),))  # expect: CG101
        return torch.zeros_like(y).index_copy_(0, order, y)

    def inputs(i):
        return _gen(90 + i, 8, 16), (torch.arange(8) % (2 + i % 3) == 0).to("cuda")

    return step, inputs


def factory_ok_swiglu_full_grid():  # hazard: 1
    w = _gen(41, 16, 40, scale=0.4)

    def grid_for(rows):
        def grid(meta):
            return (triton.cdiv(rows, meta["BM"]),)
        return grid

    grids = functools.lru_cache(None)(grid_for)

    def step(x, active):
        n_valid = active.sum(dtype=torch.int32)
        order = torch.argsort(active.to(torch.int8), descending=True, stable=True)
        y = _swiglu(x.index_select(0, order) @ w, n_valid, grids(x.shape[0]))
        return torch.zeros_like(y).index_copy_(0, order, y), n_valid

    def inputs(i):
        return _gen(100 + i, 8, 16), (torch.arange(8) % (2 + i % 3) == 0).to("cuda")

    return step, inputs


# --------------------------------------------------------------------------- autograd
@triton.jit
def _dropout_add_kernel(x_ptr, res_ptr, y_ptr, seed, p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    keep = tl.rand(seed, o) > p
    x = tl.load(x_ptr + o, mask=m)
    tl.store(y_ptr + o, tl.where(keep, x / (1 - p), 0.0) + tl.load(res_ptr + o, mask=m), mask=m)


@triton.jit
def _dropout_grad_kernel(g_ptr, dx_ptr, seed, p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    keep = tl.rand(seed, o) > p
    tl.store(dx_ptr + o, tl.where(keep, tl.load(g_ptr + o, mask=m) / (1 - p), 0.0), mask=m)


class DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, p, seed):
        x, residual = x.contiguous(), residual.contiguous()
        y = torch.empty_like(x)
        _dropout_add_kernel[(triton.cdiv(x.numel(), 32),)](x, residual, y, seed, p, x.numel(), BLOCK=32)  # expect: CG202 @dropout_python_seed
        ctx.p, ctx.seed = p, seed
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dx = torch.empty_like(g)
        _dropout_grad_kernel[(triton.cdiv(g.numel(), 32),)](g, dx, ctx.seed, ctx.p, g.numel(), BLOCK=32)  # expect: CG202 optional @dropout_python_seed
        return dx, g, None, None


def _sgd(params, loss, lr):
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, g in zip(params, grads):
            p.sub_(lr * g)
    return loss.detach()


def factory_bad_dropout_python_seed():  # hazard: 11
    rng = random.Random(17)
    w1 = _gen(42, 20, 20, scale=0.3).requires_grad_()
    w2 = _gen(43, 20, 4, scale=0.3).requires_grad_()

    def loss_fn(x, y):
        h = DropoutAdd.apply(torch.tanh(x @ w1), x, 0.5, rng.randrange(1 << 30))
        return (h @ w2 - y).square().mean()

    def step(x, y):
        return _sgd((w1, w2), loss_fn(x, y), 0.1)

    return step, lambda i: (_gen(110 + i, 4, 20), _gen(120 + i, 4, 4))


@triton.jit
def _dropout_dev_kernel(x_ptr, y_ptr, seed_ptr, p, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    keep = tl.rand(tl.load(seed_ptr), o) > p
    tl.store(y_ptr + o, tl.where(keep, tl.load(x_ptr + o, mask=m) / (1 - p), 0.0), mask=m)


class SeededDropout(torch.autograd.Function):
    @staticmethod
    def _run(x, seed, p):
        x = x.contiguous()
        y = torch.empty_like(x)
        _dropout_dev_kernel[(triton.cdiv(x.numel(), 32),)](x, y, seed, p, x.numel(), BLOCK=32)
        return y

    @staticmethod
    def forward(ctx, x, seed, p):
        mine = seed.clone()
        ctx.save_for_backward(mine)
        ctx.p = p
        return SeededDropout._run(x, mine, p)

    @staticmethod
    def backward(ctx, g):
        (seed,) = ctx.saved_tensors
        return SeededDropout._run(g, seed, ctx.p), None, None


def factory_ok_dropout_device_seed():  # hazard: 11
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(_gen(44, 20, 20, scale=0.3))
            self.register_buffer("seed", torch.full((1,), 77, dtype=torch.int64, device="cuda"))

        def forward(self, x):
            for _ in range(2):
                x = SeededDropout.apply(torch.tanh(x @ self.w), self.seed, 0.25)
                self.seed += 1
            return x

    net = Block()

    def step(x, y):
        return _sgd(list(net.parameters()), (net(x) - y).square().mean(), 0.1)

    return step, lambda i: (_gen(130 + i, 4, 20), _gen(140 + i, 4, 20))


@triton.jit
def _softcap_fwd_kernel(x_ptr, y_ptr, cap, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.store(y_ptr + o, cap * (2 * tl.sigmoid(2 * x / cap) - 1), mask=o < n)


@triton.jit
def _softcap_bwd_kernel(y_ptr, g_ptr, dx_ptr, cap, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + o, mask=o < n, other=0.0) / cap
    g = tl.load(g_ptr + o, mask=o < n, other=0.0)
    tl.store(dx_ptr + o, g * (1 - y * y), mask=o < n)


def _softcap_class(check):
    class SoftCap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cap):
            y = torch.empty_like(x)
            _softcap_fwd_kernel[(triton.cdiv(x.numel(), 64),)](x, y, cap, x.numel(), BLOCK=64)
            ctx.save_for_backward(y)
            ctx.cap = cap
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            dx = torch.empty_like(y)
            _softcap_bwd_kernel[(triton.cdiv(y.numel(), 64),)](y, g.contiguous(), dx, ctx.cap, y.numel(), BLOCK=64)
            if check:
                assert torch.isfinite(dx).all(), "softcap: bad gradient"  # expect: CG101|CG108 @softcap_assert
            else:
                dx = torch.nan_to_num(dx, 0.0, 1e4, -1e4)
            return dx, None

    return SoftCap


def factory_bad_softcap_assert():  # hazard: 9
    cap = _softcap_class(check=True)
    w = _gen(45, 16, 12).requires_grad_()

    def step(x, labels):
        logits = cap.apply(x @ w, 5.0)
        return _sgd((w,), torch.nn.functional.cross_entropy(logits, labels), 0.2)

    return step, lambda i: (_gen(150 + i, 4, 16), (torch.arange(4) * 3 + i).remainder(12).to("cuda"))


def factory_ok_softcap_nan_to_num():  # hazard: 9
    cap = _softcap_class(check=False)
    w = _gen(46, 16, 12).requires_grad_()
    momentum = torch.zeros_like(w)

    def step(x, labels):
        loss = torch.nn.functional.cross_entropy(cap.apply(x @ w, 5.0), labels)
        (g,) = torch.autograd.grad(loss, (w,))
        with torch.no_grad():
            momentum.mul_(0.9).add_(g)
            ok = torch.isfinite(loss)
            w.sub_(torch.where(ok, 0.1 * momentum, torch.zeros_like(momentum)))
        return loss.detach(), g

    return step, lambda i: (_gen(160 + i, 4, 16), (torch.arange(4) * 5 + i).remainder(12).to("cuda"))


# --------------------------------------------------------------------------- penalties over what was generated
@triton.jit
def _repetition_kernel(logits_ptr, hist_ptr, n_hist, V, penalty, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < V
    x = tl.load(logits_ptr + b * V + c, mask=m, other=0.0)
    seen = tl.zeros((BLOCK,), tl.int32)
    for t in range(0, n_hist):
        seen += (c == tl.load(hist_ptr + b * n_hist + t)).to(tl.int32)
    tl.store(logits_ptr + b * V + c, tl.where(seen > 0, tl.where(x > 0, x / penalty, x * penalty), x), mask=m)


@dataclass
class GenerationState:
    tokens: list = field(default_factory=list)

    def history(self):
        return torch.stack(self.tokens, dim=1)  # expect: CG208 @token_history


def factory_bad_token_history():  # hazard: 17
    state = GenerationState([torch.zeros(2, dtype=torch.long, device="cuda")])
    emb, head = _gen(47, 20, 16), _gen(48, 16, 20)

    def step(x):
        hist = state.history()
        logits = (x + emb[hist[:, -1]]) @ head
        _repetition_kernel[(2,)](logits, hist, hist.shape[1], 20, 1.7, BLOCK=32)  # expect: CG202|CG208 optional
        state.tokens.append(logits.argmax(-1))  # expect: CG210|CG208|CG205 optional
        return logits

    return step, lambda i: (_gen(170 + i, 2, 16),)


@triton.jit
def _count_and_penalise_kernel(logits_ptr, last_ptr, counts_ptr, freq, pres, V, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < V
    last = tl.load(last_ptr + b)
    n = tl.load(counts_ptr + b * V + c, mask=m, other=0) + (c == last).to(tl.int32)
    tl.store(counts_ptr + b * V + c, n, mask=m)
    x = tl.load(logits_ptr + b * V + c, mask=m)
    tl.store(logits_ptr + b * V + c, x - freq * n - tl.where(n > 0, pres, 0.0), mask=m)


def factory_ok_token_counts():  # hazard: 17
    class Penalties:
        def __init__(self, batch, vocab, freq, pres):
            self.counts = torch.zeros(batch, vocab, dtype=torch.int32, device="cuda")
            self.last = torch.zeros(batch, dtype=torch.long, device="cuda")
            self.freq, self.pres = freq, pres
            self.window = []

        def __call__(self, logits):
            b, v = logits.shape
            _count_and_penalise_kernel[(b,)](logits, self.last, self.counts, self.freq, self.pres, v, BLOCK=triton.next_power_of_2(v))
            return logits

        def commit(self, tokens):
            self.last.copy_(tokens)

    pen = Penalties(2, 20, 0.3, 0.7)
    emb, head = _gen(49, 20, 16), _gen(39, 16, 20)

    def step(x):
        logits = pen((x + emb[pen.last]) @ head)
        pen.commit(logits.argmax(-1))
        return logits, pen.counts.sum(0)

    return step, lambda i: (_gen(180 + i, 2, 16),)


# --------------------------------------------------------------------------- bookkeeping that nobody reads
@dataclass
class LaunchStats:
    launches: dict = field(default_factory=dict)

    def traced(self, fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            self.launches[fn.__name__] = self.launches.get(fn.__name__, 0) + 1  # expect: CG210 @launch_stats
            return fn(*args, **kwargs)
        return wrapper


def factory_quiet_launch_stats():  # hazard: 32
    stats = LaunchStats()
    cap = _softcap_class(check=False)

    @stats.traced
    def softcap(x):
        return cap.apply(x, 3.0)

    @stats.traced
    def swiglu(x):
        return _swiglu(x, n_rows, (2,))

    n_rows = torch.full((1,), 4, dtype=torch.int32, device="cuda")
    w = _gen(38, 16, 24)

    def step(x):
        return swiglu(softcap(x @ w))

    return step, lambda i: (_gen(190 + i, 4, 16),)
