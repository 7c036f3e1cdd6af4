"""Decode caches: pages, sliding windows, growth by doubling, segment memories, long-context rotary factors."""
import torch

STEPS = 24
D = 16
PAGE = 8


def rnd(index, *shape, salt=0):
    g = torch.Generator().manual_seed(7919 * salt + index)
    return torch.randn(*shape, generator=g).to("cuda")


def attend(q, keys, mask=None):
    scores = q @ keys.t() / D**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return torch.softmax(scores, -1) @ keys


# --------------------------------------------------------------- paged cache

class PagedKV:
    """The offset inside a page lives on the device; the page number comes from the host's block table."""

    def __init__(self):
        self.pool = torch.zeros(4, PAGE, D, device="cuda")
        self.table = [2, 0, 3, 1]
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")
        self.n = 0

    def append(self, k):
        page = self.pool[self.table[self.n // PAGE]]  # expect: CG202 @page_boundary
        page.index_copy_(0, self.pos % PAGE, k)
        self.pos += 1
        self.n += 1  # expect: CG210 optional @page_boundary


class PagedKVDevice:
    def __init__(self):
        self.pool = torch.zeros(4, PAGE, D, device="cuda")
        self.table = torch.tensor([2, 0, 3, 1], device="cuda")
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")
        self.n = 0
        self.pages_in_use = 1

    def append(self, k):
        page = self.table[self.pos // PAGE]
        slot = page * PAGE + self.pos % PAGE
        self.pool.view(-1, D).index_copy_(0, slot, k)
        self.pos += 1
        self.n += 1
        self.pages_in_use = (self.n + PAGE - 1) // PAGE


def paged_case(cache):
    def step(q, k):
        cache.append(k)
        return attend(q, cache.pool.view(-1, D))

    def inputs(index):
        return rnd(index, 2, D, salt=1), rnd(index, 1, D, salt=2)

    return step, inputs


def factory_bad_page_boundary():
    return paged_case(PagedKV())


def factory_ok_page_table_device():
    return paged_case(PagedKVDevice())


# --------------------------------------------------------------- attention sinks and a window that fills up

class ShiftingWindow:
    SINKS, SIZE = 2, 12

    def __init__(self):
        self.k = torch.zeros(self.SIZE, D, device="cuda")
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")
        self.length = 0

    def push(self, k):
        if self.length == self.SIZE:  # expect: CG201 @window_shift
            self.k[self.SINKS:-1].copy_(self.k[self.SINKS + 1:].clone())
        else:
            self.length += 1  # expect: CG210 optional @window_shift
        self.k.index_copy_(0, self.pos.clamp(max=self.SIZE - 1), k)
        self.pos += 1


class RingWindow:
    SINKS, SIZE = 2, 12

    def __init__(self):
        self.k = torch.zeros(self.SIZE, D, device="cuda")
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")

    def push(self, k):
        wrapped = self.SINKS + (self.pos - self.SINKS) % (self.SIZE - self.SINKS)
        slot = torch.where(self.pos < self.SIZE, self.pos, wrapped)
        self.k.index_copy_(0, slot, k)
        self.pos += 1


def window_case(window):
    def step(q, k):
        window.push(k)
        return attend(q, window.k)

    def inputs(index):
        return rnd(index, 2, D, salt=3), rnd(index, 1, D, salt=4)

    return step, inputs


def factory_bad_window_shift():
    return window_case(ShiftingWindow())


def factory_ok_window_ring():
    return window_case(RingWindow())


# --------------------------------------------------------------- capacity doubles past a threshold

class DoublingCache:
    def __init__(self, capacity=8):
        self.k = torch.zeros(capacity, D, device="cuda")
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")
        self.n = 0

    def append(self, k):
        if self.n >= self.k.shape[0]:  # expect: CG201|CG205|CG208 @capacity_doubling
            self.k = torch.cat([self.k, torch.zeros_like(self.k)])  # expect: CG208 optional @capacity_doubling
        at = torch.arange(self.k.shape[0], device="cuda") == self.pos  # expect: CG208 optional @capacity_doubling
        self.k.copy_(torch.where(at[:, None], k, self.k))  # expect: CG205 optional @capacity_doubling
        self.pos += 1
        self.n += 1  # expect: CG210 optional @capacity_doubling
        return torch.arange(self.k.shape[0], device="cuda") < self.pos


class ReservedCache:
    """Reserves the maximum at once; the "capacity" that grows is a number for the metrics page."""

    def __init__(self, reserve=32):
        self.k = torch.zeros(reserve, D, device="cuda")
        self.pos = torch.zeros(1, dtype=torch.long, device="cuda")
        self.n = 0
        self.metrics = {"capacity": 8, "grown": 0}

    def append(self, k):
        if self.n >= self.metrics["capacity"]:
            self.metrics["capacity"] *= 2
            self.metrics["grown"] += 1
        at = torch.arange(self.k.shape[0], device="cuda") == self.pos
        self.k.copy_(torch.where(at[:, None], k, self.k))
        self.pos += 1
        self.n += 1
        return torch.arange(self.k.shape[0], device="cuda") < self.pos


def growth_case(cache):
    def step(q, k):
        mask = cache.append(k)
        return attend(q, cache.k, mask)

    def inputs(index):
        return rnd(index, 2, D, salt=5), rnd(index, 1, D, salt=6)

    return step, inputs


def factory_bad_capacity_doubling():
    return growth_case(DoublingCache())


def factory_ok_capacity_reserved():
    return growth_case(ReservedCache())


# --------------------------------------------------------------- memory of finished segments

SEG = 9


class SegmentMemory:
    def __init__(self):
        self.current = torch.zeros(1, D, device="cuda")
        self.segments = [torch.ones(1, D, device="cuda") * 0.1]
        self.filled = 0

    def add(self, h):
        self.current.mul_(0.7).add_(h)
        self.filled += 1  # expect: CG210 optional @segments_lengthen
        if self.filled == SEG:  # expect: CG201 @segments_lengthen
            self.segments.append(self.current.clone())
            self.current.zero_()
            self.filled = 0

    def read(self, q):
        memory = torch.cat(self.segments + [self.current])  # expect: CG208 optional @segments_lengthen
        return attend(q, memory)


class SegmentSlots:
    """The same memory with a slot for each segment and a device counter."""

    def __init__(self, slots=4):
        self.current = torch.zeros(1, D, device="cuda")
        self.mem = torch.zeros(slots, D, device="cuda")
        self.mem[0].fill_(0.1)
        self.ids = torch.arange(slots, device="cuda")
        self.count = torch.ones(1, dtype=torch.long, device="cuda")
        self.filled = torch.zeros(1, dtype=torch.long, device="cuda")

    def add(self, h):
        self.current.mul_(0.7).add_(h)
        self.filled += 1
        done = self.filled == SEG
        write = (self.ids == self.count) & done
        self.mem.copy_(torch.where(write[:, None], self.current, self.mem))
        self.current.mul_((~done).float())
        self.count += done
        self.filled.mul_((~done).long())

    def read(self, q):
        memory = torch.cat([self.mem, self.current])
        live = torch.cat([self.ids < self.count, torch.ones_like(self.count, dtype=torch.bool)])
        return attend(q, memory, live)


def segment_case(memory):
    def step(h, q):
        memory.add(h)
        return memory.read(q)

    def inputs(index):
        return rnd(index, 1, D, salt=7), rnd(index, 2, D, salt=8)

    return step, inputs


def factory_bad_segments_lengthen():
    return segment_case(SegmentMemory())


def factory_ok_segment_slots():
    return segment_case(SegmentSlots())


# --------------------------------------------------------------- LongRoPE: other factors past the original length

class LongRope:
    ORIGINAL = 14

    def __init__(self):
        half = D // 2
        self.inv = (10000.0 ** (-torch.arange(half) / half)).to("cuda")
        self.short = torch.ones(half, device="cuda")
        self.long = torch.linspace(1.0, 6.0, half, device="cuda")
        self.seq_len = 0
        self.pos = torch.zeros(1, device="cuda")

    def rotate(self, x, factors):
        angle = self.pos * self.inv / factors
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def host(self, x):
        self.seq_len += 1  # expect: CG210 optional @longrope_switch
        factors = self.long if self.seq_len > self.ORIGINAL else self.short  # expect: CG201 @longrope_switch
        out = self.rotate(x, factors)
        self.pos += 1
        return out

    def device(self, x):
        factors = torch.where(self.pos >= self.ORIGINAL, self.long, self.short)
        out = self.rotate(x, factors)
        self.pos += 1
        return out


def factory_bad_longrope_switch():
    rope = LongRope()

    def step(x):
        return rope.host(x)

    def inputs(index):
        return (rnd(index, 3, D, salt=9),)

    return step, inputs


def factory_ok_longrope_where():
    rope = LongRope()

    def step(x):
        return rope.device(x)

    def inputs(index):
        return (rnd(index, 3, D, salt=9),)

    return step, inputs
