"""Accepted drafts, attention plans, adapter ids, double-buffered metadata."""
from __future__ import annotations

import torch

DEV = "cuda"
STEPS = 12


def rnd(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEV)


def ids(values):
    return torch.tensor(values, dtype=torch.int64, device=DEV)


# --------------------------------------------------------------------------------------------------------------------
# verification of drafts


def agreed(draft, target):
    """Length of the common prefix of each row."""
    return torch.cumprod((draft == target).to(torch.int64), dim=1).sum(dim=1)


def draft_and_target(index, batch=3, width=4):
    draft, target = [], []
    for r in range(batch):
        hits = (index + 2 * r) % (width + 1)
        row = [(3 * index + r + 5 * c) % 29 for c in range(width)]
        draft.append(row)
        target.append([t if c != hits else (t + 1) % 29 for c, t in enumerate(row)])
    return ids(draft), ids(target)


class Verifier:
    def __init__(self, batch, width):
        self.lens = torch.full((batch,), 3, dtype=torch.int64, device=DEV)
        self.emb = rnd(29, 8, seed=1)
        self.pos = rnd(128, 8, seed=2)
        self.columns = torch.arange(width, device=DEV)

    def bonus(self, target, n):
        token = target.gather(1, n.clamp(max=target.shape[1] - 1)[:, None]).squeeze(1)
        return self.emb[token] + self.pos[self.lens.clamp(max=127)]


class LockstepVerifier(Verifier):
    """Commits what the worst row of the batch has accepted."""

    def forward(self, draft, target):
        n = agreed(draft, target)
        worst = n.min()
        committed = self.emb[draft[:, :worst]].sum(dim=1)  # expect: CG101 @worst_accept_count_bounds_slice
        self.lens += worst
        return committed + self.bonus(target, n)


class PerRowVerifier(Verifier):
    def forward(self, draft, target):
        n = agreed(draft, target)
        kept = (self.columns < n[:, None]).unsqueeze(-1)
        committed = torch.where(kept, self.emb[draft], 0.0).sum(dim=1)
        self.lens += n
        return committed + self.bonus(target, n), self.lens.clone()


def factory_bad_worst_accept_count_bounds_slice():
    ver = LockstepVerifier(3, 4)

    def inputs(index):
        return draft_and_target(index)

    return ver.forward, inputs


def factory_ok_accept_counts_on_device():
    ver = PerRowVerifier(3, 4)

    def inputs(index):
        return draft_and_target(index)

    return ver.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# cache entries of rejected drafts (linear attention over the cache: a zero row is no row)

ACCEPTED = [4, 2, 1, 4, 3, 0, 2, 4, 1, 3, 2, 4]


class DraftCache:
    def __init__(self, cap, width, n_draft):
        self.k = torch.zeros(cap, width, device=DEV)
        self.v = torch.zeros(cap, width, device=DEV)
        self.columns = torch.arange(n_draft, device=DEV)

    def read(self, q):
        return q @ (self.k.t() @ self.v)

    def rewind(self, where, n_accepted):
        rejected = where[n_accepted:]  # expect: CG202 @rejected_drafts_zeroed_by_host_count
        self.k.index_fill_(0, rejected, 0.0)
        self.v.index_fill_(0, rejected, 0.0)

    def rewind_masked(self, where, n_accepted):
        keep = (self.columns < n_accepted).unsqueeze(1)
        self.k.index_copy_(0, where, self.k[where] * keep)
        self.v.index_copy_(0, where, self.v[where] * keep)


def draft_positions(index):
    base = sum(ACCEPTED[i % len(ACCEPTED)] for i in range(index))
    return ids([base + c for c in range(4)])


def factory_bad_rejected_drafts_zeroed_by_host_count():
    cache = DraftCache(64, 16, 4)

    def step(k, v, q, where, n_accepted):
        cache.k.index_copy_(0, where, k)
        cache.v.index_copy_(0, where, v)
        cache.rewind(where, n_accepted)
        return cache.read(q)

    def inputs(index):
        kvq = [rnd(4, 16, seed=1000 * j + index) for j in (1, 2, 3)]
        return *kvq, draft_positions(index), ACCEPTED[index % len(ACCEPTED)]

    return step, inputs


def factory_ok_rejected_drafts_masked():
    cache = DraftCache(64, 16, 4)

    def step(k, v, q, where, n_accepted):
        cache.k.index_copy_(0, where, k)
        cache.v.index_copy_(0, where, v)
        cache.rewind_masked(where, n_accepted)
        return cache.read(q)

    def inputs(index):
        kvq = [rnd(4, 16, seed=1000 * j + index) for j in (1, 2, 3)]
        return *kvq, draft_positions(index), ids([ACCEPTED[index % len(ACCEPTED)]])

    return step, inputs


# --------------------------------------------------------------------------------------------------------------------
# a plan of the work, renewed every few steps


def make_plan(seq_lens, n_workers):
    """Longest request first, dealt to the workers in turn."""
    order = torch.argsort(seq_lens, descending=True, stable=True)
    worker = torch.arange(seq_lens.shape[0], device=seq_lens.device) % n_workers
    return order, torch.zeros_like(order).scatter_(0, order, worker)


class PlannedStep:
    EVERY = 4

    def __init__(self, n_workers, width):
        self.n_workers = n_workers
        self.scale = rnd(n_workers, width, seed=12)

    def run(self, x, order, worker):
        y = x * self.scale[worker]
        return torch.cumsum(y.index_select(0, order), dim=0)


class HostPlanned(PlannedStep):
    def __init__(self, *args):
        super().__init__(*args)
        self.tick = 0
        self.plan = None

    def forward(self, x, seq_lens):
        if self.tick % self.EVERY == 0:  # expect: CG201 @plan_renewed_by_host_tick
            self.plan = make_plan(seq_lens, self.n_workers)  # expect: CG205 optional @plan_renewed_by_host_tick
        self.tick += 1  # expect: CG210 optional @plan_renewed_by_host_tick
        return self.run(x, *self.plan)


class DevicePlanned(PlannedStep):
    def __init__(self, n_reqs, *args):
        super().__init__(*args)
        self.tick = torch.zeros((), dtype=torch.int64, device=DEV)
        self.plan = tuple(torch.zeros(n_reqs, dtype=torch.int64, device=DEV) for _ in range(2))

    def forward(self, x, seq_lens):
        renew = self.tick % self.EVERY == 0
        for held, new in zip(self.plan, make_plan(seq_lens, self.n_workers)):
            held.copy_(torch.where(renew, new, held))
        self.tick += 1
        return self.run(x, *self.plan)


def lens_of(index, n=5):
    return ids([(13 * index + 7 * r * (index + 1)) % 31 + 1 for r in range(n)])


def factory_bad_plan_renewed_by_host_tick():
    planned = HostPlanned(2, 16)

    def inputs(index):
        return rnd(5, 16, seed=300 + index), lens_of(index)

    return planned.forward, inputs


def factory_ok_plan_renewed_on_device():
    planned = DevicePlanned(5, 2, 16)

    def inputs(index):
        return rnd(5, 16, seed=300 + index), lens_of(index)

    return planned.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# LoRA


class LoraBank:
    def __init__(self, n_adapters, width, rank):
        self.n = n_adapters
        self.base = rnd(width, width, seed=21) / width ** 0.5
        self.a = rnd(n_adapters, width, rank, seed=22) / width ** 0.5
        self.b = rnd(n_adapters, rank, width, seed=23) / rank ** 0.5

    def delta(self, x, i):
        return x @ self.a[i] @ self.b[i]


class SkippingLora(LoraBank):
    def forward(self, x, adapter_ids):
        y = x @ self.base
        for i in range(self.n):
            mine = adapter_ids == i
            if mine.any():  # expect: CG101|CG108 @lora_skips_absent_adapters
                y = y + self.delta(x, i) * mine[:, None]
        return y


class MaskedLora(LoraBank):
    """All adapters on all rows; -1 is no adapter."""

    def forward(self, x, adapter_ids):
        y = x @ self.base
        for i in range(self.n):
            y = y + self.delta(x, i) * (adapter_ids == i)[:, None]
        return y


def adapters_of(index, n=6):
    return ids([(index * (r + 2) + r) % 5 - 1 for r in range(n)])


def factory_bad_lora_skips_absent_adapters():
    bank = SkippingLora(4, 16, 4)

    def inputs(index):
        return rnd(6, 16, seed=500 + index), adapters_of(index)

    return bank.forward, inputs


def factory_ok_lora_all_adapters_masked():
    bank = MaskedLora(4, 16, 4)

    def inputs(index):
        return rnd(6, 16, seed=500 + index), adapters_of(index)

    return bank.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# the metadata of this step and of the one before (the step wants to know which requests went on)


class PingPong:
    def __init__(self, n):
        self.bufs = [torch.zeros(n, dtype=torch.int64, device=DEV) for _ in range(2)]
        self.turn = 0

    def push(self, lens):
        now = self.bufs[self.turn]  # expect: CG201|CG202|CG205 @two_metadata_buffers_in_turn
        before = self.bufs[1 - self.turn]  # expect: CG202 optional @two_metadata_buffers_in_turn
        now.copy_(lens)
        self.turn = 1 - self.turn  # expect: CG210 optional @two_metadata_buffers_in_turn
        return now, before


class Shifting:
    def __init__(self, n):
        self.now = torch.zeros(n, dtype=torch.int64, device=DEV)
        self.before = torch.zeros(n, dtype=torch.int64, device=DEV)

    def push(self, lens):
        self.before.copy_(self.now)
        self.now.copy_(lens)
        return self.now, self.before


def continued_step(history, emb):
    def step(x, lens):
        now, before = history.push(lens)
        went_on = (now == before + 1).unsqueeze(1)
        return torch.where(went_on, x, x * 0.5 + emb[now % 16])

    return step


def request_lens(index):
    # rows 0 and 1 go on for some steps and are then replaced, row 2 is new in every step
    return ids([1 + index % 5, 3 + (index + 1) % 4, 2 + (index * 7) % 11])


def factory_bad_two_metadata_buffers_in_turn():
    step = continued_step(PingPong(3), rnd(16, 8, seed=31))

    def inputs(index):
        return rnd(3, 8, seed=600 + index), request_lens(index)

    return step, inputs


def factory_ok_metadata_shifted_in_place():
    step = continued_step(Shifting(3), rnd(16, 8, seed=31))

    def inputs(index):
        return rnd(3, 8, seed=600 + index), request_lens(index)

    return step, inputs
