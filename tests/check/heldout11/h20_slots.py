"""Slot mappings, block tables and pages of a paged KV cache."""
from __future__ import annotations

import torch

DEV = "cuda"
STEPS = 12
PAGE = 4


def rnd(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEV)


def ids(values):
    return torch.tensor(values, dtype=torch.int64, device=DEV)


def pool_attention(q, rows, valid):
    """q [B, D], rows [B, L, D], valid [B, L] -> [B, D]; at least one valid row each."""
    scores = torch.einsum("bd,bld->bl", q, rows) / q.shape[-1] ** 0.5
    w = torch.softmax(scores.masked_fill(~valid, float("-inf")), dim=-1)
    return torch.einsum("bl,bld->bd", w, rows)


# --------------------------------------------------------------------------------------------------------------------
# padded tokens carry slot -1


def padded_slots(index, n_slots, batch=6):
    live = 2 + (index * 3) % (batch - 1)
    return [(7 * index + 3 * i) % n_slots if i < live else -1 for i in range(batch)]


class SlotPool:
    """`n_slots` usable rows, and one more behind them that nobody reads."""

    def __init__(self, n_slots, width):
        self.n_slots = n_slots
        self.k = rnd(n_slots + 1, width, seed=3)

    def read(self, q):
        k = self.k[: self.n_slots]
        return torch.softmax(q @ k.t() / q.shape[-1] ** 0.5, dim=-1) @ k


class FilteringPool(SlotPool):
    def write(self, slots, k):
        keep = slots >= 0
        live = slots[keep]  # expect: CG104 @drop_negative_slots
        self.k.index_copy_(0, live, k[keep])  # expect: CG104 optional @drop_negative_slots


class RedirectingPool(SlotPool):
    def write(self, slots, k):
        keep = slots >= 0
        live = torch.where(keep, slots, self.n_slots)
        self.k.index_copy_(0, live, k)


class WrappingPool(SlotPool):
    def write(self, slots, k):
        # -1 counts from the end: that is the row behind the usable ones
        self.k[slots] = k


def factory_bad_drop_negative_slots():
    pool = FilteringPool(20, 16)

    def step(x, slots):
        pool.write(slots, torch.tanh(x))
        return pool.read(x)

    def inputs(index):
        return rnd(6, 16, seed=100 + index), ids(padded_slots(index, 20))

    return step, inputs


def factory_ok_redirect_negative_slots():
    pool = RedirectingPool(20, 16)

    def step(x, slots):
        pool.write(slots, torch.tanh(x))
        return pool.read(x)

    def inputs(index):
        return rnd(6, 16, seed=100 + index), ids(padded_slots(index, 20))

    return step, inputs


def factory_ok_negative_slot_is_the_spare_row():
    pool = WrappingPool(20, 16)

    def step(x, slots):
        pool.write(slots, torch.tanh(x))
        return pool.read(x)

    def inputs(index):
        return rnd(6, 16, seed=100 + index), ids(padded_slots(index, 20))

    return step, inputs


# --------------------------------------------------------------------------------------------------------------------
# a number of real tokens beside padded tensors


def factory_bad_num_actual_tokens_scalar():
    """Padding rows carry slot 0, so that a write of them destroys the first token of the first request."""
    pool = rnd(24, 16, seed=5)
    wk = rnd(16, 16, seed=6) / 4

    def step(x, slots, num_actual_tokens):
        k = x @ wk
        pool.index_copy_(0, slots[:num_actual_tokens], k[:num_actual_tokens])  # expect: CG202
        return torch.softmax(x @ pool.t() / 4, dim=-1) @ pool

    def inputs(index):
        n = (6, 8, 5, 7, 3, 8, 4)[index % 7]
        slots = [1 + (8 * index + i) % 23 for i in range(n)] + [0] * (8 - n)
        return rnd(8, 16, seed=150 + index), ids(slots), n

    return step, inputs


# --------------------------------------------------------------------------------------------------------------------
# a page is taken when a sequence enters it


class PagedDecoder:
    def __init__(self, batch, max_pages, width, first_len):
        self.rows = torch.arange(batch, device=DEV)
        self.span = torch.arange(max_pages * PAGE, device=DEV)
        self.pool = torch.zeros(batch * max_pages * PAGE, width, device=DEV)
        self.table = torch.zeros(batch, max_pages, dtype=torch.int64, device=DEV)
        self.free = torch.zeros((), dtype=torch.int64, device=DEV)
        self.lens = ids(first_len)
        self.batch = batch

    def append_and_attend(self, x):
        slot = self.table[self.rows, self.lens // PAGE] * PAGE + self.lens % PAGE
        self.pool.index_copy_(0, slot, x)
        self.lens.add_(1)
        where = (self.table.unsqueeze(-1) * PAGE + self.span[:PAGE]).flatten(1)
        return pool_attention(x, self.pool[where], self.span[None] < self.lens[:, None])


class HostMirrorDecoder(PagedDecoder):
    """All sequences have one length; a copy of it on the host says when to take pages."""

    def __init__(self, batch, max_pages, width):
        super().__init__(batch, max_pages, width, [0] * batch)
        self.host_len = 0

    def forward(self, x):
        if self.host_len % PAGE == 0:  # expect: CG201 @page_taken_by_host_length
            self.table.scatter_(1, (self.lens // PAGE)[:, None], (self.free + self.rows)[:, None])
            self.free.add_(self.batch)
        self.host_len += 1  # expect: CG210 optional @page_taken_by_host_length
        return self.append_and_attend(x)


class DeviceAllocDecoder(PagedDecoder):
    def forward(self, x):
        column = (self.lens // PAGE)[:, None]
        need = self.lens % PAGE == 0
        fresh = self.free + torch.cumsum(need, 0) - 1
        held = self.table.gather(1, column).squeeze(1)
        self.table.scatter_(1, column, torch.where(need, fresh, held)[:, None])
        self.free.add_(need.sum())
        return self.append_and_attend(x)


def factory_bad_page_taken_by_host_length():
    dec = HostMirrorDecoder(3, 5, 16)

    def inputs(index):
        return (rnd(3, 16, seed=200 + index),)

    return dec.forward, inputs


def factory_ok_page_taken_by_device_length():
    dec = DeviceAllocDecoder(3, 5, 16, [0, 0, 0])

    def inputs(index):
        return (rnd(3, 16, seed=200 + index),)

    return dec.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# the table of slots each request has used


class GrowingSlotTable:
    def __init__(self, first):
        self.used = first[:, None]

    def append(self, slots):
        self.used = torch.cat([self.used, slots[:, None]], dim=1)  # expect: CG208|CG205 @slot_table_grows
        return self.used, torch.ones_like(self.used, dtype=torch.bool)


class StaticSlotTable:
    def __init__(self, first, cap):
        self.used = torch.zeros(first.shape[0], cap, dtype=torch.int64, device=DEV)
        self.used[:, 0].copy_(first)
        self.count = torch.ones(first.shape[0], 1, dtype=torch.int64, device=DEV)
        self.columns = torch.arange(cap, device=DEV)

    def append(self, slots):
        self.used.scatter_(1, self.count, slots[:, None])
        self.count += 1
        return self.used, self.columns < self.count


def _slot_history(table):
    pool = rnd(40, 16, seed=8)

    def step(q, slots):
        used, valid = table.append(slots)
        return pool_attention(q, pool[used.clamp(0, 39)], valid)

    def inputs(index):
        return rnd(2, 16, seed=300 + index), ids([(3 * index + 1) % 40, (5 * index + 2) % 40])

    return step, inputs


def factory_bad_slot_table_grows():
    return _slot_history(GrowingSlotTable(ids([39, 38])))


def factory_ok_slot_table_of_fixed_width():
    return _slot_history(StaticSlotTable(ids([39, 38]), 16))


# --------------------------------------------------------------------------------------------------------------------
# block-wise attention: as many blocks as the longest request has

PROMPTS = [[5, 8], [7, 6], [8, 3], [5, 5], [6, 8], [8, 7], [4, 8], [9, 6], [8, 8], [5, 7], [6, 6], [7, 8]]
TAME = [[5, 8], [7, 6], [8, 3], [5, 5], [6, 8], [8, 7], [4, 8], [6, 5], [8, 8], [5, 7], [6, 6], [7, 8]]


def block_attention(q, pool, table, lens, n_blocks):
    b, d = q.shape
    best = torch.full((b, 1), -1e30, device=q.device)
    norm = torch.zeros(b, 1, device=q.device)
    acc = torch.zeros(b, d, device=q.device)
    column = torch.arange(PAGE, device=q.device)
    for j in range(n_blocks):  # expect: CG202|CG201 @blocks_of_longest_prompt
        kv = pool[table[:, j]]
        s = torch.einsum("bd,bpd->bp", q, kv) / d ** 0.5
        s = s.masked_fill(j * PAGE + column >= lens[:, None], -1e30)
        top = torch.maximum(best, s.amax(dim=1, keepdim=True))
        p, old = torch.exp(s - top), torch.exp(best - top)
        norm = norm * old + p.sum(dim=1, keepdim=True)
        acc = acc * old + torch.einsum("bp,bpd->bd", p, kv)
        best = top
    return acc / norm


def blocks_needed(max_len):
    return -(-max_len // PAGE)  # expect: CG202 optional @blocks_of_longest_prompt


def table_of(index):
    return ids([[(index + 5 * r + 3 * c) % 12 for c in range(4)] for r in range(2)])


def factory_bad_blocks_of_longest_prompt():
    """Two blocks do for every batch but one, whose first prompt is one token too long."""
    pool = rnd(12, PAGE, 16, seed=9)

    def step(q, table, lens, max_len):
        return block_attention(q, pool, table, lens, blocks_needed(max_len))

    def inputs(index):
        lens = PROMPTS[index % len(PROMPTS)]
        return rnd(2, 16, seed=400 + index), table_of(index), ids(lens), max(lens)

    return step, inputs


def factory_ok_blocks_of_bucket():
    """The same loop over a count from a host scalar, but all batches of this graph round up to one bucket."""
    pool = rnd(12, PAGE, 16, seed=9)

    def step(q, table, lens, max_len):
        bucket = 8
        while bucket < max_len:
            bucket *= 2
        return block_attention(q, pool, table, lens, bucket // PAGE)

    def inputs(index):
        lens = TAME[index % len(TAME)]
        return rnd(2, 16, seed=400 + index), table_of(index), ids(lens), max(lens)

    return step, inputs
