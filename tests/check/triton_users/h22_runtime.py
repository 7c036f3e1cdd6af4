"""State that changes hands, streams, profiling, scans, masks, speculative decoding."""
import functools
import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl


def _mk(seed, *shape, std=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to("cuda")


# --------------------------------------------------------------------------- two state buffers
@triton.jit
def _diffuse_kernel(src_ptr, x_ptr, dst_ptr, N, rate, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    m = c < N
    left = tl.load(src_ptr + (c + N - 1) % N, mask=m, other=0.0)
    right = tl.load(src_ptr + (c + 1) % N, mask=m, other=0.0)
    here = tl.load(src_ptr + c, mask=m, other=0.0)
    tl.store(dst_ptr + c, here + rate * (left + right - 2 * here) + tl.load(x_ptr + c, mask=m, other=0.0), mask=m)


@dataclass
class Field:
    now: torch.Tensor
    then: torch.Tensor

    @classmethod
    def zeros(cls, n):
        return cls(torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda"))

    def advance(self, x, rate):
        n = x.numel()
        _diffuse_kernel[(1,)](self.now, x, self.then, n, rate, BLOCK=triton.next_power_of_2(n))  # expect: CG205|CG201 @diffusion_swap
        self.now, self.then = self.then, self.now  # expect: CG205|CG210 optional @diffusion_swap


def factory_bad_diffusion_swap():  # hazard: 14
    f = Field.zeros(20)

    def step(x):
        f.advance(x, 0.2)
        return f.now * 2

    return step, lambda i: (_mk(50 + i, 20),)


def factory_ok_diffusion_two_substeps():  # hazard: 14
    f = Field.zeros(24)
    zero = torch.zeros(24, device="cuda")

    def step(x):
        # two swaps: every step starts from the same buffers
        for source in (x, zero):
            f.advance(source, 0.25)
        return {"field": f.now.clone(), "mass": f.now.sum()}

    return step, lambda i: (_mk(60 + i, 24),)


# --------------------------------------------------------------------------- a cache that grows by concatenation
@triton.jit
def _decay_attend_kernel(q_ptr, kv_ptr, out_ptr, T, D: tl.constexpr, MAXT: tl.constexpr):
    h = tl.program_id(0)
    d = tl.arange(0, D)
    t = tl.arange(0, MAXT)
    live = t < T
    kv = tl.load(kv_ptr + h * T * D + t[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    q = tl.load(q_ptr + h * D + d)
    s = tl.where(live, tl.sum(kv * q[None, :], 1) * 0.25, -1.0e9)
    s = tl.where(live, tl.exp(s - tl.max(s, 0)), 0.0)
    tl.store(out_ptr + h * D + d, tl.sum(kv * s[:, None], 0) / tl.sum(s, 0))


class ConcatCache:
    def __init__(self):
        self.layers = {}

    def update(self, layer, kv):
        old = self.layers.get(layer)
        self.layers[layer] = kv if old is None else torch.cat([old, kv], dim=1)  # expect: CG208 @concat_cache
        return self.layers[layer]


def factory_bad_concat_cache():  # hazard: 17
    cache = ConcatCache()
    w = _mk(1, 32, 32, std=0.3)

    def attend(layer, x):
        q = (x @ w).view(2, 16)
        kv = cache.update(layer, q[:, None].contiguous())
        out = torch.empty_like(q)
        _decay_attend_kernel[(2,)](q, kv, out, kv.shape[1], D=16, MAXT=16)  # expect: CG202|CG208 optional
        return out.view(-1)

    def step(x):
        return x + attend(1, x + attend(0, x))

    return step, lambda i: (_mk(70 + i, 32),)


@triton.jit
def _decay_attend_fixed_kernel(q_ptr, kv_ptr, len_ptr, out_ptr, D: tl.constexpr, MAXT: tl.constexpr):
    h = tl.program_id(0)
    d = tl.arange(0, D)
    t = tl.arange(0, MAXT)
    live = t < tl.load(len_ptr)
    kv = tl.load(kv_ptr + h * MAXT * D + t[:, None] * D + d[None, :])
    q = tl.load(q_ptr + h * D + d)
    s = tl.where(live, tl.sum(kv * q[None, :], 1) * 0.25, -1.0e9)
    s = tl.where(live, tl.exp(s - tl.max(s, 0)), 0.0)
    tl.store(out_ptr + h * D + d, tl.sum(kv * s[:, None], 0) / tl.sum(s, 0))


def factory_ok_preallocated_cache():  # hazard: 17
    class FixedCache:
        def __init__(self, layers, heads, max_t, d):
            self.kv = [torch.zeros(heads, max_t, d, device="cuda") for _ in range(layers)]
            self.length = torch.zeros(1, dtype=torch.long, device="cuda")

        @contextmanager
        def token(self):
            at = self.length.clone()
            self.length += 1
            yield lambda layer, kv: self.kv[layer].index_copy_(1, at, kv)

    cache = FixedCache(2, 2, 16, 16)
    w = _mk(2, 32, 32, std=0.3)

    def step(x):
        with cache.token() as put:
            for layer in range(2):
                q = (x @ w).view(2, 16)
                kv = put(layer, q[:, None])
                out = torch.empty_like(q)
                _decay_attend_fixed_kernel[(2,)](q, kv, cache.length, out, D=16, MAXT=16)
                x = x + out.view(-1)
        return x

    return step, lambda i: (_mk(80 + i, 32),)


# --------------------------------------------------------------------------- profiling
@triton.jit
def _gated_norm_kernel(x_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * N + c, mask=c < N, other=0.0)
    inv = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + 1e-6)
    g = tl.load(g_ptr + r * N + c, mask=c < N, other=0.0)
    tl.store(y_ptr + r * N + c, x * inv * tl.sigmoid(g), mask=c < N)


class KernelProfiler:
    def __init__(self, enabled):
        self.enabled = enabled
        self.ms = {}

    def __call__(self, fn):
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def timed(*args):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = fn(*args)
            end.record()
            end.synchronize()  # expect: CG106 @profiled_norm
            self.ms.setdefault(fn.__name__, []).append(start.elapsed_time(end))  # expect: CG106|CG107|CG210 optional @profiled_norm
            return out
        return timed


def _profiled_net(profiler, seed):
    @profiler
    def gated_norm(x, g):
        y = torch.empty_like(x)
        _gated_norm_kernel[(x.shape[0],)](x, g, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return y

    w = _mk(seed, 24, 48, std=0.3)

    def step(x):
        h, g = (x @ w).chunk(2, -1)
        return gated_norm(h.contiguous(), g.contiguous())

    return step


def factory_bad_profiled_norm():  # hazard: 7
    return _profiled_net(KernelProfiler(enabled=True), 3), lambda i: (_mk(90 + i, 3, 24),)


def factory_ok_profiler_off():  # hazard: 7
    off = KernelProfiler(enabled=os.environ.get("BLIND_PROFILE", "0") == "1")
    return _profiled_net(off, 4), lambda i: (_mk(100 + i, 3, 24),)


# --------------------------------------------------------------------------- scans by several launches
@triton.jit
def _scan_pass_kernel(src_ptr, dst_ptr, offset, N, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(src_ptr + r * N + c, mask=m, other=0.0)
    x += tl.load(src_ptr + r * N + c - offset, mask=m & (c >= offset), other=0.0)
    tl.store(dst_ptr + r * N + c, x, mask=m)


def _passes(n):
    k = 1
    while k < n:
        yield k
        k *= 2


class PrefixWindow:
    """A sum over the last `span` entries; the span widens while the stream is young."""

    def __init__(self, limit):
        self.limit = limit
        self.age = 1

    def __call__(self, x):
        for offset in _passes(min(2 ** self.age, self.limit)):  # expect: CG201 optional @widening_scan
            y = torch.empty_like(x)
            _scan_pass_kernel[(x.shape[0],)](x, y, offset, x.shape[1], BLOCK=32)  # expect: CG201|CG202|CG307 @widening_scan
            x = y
        self.age += 1  # expect: CG210|CG201|CG202 optional @widening_scan
        return x


def factory_bad_widening_scan():  # hazard: 10
    window = PrefixWindow(32)
    return (lambda x: window(x * x)), lambda i: (_mk(110 + i, 2, 28),)


def factory_ok_full_scan():  # hazard: 10
    schedule = tuple(_passes(28))
    ping = [torch.empty(2, 28, device="cuda") for _ in range(2)]

    def scan(x):
        src = x
        for j, offset in enumerate(schedule):
            dst = ping[j % 2]
            _scan_pass_kernel[(x.shape[0],)](src, dst, offset, x.shape[1], BLOCK=32)
            src = dst
        return src

    return (lambda x: scan(torch.sigmoid(x)).clone()), lambda i: (_mk(120 + i, 2, 28),)


# --------------------------------------------------------------------------- compaction
@triton.jit
def _compact_rows_kernel(x_ptr, dest_ptr, keep_ptr, y_ptr, D: tl.constexpr):
    r = tl.program_id(0)
    if tl.load(keep_ptr + r) == 0:
        return
    d = tl.arange(0, D)
    tl.store(y_ptr + tl.load(dest_ptr + r) * D + d, tl.load(x_ptr + r * D + d))


@triton.jit
def _square_rows_kernel(x_ptr, y_ptr, D: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + r * D + d)
    tl.store(y_ptr + r * D + d, x * x + x)


class TokenDropper:
    def __init__(self, thr):
        self.thr = thr

    def keep(self, x):
        return x.mean(-1) > self.thr

    def pack(self, x):
        return x[self.keep(x)]  # expect: CG104 @boolean_token_drop


def factory_bad_boolean_token_drop():  # hazard: 5
    drop = TokenDropper(-0.1)

    def step(x):
        kept = drop.pack(x)
        y = torch.empty_like(kept)
        if kept.shape[0]:
            _square_rows_kernel[(kept.shape[0],)](kept, y, D=16)  # expect: CG202|CG208 optional
        return y.sum(0)

    return step, lambda i: (_mk(130 + i, 9, 16),)


def factory_ok_static_token_drop():  # hazard: 5
    class Packed(TokenDropper):
        def pack(self, x):
            keep = self.keep(x).to(torch.int32)
            dest = keep.cumsum(0, dtype=torch.int32) - keep
            y = torch.zeros_like(x)
            _compact_rows_kernel[(x.shape[0],)](x, dest, keep, y, D=x.shape[1])
            return y, keep.sum()

    drop = Packed(0.0)

    def step(x):
        packed, n = drop.pack(x)
        y = torch.empty_like(packed)
        _square_rows_kernel[(packed.shape[0],)](packed, y, D=16)
        return y, n

    return step, lambda i: (_mk(140 + i, 9, 16),)


# --------------------------------------------------------------------------- side stream
@triton.jit
def _running_amax_kernel(x_ptr, amax_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.atomic_max(amax_ptr, tl.max(tl.abs(x), 0))


class AsyncObserver:
    def __init__(self, join):
        self.stream = torch.cuda.Stream()
        self.amax = torch.zeros(1, device="cuda")
        self.join = join

    def watch(self, x):
        n = x.numel()
        self.stream.wait_stream(torch.cuda.current_stream())  # expect: CG305 optional @unjoined_observer
        with torch.cuda.stream(self.stream):  # expect: CG305 optional @unjoined_observer
            _running_amax_kernel[(triton.cdiv(n, 32),)](x, self.amax, n, BLOCK=32)  # expect: CG305 @unjoined_observer

    def settle(self):
        if self.join:
            torch.cuda.current_stream().wait_stream(self.stream)
        return self.amax


def factory_bad_unjoined_observer():  # hazard: 25
    obs = AsyncObserver(join=False)
    w = _mk(5, 16, 16, std=0.4)

    def step(x):
        h = x @ w
        obs.watch(h)
        y = torch.empty_like(h)
        _square_rows_kernel[(h.shape[0],)](h, y, D=16)
        obs.settle()
        return y

    return step, lambda i: (_mk(150 + i, 5, 16),)


def factory_ok_joined_observer():  # hazard: 25
    obs = AsyncObserver(join=True)
    w = _mk(6, 16, 16, std=0.4)

    def step(x):
        h = x @ w
        obs.watch(h)
        y = torch.empty_like(h)
        _square_rows_kernel[(h.shape[0],)](h, y, D=16)
        return y / (1e-6 + obs.settle()), obs.amax.clone()

    return step, lambda i: (_mk(160 + i, 5, 16) * (1 + i),)


# --------------------------------------------------------------------------- grammar masks
@triton.jit
def _bitmask_kernel(logits_ptr, mask_ptr, V, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < V
    word = tl.load(mask_ptr + b * WORDS + c // 32, mask=m, other=0)
    ok = (word >> (c % 32)) & 1
    x = tl.load(logits_ptr + b * V + c, mask=m, other=0.0)
    tl.store(logits_ptr + b * V + c, tl.where(ok != 0, x, -30.0), mask=m)


class Grammar:
    """A toy automaton: from state s the tokens v with (v * 3 + s) % 4 != 0 are allowed, and the state cycles."""

    def __init__(self, vocab, states=5):
        v = np.arange(vocab)
        self.allowed = np.stack([(v * 3 + s) % 4 != 0 for s in range(states)])
        self.states = np.arange(2) % states

    def words(self):
        bits = np.zeros((self.allowed.shape[0], 64), dtype=np.uint8)
        bits[:, : self.allowed.shape[1]] = self.allowed
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def bitmask(self):
        rows = self.words()[self.states]
        self.states = (self.states + 1) % self.allowed.shape[0]  # expect: CG210|CG204 optional @grammar_bitmask
        return torch.from_numpy(rows).to("cuda", non_blocking=True)  # expect: CG102 @grammar_bitmask


def factory_bad_grammar_bitmask():  # hazard: 3
    grammar = Grammar(40)
    head = _mk(7, 16, 40)

    def step(h):
        logits = h @ head
        _bitmask_kernel[(2,)](logits, grammar.bitmask(), 40, WORDS=2, BLOCK=64)
        return torch.softmax(logits, -1)

    return step, lambda i: (_mk(170 + i, 2, 16),)


def factory_ok_grammar_table():  # hazard: 3
    grammar = Grammar(40)
    table = torch.from_numpy(grammar.words()).to("cuda")
    state = torch.arange(2, device="cuda")
    head = _mk(8, 16, 40)

    def step(h):
        logits = h @ head
        _bitmask_kernel[(2,)](logits, table.index_select(0, state), 40, WORDS=2, BLOCK=64)
        tok = logits.argmax(-1)
        state.add_(tok % 2 + 1).remainder_(table.shape[0])
        return torch.softmax(logits, -1), state.clone()

    return step, lambda i: (_mk(180 + i, 2, 16),)


# --------------------------------------------------------------------------- speculative decoding
@triton.jit
def _accept_kernel(p_ptr, q_ptr, u_ptr, tok_ptr, acc_ptr, V):
    i = tl.program_id(0)
    t = tl.load(tok_ptr + i)
    ratio = tl.load(p_ptr + i * V + t) / tl.load(q_ptr + i * V + t)
    tl.store(acc_ptr + i, (tl.load(u_ptr + i) < ratio).to(tl.int32))


class Verifier:
    def __init__(self, vocab):
        self.vocab = vocab

    def accepted(self, p, q, u, tokens):
        flags = torch.empty(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        _accept_kernel[(tokens.shape[0],)](p, q, u, tokens, flags, self.vocab)
        return flags

    def prefix(self, flags):
        n = 0
        while n < flags.shape[0] and flags[n]:  # expect: CG101|CG108 @speculative_prefix
            n += 1
        return n


def factory_bad_speculative_prefix():  # hazard: 9
    ver = Verifier(12)

    def step(p_logits, q_logits, u, tokens):
        p, q = torch.softmax(p_logits, -1), torch.softmax(q_logits, -1)
        n = ver.prefix(ver.accepted(p, q, u, tokens))
        out = torch.full_like(tokens, -1)
        out[:n] = tokens[:n]  # expect: CG202|CG208|CG201 optional
        return out, p.sum(0)

    def inputs(i):
        u = torch.rand(4, generator=torch.Generator().manual_seed(190 + i))
        return _mk(190 + i, 4, 12), _mk(200 + i, 4, 12), u.to("cuda"), (torch.arange(4) * 2 + i).remainder(12).to("cuda")

    return step, inputs


# --------------------------------------------------------------------------- tuned by bucket
@triton.jit
def _window_mean_kernel(x_ptr, len_ptr, y_ptr, bucket, D: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, T)
    n = tl.load(len_ptr)
    x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=(t < n)[:, None] & (d < D)[None, :], other=0.0)
    tl.store(y_ptr + d, tl.sum(x, 0) / n, mask=d < D)


class BucketedWindow:
    def __init__(self, dim, max_len, start):
        configs = [triton.Config({"BLOCK": b}, num_warps=1) for b in (16, 32)]
        self.kernel = triton.autotune(configs, key=["bucket"])(_window_mean_kernel)
        self.rows = torch.zeros(max_len, dim, device="cuda")
        self.at = torch.full((1,), start, dtype=torch.long, device="cuda")
        self.seen = start

    @property
    def bucket(self):
        return max(4, triton.next_power_of_2(self.seen))

    def push(self, row):
        self.rows.index_copy_(0, self.at, row[None])
        self.at += 1
        self.seen += 1  # expect: CG210|CG307|CG202 optional @bucketed_tuning

    def mean(self):
        y = torch.empty_like(self.rows[0])
        d = y.numel()
        self.kernel[lambda m: (triton.cdiv(d, m["BLOCK"]),)](self.rows, self.at, y, self.bucket, D=d, T=16)  # expect: CG307|CG202|CG106 @bucketed_tuning
        return y


def factory_bad_bucketed_tuning():  # hazard: 27
    win = BucketedWindow(24, 16, start=7)

    def step(x):
        win.push(torch.tanh(x))
        return win.mean()

    return step, lambda i: (_mk(210 + i, 24),)


# --------------------------------------------------------------------------- raw addresses
@triton.jit
def _axpy_raw_kernel(x_addr, y_addr, a_ptr, n, BLOCK: tl.constexpr):
    x_ptr = x_addr.to(tl.pointer_type(tl.float32))
    y_ptr = y_addr.to(tl.pointer_type(tl.float32))
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(y_ptr + o, tl.load(y_ptr + o, mask=m) + tl.load(a_ptr) * tl.load(x_ptr + o, mask=m), mask=m)


def factory_ok_addresses_of_static_state():  # hazard: 15
    @dataclass(frozen=True)
    class RawView:
        address: int
        numel: int
        owner: torch.Tensor

        @classmethod
        def of(cls, t):
            return cls(t.data_ptr(), t.numel(), t)

    src, acc = RawView.of(torch.zeros(4, 12, device="cuda")), RawView.of(torch.zeros(4, 12, device="cuda"))
    a = torch.full((1,), 1.0, device="cuda")

    def step(x):
        src.owner.copy_(x)
        _axpy_raw_kernel[(triton.cdiv(acc.numel, 32),)](src.address, acc.address, a, acc.numel, BLOCK=32)
        a.mul_(-0.5)
        return acc.owner * 1.0

    return step, lambda i: (_mk(220 + i, 4, 12),)


# --------------------------------------------------------------------------- a trace for the debugger
def factory_quiet_shape_trace():  # hazard: 32
    @dataclass
    class Trace:
        lines: list

        def note(self, fmt, *args):
            self.lines.append(fmt % args)  # expect: CG210

    trace = Trace([])
    w = _mk(9, 16, 16, std=0.4)

    def step(x):
        h = x @ w
        y = torch.empty_like(h)
        trace.note("square_rows %s -> %s", tuple(h.shape), y.dtype)
        _square_rows_kernel[(h.shape[0],)](h, y, D=16)
        return y

    return step, lambda i: (_mk(230 + i, 5, 16),)
