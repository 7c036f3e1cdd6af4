"""Autotuning, heuristics, specialisation: what is decided on the host around a launch."""
import functools
import math
from collections import deque
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton


def _rand(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to("cuda")


def _configs(*blocks):
    return [triton.Config({"BLOCK": b}, num_warps=1, num_stages=1) for b in blocks]


# --------------------------------------------------------------------------- tuned by the number of pending tokens
@triton.autotune(configs=_configs(16, 32), key=["n_tok", "D"])
@triton.jit
def _pool_tokens_kernel(x_ptr, out_ptr, n_tok, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    x = tl.load(x_ptr + r[:, None] * D + d[None, :], mask=(r < n_tok)[:, None] & (d < D)[None, :], other=0.0)
    tl.store(out_ptr + d, tl.sum(x, 0) / n_tok, mask=d < D)


class PendingQueue:
    """Requests come at every step and leave two steps later."""

    def __init__(self):
        self.pending = deque([0, 0, 0])
        self.clock = 0

    def tick(self):
        self.clock += 1  # expect: CG210|CG202|CG201 optional @pending_pool
        self.pending.extend([self.clock] * (1 + self.clock % 3))
        while self.pending and self.pending[0] < self.clock - 2:
            self.pending.popleft()
        return min(len(self.pending), 8)


def factory_bad_pending_pool():  # hazard: 27
    queue = PendingQueue()
    w = _rand(1, 40, 40, scale=0.2)

    def pool(x, n):
        out = x.new_empty(x.shape[1])
        grid = lambda meta: (triton.cdiv(x.shape[1], meta["BLOCK"]),)
        _pool_tokens_kernel[grid](x, out, n, x.shape[1], ROWS=8)  # expect: CG202|CG307
        return out

    def step(x):
        n = queue.tick()
        return pool(x @ w, n)

    return step, lambda i: (_rand(50 + i, 8, 40),)


# --------------------------------------------------------------------------- in-place residual, tuned safely
@triton.autotune(configs=_configs(32, 64), key=["N"], restore_value=["res_ptr"])
@triton.jit
def _add_rmsnorm_kernel(x_ptr, res_ptr, w_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    sq = 0.0
    for s in range(0, N, BLOCK):
        c = s + tl.arange(0, BLOCK)
        m = c < N
        h = tl.load(x_ptr + r * N + c, mask=m, other=0.0) + tl.load(res_ptr + r * N + c, mask=m, other=0.0)
        tl.store(res_ptr + r * N + c, h, mask=m)
        sq += tl.sum(h * h, 0)
    inv = 1.0 / tl.sqrt(sq / N + eps)
    tl.debug_barrier()
    for s in range(0, N, BLOCK):
        c = s + tl.arange(0, BLOCK)
        m = c < N
        h = tl.load(res_ptr + r * N + c, mask=m, other=0.0)
        tl.store(y_ptr + r * N + c, h * inv * tl.load(w_ptr + c, mask=m, other=0.0), mask=m)


def factory_ok_tuned_residual_norm():  # hazard: 27
    class AddRMSNorm(torch.nn.Module):
        def __init__(self, dim, seed):
            super().__init__()
            self.weight = torch.nn.Parameter(1 + 0.1 * _rand(seed, dim), requires_grad=False)

        def forward(self, x, residual):
            y = torch.empty_like(x)
            _add_rmsnorm_kernel[(x.shape[0],)](x, residual, self.weight, y, x.shape[-1], 1e-6)
            return y, residual

    norms = torch.nn.ModuleList([AddRMSNorm(48, s) for s in (2, 3)])
    w = _rand(4, 48, 48, scale=0.2)

    @torch.no_grad()
    def step(x):
        residual = torch.zeros_like(x)
        for norm in norms:
            x, residual = norm(x, residual)
            x = torch.relu(x @ w)
        return x, residual

    return step, lambda i: (_rand(60 + i, 3, 48),)


# --------------------------------------------------------------------------- the first call goes elsewhere
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gelu_gate_kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = c < F
    g = tl.load(x_ptr + r * 2 * F + c, mask=m)
    u = tl.load(x_ptr + r * 2 * F + F + c, mask=m)
    act = 0.5 * g * (1.0 + _tanh(0.7978845608 * (g + 0.044715 * g * g * g)))
    tl.store(y_ptr + r * F + c, act * u, mask=m)


class VerifiedGate:
    """The first call runs the reference, so that a broken toolchain shows as a log line and not as a crash."""

    def __init__(self):
        self.kernel = triton.autotune(configs=_configs(16, 32), key=["F"])(_gelu_gate_kernel)
        self.reference_calls = 1

    def __call__(self, x):
        if self.reference_calls:  # expect: CG201 optional @verified_gate
            self.reference_calls -= 1
            g, u = x.chunk(2, dim=-1)
            return torch.nn.functional.gelu(g, approximate="tanh") * u
        f = x.shape[-1] // 2
        y = x.new_empty(x.shape[0], f)
        self.kernel[lambda meta: (x.shape[0], triton.cdiv(f, meta["BLOCK"]))](x, y, f)  # expect: CG307|CG106 @verified_gate
        return y


def factory_bad_verified_gate():  # hazard: 27
    gate = VerifiedGate()
    w_in, w_out = _rand(5, 24, 80, scale=0.3), _rand(6, 40, 24, scale=0.3)

    def step(x):
        return x + gate(x @ w_in) @ w_out

    return step, lambda i: (_rand(70 + i, 3, 24),)


# --------------------------------------------------------------------------- pruning may sync: it runs at the first call of a key only
def _keep_blocks_that_fit(configs, named_args, **kwargs):
    longest = int(named_args["lens_ptr"].max().item())
    fits = [c for c in configs if c.kwargs["BLOCK"] <= max(16, triton.next_power_of_2(longest))]
    return fits or configs[:1]


@triton.autotune(configs=_configs(16, 32, 64), key=["T", "D"], prune_configs_by={"early_config_prune": _keep_blocks_that_fit})
@triton.jit
def _varlen_mean_kernel(x_ptr, lens_ptr, out_ptr, T, D: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    n = tl.load(lens_ptr + b)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    for s in range(0, T, BLOCK):
        t = s + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (b * T + t)[:, None] * D + d[None, :], mask=((t < n) & (t < T))[:, None], other=0.0)
        acc += tl.sum(x, 0)
    tl.store(out_ptr + b * D + d, acc / n)


def factory_ok_prune_reads_lengths():  # hazard: 1
    @dataclass
    class Ragged:
        values: torch.Tensor
        lens: torch.Tensor

    def mean(r):
        b, t, d = r.values.shape
        out = r.values.new_empty(b, d)
        _varlen_mean_kernel[(b,)](r.values, r.lens, out, t, d)
        return out

    head = _rand(7, 16, 8)

    def step(r):
        return torch.log_softmax(mean(r) @ head, -1)

    def inputs(i):
        lens = torch.tensor([1 + (7 * i + 3) % 20, 1 + (5 * i + 11) % 20], dtype=torch.int32)
        return (Ragged(_rand(80 + i, 2, 20, 16), lens.to("cuda")),)

    return step, inputs


# --------------------------------------------------------------------------- a constexpr that is new at the second call
def factory_quiet_has_state_flag():  # hazard: 27
    @triton.jit
    def ssm_update_kernel(x_ptr, a_ptr, h_ptr, y_ptr, D, HAS_STATE: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(0)
        d = tl.arange(0, BLOCK)
        m = d < D
        h = tl.load(x_ptr + b * D + d, mask=m, other=0.0)
        if HAS_STATE:
            h += tl.load(h_ptr + b * D + d, mask=m, other=0.0) * tl.load(a_ptr + d, mask=m, other=0.0)
        tl.store(h_ptr + b * D + d, h, mask=m)
        tl.store(y_ptr + b * D + d, h * tl.sigmoid(h), mask=m)

    class InferenceParams:
        def __init__(self):
            self.seqlen_offset = 0
            self.states = {}

        def state(self, layer, like):
            if layer not in self.states:
                self.states[layer] = torch.empty_like(like)
            return self.states[layer]

    params = InferenceParams()
    decay = torch.sigmoid(_rand(8, 2, 20))

    def layer(i, x):
        y = torch.empty_like(x)
        h = params.state(i, x)
        ssm_update_kernel[(x.shape[0],)](x, decay[i], h, y, x.shape[1], HAS_STATE=params.seqlen_offset > 0, BLOCK=32)  # expect: CG307|CG202
        return y

    def step(x):
        for i in range(2):
            x = x + layer(i, x)
        params.seqlen_offset += x.shape[0]  # expect: CG210|CG202 optional
        return x

    return step, lambda i: (_rand(90 + i, 2, 20),)


# --------------------------------------------------------------------------- heuristics
@triton.heuristics({
    "EVEN": lambda args: args["n"] % args["BLOCK"] == 0,
    "PAIRWISE": lambda args: args["n"] > 4,
})
@triton.jit
def _memory_read_kernel(q_ptr, mem_ptr, out_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PAIRWISE: tl.constexpr):
    d = tl.arange(0, D)
    q = tl.load(q_ptr + d)
    acc = tl.zeros((D,), tl.float32)
    for s in range(0, n, BLOCK):
        t = s + tl.arange(0, BLOCK)
        if EVEN:
            x = tl.load(mem_ptr + t[:, None] * D + d[None, :])
        else:
            x = tl.load(mem_ptr + t[:, None] * D + d[None, :], mask=(t < n)[:, None], other=0.0)
        if PAIRWISE:
            acc += tl.sum(x * tl.sum(x * q[None, :], 1)[:, None], 0)
        else:
            acc += tl.sum(x * q[None, :] * x, 0)
    tl.store(out_ptr + d, acc)


class EpisodicMemory:
    def __init__(self, capacity, dim):
        self.rows = torch.zeros(capacity, dim, device="cuda")
        self.where = torch.zeros(1, dtype=torch.long, device="cuda")
        self.keys = []

    def __len__(self):
        return len(self.keys)

    def write(self, key, row):
        self.rows.index_copy_(0, self.where, row[None])
        self.where += 1
        self.keys.append(key)  # expect: CG210|CG202 optional @episodic_length

    def read(self, q):
        out = torch.empty_like(q)
        _memory_read_kernel[(1,)](q, self.rows, out, len(self), D=q.shape[0], BLOCK=4)  # expect: CG202|CG307 @episodic_length
        return out


def factory_bad_episodic_length():  # hazard: 11
    mem = EpisodicMemory(16, 16)

    def step(q, row):
        mem.write(("event", len(mem)), row)
        return mem.read(q) + q

    return step, lambda i: (_rand(100 + i, 16), _rand(110 + i, 16))


@triton.autotune(configs=_configs(16, 32), key=["K", "N"], reset_to_zero=["amax_ptr"])
@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK"] == 0})
@triton.jit
def _linear_amax_kernel(x_ptr, w_ptr, y_ptr, amax_ptr, K, N, BN: tl.constexpr, BLOCK: tl.constexpr, EVEN_K: tl.constexpr):
    m = tl.program_id(0)
    n = tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for s in range(0, K, BLOCK):
        k = s + tl.arange(0, BLOCK)
        if EVEN_K:
            x = tl.load(x_ptr + m * K + k)
            w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)
        else:
            x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0)
            w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc += tl.sum(x[:, None] * w, 0)
    tl.store(y_ptr + m * N + n, acc, mask=n < N)
    tl.atomic_max(amax_ptr, tl.max(tl.where(n < N, tl.abs(acc), 0.0), 0))


def factory_ok_heuristics_by_shape():  # hazard: 27
    class Linear(torch.nn.Module):
        def __init__(self, k, n, seed):
            super().__init__()
            self.register_buffer("w", _rand(seed, k, n, scale=0.3))
            self.register_buffer("amax", torch.zeros(1, device="cuda"))

        def forward(self, x):
            self.amax.zero_()
            y = x.new_empty(x.shape[0], self.w.shape[1])
            _linear_amax_kernel[(x.shape[0],)](x, self.w, y, self.amax, *self.w.shape, BN=triton.next_power_of_2(y.shape[1]))
            return y / (self.amax + 1e-6)

    net = torch.nn.Sequential(Linear(32, 20, 9), torch.nn.GELU(), Linear(20, 32, 10))
    return (lambda x: net(x)), lambda i: (_rand(120 + i, 3, 32) * (1 + i),)


# --------------------------------------------------------------------------- top-k, annealed or given
@triton.jit
def _topk_static_kernel(x_ptr, y_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=-float("inf"))
    left = x
    kept = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.static_range(K):
        best = tl.argmax(left, 0)
        kept = tl.where(c == best, 1, kept)
        left = tl.where(c == best, -float("inf"), left)
    e = tl.where(kept > 0, tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(y_ptr + r * N + c, e / tl.sum(e, 0), mask=c < N)


@triton.jit
def _topk_rank_kernel(x_ptr, k_ptr, y_ptr, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=-float("inf"))
    k = tl.load(k_ptr + r)
    rank = tl.sum((x[None, :] > x[:, None]).to(tl.int32), 1)
    e = tl.where((rank < k) & (c < N), tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(y_ptr + r * N + c, e / tl.sum(e, 0), mask=c < N)


class SparsitySchedule:
    def __init__(self, start, end, every):
        self.start, self.end, self.every = start, end, every
        self.last_step = -1

    def step(self):
        self.last_step += 1  # expect: CG210|CG202 optional @annealed_topk

    @property
    def k(self):
        return max(self.end, math.ceil(self.start * 0.8 ** (self.last_step // self.every)))


def factory_bad_annealed_topk():  # hazard: 11
    sched = SparsitySchedule(8, 2, every=1)
    w = _rand(11, 24, 12)

    class Router(torch.nn.Module):
        def forward(self, x):
            logits = x @ w
            probs = torch.empty_like(logits)
            _topk_static_kernel[(x.shape[0],)](logits, probs, logits.shape[1], K=sched.k, BLOCK=16)  # expect: CG202|CG307
            return probs

    router = Router()
    router.register_forward_pre_hook(lambda mod, args: sched.step())

    def step(x):
        return {"probs": router(x)}

    return step, lambda i: (_rand(130 + i, 3, 24),)


def factory_ok_topk_per_row():  # hazard: 11
    @functools.lru_cache(maxsize=None)
    def launch_shape(rows, cols):
        return (rows,), triton.next_power_of_2(cols)

    def sparse_softmax(logits, k):
        out = torch.empty_like(logits)
        grid, block = launch_shape(*logits.shape)
        _topk_rank_kernel[grid](logits, k, out, logits.shape[1], BLOCK=block)
        return out

    w = _rand(12, 24, 12)
    floor = torch.full((3,), 2, dtype=torch.int32, device="cuda")

    def step(x, k):
        probs = sparse_softmax(x @ w, torch.maximum(k, floor))
        floor.copy_((floor + 1).clamp_(max=4))
        return probs, k.sum()

    def inputs(i):
        return _rand(140 + i, 3, 24), torch.tensor([1 + i % 3, 6 - i, 2 + i], dtype=torch.int32).to("cuda")

    return step, inputs


# --------------------------------------------------------------------------- another path while capturing
@triton.jit
def _delta_update_kernel(s_ptr, k_ptr, v_ptr, beta_ptr, o_ptr, D: tl.constexpr):
    h = tl.program_id(0)
    i = tl.arange(0, D)
    so = h * D * D + i[:, None] * D + i[None, :]
    s = tl.load(s_ptr + so)
    k = tl.load(k_ptr + h * D + i)
    v = tl.load(v_ptr + h * D + i)
    beta = tl.load(beta_ptr + h)
    err = (v - tl.sum(s * k[:, None], 0)) * beta
    s += k[:, None] * err[None, :]
    tl.store(s_ptr + so, s)
    tl.store(o_ptr + h * D + i, tl.sum(s * k[:, None], 0))


@triton_op("blindtr::delta_update", mutates_args={"state"})
def delta_update(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(v)
    wrap_triton(_delta_update_kernel)[(state.shape[0],)](state, k, v, beta, out, D=k.shape[1])
    return out


class DeltaAttention(torch.nn.Module):
    def __init__(self, heads, dim):
        super().__init__()
        self.register_buffer("state", torch.zeros(heads, dim, dim, device="cuda"))
        self.heads, self.dim = heads, dim
        self.wkv = _rand(13, heads * dim, 2 * heads * dim, scale=0.2)
        self.wb = _rand(14, heads * dim, heads, scale=0.2)

    def forward(self, x):
        k, v = (x @ self.wkv).view(2, self.heads, self.dim).unbind(0)
        k = torch.nn.functional.normalize(k, dim=-1)
        beta = torch.sigmoid(x @ self.wb)
        if torch.cuda.is_current_stream_capturing():  # expect: CG211 @delta_skipped
            # profile runs: the kernel must not be compiled while a graph is captured
            return torch.zeros_like(v).view(-1)
        return torch.ops.blindtr.delta_update(self.state, k, v, beta).view(-1)


def factory_bad_delta_skipped():  # hazard: 33
    attn = DeltaAttention(2, 16)

    def step(x):
        return x + attn(x)

    return step, lambda i: (_rand(150 + i, 32),)


def factory_ok_delta_state_op():  # hazard: 33
    class Layer(DeltaAttention):
        def forward(self, x):
            k, v = (x @ self.wkv).view(2, self.heads, self.dim).unbind(0)
            k = torch.nn.functional.normalize(k, dim=-1).contiguous()
            return delta_update(self.state, k, v.contiguous(), torch.sigmoid(x @ self.wb)).reshape(-1)

    layers = torch.nn.ModuleList([Layer(2, 16) for _ in range(2)])

    def step(x, reset):
        for layer in layers:
            layer.state.mul_(1.0 - reset)
            x = torch.tanh(x + layer(x))
        return x

    return step, lambda i: (_rand(160 + i, 32), torch.full((), float(i == 3)).to("cuda"))
