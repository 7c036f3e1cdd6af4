"""E8P linear for 1 to 8 tokens: how `e8p_decode.cu` is cut over the GPU."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, SLICE, SLOT, TABLES, Linear
from onegraph.ops.cuda.exchange import INTS, POINTERS, peer_arguments
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.tensor_map import sliced_tensor_map, tensor_map

MAX_TOKENS, FEW = 8, 4
MOST_ROWS = 16384  # of more than FEW tokens: of more rows e8p_batch.cu is quicker
CLASSES = 1, 2, FEW, MAX_TOKENS  # tokens that a kernel is compiled for
PARTS = ROWS // 16  # row tiles of 16 in ROWS
SHARED_STRUCT = 1792  # bytes of `Shared` in e8p_decode.cu
WARPS = 21  # of a block at most: 5376 columns are 21 slices
# What `Shape` of e8p_decode.cu is made of.
SHAPE = "N", "K", "CLUSTER", "ACROSS", "PER_BLOCK", "BLOCKS", "NORMED", "SILU", "BIASED", "ADDED", "WIDE", "WORLD"
NO_MAP = bytes(128)  # in place of a tensor map that is not used
TURNED, WEIGHTS = 544, 1024  # bytes of a token's slice and of in_scale's, in e8p_decode_turn.cuh
# Row tiles of codes that a warp has under way, by bits: the most that fit. More of them lose: activations come behind
# them (docs/log.md). Of more than 4 tokens two at most.
DEPTHS = {2: (4, 2, 1), 3: (2, 1), 4: (2, 1)}
# Part of a GPU's SMs that clusters may take. At 2 bits on an H200 17408 -> 5120 took 18.4 us by 40 clusters of three
# blocks, which fit at once, and 10.0 by 20 of five; 6144 -> 5120 7.7 by 40 of three and 5.3 by 40 of two (docs/log.md).
MOST_SMS = 0.85
# Row tiles that a warp takes at a time, where its number of them allows it, by bits; one of more than 4 tokens.
GROUP = {2: 2, 3: 1, 4: 1}


def compiled_for(tokens: int) -> int:
    """Of `CLASSES` the one that runs so many."""
    return min(each for each in CLASSES if each >= tokens)


MAPS = "codes_map", "residual_map", "first_codes_map", "first_residual_map"
ARGUMENTS = build.Arguments(
    maps=MAPS,
    pointers=("x", "codes", "residual", "tables", "in_scale", "out_scale", "bias", "add", "y", *POINTERS),
    floats=("norm", "eps", "inverse_k"),
    ints=("tokens", *INTS),
)


@dataclass(frozen=True, order=True)
class DecodeTiling:
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
        """What the kernel is compiled for: 512 threads have 128 registers each, 640 have 96, 672 have 80."""
        return next(32 * warps for warps in (16, 20, WARPS) if warps >= self.warps)

    def group(self, bits: int, tokens: int) -> int:
        """Row tiles that a warp takes at a time."""
        mine = self.blocks * PARTS // self.down
        if tokens > FEW:
            return 1
        return GROUP[bits] if self.ahead % GROUP[bits] == 0 and mine % GROUP[bits] == 0 else 1

    def shared(self, bits: int, tokens: int) -> int:
        """Bytes of shared memory of a block."""
        kept = compiled_for(tokens)
        partial = self.across * kept * (self.blocks * ROWS + 8) * 4
        received = (tokens * self.blocks + self.cluster) * ROWS * 4 if self.cluster > 1 else 0
        in_place = self.per_block <= self.across and (self.down == 1 or kept > 2)
        exchange = 0 if in_place else self.across * (512 if kept <= 2 else TURNED * kept)
        if kept > 2 and self.down > 1 and not (in_place and self.blocks > 1):
            exchange += self.across * WEIGHTS
        return TABLES[bits] + SHARED_STRUCT + partial + received + exchange + self.ring(bits)

    def ring(self, bits: int) -> int:
        """Bytes of codes that a block has under way."""
        return self.warps * self.ahead * SLOT[bits]

    def cost(self, bits: int, tokens: int, device: build.Device) -> float:
        """Estimated microseconds on an H200, up to what all plans have in common."""
        waves = -(-self.tiles // (device.sms if self.cluster == 1 else device.at_once(self.cluster)))
        if self.cluster > 1 and self.tiles * self.cluster > MOST_SMS * device.sms:
            waves *= 2
        turns = -(-self.per_block // self.across)  # slices that a warp takes
        mine = turns * self.blocks * PARTS // self.down  # row tiles of a warp
        work = self.per_block * self.blocks * PARTS  # ... of a block
        stages = 1 if bits == 2 else 1.8
        if tokens > 2:  # fitted to 770 timed cuts of four and eight tokens (docs/log.md)
            fours = compiled_for(tokens) // FEW
            rotation = turns * (1.5 * fours if self.down == 1 else 1.5) + self.per_block * 0.13 * fours
            memory = work * SLOT[bits] * (0.11 / self.ring(bits) + 2.4e-5)
            together = 0.5 + 0.1 * self.cluster if self.cluster > 1 else 0.0
            return waves * (0.9 + work * 0.0186 * stages + rotation + memory) + together + 0.2 * fours * self.blocks
        issue = work * 0.016 * stages
        latency = mine * 0.16 * stages
        memory = work * SLOT[bits] / self.ring(bits) * 0.6  # 0.6 us a ringful
        gather = turns * 0.3 * tokens
        together = 0.4 + 0.25 * self.cluster if self.cluster > 1 else 0.0
        return waves * (max(issue, latency, memory) + gather + 2.0) + together + 0.1 * self.blocks


def plans(n: int, k: int, bits: int, tokens: int, device: build.Device) -> list[DecodeTiling]:
    """Every plan that fits into shared memory."""
    slices, whole = -(-k // SLICE), -(-n // ROWS)
    found = []
    for cluster in range(1, 9):
        per_block = -(-slices // cluster)
        if (cluster - 1) * per_block >= slices:
            continue  # a block would have nothing to do
        least = -(-per_block // WARPS)  # turns that a warp takes through slices
        for across in {-(-per_block // turns) for turns in (least, least + 1, 2 * least, 3 * least)}:
            for blocks in {1, -(-whole * cluster // device.sms)}:
                tiles = -(-whole // blocks)
                down = max(d for d in (1, 2, 4, 8) if d == 1 or (d * across <= WARPS and blocks * PARTS % d == 0))
                most = -(-per_block // across) * blocks * PARTS // down  # row tiles of a warp
                for ahead in (d for d in DEPTHS[bits] if d <= most and (tokens <= FEW or d <= 2)):
                    plan = DecodeTiling(ahead, tiles, cluster, blocks, slices, per_block, across, down)
                    if plan.shared(bits, tokens) <= device.shared:
                        found.append(plan)
                        break
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, device: build.Device) -> DecodeTiling:
    """The plan that costs least."""
    return min(plans(n, k, bits, tokens, device), key=lambda plan: (plan.cost(bits, tokens, device), plan))


def copies(k: int, bits: int) -> int:
    """COPY of e8p_decode.cu: boxes begin at multiples of 16 bytes."""
    return 2 if k % SLICE == 0 else int(bits != 3 or k % 128 == 0)


def defines(
    plan: DecodeTiling, n: int, k: int, bits: int, tokens: int, half: bool, around: tuple[int, ...]
) -> dict[str, int]:
    """What e8p_decode.cu is compiled with. `around`: normed, silu, biased, added, wide, ranks."""
    group, copy = plan.group(bits, tokens), copies(k, bits)
    made = {"BITS": bits, "TOKENS": compiled_for(tokens), "HALF": int(half), "COPY": copy}
    made |= {"DEPTH": plan.ahead, "GROUP": group, "THREADS": plan.most_threads, "DOWN": plan.down}
    shape = (n, k, plan.cluster, plan.across, plan.per_block, plan.blocks, *map(int, around))
    return made | dict(zip(SHAPE, shape, strict=True))


KERNEL = build.Source(
    "e8p_decode",
    ops=("e8p_linear",),
    functions=("e8p_decode",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    example=defines(
        DecodeTiling(4, 32, 3, 1, 16, 6, 6, 2), 4096, 4096, 2, 4, False, (False, False, False, True, False, 2)
    ),
    otherwise="another kernel runs 1 to 8 tokens of an E8P linear",
)


def supports_shape(tokens: int, n: int) -> bool:
    """Whether this kernel is the quickest, of the shapes that `e8p.supports_shape` allows."""
    return tokens <= FEW or (tokens <= MAX_TOKENS and n <= MOST_ROWS)


def run(call: Linear) -> None:
    """`call`, of up to 8 tokens."""
    n, k, bits, tokens, group = call.n, call.k, call.bits, call.tokens, call.group
    chosen = plan(n, k, bits, tokens, build.device(call.out.device.index))
    around = *call.around, 1 if group is None else len(group[0])
    codes, residual = (each.data_ptr() for each in call.stages.values())
    maps = _maps(codes, residual, bits, n, k, chosen, chosen.group(bits, tokens))
    peers = dict.fromkeys((*POINTERS, *INTS), 0) if group is None else peer_arguments(*group)
    grid, shared = (chosen.tiles * chosen.cluster, 1, 1), chosen.shared(bits, tokens)
    launch(
        KERNEL, defines(chosen, n, k, bits, tokens, call.half, around),
        Launch(grid, 32 * chosen.warps, shared, chosen.cluster),
        **dict(zip(MAPS, maps, strict=True)), **call.arguments, **call.stages, **peers,
        tables=resident_tables(call.codebook), inverse_k=1 / k,
    )  # fmt: skip


@lru_cache(maxsize=1 << 16)
def _maps(codes: int, residual: int, bits: int, n: int, k: int, plan: DecodeTiling, group: int) -> tuple[bytes, ...]:
    """The tensor maps of e8p_decode.cu, codes and residual codes at these addresses."""
    copy = copies(k, bits)
    if not copy:
        return (NO_MAP,) * 4
    width = 8 if bits == 3 else 4  # columns that a byte of the residual stands for
    maps = [tensor_map(codes, n, k // 4, 16 * group, SLICE // 4)]
    maps.append(maps[0] if bits == 2 else tensor_map(residual, n, k // width, 16 * group, SLICE // width))
    if copy == 2:
        rows = 16 * group * plan.down, plan.across
        maps.append(sliced_tensor_map(codes, n, k // 4, (SLICE // 4, *rows), swizzle=False))
        if bits > 2:
            maps.append(sliced_tensor_map(residual, n, k // width, (SLICE // width, *rows), swizzle=False))
    return (*maps, *[NO_MAP] * (4 - len(maps)))


def tables(codebook: Tensor) -> Tensor:
    """uint8 [98304]: the tables of `e8p_common.cuh` unchanged in shared memory, each word 32 times.

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


def resident_tables(codebook: Tensor) -> int:
    """Address of the tables on the codebook's GPU, made of the first codebook that it has: there is one. Not for the
    first time inside a capture."""
    device = codebook.device.index
    if device not in _TABLES:
        _TABLES[device] = build.resident(tables(build.host_copy(codebook)), device)
    return _TABLES[device]
