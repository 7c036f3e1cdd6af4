"""Side streams, events, pinned copies, thread pools, state-space layers, vision encoders, rotary caches, pooling."""
import concurrent.futures
import contextlib
import enum
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def noise(seed, *shape, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda")


def ints(seed, *shape, high):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- two streams
class AuxStreamMoE:
    """Shared expert on a side stream while the routed ones run on the main stream."""

    def __init__(self, join):
        self.join = join
        self.side = torch.cuda.Stream()
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()
        self.shared, self.routed = noise(1, 16, 16, scale=0.3), noise(2, 16, 16, scale=0.3)
        self.load = torch.zeros(16, device="cuda")

    def record_load(self, x):
        with torch.cuda.stream(self.side):
            self.load.add_(x.abs().mean(0))  # expect: CG305 @load_stats_not_joined

    def forward_joined(self, x):
        main = torch.cuda.current_stream()
        self.forked.record(main)
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.forked)
            s = torch.relu(x @ self.shared)
            self.load.add_(x.abs().mean(0))
            self.joined.record(self.side)
        r = torch.tanh(x @ self.routed)
        main.wait_event(self.joined)
        return r + s, self.load.clone()

    def forward_forgotten(self, x):
        self.side.wait_stream(torch.cuda.current_stream())  # expect: CG305 @load_stats_not_joined optional
        self.record_load(x)  # expect: CG305 @load_stats_not_joined optional
        return torch.tanh(x @ self.routed)

    def __call__(self, x):
        with torch.no_grad():
            return self.forward_joined(x) if self.join else self.forward_forgotten(x)


def factory_ok_aux_stream_joined():  # hazard: 25
    return AuxStreamMoE(join=True), lambda i: (noise(100 + i, 4, 16),)


def factory_bad_load_stats_not_joined():  # hazard: 25
    return AuxStreamMoE(join=False), lambda i: (noise(110 + i, 4, 16),)


class LayerwisePrefetcher:
    """Brings the next step's block in behind this step's compute; the event says when it is there."""

    def __init__(self):
        self.copy_stream = torch.cuda.Stream()
        self.slot = noise(11, 16, 16, scale=0.3)
        self.ready = torch.cuda.Event()
        self.ready.record(torch.cuda.current_stream())

    def wait_ready(self):
        torch.cuda.current_stream().wait_event(self.ready)  # expect: CG305 @prefetch_event_of_last_step


class PrefetchingLayer:
    def __init__(self):
        self.pf = LayerwisePrefetcher()

    def __call__(self, x):
        self.pf.wait_ready()
        y = torch.tanh(x @ self.pf.slot)
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self.pf.copy_stream):
            self.pf.copy_stream.wait_stream(main)
            self.pf.slot.mul_(0.9)
            self.pf.ready.record(self.pf.copy_stream)  # expect: CG305 @prefetch_event_of_last_step optional
        main.wait_stream(self.pf.copy_stream)
        return y


def factory_bad_prefetch_event_of_last_step():  # hazard: 25
    return PrefetchingLayer(), lambda i: (noise(120 + i, 4, 16),)


# --------------------------------------------------------------------------- timing
class CudaTimer(contextlib.ContextDecorator):
    totals = OrderedDict()

    def __init__(self, name, enabled=True):
        self.name, self.enabled = name, enabled

    def __enter__(self):
        if self.enabled:
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.start.record()
        return self

    def __exit__(self, *exc):
        if self.enabled:
            self.end.record()
            self.end.synchronize()  # expect: CG106 @timer_synchronizes
            ms = self.start.elapsed_time(self.end)  # expect: CG107|CG106 @timer_synchronizes optional
            CudaTimer.totals[self.name] = CudaTimer.totals.get(self.name, 0.0) + ms
        return False


def make_timed_mlp(enabled):
    w1, w2 = noise(21, 16, 32, scale=0.3), noise(22, 32, 16, scale=0.3)

    @CudaTimer("mlp.down", enabled)
    def down(h):
        return h @ w2

    def mlp(x):
        with CudaTimer("mlp.up", enabled):
            h = F.silu(x @ w1)
        return down(h)

    return mlp, lambda i: (noise(130 + i, 4, 16),)


def factory_bad_timer_synchronizes():  # hazard: 7
    return make_timed_mlp(True)


def factory_ok_timer_disabled():  # hazard: 7
    return make_timed_mlp(False)


class AsyncOutputCopier:
    """Copies of the sampled tokens to the host; polls whether the last one came through."""

    def __init__(self, n):
        self.pinned = torch.zeros(n, dtype=torch.int64, pin_memory=True)
        self.stream_event = torch.cuda.Event()
        self.harvested = 0
        self.pending = False

    def poll(self):
        if self.pending and self.stream_event.query():  # expect: CG107 @poll_output_event
            self.harvested += int(self.pinned[0])
            self.pending = False

    def submit(self, toks):
        self.pinned.copy_(toks, non_blocking=True)
        self.stream_event.record()
        self.pending = True


def greedy_with(copier):
    head = noise(31, 16, 20)

    @torch.inference_mode()
    def step(x):
        copier.poll()
        logits = x @ head
        toks = logits.argmax(-1)
        copier.submit(toks)
        return toks, logits

    return step, lambda i: (noise(140 + i, 4, 16),)


def factory_bad_poll_output_event():  # hazard: 8
    return greedy_with(AsyncOutputCopier(4))


class FireAndForgetCopier(AsyncOutputCopier):
    """The engine loop outside of the step waits for the copy; here it is only queued."""

    def poll(self):
        pass

    def submit(self, toks):
        self.pinned.copy_(toks, non_blocking=True)


def factory_ok_async_pinned_output():  # hazard: 16
    return greedy_with(FireAndForgetCopier(4))


# --------------------------------------------------------------------------- threads
class OutputProcessor:
    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="output")

    def logprobs(self, logits):
        return logits.log_softmax(-1).amax(-1)

    def submit(self, logits):
        return self.pool.submit(self.logprobs, logits)  # expect: CG309 @logprobs_in_thread_pool


def factory_bad_logprobs_in_thread_pool():  # hazard: 29
    proc, head = OutputProcessor(), noise(41, 16, 20)

    @torch.no_grad()
    def step(x):
        logits = x @ head
        toks = logits.argmax(-1)
        future = proc.submit(logits)
        return toks, future.result()  # expect: CG309 optional

    return step, lambda i: (noise(150 + i, 4, 16),)


def factory_ok_tables_from_thread_pool():  # hazard: 29
    def column(j):
        g = torch.Generator().manual_seed(j)
        return torch.randn(16, generator=g)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        table = torch.stack(list(pool.map(column, range(20))), 1).to("cuda")
    lock = threading.Lock()
    running = torch.zeros(20, device="cuda")

    @torch.no_grad()
    def step(x):
        with lock:
            logits = x @ table
            running.lerp_(logits.mean(0), 0.25)
        return logits - running

    return step, lambda i: (noise(160 + i, 4, 16),)


# --------------------------------------------------------------------------- async scheduling
@dataclass
class AsyncState:
    prev_sampled: torch.Tensor | None = None
    steps: int = 0


class AsyncScheduler:
    """Negative input ids stand for the token that the last step sampled."""

    def __init__(self, seed):
        self.emb, self.head = noise(seed, 24, 16), noise(seed + 1, 16, 24)
        self.state = AsyncState()

    def resolve(self, ids):
        prev = self.state.prev_sampled
        if prev is None:
            return ids.clamp_min(0)
        return torch.where(ids < 0, prev, ids)  # expect: CG205|CG206 @prev_sampled_kept

    def finish(self, sampled):
        self.state.prev_sampled = sampled

    @torch.no_grad()
    def step(self, ids):
        ids = self.resolve(ids)
        logits = self.emb[ids.remainder(24)] @ self.head
        sampled = (logits.argmax(-1) + ids + 1) % 24
        self.finish(sampled)
        return ids.clone(), logits


class BufferedAsyncScheduler(AsyncScheduler):
    def __init__(self, seed):
        super().__init__(seed)
        self.state.prev_sampled = torch.zeros(4, dtype=torch.int64, device="cuda")

    def resolve(self, ids):
        return torch.where(ids < 0, self.state.prev_sampled, ids)

    def finish(self, sampled):
        self.state.prev_sampled.copy_(sampled)


def placeholder_ids(i):
    ids = ints(170 + i, 4, high=24)
    ids[:2] = -1
    return (ids,)


def factory_bad_prev_sampled_kept():  # hazard: 18
    return AsyncScheduler(51).step, placeholder_ids


def factory_ok_prev_sampled_buffer():  # hazard: 18
    return BufferedAsyncScheduler(51).step, placeholder_ids


# --------------------------------------------------------------------------- Mamba
class MambaMixer(nn.Module):
    def __init__(self, dim, width, seed):
        super().__init__()
        self.register_buffer("conv_w", noise(seed, dim, width, scale=0.5))
        self.register_buffer("A", -noise(seed + 1, dim).abs())
        self.register_buffer("conv_state", torch.zeros(2, dim, width, device="cuda"))
        self.register_buffer("ssm_state", torch.zeros(2, dim, device="cuda"))

    def shift(self, x):
        self.conv_state = torch.cat([self.conv_state[..., 1:], x[..., None]], -1)  # expect: CG205 @mamba_conv_state_rebound

    def forward(self, x, dt):
        self.shift(x)
        u = F.silu((self.conv_state * self.conv_w).sum(-1))  # expect: CG205 @mamba_conv_state_rebound optional
        decay = torch.exp(F.softplus(dt)[:, None] * self.A)
        self.ssm_state.mul_(decay).add_(u)
        return self.ssm_state * torch.sigmoid(x)


class InplaceMambaMixer(MambaMixer):
    def shift(self, x):
        self.conv_state.copy_(self.conv_state.roll(-1, -1))
        self.conv_state[..., -1].copy_(x)


def mamba_inputs(i):
    return noise(180 + i, 2, 16), noise(190 + i, 2)


def factory_bad_mamba_conv_state_rebound():  # hazard: 14
    return torch.inference_mode()(MambaMixer(16, 4, 61)), mamba_inputs


def factory_ok_mamba_conv_state_inplace():  # hazard: 14
    mixer = InplaceMambaMixer(16, 4, 61)

    def step(*args):
        """Writes into a static output and says nothing."""
        with torch.no_grad():
            out.copy_(mixer(*args))
        return out, mixer.conv_state

    out = torch.empty(2, 16, device="cuda")
    return step, mamba_inputs


class StateSlots:
    """Which row of the state pool a request has; slots are handed out by the host."""

    def __init__(self, n):
        self.free = list(range(n))

    def rotate(self):
        slot = self.free.pop(0)
        self.free.append(slot)
        return slot


def factory_bad_ssm_slot_from_free_list():  # hazard: 11
    slots, pool = StateSlots(4), torch.zeros(4, 16, device="cuda")
    w = noise(65, 16, 16, scale=0.3)

    def update(x):
        row = pool.narrow(0, slots.rotate(), 1)  # expect: CG202|CG201
        row.mul_(0.5).add_(x @ w)  # expect: CG202|CG205|CG201 optional
        return pool.cumsum(0)

    return update, lambda i: (noise(195 + i, 1, 16),)


# --------------------------------------------------------------------------- vision
class VisionRotary:
    def __init__(self, dim):
        self.inv = (10000 ** (-torch.arange(0, dim, 2) / dim)).to("cuda")

    def table(self, n, device):
        return torch.outer(torch.arange(n, device=device).float(), self.inv)

    def rot_pos_emb(self, grid_thw):
        ids = []
        for t, h, w in grid_thw:  # expect: CG101 @vision_grid_loop optional
            hp = torch.arange(h, device=grid_thw.device)[:, None].expand(-1, w)  # expect: CG101 @vision_grid_loop
            wp = torch.arange(w, device=grid_thw.device)[None].expand(h, -1)  # expect: CG101 @vision_grid_loop optional
            ids.append(torch.stack([hp.flatten(), wp.flatten()], -1).repeat(t, 1))  # expect: CG101 @vision_grid_loop optional
        ids = torch.cat(ids)
        return self.table(8, ids.device)[ids].flatten(1)


class StaticGridRotary(VisionRotary):
    def __init__(self, dim, grid):
        super().__init__(dim)
        cpu = torch.tensor(grid)
        self.inv = self.inv.cpu()
        emb = self.rot_pos_emb(cpu)
        self.cached = {tuple(map(tuple, grid)): emb.to("cuda")}

    def lookup(self, grid):
        return self.cached[grid]


class VisionEncoder:
    def __init__(self, seed):
        self.patch = noise(seed, 12, 16, scale=0.4)
        self.out = noise(seed + 1, 16, 16, scale=0.4)

    def encode(self, pixels, emb):
        x = pixels @ self.patch
        cos, sin = emb.cos(), emb.sin()
        a, b = x.chunk(2, -1)
        x = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return F.gelu(x @ self.out)


def factory_bad_vision_grid_loop():  # hazard: 1
    enc, rot = VisionEncoder(71), VisionRotary(8)

    def inputs(i):
        grid = [[1, 2, 4], [1, 4, 2]] if i % 2 else [[1, 4, 2], [2, 2, 2]]
        return noise(200 + i, 16, 12), torch.tensor(grid).to("cuda")

    @torch.no_grad()
    def step(pixels, grid):
        return enc.encode(pixels, rot.rot_pos_emb(grid))

    return step, inputs


def factory_ok_vision_grid_cached():  # hazard: 1
    enc, rot = VisionEncoder(73), StaticGridRotary(8, [[1, 2, 4], [2, 2, 2]])

    @torch.no_grad()
    def step(pixels, grid=((1, 2, 4), (2, 2, 2))):
        return enc.encode(pixels, rot.lookup(grid))

    return step, lambda i: (noise(210 + i, 16, 12),)


class MultimodalEmbedder:
    IMAGE = 9

    def __init__(self, by_mask):
        self.emb = noise(75, 12, 8)
        self.by_mask = by_mask

    def merge_masked(self, ids, x, feats):
        x[ids == self.IMAGE] = feats  # expect: CG104|CG103 @multimodal_mask_assign
        return x

    def merge_gather(self, ids, x, feats):
        is_img = ids == self.IMAGE
        src = (is_img.flatten().cumsum(0) - 1).clamp_(0, feats.shape[0] - 1).view_as(ids)
        return torch.where(is_img[..., None], feats[src], x)

    def __call__(self, batch):
        x = F.embedding(batch["ids"], self.emb)
        x = (self.merge_masked if self.by_mask else self.merge_gather)(batch["ids"], x, batch["feats"])
        return {"embeds": x, "pooled": x.mean(1)}


def mm_inputs(i):
    g = torch.Generator().manual_seed(220 + i)
    ids = torch.randint(0, 9, (2, 6), generator=g)
    flat = ids.view(-1)
    flat[torch.randperm(12, generator=g)[:4]] = 9
    return ({"ids": ids.to("cuda"), "feats": noise(230 + i, 4, 8)},)


def factory_bad_multimodal_mask_assign():  # hazard: 5
    return MultimodalEmbedder(by_mask=True), mm_inputs


def factory_ok_multimodal_gather():  # hazard: 5
    return MultimodalEmbedder(by_mask=False), mm_inputs


# --------------------------------------------------------------------------- rotary caches
class NTKRotary:
    """Qwen's: grows its table when the sequence outgrows it, with another base."""

    def __init__(self, dim, cached):
        self.dim, self.trained = dim, cached
        self.update(cached)

    def update(self, n):
        self.max_cached = n
        base = 10000.0 * (n / self.trained) ** 2
        inv = base ** (-torch.arange(0, self.dim, 2, device="cuda") / self.dim)
        f = torch.outer(torch.arange(2 * self.trained + 16, device="cuda").float(), inv)
        self.cos, self.sin = f.cos(), f.sin()  # expect: CG201|CG205 @ntk_table_regrown optional

    def __call__(self, q, pos, seq_len):
        if seq_len > self.max_cached:  # expect: CG201 @ntk_table_regrown
            self.update(2 * seq_len)  # expect: CG201|CG205|CG202 @ntk_table_regrown optional
        c, s = self.cos[pos], self.sin[pos]  # expect: CG205|CG201 @ntk_table_regrown optional
        a, b = q.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)


class RotaryRunner:
    def __init__(self, rotary):
        self.rotary, self.kv_len = rotary, 3
        self.pos = torch.full((2,), 3, device="cuda")

    @torch.inference_mode()
    def __call__(self, q):
        self.kv_len += 1
        out = self.rotary(q, self.pos, self.kv_len)
        self.pos.add_(1)
        return out


def factory_bad_ntk_table_regrown():  # hazard: 10
    return RotaryRunner(NTKRotary(8, cached=6)), lambda i: (noise(240 + i, 2, 8),)


# --------------------------------------------------------------------------- pooling, prefix cache, capture-time branch, call arguments
class PoolingType(enum.Enum):
    LAST, MEAN = 0, 1


class Pooler:
    def __init__(self, kind):
        self.kind = kind

    def last(self, hidden, lens):
        return torch.stack([hidden[b, lens[b] - 1] for b in range(hidden.shape[0])])  # expect: CG101|CG103 @pool_last_token

    def mean(self, hidden, lens):
        mask = torch.arange(hidden.shape[1], device=hidden.device) < lens[:, None]
        return (hidden * mask[..., None]).sum(1) / lens[:, None]

    def __call__(self, hidden, lens):
        pooled = self.last(hidden, lens) if self.kind is PoolingType.LAST else self.mean(hidden, lens)
        return F.normalize(pooled, dim=-1)


def pool_inputs(i):
    return noise(250 + i, 3, 5, 8), ints(260 + i, 3, high=5) + 1


def factory_bad_pool_last_token():  # hazard: 1
    return Pooler(PoolingType.LAST), pool_inputs


def factory_ok_pool_mean():  # hazard: 1
    return Pooler(PoolingType.MEAN), pool_inputs


class PrefixCache:
    def __init__(self, block):
        self.block, self.table = block, {}

    def hash_blocks(self, ids):
        h = 0
        for blk in ids.view(-1, self.block).numpy(force=True):  # expect: CG101 @prefix_hash_writes_none
            h = hash((h, blk.tobytes()))
            yield h

    def hits(self, ids):
        return sum(self.table.setdefault(h, len(self.table)) < 0 for h in self.hash_blocks(ids))


def factory_bad_prefix_hash_writes_none():  # hazard: 2
    cache, emb = PrefixCache(4), noise(81, 16, 8)
    out = torch.zeros(8, 8, device="cuda")

    def step(ids):
        skip = cache.hits(ids)
        out[skip:].copy_(emb[ids][skip:])

    return step, lambda i: (ints(270 + i, 8, high=16),)


class PiecewiseBackend:
    """Falls back to a plain residual while a graph is being captured."""

    def __init__(self, seed):
        self.w, self.norm = noise(seed, 16, 16, scale=0.4), torch.ones(16, device="cuda")

    def fused_add_norm(self, x, res):
        x = x + res
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm, x

    def __call__(self, x, res):
        h = x @ self.w
        if torch.cuda.is_current_stream_capturing():  # expect: CG211 @capture_only_path
            return h + res, res
        return self.fused_add_norm(h, res)


def factory_bad_capture_only_path():  # hazard: 33
    backend = PiecewiseBackend(85)
    return backend, lambda i: (noise(280 + i, 3, 16), noise(290 + i, 3, 16))


class SlidingWindowKV:
    def __init__(self, window):
        self.window = window
        self.k = torch.zeros(2, window, 8, device="cuda")

    def insert(self, k, seq_len):
        self.k.select(1, seq_len % self.window).copy_(k)  # expect: CG202|CG201 @window_slot_argument

    def insert_dev(self, k, seq_len):
        self.k.index_copy_(1, seq_len % self.window, k[:, None])


def factory_bad_window_slot_argument():  # hazard: 11
    kv = SlidingWindowKV(4)

    def step(q, k, seq_len: int):
        kv.insert(k, seq_len)
        att = torch.einsum("bd,bld->bl", q, kv.k).softmax(-1)
        return torch.einsum("bl,bld->bd", att, kv.k), kv.k.clone()

    return step, lambda i: (noise(300 + i, 2, 8), noise(310 + i, 2, 8), i)


def factory_ok_window_slot_tensor():  # hazard: 11
    kv = SlidingWindowKV(4)

    def step(q, k, seq_len, softcap: float):
        kv.insert_dev(k, seq_len)
        att = (torch.einsum("bd,bld->bl", q, kv.k) / softcap).tanh().mul(softcap).softmax(-1)
        return torch.einsum("bl,bld->bd", att, kv.k), kv.k.clone()

    return step, lambda i: (noise(320 + i, 2, 8), noise(330 + i, 2, 8), torch.full((1,), i, device="cuda"), 3.0)


# --------------------------------------------------------------------------- metrics
class EngineMetrics:
    def __init__(self):
        self.generation_tokens = 0
        self.iteration_times = []
        self._last = time.monotonic()

    def on_iteration(self, batch):
        now = time.monotonic()
        self.iteration_times.append(now - self._last)  # expect: CG210 @engine_metrics
        self.generation_tokens += batch  # expect: CG210 @engine_metrics optional
        self._last = now  # expect: CG210 @engine_metrics optional


def factory_quiet_engine_metrics():  # hazard: 32
    metrics, w = EngineMetrics(), noise(91, 16, 16, scale=0.3)
    acc = torch.zeros(16, device="cuda")

    @torch.no_grad()
    def step(x):
        metrics.on_iteration(x.shape[0])
        y = torch.tanh(x @ w)
        acc.add_(y.sum(0))
        return y, acc.clone()

    return step, lambda i: (noise(340 + i, 3, 16),)
