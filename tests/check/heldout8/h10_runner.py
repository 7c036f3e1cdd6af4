"""Model runners: input batches, block tables, attention metadata, persistent buffers."""
import contextlib
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F


def rnd(seed, *shape, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to("cuda")


# --------------------------------------------------------------------------- slot mapping made by the host
class CpuGpuBuffer:
    """A pinned host buffer, its numpy view and the device buffer it feeds."""

    def __init__(self, *shape, dtype=torch.int64):
        self.cpu = torch.zeros(*shape, dtype=dtype, pin_memory=True)
        self.np = self.cpu.numpy()
        self.gpu = torch.zeros(*shape, dtype=dtype, device="cuda")

    def copy_to_gpu(self, n):
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)  # expect: CG204 @slot_mapping_host


class HostInputBatch:
    def __init__(self, num_reqs, block_size, max_blocks):
        self.num_reqs, self.block_size = num_reqs, block_size
        rng = np.random.default_rng(3)
        self.block_table = rng.permutation(num_reqs * max_blocks).reshape(num_reqs, max_blocks)
        self.num_computed_tokens = np.arange(num_reqs, dtype=np.int64)

    def compute_slot_mapping(self, out):
        pos = self.num_computed_tokens
        blocks = self.block_table[np.arange(self.num_reqs), pos // self.block_size]
        np.add(blocks * self.block_size, pos % self.block_size, out=out[: self.num_reqs])


class HostSlotRunner:
    def __init__(self):
        self.batch = HostInputBatch(4, 4, 6)
        self.slot_mapping = CpuGpuBuffer(8)
        self.kv = torch.zeros(4 * 4 * 6, 16, device="cuda")
        self.proj = rnd(1, 16, 16, scale=0.2)

    def _prepare_inputs(self):
        self.batch.compute_slot_mapping(self.slot_mapping.np)
        slots = self.slot_mapping.copy_to_gpu(self.batch.num_reqs)
        return slots

    def _update_states(self):
        self.batch.num_computed_tokens += 1

    @torch.inference_mode()
    def execute_model(self, hidden):
        slots = self._prepare_inputs()
        k = hidden @ self.proj
        self.kv.index_copy_(0, slots, k)
        out = self.kv.reshape(24, 4, 16).mean(1)
        self._update_states()
        return out, slots.clone()


def factory_bad_slot_mapping_host():  # hazard: 13
    runner = HostSlotRunner()
    return runner.execute_model, lambda i: (rnd(100 + i, 4, 16),)


# --------------------------------------------------------------------------- the same on the device
class DeviceBlockTable:
    def __init__(self, num_reqs, max_blocks, block_size):
        g = torch.Generator().manual_seed(5)
        perm = torch.randperm(num_reqs * max_blocks, generator=g).view(num_reqs, max_blocks)
        self.table = perm.to("cuda")
        self.block_size = block_size
        self._slots = torch.zeros(num_reqs, dtype=torch.int64, device="cuda")

    def slot_mapping(self, positions):
        blk = self.table.gather(1, (positions // self.block_size).unsqueeze(1)).squeeze(1)
        torch.add(blk * self.block_size, positions % self.block_size, out=self._slots)
        return self._slots


class DeviceSlotRunner:
    def __init__(self, num_reqs=4, max_blocks=6, block_size=4, dim=16):
        self.bt = DeviceBlockTable(num_reqs, max_blocks, block_size)
        self.k = torch.zeros(num_reqs * max_blocks * block_size, dim, device="cuda")
        self.v = torch.zeros_like(self.k)
        self.positions = torch.arange(num_reqs, device="cuda")
        self.wqkv = rnd(2, dim, 3 * dim, scale=0.3)
        self.ctx = torch.arange(max_blocks * block_size, device="cuda")

    @torch.inference_mode()
    def __call__(self, hidden):
        q, k, v = (hidden @ self.wqkv).chunk(3, dim=-1)
        slots = self.bt.slot_mapping(self.positions)
        self.k.index_copy_(0, slots, k)
        self.v.index_copy_(0, slots, v)
        all_slots = (self.bt.table * self.bt.block_size).repeat_interleave(self.bt.block_size, dim=1)
        all_slots = all_slots + self.ctx % self.bt.block_size
        kk, vv = self.k[all_slots], self.v[all_slots]
        att = torch.einsum("bd,bld->bl", q, kk) / math.sqrt(q.shape[-1])
        att = att.masked_fill(self.ctx[None] > self.positions[:, None], float("-inf")).softmax(-1)
        self.positions.add_(1)
        return torch.einsum("bl,bld->bd", att, vv)


def factory_ok_slot_mapping_device():  # hazard: 13
    runner = DeviceSlotRunner()
    return runner, lambda i: (rnd(200 + i, 4, 16),)


# --------------------------------------------------------------------------- metadata builders
@dataclass
class CommonAttentionMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    num_prefills: int = 0
    window: int | None = None


class PagedAttention:
    def __init__(self, blocks, block_size, dim, seed):
        self.block_size = block_size
        self.pages = torch.zeros(blocks, block_size, 2, dim, device="cuda")
        self.w = rnd(seed, dim, 3 * dim, scale=0.3)

    def write(self, k, v, meta):
        pos = meta.seq_lens - 1
        page = meta.block_table.gather(1, (pos // self.block_size)[:, None])[:, 0]
        self.pages.index_put_((page, pos % self.block_size), torch.stack([k, v], 1))

    def read(self, table, b):
        kv = self.pages[table].reshape(b, -1, 2, self.pages.shape[-1])
        return kv.unbind(2)

    def attend(self, q, k, v, seq_lens):
        mask = torch.arange(k.shape[1], device=q.device)[None] < seq_lens[:, None]
        return F.scaled_dot_product_attention(q[:, None, None], k[:, None], v[:, None], attn_mask=mask[:, None, None])[:, 0, 0]


class TrimmedPagedAttention(PagedAttention):
    def forward(self, x, meta):
        q, k, v = (x @ self.w).chunk(3, -1)
        self.write(k, v, meta)
        n_blocks = -(-meta.max_seq_len // self.block_size)
        table = meta.block_table[:, :n_blocks]  # expect: CG208|CG202 @max_seq_len_trims_table
        kk, vv = self.read(table, x.shape[0])  # expect: CG208 @max_seq_len_trims_table optional
        return self.attend(q, kk, vv, meta.seq_lens)  # expect: CG208|CG202 @max_seq_len_trims_table optional


class PaddedPagedAttention(PagedAttention):
    def forward(self, x, meta):
        q, k, v = (x @ self.w).chunk(3, -1)
        if meta.num_prefills:
            raise NotImplementedError("mixed batches do not run in graphs")
        self.write(k, v, meta)
        kk, vv = self.read(meta.block_table, x.shape[0])
        out = self.attend(q, kk, vv, meta.seq_lens)
        return out if meta.window is None else out * 0.5


class MetadataBuilder:
    def __init__(self, reqs, max_blocks):
        g = torch.Generator().manual_seed(9)
        self.block_table = torch.randperm(reqs * max_blocks, generator=g).view(reqs, max_blocks).to("cuda")
        self.seq_lens = torch.zeros(reqs, dtype=torch.int64, device="cuda")
        self.max_model_len = max_blocks * 2
        self.host_lens = [0] * reqs

    def build(self):
        self.host_lens = [n + 1 for n in self.host_lens]
        self.seq_lens.add_(1)
        return CommonAttentionMetadata(self.block_table, self.seq_lens, max_seq_len=max(self.host_lens))

    def build_for_cudagraph(self):
        self.seq_lens.add_(1)
        return CommonAttentionMetadata(self.block_table, self.seq_lens, max_seq_len=self.max_model_len)


def factory_bad_max_seq_len_trims_table():  # hazard: 17
    builder = MetadataBuilder(3, 5)
    layer = TrimmedPagedAttention(15, 2, 16, seed=11)

    @torch.no_grad()
    def step(x):
        meta = builder.build()
        return {"hidden": layer.forward(x, meta), "seq_lens": meta.seq_lens.clone()}

    return step, lambda i: (rnd(300 + i, 3, 16),)


def factory_ok_max_seq_len_padded():  # hazard: 17
    builder = MetadataBuilder(3, 5)
    layer = PaddedPagedAttention(15, 2, 16, seed=11)

    @torch.no_grad()
    def step(x):
        meta = builder.build_for_cudagraph()
        return {"hidden": layer.forward(x, meta), "seq_lens": meta.seq_lens.clone()}

    return step, lambda i: (rnd(310 + i, 3, 16),)


# --------------------------------------------------------------------------- lazily fetched host lengths
@dataclass
class VarlenMetadata:
    query_start_loc: torch.Tensor
    _query_lens_cpu: list | None = field(default=None, repr=False)

    @property
    def query_lens(self):
        if self._query_lens_cpu is None:
            self._query_lens_cpu = torch.diff(self.query_start_loc).tolist()  # expect: CG101 @query_lens_property
        return self._query_lens_cpu


class VarlenBackend:
    def __init__(self, dim):
        self.wo = rnd(21, dim, dim, scale=0.3)

    def forward(self, x, meta: VarlenMetadata):
        outs = []
        for seq in torch.split(x, meta.query_lens):
            att = torch.softmax(seq @ seq.T, -1).tril()
            outs.append(att @ seq)
        return torch.cat(outs) @ self.wo


def factory_bad_query_lens_property():  # hazard: 2
    backend = VarlenBackend(8)

    def inputs(i):
        a = 1 + i % 3
        loc = torch.tensor([0, a, a + 2, 8]).to("cuda")
        return rnd(400 + i, 8, 8), loc

    @torch.inference_mode()
    def step(x, query_start_loc):
        meta = VarlenMetadata(query_start_loc)
        return backend.forward(x, meta)

    return step, inputs


# --------------------------------------------------------------------------- prefill or decode
class HybridAttnBackend:
    """Decodes and prefills go different ways; which rows are which is known on the device."""

    def __init__(self, dim):
        self.dec, self.pre = rnd(31, dim, dim, scale=0.3), rnd(32, dim, dim, scale=0.3)

    def _has_prefill(self, query_lens):
        return (query_lens > 1).any()

    def run(self, x, query_lens):
        out = torch.tanh(x @ self.dec)
        if self._has_prefill(query_lens):  # expect: CG108|CG101 @prefill_branch
            rows = (query_lens > 1)[:, None]
            out = torch.where(rows, F.silu(x @ self.pre), out)
        return out


def factory_bad_prefill_branch():  # hazard: 9
    backend = HybridAttnBackend(16)

    def inputs(i):
        q = torch.ones(4, dtype=torch.int32)
        if i % 2:
            q[i % 4] = 5
        return {"hidden": rnd(500 + i, 4, 16), "query_lens": q.to("cuda")},

    def step(batch):
        with torch.no_grad():
            return backend.run(batch["hidden"], batch["query_lens"])

    return step, inputs


# --------------------------------------------------------------------------- data parallel padding
class DPMetadata:
    @staticmethod
    def make(num_tokens, dp_size, rank):
        counts = [0] * dp_size
        counts[rank] = num_tokens
        across = torch.tensor(counts, dtype=torch.int32, device="cuda")  # expect: CG102 @dp_token_counts
        return across, torch.cumsum(across, 0)


class DPRunner:
    def __init__(self, dp_size=2, rank=1):
        self.dp_size, self.rank = dp_size, rank
        self.mlp = rnd(41, 12, 12, scale=0.3)

    @contextlib.contextmanager
    def forward_context(self, num_tokens):
        self.ctx = DPMetadata.make(num_tokens, self.dp_size, self.rank)
        try:
            yield self.ctx
        finally:
            self.ctx = None

    def step(self, x):
        with torch.no_grad(), self.forward_context(x.shape[0]) as (across, cu):
            h = torch.relu(x @ self.mlp)
            return h * (across[self.rank] / cu[-1]), cu


def factory_bad_dp_token_counts():  # hazard: 3
    runner = DPRunner()
    return runner.step, lambda i: (rnd(600 + i, 6, 12),)


class PaddedDPRunner:
    capture_sizes = (1, 2, 4, 8, 16)

    def __init__(self):
        self.mlp = rnd(42, 12, 12, scale=0.3)
        self.across = torch.tensor([6, 6], dtype=torch.int32).to("cuda")
        self.staging = torch.zeros(16, 12, device="cuda")

    def pad_for_graph(self, n):
        return next(s for s in self.capture_sizes if s >= n)

    def step(self, x, num_real):
        n = self.pad_for_graph(x.shape[0])
        buf = self.staging[:n]
        buf[: x.shape[0]].copy_(x)
        with torch.no_grad():
            h = torch.relu(buf @ self.mlp)
            valid = torch.arange(n, device=h.device) < num_real
            h = torch.where(valid[:, None], h, torch.zeros_like(h))
            return F.pad(h, (0, 4)), h.sum(0) / self.across.sum()


def factory_ok_dp_padding():  # hazard: 17
    runner = PaddedDPRunner()

    def inputs(i):
        return rnd(610 + i, 6, 12), torch.full((1,), 3 + i % 4, device="cuda")

    return runner.step, inputs


# --------------------------------------------------------------------------- multi-step scheduling
class MultiStepWorker:
    """num_steps decodes share one scheduling; every num_steps-th step takes the positions from the scheduler."""

    def __init__(self, num_steps, dim=16):
        self.num_steps, self.current = num_steps, 0
        self.embed = rnd(51, 32, dim)
        self.state = torch.zeros(4, dim, device="cuda")
        self.positions = torch.zeros(4, dtype=torch.int64, device="cuda")

    @property
    def is_first_multi_step(self):
        return self.current % self.num_steps == 0

    def advance(self, scheduled):
        if self.is_first_multi_step:  # expect: CG201 @multi_step_refresh
            self.positions.copy_(scheduled)  # expect: CG201 @multi_step_refresh optional
        else:
            self.positions.add_(1)  # expect: CG201 @multi_step_refresh optional
        self.current += 1

    def execute(self, token_ids, scheduled):
        self.advance(scheduled)
        ang = self.positions[:, None] * 0.37
        h = self.embed[token_ids] * torch.cos(ang) + self.state * 0.5
        self.state.copy_(h)
        return h, self.positions.clone()


def factory_bad_multi_step_refresh():  # hazard: 10
    worker = MultiStepWorker(num_steps=3)

    def inputs(i):
        g = torch.Generator().manual_seed(700 + i)
        return (torch.randint(0, 32, (4,), generator=g).to("cuda"), torch.full((4,), 7 * i, device="cuda"))

    return worker.execute, inputs


# --------------------------------------------------------------------------- cascade attention
class CascadeAttention:
    def __init__(self, prefix_len, dim=16):
        self.scale = dim ** -0.5
        self.prefix_k, self.prefix_v = rnd(61, prefix_len, dim), rnd(62, prefix_len, dim)
        self.k = torch.zeros(4, 12, dim, device="cuda")
        self.v = torch.zeros(4, 12, dim, device="cuda")
        self.len = torch.zeros((), dtype=torch.int64, device="cuda")

    @staticmethod
    def merge(o1, lse1, o2, lse2):
        lse = torch.logaddexp(lse1, lse2)
        return o1 * (lse1 - lse).exp()[:, None] + o2 * (lse2 - lse).exp()[:, None]

    def shared(self, q):
        s = q @ self.prefix_k.T * self.scale
        return s.softmax(-1) @ self.prefix_v, s.logsumexp(-1)

    def own(self, q, k, v):
        at = self.len.expand(1)
        self.k.index_copy_(1, at, k[:, None])
        self.v.index_copy_(1, at, v[:, None])
        self.len += 1
        s = torch.einsum("bd,bld->bl", q, self.k) * self.scale
        s = s.where(torch.arange(12, device=q.device) < self.len, float("-inf"))
        return torch.einsum("bl,bld->bd", s.softmax(-1), self.v), s.logsumexp(-1)

    def use_cascade(self, num_reqs):
        return self.prefix_k.shape[0] >= 8 and num_reqs > 2

    @torch.inference_mode()
    def forward(self, q, k, v):
        o, lse = self.own(q, k, v)
        if self.use_cascade(q.shape[0]):
            o = self.merge(*self.shared(q), o, lse)
        return o


def factory_ok_cascade_merge():  # hazard: 10
    layer = CascadeAttention(prefix_len=10)
    return layer.forward, lambda i: tuple(rnd(800 + 10 * i + j, 4, 16) for j in range(3))


# --------------------------------------------------------------------------- ping-pong buffers
class PingPong:
    def __init__(self, *shape):
        self.front = torch.zeros(*shape, device="cuda")
        self.back = torch.zeros(*shape, device="cuda")

    def swap(self):
        self.front, self.back = self.back, self.front


class OverlapRunner:
    def __init__(self):
        self.hidden = PingPong(4, 16)
        self.w = rnd(71, 16, 16, scale=0.4)

    @torch.no_grad()
    def step(self, x):
        src, dst = self.hidden.front, self.hidden.back
        torch.add(src @ self.w, x, out=dst)  # expect: CG205 @ping_pong_hidden
        self.hidden.swap()
        return self.hidden.front.tanh()  # expect: CG205 @ping_pong_hidden optional


def factory_bad_ping_pong_hidden():  # hazard: 14
    runner = OverlapRunner()
    return runner.step, lambda i: (rnd(900 + i, 4, 16),)


# --------------------------------------------------------------------------- virtual engines
_forward_context = None


@dataclass
class ForwardContext:
    virtual_engine: int
    kv_caches: list
    scale: float


@contextlib.contextmanager
def set_forward_context(ctx):
    global _forward_context
    prev, _forward_context = _forward_context, ctx
    try:
        yield
    finally:
        _forward_context = prev


class LayerReadingContext(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", rnd(81, 16, 16, scale=0.3))

    def forward(self, x):
        ctx = _forward_context
        cache = ctx.kv_caches[ctx.virtual_engine]
        cache.mul_(0.5).add_(x @ self.w)  # expect: CG205|CG201 @virtual_engine_cache
        return cache.sum(0) * ctx.scale  # expect: CG205|CG201 @virtual_engine_cache optional


def make_ve_step(num_engines):
    layer = LayerReadingContext()
    caches = [torch.zeros(4, 16, device="cuda") for _ in range(num_engines)]
    ticks = iter(range(10 ** 6))

    @torch.no_grad()
    def step(x):
        ctx = ForwardContext(next(ticks) % num_engines, caches, 0.25)
        with set_forward_context(ctx):
            return layer(x)

    return step


def factory_bad_virtual_engine_cache():  # hazard: 14
    return make_ve_step(2), lambda i: (rnd(1000 + i, 4, 16),)


class SingleEngineLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", rnd(82, 16, 16, scale=0.3))

    def forward(self, x):
        ctx = _forward_context
        cache = ctx.kv_caches[ctx.virtual_engine]
        cache.mul_(0.5).add_(x @ self.w)
        return cache.sum(0) * ctx.scale


def factory_ok_forward_context():  # hazard: 14
    layer = SingleEngineLayer()
    caches = [torch.zeros(4, 16, device="cuda") for _ in range(2)]

    @torch.no_grad()
    def step(x):
        with set_forward_context(ForwardContext(1, caches, 0.25)):
            return layer(x)

    return step, lambda i: (rnd(1010 + i, 4, 16),)
