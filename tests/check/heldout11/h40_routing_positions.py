"""Expert ids, token types, positions, and the buffers which carry them."""
from __future__ import annotations

import torch

DEV = "cuda"
PINNED = DEV != "cpu"
STEPS = 10


def rnd(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEV)


def ids(values):
    return torch.tensor(values, dtype=torch.int64, device=DEV)


# --------------------------------------------------------------------------------------------------------------------
# experts with a capacity


class CapacityMoE:
    def __init__(self, n_experts, width, capacity):
        self.n, self.capacity = n_experts, capacity
        self.w = rnd(n_experts, width, width, seed=1) / width ** 0.5

    def counts(self, expert_ids):
        raise NotImplementedError

    def forward(self, x, expert_ids):
        order = torch.argsort(expert_ids, stable=True)
        counts = self.counts(expert_ids)
        starts = torch.cumsum(counts, 0) - counts
        sorted_ids = expert_ids[order]
        rank = torch.arange(x.shape[0], device=x.device) - starts[sorted_ids]
        fits = rank < self.capacity
        # what does not fit goes to a spare row behind all experts
        cell = torch.where(fits, sorted_ids * self.capacity + rank, self.n * self.capacity)
        grid = torch.zeros(self.n * self.capacity + 1, x.shape[1], device=x.device)
        grid[cell] = x[order]
        done = torch.bmm(grid[:-1].view(self.n, self.capacity, -1), self.w).flatten(0, 1)
        picked = done[cell.clamp(max=self.n * self.capacity - 1)] * fits[:, None]
        return torch.zeros_like(x).index_copy_(0, order, picked)


class BincountMoE(CapacityMoE):
    def counts(self, expert_ids):
        return torch.bincount(expert_ids, minlength=self.n)  # expect: CG104 @expert_histogram


class ScatterCountMoE(CapacityMoE):
    def counts(self, expert_ids):
        return torch.zeros(self.n, dtype=torch.int64, device=DEV).scatter_add_(0, expert_ids, torch.ones_like(expert_ids))


def experts_of(index, n=10):
    return ids([(index * (r % 3 + 1) + r * r) % 4 for r in range(n)])


def factory_bad_expert_histogram():
    moe = BincountMoE(4, 16, 3)

    def inputs(index):
        return rnd(10, 16, seed=100 + index), experts_of(index)

    return moe.forward, inputs


def factory_ok_expert_counts_scattered():
    moe = ScatterCountMoE(4, 16, 3)

    def inputs(index):
        return rnd(10, 16, seed=100 + index), experts_of(index)

    return moe.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# positions which the runner moves on itself


class PositionRunner:
    def __init__(self, first, width, cap=64):
        self.positions = ids(first)
        self.table = rnd(cap, width, seed=2)
        self.cap = cap

    def embed(self, x):
        return x + self.table[self.positions.clamp(0, self.cap - 1)]


class RebindingRunner(PositionRunner):
    def forward(self, x, running):
        out = self.embed(x)
        self.positions = self.positions + running  # expect: CG205 @positions_rebound
        return out


class InPlaceRunner(PositionRunner):
    def forward(self, x, running):
        out = self.embed(x)
        positions = self.positions + running
        self.positions.copy_(positions)
        return out


def running_of(index):
    return ids([1, index % 2, 1 if index % 3 else 2])


def factory_bad_positions_rebound():
    runner = RebindingRunner([4, 0, 9], 16)

    def inputs(index):
        return rnd(3, 16, seed=200 + index), running_of(index)

    return runner.forward, inputs


def factory_ok_positions_copied_back():
    runner = InPlaceRunner([4, 0, 9], 16)

    def inputs(index):
        return rnd(3, 16, seed=200 + index), running_of(index)

    return runner.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# rotary tables


def rotary_table(n, dim, base=10000.0):
    inv = base ** (-torch.arange(0, dim, 2, device=DEV, dtype=torch.float32) / dim)
    angle = torch.arange(n, device=DEV, dtype=torch.float32)[:, None] * inv
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class DynamicRope:
    """Doubles its table, with a larger base, when the longest sequence passes the end."""

    def __init__(self, dim, n):
        self.dim, self.n, self.longest = dim, n, 0
        self.cos, self.sin = rotary_table(n, dim)

    def forward(self, x, positions):
        self.longest += 1  # expect: CG210 optional @rope_table_doubles
        if self.longest > self.n:  # expect: CG201 @rope_table_doubles
            self.n *= 2
            self.cos, self.sin = rotary_table(self.n, self.dim, base=10000.0 * self.n)  # expect: CG205 optional @rope_table_doubles
        at = positions.clamp(max=self.n - 1)  # expect: CG202 optional @rope_table_doubles
        return rotate(x, self.cos[at], self.sin[at])


class TwoTableRope:
    """Both tables are there from the start; the device looks at the longest position and takes one."""

    def __init__(self, dim, n):
        self.n = n
        short, long = rotary_table(2 * n, dim), rotary_table(2 * n, dim, base=10000.0 * 2 * n)
        self.cos = torch.stack([short[0], long[0]])
        self.sin = torch.stack([short[1], long[1]])

    def forward(self, x, positions):
        which = (positions.max() >= self.n).long().view(1)
        at = positions.clamp(max=2 * self.n - 1)
        return rotate(x, self.cos[which, at], self.sin[which, at])


def factory_bad_rope_table_doubles():
    rope = DynamicRope(16, 6)

    def inputs(index):
        return rnd(2, 16, seed=300 + index), ids([index, max(index - 2, 0)])

    return rope.forward, inputs


def factory_ok_rope_two_tables():
    rope = TwoTableRope(16, 6)

    def inputs(index):
        return rnd(2, 16, seed=300 + index), ids([index, max(index - 2, 0)])

    return rope.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# token types: segments alternate from one chunk to the next


class SegmentEmbedding:
    def __init__(self, n_types, width, segment):
        self.n_types = n_types
        self.emb = rnd(n_types, width, seed=4)
        self.segment = segment

    def forward(self, x, type_ids):
        padded = type_ids < 0
        rotated = (type_ids + self.segment) % self.n_types  # expect: CG203 @token_type_offset_tensor_on_cpu
        self.segment += 1
        return x + self.emb[rotated].masked_fill(padded.unsqueeze(1), 0.0)


def types_of(index, n=6):
    return ids([(index + r) % 4 - 1 for r in range(n)])


def factory_bad_token_type_offset_tensor_on_cpu():
    model = SegmentEmbedding(5, 16, torch.tensor(0))

    def inputs(index):
        return rnd(6, 16, seed=400 + index), types_of(index)

    return model.forward, inputs


def factory_ok_token_type_offset_tensor_on_device():
    model = SegmentEmbedding(5, 16, torch.tensor(0, device=DEV))

    def inputs(index):
        return rnd(6, 16, seed=400 + index), types_of(index)

    return model.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# a pinned staging buffer


class Staged:
    def __init__(self, values, cap, width):
        self.host = torch.tensor(values, dtype=torch.int64, pin_memory=PINNED)
        self.dev = torch.zeros(len(values), dtype=torch.int64, device=DEV)
        self.columns = torch.arange(cap, device=DEV)
        self.cache = rnd(len(values), cap, width, seed=5)

    def mean_of_visible(self, lens):
        seen = (self.columns < lens[:, None]).unsqueeze(-1)
        return (self.cache * seen).sum(dim=1) / lens.clamp(min=1)[:, None]


class StagedLens(Staged):
    def forward(self, x):
        for row in range(len(self.host)):
            self.host[row] += 1  # expect: CG204 optional @staged_lengths_filled_in_step
        self.dev.copy_(self.host, non_blocking=True)  # expect: CG204|CG207 @staged_lengths_filled_in_step
        return x + self.mean_of_visible(self.dev)


class StagedFirstLens(Staged):
    """The prompt lengths are staged and never change; what was decoded since is counted on the device."""

    def __init__(self, *args):
        super().__init__(*args)
        self.decoded = torch.zeros_like(self.dev)

    def forward(self, x):
        self.dev.copy_(self.host, non_blocking=True)
        self.decoded += 1
        return x + self.mean_of_visible(self.dev + self.decoded)


def factory_bad_staged_lengths_filled_in_step():
    model = StagedLens([2, 5, 1], 20, 16)

    def inputs(index):
        return (rnd(3, 16, seed=500 + index),)

    return model.forward, inputs


def factory_ok_staged_lengths_constant():
    model = StagedFirstLens([2, 5, 1], 20, 16)

    def inputs(index):
        return (rnd(3, 16, seed=500 + index),)

    return model.forward, inputs
