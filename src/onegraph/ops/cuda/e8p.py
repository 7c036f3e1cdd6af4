"""E8P linear for few tokens: how `e8p.cu` is cut over the GPU, and which calls it takes.

Which kernel a call runs, and how it is cut, follows from its shape, dtype and device alone. What `e8p.cu` does not take
(float32, more than `MAX_TOKENS` tokens, dimensions that are no multiples of 64) runs on Triton's kernels; so does
everything where it cannot be built, after one warning.
"""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build, e8p_dense, e8p_few, e8p_many

SOURCE = Path(__file__).with_name("e8p.cu")
MAX_TOKENS = 16  # above, e8p_many.cu; 5 to 64 are e8p_few.cu's but for what it refuses
SLICE, ROWS, PARTS = 256, 128, 8  # as in e8p.cu; PARTS is row tiles of 16 in ROWS
GPC = 18  # SMs of a GPC, which a cluster must fit into (H200: clusters of 8 leave 4 SMs of 18 idle)
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on Hopper
SHARED_STRUCT = 1536  # bytes of `Shared` in e8p.cu
WARPS = {1: 20, 4: 20, 8: 16, 16: 16}  # of a block at most, by tokens in a pass
# What `Shape` of e8p.cu is made of up to 4 tokens.
KNOWN = "N", "K", "CLUSTER", "ACROSS", "PER_BLOCK", "BLOCKS", "NORMED", "SILU", "BIASED", "ADDED", "WIDE"
NO_MAPS = bytes(512)  # in place of the tensor maps where each lane copies codes itself
SLOT = {2: 1024, 3: 1536, 4: 2048}  # bytes of a row tile's codes, by bits
# Row tiles of codes that a warp has under way, by bits: the most that fit. More of them lose: activations come behind
# them (benchmarks/results/e8p-layer-h200.jsonl).
DEPTHS = {2: (4, 2, 1), 3: (2, 1), 4: (2, 1)}
GROUP = {2: 2, 3: 1, 4: 1}  # row tiles that a warp takes at a time, where its number of them allows it
ALIGNMENT = 16  # bytes, of every pointer


@dataclass(frozen=True, order=True)
class Plan:
    """How one shape is cut: each of `tiles` clusters of `cluster` blocks owns `blocks` times 128 rows. A block owns
    `per_block` slices of k, one for each of `across` warps at a time; `down` such rows of warps share the rows. Each
    warp keeps `ahead` row tiles of codes under way."""

    ahead: int
    tiles: int
    cluster: int
    blocks: int
    slices: int
    per_block: int
    across: int
    down: int

    @property
    def warps(self) -> int:
        return self.across * self.down

    @property
    def most_threads(self) -> int:
        """What the kernel is compiled for: 512 threads have 128 registers each, 640 have 96."""
        return 512 if self.warps <= 16 else 640

    def group(self, bits: int) -> int:
        """Row tiles that a warp takes at a time."""
        mine = self.blocks * PARTS // self.down
        return GROUP[bits] if self.ahead % GROUP[bits] == 0 and mine % GROUP[bits] == 0 else 1

    def form(self, bits: int) -> tuple[int, int, int, int]:
        """DEPTH, GROUP, THREADS and DOWN of e8p.cu."""
        return self.ahead, self.group(bits), self.most_threads, self.down

    def shared(self, bits: int, tokens: int) -> int:
        """Bytes of shared memory of a block that serves `tokens` at a time."""
        tables = 98304 if bits == 3 else 65536
        partial = self.across * tokens * (self.blocks * ROWS + (8 if tokens <= 4 else 4)) * 4
        received = (tokens * self.blocks + self.cluster) * ROWS * 4 if self.cluster > 1 else 0
        alone = self.down == 1 and self.per_block <= self.across
        exchange = 512 * self.across if tokens <= 4 and not alone else 0
        return tables + SHARED_STRUCT + partial + received + exchange + self.ring(bits)

    def ring(self, bits: int) -> int:
        """Bytes of codes that a block has under way."""
        return self.warps * self.ahead * SLOT[bits]

    def cost(self, bits: int, tokens: int, sms: int) -> float:
        """Estimated microseconds on an H200, up to what all cuts have in common."""
        at_once = sms if self.cluster == 1 else sms // GPC * (GPC // self.cluster)
        waves = -(-self.tiles // at_once)
        turns = -(-self.per_block // self.across)  # slices that a warp takes
        mine = turns * self.blocks * PARTS // self.down  # row tiles of a warp
        stages = 1 if bits == 2 else 1.8
        heavy = 1.0 if tokens <= 4 else 1.3 if tokens <= 8 else 1.9
        issue = self.per_block * self.blocks * PARTS * 0.016 * stages * heavy
        latency = mine * 0.16 * stages * heavy
        memory = self.per_block * self.blocks * PARTS * SLOT[bits] / self.ring(bits) * 0.6  # 0.6 us a ringful
        gather = turns * (0.3 * min(tokens, 4) if tokens <= 4 else 0.5)
        together = 0.4 + 0.25 * self.cluster if self.cluster > 1 else 0.0
        return waves * (max(issue, latency, memory) + gather + 2.0) + together + 0.1 * self.blocks


def cuts(n: int, k: int, bits: int, tokens: int, sms: int) -> list[Plan]:
    """Every cut that fits into shared memory."""
    slices, whole = -(-k // SLICE), -(-n // ROWS)
    limit = WARPS[_pass(tokens)]
    found = []
    for cluster in range(1, 9):
        per_block = -(-slices // cluster)
        if (cluster - 1) * per_block >= slices:
            continue  # a block would have nothing to do
        least = -(-per_block // limit)  # turns that a warp takes through slices
        for across in {-(-per_block // turns) for turns in (least, least + 1, 2 * least, 3 * least)}:
            for blocks in {1, -(-whole * cluster // sms)}:
                tiles = -(-whole // blocks)
                down = max(d for d in (1, 2, 4, 8) if d == 1 or (d * across <= limit and blocks * PARTS % d == 0))
                most = -(-per_block // across) * blocks * PARTS // down  # row tiles of a warp
                for ahead in (d for d in DEPTHS[bits] if d <= most):
                    cut = Plan(ahead, tiles, cluster, blocks, slices, per_block, across, down)
                    if cut.shared(bits, tokens) <= SHARED_LIMIT:
                        found.append(cut)
                        break
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, sms: int) -> Plan:
    """The cut that costs least."""
    return min(cuts(n, k, bits, tokens, sms), key=lambda cut: (cut.cost(bits, tokens, sms), cut))


def _block(dimension: int) -> int:
    """Of the Hadamard rotation of a dimension that 64 divides."""
    return 64 if dimension % 128 else 128


def _pass(tokens: int) -> int:
    """Tokens that one pass over the codes takes."""
    return 1 if tokens == 1 else 4 if tokens <= 4 else 8 if tokens <= 8 else 16


def takes(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the CUDA kernels compute this shape."""
    if tokens == 0 or n % 64 or k % 64 or dtype not in (torch.bfloat16, torch.float16):
        return False
    return tokens <= MAX_TOKENS or k <= e8p_many.MAX_K


@cache
def _kernels(
    bits: int, most: int, half: bool, form: tuple[int, int, int, int], copy: int, known: tuple[int, ...], device: int
) -> tuple[build.Kernel, ...]:
    """`form`: see `Plan.form`; `copy`: COPY of e8p.cu; `known`: `KNOWN` up to 4 tokens, above nothing."""
    defines = {"BITS": bits, "TOKENS": most, "HALF": int(half), "COPY": copy}
    defines |= dict(zip(("DEPTH", "GROUP", "THREADS", "DOWN"), form, strict=True))
    if known:
        defines |= dict(zip(KNOWN, known, strict=True))
    return build.load(SOURCE, defines, ("e8p_linear", "e8p_rotate"), device, SHARED_LIMIT)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    return build.usable(lambda: _kernels(2, 8, False, (DEPTHS[2][0], GROUP[2], 512, 1), 1, (), device))


def tables(codebook: Tensor) -> Tensor:
    """uint8 [98304]: the tables of `e8p_common.cuh` as they stand in shared memory, each word 32 times.

    `codebook` int8 [512, 8], on a CPU.
    """
    column = torch.arange(8, device="cpu")  # whatever torch.set_default_device says
    place = column % 4 * 8 + column // 4 * 4  # of a group's nibbles in a word

    def words(nibbles: Tensor) -> Tensor:
        return ((nibbles & 15) << place).sum(1)

    book = codebook.long()
    if (book[:256] % 2 == 0).any() or (book[:256].abs() > 11).any() or (book[256:].abs() > 4).any():
        raise ValueError("codebook is not the one of E8P; it must be formats.e8p.codebook()")
    signs = torch.arange(256, device="cpu")[:, None] >> column & 1
    shift = signs.sum(1, keepdim=True) & 1
    signs[:, :1] ^= shift
    e8p = torch.stack([words((book[:256] >> 1) ^ 8), words(signs * 0xE ^ shift)], 1)
    runs = torch.cat([e8p.flatten(), words(book[256:] ^ 8)]).to(torch.uint32)
    return runs[:, None].expand(-1, 32).contiguous().view(torch.uint8).flatten()


_TABLES: dict[int, int] = {}  # address of the tables, by GPU


def _have_tables(codebook: Tensor) -> None:
    """Sees to the tables on the codebook's GPU, made of the first codebook that it has: there is one. Not for the first
    time inside a capture."""
    device = codebook.device.index
    if device not in _TABLES:
        _TABLES[device] = build.resident(tables(build.host_copy(codebook)), device)


@cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def linear(
    x: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    add: Tensor | None = None,
    eps: float | None = None,
    silu: bool = False,
    wide: bool = False,
) -> Tensor:
    """See `onegraph.ops.e8p.e8p_linear`."""
    n, k = codes.shape[0], codes.shape[1] * 8
    tokens = x.numel() // (2 * k if silu else k)
    if not x.is_cuda or not takes(tokens, n, k, x.dtype) or not available(x.device.index):
        from onegraph.ops.triton.e8p import linear as fallback  # kernels are compiled or interpreted as of their import

        return fallback(x, codes, residual, codebook, in_scale, out_scale, bias, bits, add, eps, silu, wide)
    x = x.contiguous()
    if bias is not None:
        bias = bias.float()
    _have_tables(codebook)  # now, since 5 tokens and more, which may be all that runs before a capture, do without
    inputs = [_aligned(t) for t in (x, codes, residual, codebook, in_scale, out_scale, bias, add)]
    out = torch.empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype, device=x.device)
    options = -1.0 if eps is None else eps, silu, wide
    if torch.cuda.current_device() == x.device.index:
        _launch(inputs, out, bits, tokens, n, k, x.dtype == torch.float16, options)
    else:
        with torch.cuda.device(x.device):  # the driver launches in the current context
            _launch(inputs, out, bits, tokens, n, k, x.dtype == torch.float16, options)
    return out


def _aligned(tensor: Tensor | None) -> Tensor | None:
    return tensor.clone() if tensor is not None and tensor.data_ptr() % ALIGNMENT else tensor


def _maps(codes: int, residual: int, bits: int, n: int, k: int, cut: Plan, copy: int) -> bytes:
    """The tensor maps of e8p.cu, codes and residual codes at these addresses; zeros for those it does not use."""
    group, width = cut.group(bits), 8 if bits == 3 else 4  # columns that a byte of the residual stands for
    maps = build.tensor_map(codes, n, k // 4, 16 * group, SLICE // 4)
    maps += maps if bits == 2 else build.tensor_map(residual, n, k // width, 16 * group, SLICE // width)
    if copy == 2:
        rows = 16 * group * cut.down, cut.across
        maps += build.sliced_tensor_map(codes, n, k // 4, (SLICE // 4, *rows), swizzle=False)
        if bits > 2:
            maps += build.sliced_tensor_map(residual, n, k // width, (SLICE // width, *rows), swizzle=False)
    return maps + NO_MAPS[len(maps) :]


def _launch(
    inputs: list[Tensor | None], out: Tensor, bits: int, tokens: int, n: int, k: int, half: bool,
    options: tuple[float, bool, bool],
) -> None:  # fmt: skip
    device = out.device.index
    norm = (_block(n) * _block(k)) ** -0.5
    if inputs[2] is None:
        inputs[2] = inputs[1]
    if tokens >= e8p_dense.LEAST_TOKENS:
        e8p_dense.linear(inputs, out, bits, _block(n), norm, options)
        return
    if e8p_few.takes(tokens, bits, k):
        e8p_few.launch(inputs, out, bits, tokens, n, k, half, norm, options)
        return
    if tokens > MAX_TOKENS:
        e8p_many.launch(inputs, out, bits, tokens, n, k, half, norm, options, _sms(device))
        return
    chunk = _pass(tokens)
    chunks = -(-tokens // chunk)
    cut = plan(n, k, bits, min(tokens, chunk), _sms(device))
    copy = 2 if k % SLICE == 0 else int(bits != 3 or k % 128 == 0)  # boxes begin at multiples of 16 bytes
    eps, silu, wide = options
    around = tuple(map(int, (eps >= 0, silu, inputs[6] is not None, inputs[7] is not None, wide)))
    known = (n, k, cut.cluster, cut.across, cut.per_block, cut.blocks, *around) if chunk <= 4 else ()
    main, rotate = _kernels(bits, chunk, half, cut.form(bits), copy, known, device)
    fragments = scales = None
    if chunk > 4:
        fragments = torch.empty(chunks * cut.slices * chunk * 512, dtype=torch.uint8, device=out.device)
        scales = torch.empty(chunks * cut.slices * chunk * 4, dtype=torch.float32, device=out.device)
    pointers = [0 if t is None else t.data_ptr() for t in (*inputs, out, fragments, scales)]
    pointers[3] = _TABLES[device]
    arguments = _maps(pointers[1], pointers[2], bits, n, k, cut, copy) if copy else NO_MAPS
    arguments += struct.pack("11Q3f28x", *pointers, norm, eps, 1 / k)
    if chunk == 4:
        arguments = struct.pack("i60x", tokens) + arguments
    elif chunk > 4:
        warps = cut.across, -(-256 // cut.across), cut.slices, cut.per_block, cut.blocks, cut.blocks * PARTS // cut.down
        divided = cut.cluster, -(-65536 // cut.cluster), -(-65536 // cut.blocks)
        arguments = struct.pack("17i60x", tokens, n, k, *warps, *around, *divided) + arguments
    stream = torch._C._cuda_getCurrentRawStream(device)
    if chunk > 4:
        rotate.launch((cut.slices, chunk // 8, chunks), 256, 0, 1, stream, arguments)
    shared = cut.shared(bits, min(tokens, chunk))
    main.launch((cut.tiles * cut.cluster, chunks, 1), 32 * cut.warps, shared, cut.cluster, stream, arguments)
