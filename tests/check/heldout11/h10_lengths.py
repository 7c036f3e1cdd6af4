"""Sequence lengths, cu_seqlens and masks in attention and pooling steps."""
from __future__ import annotations

from dataclasses import dataclass

import torch

DEV = "cuda"
STEPS = 8


def rnd(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEV)


def ids(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEV)


def cu_of(lens):
    cu = [0]
    for n in lens:
        cu.append(cu[-1] + n)
    return ids(cu)


# --------------------------------------------------------------------------------------------------------------------
# decode attention against a padded cache


class LengthBias:
    """Additive bias that hides the columns from `n` on; one tensor per length, built on first use."""

    def __init__(self, cap):
        self.columns = torch.arange(cap, device=DEV)
        self.by_length = {}

    def get(self, n):
        bias = self.by_length.get(n)
        if bias is None:
            bias = torch.zeros(self.columns.shape[0], device=DEV)
            bias = bias.masked_fill(self.columns >= n, -1e9)  # expect: CG202 optional @bias_cache_by_max_seqlen
            self.by_length[n] = bias
        return bias


def attend(q, k, v, bias):
    scores = torch.einsum("bd,bld->bl", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bl,bld->bd", torch.softmax(scores + bias, dim=-1), v)


def factory_bad_bias_cache_by_max_seqlen():
    cap, width = 24, 16
    k, v = rnd(3, cap, width, seed=1), rnd(3, cap, width, seed=2)
    biases = LengthBias(cap)

    def step(q, max_seqlen):
        bias = biases.get(max_seqlen)  # expect: CG202
        return attend(q, k, v, bias)

    def inputs(index):
        return rnd(3, width, seed=100 + index), 5 + 2 * index

    return step, inputs


def factory_ok_bias_from_seq_lens():
    cap, width = 24, 16
    k, v = rnd(3, cap, width, seed=1), rnd(3, cap, width, seed=2)
    biases = LengthBias(cap)

    def step(q, seq_lens):
        bias = biases.get(cap)  # capacity: nothing hidden, the same tensor in every step
        hidden = biases.columns[None, :] >= seq_lens[:, None]
        return attend(q, k, v, bias.expand(q.shape[0], cap).masked_fill(hidden, -1e9))

    def inputs(index):
        lens = [5 + 2 * index, 3 + index, 9]
        return rnd(3, width, seed=100 + index), ids(lens)

    return step, inputs


# --------------------------------------------------------------------------------------------------------------------
# pooling of a packed batch


class PackedPooler:
    def __init__(self, width, n_seqs, total):
        self.proj = rnd(width, width, seed=11) / width ** 0.5
        self.rows = torch.arange(total, device=DEV)
        self.n_seqs = n_seqs


class SplitPooler(PackedPooler):
    def __call__(self, hidden, cu_seqlens):
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()  # expect: CG101 @split_sizes_from_cu_seqlens
        parts = (hidden @ self.proj).split(sizes)
        return torch.stack([p.mean(dim=0) for p in parts])


class SegmentPooler(PackedPooler):
    def __call__(self, hidden, cu_seqlens):
        h = hidden @ self.proj
        seg = torch.searchsorted(cu_seqlens[1:], self.rows, right=True)
        sums = torch.zeros(self.n_seqs, h.shape[1], device=h.device)
        sums.index_add_(0, seg, h)
        counts = (cu_seqlens[1:] - cu_seqlens[:-1]).unsqueeze(1)
        return sums / counts.clamp(min=1)


PACKS = [[4, 5, 7], [6, 6, 4], [1, 14, 1], [8, 2, 6], [3, 3, 10], [5, 9, 2], [12, 2, 2], [7, 1, 8]]


def _pooler(cls):
    pooler = cls(16, 3, 16)

    def step(hidden, cu_seqlens):
        return pooler(hidden, cu_seqlens)

    def inputs(index):
        return rnd(16, 16, seed=200 + index), cu_of(PACKS[index % len(PACKS)])

    return step, inputs


def factory_bad_split_sizes_from_cu_seqlens():
    return _pooler(SplitPooler)


def factory_ok_segment_ids_from_cu_seqlens():
    return _pooler(SegmentPooler)


# --------------------------------------------------------------------------------------------------------------------
# flattening per-request values to tokens


@dataclass
class TokenLayout:
    n_tokens: int
    n_reqs: int

    def __post_init__(self):
        self.req_ids = torch.arange(self.n_reqs, device=DEV)
        self.flat = torch.arange(self.n_tokens, device=DEV)

    def positions(self, owner, lens):
        starts = torch.cumsum(lens, 0) - lens
        return self.flat - starts[owner]


def factory_bad_repeat_requests_over_tokens():
    layout = TokenLayout(16, 3)
    pos_emb, temperature = rnd(16, 8, seed=21), rnd(3, 8, seed=22)

    def step(x, lens):
        owner = torch.repeat_interleave(layout.req_ids, lens)  # expect: CG104
        pos = layout.positions(owner, lens)
        return x * temperature[owner] + pos_emb[pos]

    def inputs(index):
        return rnd(16, 8, seed=300 + index), ids(PACKS[index % len(PACKS)])

    return step, inputs


def factory_ok_repeat_requests_known_total():
    layout = TokenLayout(16, 3)
    pos_emb, temperature = rnd(16, 8, seed=21), rnd(3, 8, seed=22)

    def step(x, lens):
        # every batch is packed to exactly n_tokens, so the size needs no look at the device
        owner = torch.repeat_interleave(layout.req_ids, lens, output_size=layout.n_tokens)
        pos = layout.positions(owner, lens)
        return x * temperature[owner] + pos_emb[pos]

    def inputs(index):
        return rnd(16, 8, seed=300 + index), ids(PACKS[index % len(PACKS)])

    return step, inputs


# --------------------------------------------------------------------------------------------------------------------
# chunked prefill: the causal mask is built once for the maximum length


class ChunkedPrefill:
    def __init__(self, max_len, chunk, width):
        self.chunk = chunk
        self.k = torch.zeros(max_len, width, device=DEV)
        self.v = torch.zeros(max_len, width, device=DEV)
        self.wk = rnd(width, width, seed=31) / width ** 0.5
        self.wv = rnd(width, width, seed=32) / width ** 0.5
        self.causal = torch.ones(max_len, max_len, dtype=torch.bool, device=DEV).tril()

    def attention(self, x, visible):
        scores = (x @ self.k.t()) / x.shape[-1] ** 0.5
        return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ self.v


class HostCursorPrefill(ChunkedPrefill):
    def __init__(self, *args):
        super().__init__(*args)
        self.done = 0

    def forward(self, x):
        lo, hi = self.done, self.done + self.chunk
        self.k[lo:hi].copy_(x @ self.wk)  # expect: CG202 @chunked_prefill_host_cursor
        self.v[lo:hi].copy_(x @ self.wv)  # expect: CG202 optional @chunked_prefill_host_cursor
        out = self.attention(x, self.causal[lo:hi])  # expect: CG202 optional @chunked_prefill_host_cursor
        self.done = hi  # expect: CG210 optional @chunked_prefill_host_cursor
        return out


class DeviceCursorPrefill(ChunkedPrefill):
    def __init__(self, *args):
        super().__init__(*args)
        self.done = torch.zeros((), dtype=torch.int64, device=DEV)
        self.offsets = torch.arange(self.chunk, device=DEV)

    def forward(self, x):
        rows = self.done + self.offsets
        self.k.index_copy_(0, rows, x @ self.wk)
        self.v.index_copy_(0, rows, x @ self.wv)
        out = self.attention(x, self.causal.index_select(0, rows))
        self.done += self.chunk
        return out


def factory_bad_chunked_prefill_host_cursor():
    model = HostCursorPrefill(40, 4, 16)

    def inputs(index):
        return (rnd(4, 16, seed=400 + index),)

    return model.forward, inputs


def factory_ok_chunked_prefill_device_cursor():
    model = DeviceCursorPrefill(40, 4, 16)

    def inputs(index):
        return (rnd(4, 16, seed=400 + index),)

    return model.forward, inputs


# --------------------------------------------------------------------------------------------------------------------
# checks of the metadata


def validate_on_host(cu_seqlens, total):
    ordered = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    assert ordered, "cu_seqlens must not decrease"  # expect: CG101|CG108 @assert_monotonic_cu_seqlens
    return cu_seqlens.clamp(max=total)


def validate_on_device(cu_seqlens, total):
    torch._assert_async((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
    return cu_seqlens.clamp(max=total)


def last_token_logits(hidden, cu_seqlens, head):
    last = (cu_seqlens[1:] - 1).clamp(min=0)
    return hidden.index_select(0, last) @ head


def factory_bad_assert_monotonic_cu_seqlens():
    head = rnd(16, 32, seed=41)

    def step(hidden, cu_seqlens):
        cu = validate_on_host(cu_seqlens, hidden.shape[0])
        return last_token_logits(hidden, cu, head)

    def inputs(index):
        return rnd(16, 16, seed=500 + index), cu_of(PACKS[index % len(PACKS)])

    return step, inputs


def factory_ok_assert_monotonic_on_device():
    head = rnd(16, 32, seed=41)

    def step(hidden, cu_seqlens):
        cu = validate_on_device(cu_seqlens, hidden.shape[0])
        return last_token_logits(hidden, cu, head)

    def inputs(index):
        return rnd(16, 16, seed=500 + index), cu_of(PACKS[index % len(PACKS)])

    return step, inputs
