"""Second held-out set: KV caches, paged, ring, quantized, and what people do beside them."""

import torch
import torch.nn.functional as F
from torch import nn

HEADS, DIM, LENGTH = 2, 4, 16


def _rows(i, count=1):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(count, HEADS, DIM, generator=generator).to("cuda")


def _position(i):
    return torch.tensor([i], device="cuda")


class HostCounterCache(nn.Module):
    """Counts tokens on the host, as transformers' first caches did."""

    def __init__(self):
        super().__init__()
        self.seen_tokens = 0
        self.register_buffer("keys", torch.zeros(LENGTH, HEADS, DIM))

    def update(self, key):
        start = self.seen_tokens
        self.seen_tokens += key.shape[0]  # expect: CG210 @host_counter_cache
        self.keys[start : self.seen_tokens] = key  # expect: CG202 @host_counter_cache
        return self.keys


class QuantizedCache:
    """Keeps a float residual that is appended to, and quantizes what gets old."""

    def __init__(self):
        self.codes = torch.zeros(LENGTH, HEADS, DIM, dtype=torch.int8, device="cuda")
        self.residual = torch.zeros(0, HEADS, DIM, device="cuda")

    def update(self, key):
        self.residual = torch.cat([self.residual, key])  # expect: CG205|CG208 @quantized_residual
        dense = self.codes.float() * 0.02
        return torch.cat([self.residual, dense])  # expect: CG205|CG208 optional @quantized_residual


class PagedCache:
    """Pages and a block table on the device; the page of a token by device arithmetic."""

    def __init__(self, pages=8, page_size=4):
        self.page_size = page_size
        self.pages = torch.zeros(pages, page_size, HEADS, DIM, device="cuda")
        self.table = torch.tensor([[3, 1, 6, 0]], device="cuda")

    def write(self, key, position):
        page = self.table[0].index_select(0, position // self.page_size)
        self.pages[page, position % self.page_size] = key

    def read(self, position):
        rows = self.pages[self.table[0]].flatten(0, 1)
        return rows, torch.arange(rows.shape[0], device=rows.device) <= position


def _attend(query, keys, valid=None):
    scores = torch.einsum("qhd,khd->hqk", query, keys) / DIM**0.5
    if valid is not None:
        scores = scores.masked_fill(~valid, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), keys)


def factory_bad_host_counter_cache():  # hazard: 11
    cache = HostCounterCache().to("cuda")

    def step(key):
        return _attend(key, cache.update(key))

    return step, lambda i: (_rows(i),)


def factory_bad_quantized_residual():  # hazard: 17
    cache = QuantizedCache()

    def step(key):
        return _attend(key, cache.update(key))

    return step, lambda i: (_rows(i),)


def factory_ok_paged_cache():
    cache = PagedCache()

    def step(key, position):
        cache.write(key, position)
        rows, valid = cache.read(position)
        return _attend(key, rows, valid)

    return step, lambda i: (_rows(i), _position(i))


def factory_bad_sliding_window_roll():  # hazard: 10
    """A window that starts to roll once it is full; the host decides when."""
    window = 3
    keys = torch.zeros(window, HEADS, DIM, device="cuda")
    state = {"filled": 0}

    def step(key):
        if state["filled"] >= window:  # expect: CG201
            keys.copy_(keys.roll(-1, 0))
            keys[window - 1] = key[0]
        else:
            keys[state["filled"]] = key[0]  # expect: CG202 optional
            state["filled"] += 1  # expect: CG210
        return keys.sum(0)

    return step, lambda i: (_rows(i),)


def factory_bad_length_as_slice_end():  # hazard: 1
    keys = _rows(99, LENGTH)

    def step(query, length):
        visible = keys[: length[0]]  # expect: CG101
        return _attend(query, visible)  # expect: CG202 optional, CG208 optional

    return step, lambda i: (_rows(i), torch.tensor([3 + i], device="cuda"))


def factory_bad_lengths_of_the_host_tensor():  # hazard: 11
    """`seq_lens_cpu` beside the device tensor: read on the host without any wait, and stale after capture."""
    keys = _rows(99, LENGTH)

    def step(query, lengths_cpu):
        longest = int(lengths_cpu.max())
        return _attend(query, keys[:longest])  # expect: CG202|CG208

    def inputs(i):
        return _rows(i), torch.tensor([2 + i, 1])

    return step, inputs


def factory_bad_copy_on_write_pairs():  # hazard: 1
    pages = _rows(98, LENGTH)

    def step(pairs, x):
        for source, target in pairs.tolist():  # expect: CG101
            pages[target].copy_(pages[source] + x)  # expect: CG202 optional
        return pages.sum(0)

    return step, lambda i: (torch.tensor([[i, 8 + i]], device="cuda"), _rows(i)[0])


def factory_bad_pages_by_list():  # hazard: 4
    """The block table as Python lists, as a scheduler holds it."""
    pages = _rows(97, LENGTH)
    table = {0: [3, 1, 4], 1: [2, 0, 5]}

    def step(query):
        return _attend(query, torch.stack([pages[table[row]] for row in table]).flatten(0, 1))  # expect: CG103

    return step, lambda i: (_rows(i),)


def factory_bad_evict_by_mask():  # hazard: 5
    """Heavy hitters: keep the rows above the mean score."""
    keys = _rows(96, LENGTH)

    def step(query):
        scores = torch.einsum("qhd,khd->k", query, keys)
        kept = keys[scores > scores.mean()]  # expect: CG104
        return _attend(query, kept)  # expect: CG208 optional

    return step, lambda i: (_rows(i),)


def factory_bad_double_buffer():  # hazard: 14
    """Two halves that change places each step."""

    class State:
        def __init__(self):
            self.front = torch.zeros(HEADS, DIM, device="cuda")
            self.back = torch.zeros(HEADS, DIM, device="cuda")

        def flip(self):
            self.front, self.back = self.back, self.front

    state = State()

    def step(key):
        torch.add(state.front, key[0], out=state.back)  # expect: CG205
        state.flip()
        return state.front + 1  # expect: CG205 optional

    return step, lambda i: (_rows(i),)


def factory_bad_rotary_limit_on_device():  # hazard: 9
    """Dynamic rotary tables: grown when a position passes what was built."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.limit = 4
            self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, DIM, 2).float() / DIM))

        def forward(self, position):
            longest = torch.max(position) + 1
            if longest > self.limit:  # expect: CG108
                self.frequency.mul_(0.5)
                self.limit *= 2  # expect: CG210 optional
            angle = position[:, None].float() * self.frequency
            return torch.cat([angle.cos(), angle.sin()], -1)

    rotary = Rotary().to("cuda")

    def step(key, position):
        return key * rotary(position)[:, None]

    return step, lambda i: (_rows(i), _position(2 + i))


def factory_bad_rotary_offset_of_the_host():  # hazard: 11
    table = torch.randn(64, DIM, generator=torch.Generator().manual_seed(0)).to("cuda")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.offset = 0

        def forward(self, key):
            angles = table[self.offset : self.offset + key.shape[0]]  # expect: CG202
            self.offset += key.shape[0]  # expect: CG210
            return key * angles[:, None]

    attention = Attention()
    return (lambda key: attention(key)), lambda i: (_rows(i),)


def factory_ok_index_copy_by_position():
    keys = torch.zeros(LENGTH, HEADS, DIM, device="cuda")

    def step(key, position):
        keys.index_copy_(0, position, key)
        valid = torch.arange(LENGTH, device="cuda") <= position
        return _attend(key, keys, valid)

    return step, lambda i: (_rows(i), _position(i))


def factory_ok_ring_of_four():
    keys = torch.zeros(4, HEADS, DIM, device="cuda")

    def step(key, position):
        keys.index_copy_(0, position % 4, key)
        age = (position - torch.arange(4, device="cuda")) % 4
        return _attend(key, keys, age <= position)

    return step, lambda i: (_rows(i), _position(i))


def factory_ok_int8_rows():
    codes = torch.zeros(LENGTH, HEADS, DIM, dtype=torch.int8, device="cuda")
    scales = torch.zeros(LENGTH, HEADS, 1, device="cuda")

    def step(key, position):
        scale = key.abs().amax(-1, keepdim=True) / 127
        codes[position] = (key / scale.clamp_min(1e-8)).round().clamp(-127, 127).to(torch.int8)
        scales[position] = scale
        valid = torch.arange(LENGTH, device="cuda") <= position
        return _attend(key, codes * scales, valid)

    return step, lambda i: (_rows(i), _position(i))


def factory_ok_evict_fixed_number():
    keys = _rows(96, LENGTH)

    def step(query):
        scores = torch.einsum("qhd,khd->k", query, keys)
        best = scores.topk(4).indices.sort().values
        return _attend(query, keys.index_select(0, best))

    return step, lambda i: (_rows(i),)


def factory_ok_sdpa_with_mask():
    keys = _rows(95, LENGTH).transpose(0, 1).unsqueeze(0)

    def step(query, length):
        mask = (torch.arange(LENGTH, device=query.device) < length).view(1, 1, 1, LENGTH)
        return F.scaled_dot_product_attention(query.transpose(0, 1).unsqueeze(0), keys, keys, attn_mask=mask)

    return step, lambda i: (_rows(i), torch.tensor([3 + i], device="cuda"))


def factory_ok_host_bucket():
    """The bucket's length is a host number that stays; the caller captures one graph for each."""

    class Bucket:
        def __init__(self, length):
            self.length = length

    bucket, keys = Bucket(8), _rows(94, LENGTH)

    def step(query, position):
        valid = torch.arange(bucket.length, device="cuda") <= position
        return _attend(query, keys[: bucket.length], valid)

    return step, lambda i: (_rows(i), _position(i))
