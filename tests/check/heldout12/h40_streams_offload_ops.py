"""Side streams, CPU offload, staging copies, generators, custom ops and pools."""
import weakref
from collections import deque

import torch
import torch.nn.functional as F

STEPS = 8

HID = 32


def _rand(shape, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to("cuda")


def _pinned_rand(shape, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).pin_memory()


# ---------------------------------------------------------------- a side stream for KV write-back
class HiCache:
    """A second tier of the KV cache: new keys are written back on a stream of their own."""

    def __init__(self, slots):
        self.device_keys = torch.zeros(slots, HID, device="cuda")
        self.backup = torch.zeros(slots, HID, device="cuda")
        self.stream = torch.cuda.Stream()

    def write_back(self):
        self.stream.wait_stream(torch.cuda.current_stream())  # expect: CG305 @hicache_write_back
        with torch.cuda.stream(self.stream):  # expect: CG305 optional @hicache_write_back
            self.backup.copy_(self.device_keys)  # expect: CG305 optional @hicache_write_back


def factory_bad_hicache_write_back():
    cache = HiCache(16)
    wk = _rand((HID, HID), 1, 0.3)
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    lane = torch.arange(2, device="cuda")

    def step(x):
        k = x @ wk
        cache.device_keys.index_copy_(0, (at + lane) % 16, k)
        at.add_(2)
        out = (x @ cache.device_keys.mT).softmax(-1) @ cache.device_keys
        cache.write_back()
        return out

    def inputs(index):
        return (_rand((2, HID), 20 + index),)

    return step, inputs


class SharedExpertOverlap:
    """The shared expert runs beside the routed ones; both are joined before the sum."""

    def __init__(self, experts, seed):
        self.gate = _rand((HID, experts), seed, 0.5)
        self.routed = _rand((experts, HID, HID), seed + 1, 0.2)
        self.shared = _rand((HID, HID), seed + 2, 0.2)
        self.aux = torch.cuda.Stream()
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()
        self.shared_out = torch.zeros(4, HID, device="cuda")

    def __call__(self, x):
        main = torch.cuda.current_stream()
        self.forked.record(main)
        with torch.cuda.stream(self.aux):
            self.aux.wait_event(self.forked)
            torch.mm(x, self.shared, out=self.shared_out)
            self.shared_out.relu_()
            self.joined.record(self.aux)
        weight, ids = (x @ self.gate).softmax(-1).topk(2)
        y = torch.einsum("th,tkhd->tkd", x, self.routed[ids])
        y = (y * weight[..., None]).sum(1)
        main.wait_event(self.joined)
        return y + self.shared_out


def factory_ok_shared_expert_overlap():
    layers = [SharedExpertOverlap(4, 3), SharedExpertOverlap(4, 13)]
    ema = torch.zeros(HID, device="cuda")

    def step(x):
        for layer in layers:
            x = x + layer(x)
        ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x, ema.clone()

    def inputs(index):
        return (_rand((4, HID), 20 + index),)

    return step, inputs


# ---------------------------------------------------------------- offloaded weights
class Offloader:
    """Weights live in pinned host memory; two device buffers take turns."""

    def __init__(self, layers, seed):
        self.host = [_pinned_rand((HID, HID), seed + i, 0.2) for i in range(layers)]
        self.dev = [torch.zeros(HID, HID, device="cuda") for _ in range(2)]
        self.copy_stream = torch.cuda.Stream()
        self.ready = [torch.cuda.Event() for _ in range(layers)]
        self.done = [torch.cuda.Event() for _ in range(2)]


class CyclicOffloader(Offloader):
    """While the last layer computes, the first one of the next step is already on its way."""

    def __init__(self, layers, seed):
        super().__init__(layers, seed)
        self.prefetch(0)

    def prefetch(self, i):
        i %= len(self.host)
        self.copy_stream.wait_stream(torch.cuda.current_stream())  # expect: CG305 optional @offload_prefetch_next_step
        with torch.cuda.stream(self.copy_stream):
            self.dev[i % 2].copy_(self.host[i], non_blocking=True)
            self.ready[i].record(self.copy_stream)

    def run(self, x):
        for i in range(len(self.host)):
            torch.cuda.current_stream().wait_event(self.ready[i])  # expect: CG305 @offload_prefetch_next_step
            self.prefetch(i + 1)
            x = torch.tanh(x @ self.dev[i % 2]) + x
        return x


class ScopedOffloader(Offloader):
    """All prefetches of a step are forked from the step's stream and joined to it again."""

    def run(self, x):
        main, copies = torch.cuda.current_stream(), self.copy_stream
        copies.wait_stream(main)
        for i, host in enumerate(self.host):
            with torch.cuda.stream(copies):
                if i >= 2:
                    copies.wait_event(self.done[i % 2])
                self.dev[i % 2].copy_(host, non_blocking=True)
                self.ready[i].record(copies)
            main.wait_event(self.ready[i])
            x = torch.tanh(x @ self.dev[i % 2]) + x
            self.done[i % 2].record(main)
        main.wait_stream(copies)
        return x


def factory_bad_offload_prefetch_next_step():
    off = CyclicOffloader(4, 31)

    def step(x):
        return off.run(x)

    def inputs(index):
        return (_rand((3, HID), 50 + index),)

    return step, inputs


def factory_ok_offload_prefetch_scoped():
    off = ScopedOffloader(5, 31)

    def step(x):
        return off.run(x)

    def inputs(index):
        return (_rand((3, HID), 50 + index),)

    return step, inputs


# ---------------------------------------------------------------- staging copies of host positions
class PositionStager:
    """One pinned buffer; it is filled again only after its last copy has run."""

    def __init__(self, starts):
        self.lens = list(starts)
        self.host = torch.zeros(len(starts), dtype=torch.int64).pin_memory()
        self.dev = torch.zeros(len(starts), dtype=torch.int64, device="cuda")
        self.copied = torch.cuda.Event()

    def advance(self):
        self.copied.synchronize()  # expect: CG106 @positions_staging_event
        for i, n in enumerate(self.lens):
            self.host[i] = n
            self.lens[i] = n + 1
        self.dev.copy_(self.host, non_blocking=True)  # expect: CG204 optional @positions_staging_event
        self.copied.record()
        return self.dev


def _rope(x, angle):
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def factory_bad_positions_staging_event():
    stager = PositionStager((3, 0, 7))
    freq = torch.exp(-torch.arange(HID // 2, device="cuda") / 4.0)
    w = _rand((HID, HID), 41, 0.3)

    def step(x):
        pos = stager.advance()
        return _rope(x @ w, pos[:, None] * freq), pos.clone()

    def inputs(index):
        return (_rand((3, HID), 70 + index),)

    return step, inputs


# ---------------------------------------------------------------- random numbers
class SeededRequests:
    """Requests with a seed of their own draw from their own generator."""

    def __init__(self, batch, seeds):
        self.noise = torch.empty(batch, 64, device="cuda")
        self.generators = {}
        for row, seed in seeds.items():
            gen = torch.Generator(device="cuda")
            gen.manual_seed(seed)
            self.generators[row] = gen

    def sample(self, logits):
        q = self.noise
        if len(self.generators) != q.shape[0]:
            q.exponential_()
        for row, gen in self.generators.items():
            q[row].exponential_(generator=gen)  # expect: CG301 @per_request_generators
        return (logits.softmax(-1) / q).argmax(-1)


def factory_bad_per_request_generators():
    torch.manual_seed(5)
    head = _rand((HID, 64), 51, 0.3)
    sampler = SeededRequests(3, {1: 77})

    def step(hidden):
        return sampler.sample(hidden @ head)

    def inputs(index):
        return (_rand((3, HID), 90 + index),)

    return step, inputs


class PooledNoise:
    """One draw of the default generator per step; seeded rows take theirs from a fixed table."""

    def __init__(self, batch, seeded_row, rounds=16):
        self.noise = torch.empty(batch, 64, device="cuda")
        g = torch.Generator().manual_seed(77)
        self.table = torch.empty(rounds, 64).exponential_(generator=g).to("cuda")
        self.round = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.seeded_row = seeded_row

    def sample(self, logits):
        self.noise.exponential_()
        self.noise[self.seeded_row].copy_(self.table.index_select(0, self.round)[0])
        self.round.add_(1).remainder_(self.table.shape[0])
        return (logits.softmax(-1) / self.noise).argmax(-1)


def factory_ok_default_generator_and_table():
    torch.manual_seed(5)
    head = _rand((HID, 64), 51, 0.3)
    sampler = PooledNoise(3, 1)

    def step(hidden):
        return sampler.sample(hidden @ head), sampler.noise.sum(-1)

    def inputs(index):
        return (_rand((3, HID), 90 + index),)

    return step, inputs


# ---------------------------------------------------------------- custom ops
@torch.library.custom_op("h40loop::align_blocks", mutates_args=())
def align_blocks(ids: torch.Tensor, experts: int, block: int) -> torch.Tensor:
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    blocks = (counts + block - 1) // block
    total = int(blocks.sum())  # expect: CG101 @align_blocks_op
    ends = blocks.cumsum(0)
    rank = torch.arange(total, device=ids.device)
    return torch.searchsorted(ends, rank, right=True)


@torch.library.custom_op("h40loop::align_blocks_out", mutates_args=("out",))
def align_blocks_out(ids: torch.Tensor, experts: int, block: int, out: torch.Tensor) -> None:
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    ends = ((counts + block - 1) // block).cumsum(0)
    rank = torch.arange(out.shape[0], device=ids.device)
    out.copy_(torch.searchsorted(ends, rank, right=True))


def factory_bad_align_blocks_op():
    gate = _rand((HID, 4), 61, 0.6)
    scale = torch.linspace(0.5, 2.0, 4, device="cuda")

    def step(x):
        ids = (x @ gate).argmax(-1)
        owner = align_blocks(ids, 4, 2)
        return x * scale[ids, None], scale[owner].sum()

    def inputs(index):
        return (_rand((8, HID), 110 + index),)

    return step, inputs


def factory_ok_align_blocks_out_op():
    gate = _rand((HID, 4), 61, 0.6)
    scale = torch.cat([torch.linspace(0.5, 2.0, 4, device="cuda"), torch.zeros(1, device="cuda")])
    owner = torch.zeros(4 + 8 // 2, dtype=torch.int64, device="cuda")
    seen = torch.zeros(5, device="cuda")

    def step(x):
        ids = (x @ gate).argmax(-1)
        align_blocks_out(ids, 4, 2, owner)
        seen.index_add_(0, owner, torch.ones_like(scale[owner]))
        return x * scale[ids, None], scale[owner].sum(), seen.clone()

    def inputs(index):
        return (_rand((8, HID), 110 + index),)

    return step, inputs


# ---------------------------------------------------------------- queues and pools
class EmbeddingFeed:
    """Image embeddings encoded ahead, one per coming chunk; each is dropped after its use."""

    def __init__(self, chunks, seed):
        self.queue = deque(_rand((4, HID), seed + i) for i in range(chunks))


def factory_bad_encoder_output_queue():
    feed = EmbeddingFeed(16, 300)
    w = _rand((HID, HID), 71, 0.3)
    memory = torch.zeros(4, HID, device="cuda")

    def step(x, is_image):
        emb = feed.queue.popleft()  # expect: CG206|CG205|CG204|CG201
        h = torch.where(is_image[:, None], emb, x)
        memory.mul_(0.5).add_(torch.tanh(h @ w))
        return h, memory.clone()

    def inputs(index):
        mask = torch.tensor([True, index % 2 == 0, False, True], device="cuda")
        return _rand((4, HID), 130 + index), mask

    return step, inputs


class RopeTables:
    """Tables shared between layers through weak references; the layers own them."""

    _live = weakref.WeakValueDictionary()

    @classmethod
    def get(cls, theta, length):
        table = cls._live.get((theta, length))
        if table is None:
            inv = theta ** (-torch.arange(HID // 2, device="cuda") / (HID // 2))
            table = torch.arange(length, device="cuda")[:, None] * inv
            cls._live[(theta, length)] = table
        return table


class RopeLayer:
    def __init__(self, theta, seed):
        self.theta = theta
        self.w = _rand((HID, HID), seed, 0.3)
        self.owned = RopeTables.get(theta, 64)

    def __call__(self, x, pos):
        return _rope(x @ self.w, RopeTables.get(self.theta, 64)[pos])


def factory_ok_weak_rope_tables():
    layers = [RopeLayer(100.0, 81), RopeLayer(100.0, 82), RopeLayer(500.0, 83)]
    pos = torch.tensor([0, 5, 9], device="cuda")

    def step(x):
        for layer in layers:
            x = x + layer(x, pos)
        pos.add_(1)
        return x, pos.clone()

    def inputs(index):
        return (_rand((3, HID), 150 + index, 0.5),)

    return step, inputs
