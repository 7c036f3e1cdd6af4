"""Forward batches, paged KV pools and attention backends: whole decode / mixed loops."""
import math
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

STEPS = 10

HEADS, DIM, PAGE = 2, 16, 4
HID = HEADS * DIM


def _rand(shape, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to("cuda")


class PagedKVPool:
    """Flat token slots; page 0 is reserved for padded rows."""

    def __init__(self, num_pages):
        self.k = torch.zeros(num_pages * PAGE, HEADS, DIM, device="cuda")
        self.v = torch.zeros(num_pages * PAGE, HEADS, DIM, device="cuda")

    def store(self, slots, k, v):
        self.k[slots] = k
        self.v[slots] = v

    def gather(self, slots):
        return self.k[slots], self.v[slots]


class QKVLayer:
    def __init__(self, seed):
        self.w = _rand((HID, 3 * HID), seed, 1 / math.sqrt(HID))
        self.o = _rand((HID, HID), seed + 1, 1 / math.sqrt(HID))

    def project(self, x):
        q, k, v = (x @ self.w).split(HID, dim=-1)
        return (t.view(-1, HEADS, DIM) for t in (q, k, v))

    def finish(self, ctx):
        return ctx.reshape(-1, HID) @ self.o


def _attend(q, k, v, mask):
    """q (B,H,D), k/v (B,L,H,D), mask (B,L)"""
    s = torch.einsum("bhd,blhd->bhl", q, k) / math.sqrt(DIM)
    s = s.masked_fill(~mask[:, None, :], -1e9)
    return torch.einsum("bhl,blhd->bhd", s.softmax(-1), v)


def _page_table(batch, pages):
    return (1 + torch.arange(batch * pages, device="cuda")).view(batch, pages)


def _expand_pages(table):
    off = torch.arange(PAGE, device=table.device)
    return (table[:, :, None] * PAGE + off).flatten(1)


# ---------------------------------------------------------------- decode with paged metadata
@dataclass
class ForwardBatch:
    seq_lens: torch.Tensor
    seq_lens_cpu: list = field(default_factory=list)
    page_table: torch.Tensor = None


class TrimmedBackend:
    """Trims the page table to the longest request, like an eager decode backend does."""

    def __init__(self, pool):
        self.pool = pool

    def init_forward_metadata(self, fb):
        pages = -(-max(fb.seq_lens_cpu) // PAGE)  # expect: CG202 optional @decode_trimmed_table
        self.slots = _expand_pages(fb.page_table[:, :pages])  # expect: CG202|CG208|CG201 @decode_trimmed_table
        pos = torch.arange(self.slots.shape[1], device=self.slots.device)
        self.mask = pos[None, :] < fb.seq_lens[:, None]

    def forward(self, q):
        k, v = self.pool.gather(self.slots)
        return _attend(q, k, v, self.mask)


class FullWidthBackend:
    """Keeps the captured page table at its full width; only device lengths move."""

    def __init__(self, pool, table):
        self.pool = pool
        self.slots = _expand_pages(table)
        self.pos = torch.arange(self.slots.shape[1], device="cuda")
        self.mask = torch.zeros(self.slots.shape, dtype=torch.bool, device="cuda")

    def init_forward_metadata(self, fb):
        torch.lt(self.pos[None, :], fb.seq_lens[:, None], out=self.mask)

    def forward(self, q):
        k, v = self.pool.gather(self.slots)
        return _attend(q, k, v, self.mask)


class DecodeRunner:
    def __init__(self, make_backend, starts=(2, 3, 1), pages=4):
        self.layer = QKVLayer(3)
        self.pool = PagedKVPool(1 + len(starts) * pages)
        table = _page_table(len(starts), pages)
        self.fb = ForwardBatch(torch.tensor(starts, device="cuda"), list(starts), table)
        self.backend = make_backend(self.pool, table)
        self.rows = torch.arange(len(starts), device="cuda")

    def decode(self, x):
        fb = self.fb
        q, k, v = self.layer.project(x)
        page = fb.page_table[self.rows, fb.seq_lens // PAGE]
        self.pool.store(page * PAGE + fb.seq_lens % PAGE, k, v)
        fb.seq_lens.add_(1)
        fb.seq_lens_cpu = [n + 1 for n in fb.seq_lens_cpu]  # expect: CG210 optional @decode_trimmed_table
        self.backend.init_forward_metadata(fb)
        return self.layer.finish(self.backend.forward(q))


def factory_bad_decode_trimmed_table():
    runner = DecodeRunner(lambda pool, table: TrimmedBackend(pool))

    def step(x):
        return runner.decode(x)

    def inputs(index):
        return (_rand((3, HID), 100 + index),)

    return step, inputs


def factory_ok_decode_full_table():
    runner = DecodeRunner(FullWidthBackend)

    def step(x):
        return runner.decode(x)

    def inputs(index):
        return (_rand((3, HID), 100 + index),)

    return step, inputs


# ---------------------------------------------------------------- finished requests / padded rows
class ContinuousBatch:
    """Requests finish at known budgets; the scheduler compacts the rows that still run."""

    def __init__(self, budgets):
        self.left = list(budgets)

    def schedule(self):
        self.left = [n - 1 for n in self.left if n > 0]
        return len([n for n in self.left if n >= 0])


def factory_bad_running_rows_shrink():
    layer = QKVLayer(11)
    batch = ContinuousBatch((20, 12, 6, 4))
    pool = PagedKVPool(1 + 4 * 4)
    slots_all = _expand_pages(_page_table(4, 4))
    lens = torch.zeros(4, dtype=torch.int64, device="cuda")
    out = torch.zeros(4, HID, device="cuda")

    def step(x):
        n = batch.schedule()  # expect: CG202 optional
        q, k, v = layer.project(x[:n])  # expect: CG202|CG201|CG208
        slots = slots_all[:n].gather(1, lens[:n, None])[:, 0]  # expect: CG202 optional
        pool.store(slots, k, v)
        lens[:n] += 1  # expect: CG202 optional
        keys, vals = pool.gather(slots_all[:n])  # expect: CG202 optional
        mask = torch.arange(16, device=x.device)[None] < lens[:n, None]  # expect: CG202 optional
        out.zero_()
        out[:n] = layer.finish(_attend(q, keys, vals, mask))  # expect: CG202 optional
        return out.clone(), lens.clone()

    def inputs(index):
        return (_rand((4, HID), 200 + index),)

    return step, inputs


def factory_ok_padded_rows_dummy_slot():
    """Several padded rows write slot 0 at once: nobody reads what they leave there."""
    layer = QKVLayer(11)
    pool = PagedKVPool(1 + 4 * 4)
    slots_all = _expand_pages(_page_table(4, 4))
    lens = torch.zeros(4, dtype=torch.int64, device="cuda")
    budgets = (20, 12, 6, 4)

    def step(x, valid):
        q, k, v = layer.project(x)
        own = slots_all.gather(1, lens[:, None])[:, 0]
        slots = torch.where(valid, own, torch.zeros_like(own))
        pool.store(slots, k, v)
        lens.add_(valid.to(lens.dtype))
        keys, vals = pool.gather(slots_all)
        mask = torch.arange(16, device=x.device)[None] < lens[:, None]
        res = layer.finish(_attend(q, keys, vals, mask))
        return torch.where(valid[:, None], res, torch.zeros_like(res)), lens.clone()

    def inputs(index):
        valid = torch.tensor([index < b for b in budgets], device="cuda")
        return _rand((4, HID), 200 + index), valid

    return step, inputs


# ---------------------------------------------------------------- a plan made at the first call
class SplitKVWrapper:
    """Split-KV decode: the partition depends on the configuration alone, so it is planned once."""

    def __init__(self, pool, table, splits):
        self.pool, self.table, self.splits = pool, table, splits
        self._plan = None

    def plan(self):
        width = self.table.shape[1] * PAGE
        chunk = -(-width // self.splits)
        bounds = [(i * chunk, min(width, (i + 1) * chunk)) for i in range(self.splits)]
        idx = torch.tensor([list(range(lo, hi)) for lo, hi in bounds], device="cuda")
        self._plan = (idx, _expand_pages(self.table))
        return self._plan

    def run(self, q, seq_lens):
        idx, slots = self._plan if self._plan is not None else self.plan()
        outs, lses = [], []
        for part in idx.unbind(0):
            k, v = self.pool.gather(slots[:, part])
            s = torch.einsum("bhd,blhd->bhl", q, k) / math.sqrt(DIM)
            s = s.masked_fill(~(part[None] < seq_lens[:, None])[:, None], -1e9)
            lses.append(s.logsumexp(-1))
            outs.append(torch.einsum("bhl,blhd->bhd", s.softmax(-1), v))
        w = torch.stack(lses).softmax(0)
        return (torch.stack(outs) * w[..., None]).sum(0)


def factory_ok_split_plan_first_call():
    layer = QKVLayer(21)
    pool = PagedKVPool(1 + 2 * 4)
    table = _page_table(2, 4)
    wrapper = SplitKVWrapper(pool, table, splits=2)
    lens = torch.tensor([3, 5], device="cuda")
    rows = torch.arange(2, device="cuda")

    def step(x):
        q, k, v = layer.project(x)
        pool.store(table[rows, lens // PAGE] * PAGE + lens % PAGE, k, v)
        lens.add_(1)
        return layer.finish(wrapper.run(q, lens))

    def inputs(index):
        return (_rand((2, HID), 300 + index),)

    return step, inputs


# ---------------------------------------------------------------- chunked prefill mixed with decode
class ChunkScheduler:
    """A token budget of 8: running requests decode one token, the rest goes to a prefill chunk."""

    def __init__(self, budget):
        self.budget, self.tick = budget, 0

    def next_query_lens(self):
        decoding = min(self.tick // 2, 4)
        self.tick += 1
        return [1] * decoding + [self.budget - decoding]


def factory_bad_chunked_prefill_split():
    layer = QKVLayer(31)
    sched = ChunkScheduler(8)
    state = torch.zeros(8, HID, device="cuda")

    def run_request(q, k, v):
        n = q.shape[0]
        s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return torch.einsum("hqk,khd->qhd", s.masked_fill(~causal, -1e9).softmax(-1), v)

    def step(x):
        lens = sched.next_query_lens()  # expect: CG202 optional
        q, k, v = layer.project(x + state)
        parts = zip(q.split(lens), k.split(lens), v.split(lens))  # expect: CG202|CG201|CG208
        ctx = torch.cat([run_request(*p) for p in parts])
        out = layer.finish(ctx)
        state.mul_(0.5).add_(out, alpha=0.1)
        return out

    def inputs(index):
        return (_rand((8, HID), 400 + index),)

    return step, inputs


def factory_ok_chunked_prefill_flat():
    """One path for decode and prefill tokens: request ids and positions come in as device tensors."""
    layer = QKVLayer(31)
    reqs, max_len = 5, 32  # the last request row belongs to padding
    k_cache = torch.zeros(reqs, max_len, HEADS, DIM, device="cuda")
    v_cache = torch.zeros(reqs, max_len, HEADS, DIM, device="cuda")
    filled, plans = [0] * reqs, []
    for i in range(16):
        rows = []
        for r in range(4):
            want = 1 if filled[r] >= 6 else min(6 - filled[r], 3)
            for _ in range(want):
                if len(rows) < 8 and filled[r] < max_len:
                    rows.append((r, filled[r]))
                    filled[r] += 1
        rows += [(reqs - 1, p) for p in range(8 - len(rows))]
        plans.append(rows)

    def step(x, req, pos):
        q, k, v = layer.project(x)
        k_cache[req, pos] = k
        v_cache[req, pos] = v
        mask = torch.arange(max_len, device=x.device)[None] <= pos[:, None]
        return layer.finish(_attend(q, k_cache[req], v_cache[req], mask))

    def inputs(index):
        rows = torch.tensor(plans[index], device="cuda")
        return _rand((8, HID), 400 + index), rows[:, 0].contiguous(), rows[:, 1].contiguous()

    return step, inputs


# ---------------------------------------------------------------- prefix reuse
class HostPrefixTree:
    """Blocks of tokens -> row of the block store, least recently used out first."""

    def __init__(self, capacity):
        self.rows = OrderedDict()
        self.capacity = capacity
        self.store = torch.zeros(capacity, HID, device="cuda")

    @staticmethod
    def _key(block):
        return hash(tuple(block.tolist()))  # expect: CG101 @prefix_tree_lookup

    def match(self, block):
        key = self._key(block)
        if key in self.rows:
            self.rows.move_to_end(key)
            return self.rows[key], True
        if len(self.rows) < self.capacity:
            row = len(self.rows)
        else:
            _, row = self.rows.popitem(last=False)
        self.rows[key] = row
        return row, False


def factory_bad_prefix_tree_lookup():
    emb = _rand((32, HID), 41)
    w = _rand((HID, HID), 42, 0.2)
    tree = HostPrefixTree(4)

    def step(blocks):
        outs = []
        for block in blocks.unbind(0):
            row, hit = tree.match(block)
            if not hit:
                tree.store[row] = torch.tanh(emb[block].mean(0) @ w)
            outs.append(tree.store[row].clone())
        return torch.stack(outs)

    def inputs(index):
        g = torch.Generator().manual_seed(500 + index % 3)
        return (torch.randint(0, 32, (2, 4), generator=g).to("cuda"),)

    return step, inputs


def factory_ok_prefix_hash_on_device():
    """The same reuse with polynomial hashes, a ring of keys and a device cursor."""
    emb = _rand((32, HID), 41)
    w = _rand((HID, HID), 42, 0.2)
    capacity, batch = 8, 2
    keys = torch.full((capacity,), -1, dtype=torch.int64, device="cuda")
    store = torch.zeros(capacity, HID, device="cuda")
    cursor = torch.zeros((), dtype=torch.int64, device="cuda")
    hits = torch.zeros((), dtype=torch.int64, device="cuda")
    powers = torch.tensor([1, 37, 37**2, 37**3], device="cuda")
    lane = torch.arange(batch, device="cuda")

    def step(blocks):
        h = (blocks * powers).sum(1)
        eq = keys[None] == h[:, None]
        hit = eq.any(1)
        row = eq.to(torch.int64).argmax(1)
        fresh = torch.tanh(emb[blocks].mean(1) @ w)
        out = torch.where(hit[:, None], store[row], fresh)
        slot = (cursor + lane) % capacity
        slot = torch.where(hit, row, slot)
        keys[slot] = h
        store[slot] = out
        cursor.add_(batch).remainder_(capacity)
        hits.add_(hit.sum())
        return out, hits.clone()

    def inputs(index):
        g = torch.Generator().manual_seed(500 + index % 3)
        return (torch.randint(0, 32, (2, 4), generator=g).to("cuda"),)

    return step, inputs
