"""Routed experts in E8P for 1 to 64 tokens on a GPU: how `e8p_experts.cu` is cut, and which launches a call takes.

    one token                    gate-up, down: two launches, whose clusters hold all that is added up, where a token
                                 has more than `CLUSTER` experts several a block; and combine, where the portable form
                                 runs, which has no clusters
    2 to `FRESH` tokens          gate-up, down, combine
    more                         prepare, gate-up, down, combine
    more, F no multiple of 128   prepare, gate-up, prepare (SwiGLU), down, combine; of fewer down computes SwiGLU

Triton's kernels take the rest: float32, more tokens, dimensions that are no multiples of 64, more than `MAX_PAIRS`
pairs of a token and an expert or `MAX_EXPERTS` experts, and all for which nothing here can be built.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.ops.calls import E8PExperts
from onegraph.ops.cuda import build, e8p_decode
from onegraph.ops.cuda.e8p_common import ROWS, SLICE, SLOT, TABLES, block
from onegraph.ops.cuda.launcher import Launch, aligned, launch

PLAIN, GATED, SUMMED = 0, 1, 2  # MODE
PREPARED, FROM_X, FROM_GATED, FROM_BOTH = 0, 1, 2, 3  # SOURCE
MAX_TOKENS, MAX_PAIRS, MAX_EXPERTS = 64, 1024, 528  # 512 and a shared one
CHUNKS = 9344  # bytes of `Chunks` of e8p_experts.cu, rounded up
BARRIERS = 128
WARPS, ACROSS = 16, 8  # of a block at most; side by side in k
CLUSTER = 8  # blocks at most
EACH = 2  # experts of a block at most, where one token's are added up
DEPTHS = {2: (4, 3, 2), 3: (3, 2), 4: (3, 2)}  # row tiles of codes that a warp has under way, by bits: what fits first
# The same of the portable form, which has them in registers; and warps of a block at most, by groups of tokens.
PLAIN_DEPTHS, PLAIN_WARPS = {2: (4, 2, 1), 3: (2, 1), 4: (2, 1)}, {1: 16, 2: 8}
PLAIN_TABLES = {2: TABLES[2], 3: 65536 + 16384, 4: TABLES[4]}
FRESH = 4  # tokens up to which every block rotates them for itself
CROWDED = 2  # pairs of an expert on average, above which chunks are of 8 in place of 4

ARGUMENTS = build.Arguments(
    pointers=(
        "x", "bytes", "scales", "experts", "weights", "codes", "residual", "tables", "in_scale", "out_scale", "bias",
        "next_scale", "add", "y",
    ),
    ints=("tokens", "top_k", "matrices"),
    floats=("norm", "limit", "alpha", "shift"),
)  # fmt: skip


# By launch.
VARYING = "x", "bytes", "scales", "codes", "residual", "in_scale", "out_scale", "bias", "next_scale", "add", "y"


@dataclass(frozen=True, order=True)
class ExpertTiling:
    """How one matrix is cut, by the names of e8p_experts.cu, which tells what they are; `silu`, `one` and `early` are
    flags."""

    mode: int
    one: bool
    source: int
    silu: bool
    groups: int
    blocks: int
    parts: int
    slots: int
    each: int
    per_sm: int
    early: bool
    across: int
    down: int
    depth: int
    n: int
    k: int

    @property
    def cluster(self) -> int:
        return self.parts * self.slots

    @property
    def warps(self) -> int:
        return self.across * self.down

    @property
    def slices(self) -> int:
        """Of k, of a part."""
        return -(-_slices(self.k) // self.parts)

    @property
    def passes(self) -> int:
        """Slices that a warp takes of an item, one after the other."""
        return -(-self.slices // self.across)

    @property
    def turns(self) -> int:
        """Row tiles that a warp takes of an item."""
        return self.passes * (self.blocks * ROWS // 16 // self.down)

    @property
    def tiles(self) -> int:
        return self.n // 2 // ROWS if self.mode == GATED else -(-self.n // (self.blocks * ROWS))

    def shared(self, bits: int, portable: bool = False) -> int:
        """Bytes of shared memory of a block."""
        ring = 0 if portable else self.warps * self.depth * SLOT[bits]
        sums = self.across * (1 if self.one else 4 * self.groups) * (self.blocks * ROWS + 8) * 4
        sent = self.cluster * (1 if self.mode == SUMMED else self.blocks) * ROWS * 4 if self.cluster > 1 else 0
        exchange = 0 if self.source == PREPARED else self.warps * 512
        tables = PLAIN_TABLES[bits] if portable else TABLES[bits]
        return tables + BARRIERS + (0 if self.one else CHUNKS) + ring + sums + sent + exchange

    def fits(self, bits: int, device: build.Device, portable: bool = False) -> bool:
        shared = self.shared(bits, portable)
        if portable and shared > build.PORTABLE_SHARED:
            return False
        return shared <= device.shared and self.per_sm * (shared + build.RESERVED) <= device.sm_shared

    def cost(self, bits: int, device: build.Device, experts: int) -> float:
        """Estimated microseconds of one token on an H200, up to what all cuts have in common."""
        clusters = self.tiles * (1 if self.mode == SUMMED else experts)
        at_once = device.sms if self.cluster == 1 else device.at_once(self.cluster, self.per_sm)
        waves = -(-clusters // max(1, at_once))
        issue = self.each * self.slices * self.blocks * ROWS / 16 * 0.02
        latency = self.each * self.turns * 0.16
        return waves * (max(issue, latency) * (1 if bits == 2 else 1.8) + 1.5) + 0.1 * self.cluster

    def defines(self, bits: int, half: bool) -> dict[str, int]:
        return {"BITS": bits, "HALF": int(half)} | {name.upper(): int(value) for name, value in asdict(self).items()}


def _slices(k: int) -> int:
    return -(-k // SLICE)


def _warps(slices: int, row_tiles: int, most: int, warps: int) -> tuple[int, int]:
    """Warps side by side in k, `most` of them, and in rows, of `warps` at most: what makes each warp's way shortest.
    Activations of a slice take a warp about as long as a row tile of it."""
    found = []
    for turns in range(1, slices + 1):
        across = -(-slices // turns)
        if across <= most:
            down = max(d for d in (1, 2, 4, 8, 16) if d <= min(warps // across, row_tiles))
            found.append((turns * (row_tiles // down + 1), turns, across, down))
    return min(found)[2:]


@lru_cache(maxsize=1024)
def cuts(
    n: int, k: int, bits: int, mode: int, source: int, *, one: bool, silu: bool, groups: int, top_k: int, early: bool
) -> list[ExpertTiling]:
    """Every cut of one matrix."""
    found = []
    each = -(-top_k // CLUSTER) if mode == SUMMED else 1
    slots = -(-top_k // each) if mode == SUMMED else 1
    blocks = 1 if mode == SUMMED or n <= ROWS else 2
    slices = _slices(k)
    for parts in range(1, CLUSTER // slots + 1) if one else (1,):
        per_part = -(-slices // parts)
        if (parts - 1) * per_part >= slices:
            continue  # a block would have nothing to do
        # A GPU holds few clusters of eight at a time; two blocks an SM make room for more.
        sides = ((WARPS, 1), (WARPS, 2), (WARPS // 2, 2)) if mode == SUMMED else ((WARPS, 1),)
        for most, depth, (warps, per_sm) in product((ACROSS, ACROSS // 2), DEPTHS[bits], sides):
            across, down = _warps(per_part, blocks * ROWS // 16, most, warps)
            cut = ExpertTiling(
                mode, one, source, silu, groups, blocks, parts, slots, each, per_sm, early, across, down, depth, n, k
            )
            if depth <= max(2, cut.turns):
                found.append(cut)
    return found


@lru_cache(maxsize=1024)
def plain_cuts(
    n: int, k: int, bits: int, mode: int, source: int, *, one: bool, silu: bool, groups: int, top_k: int, early: bool
) -> list[ExpertTiling]:
    """The same of the portable form: no clusters, and a warp's row tiles are a multiple of those under way."""
    found, most, blocks = [], PLAIN_WARPS[groups], 1 if n <= ROWS else 2
    for across, depth, warps in product((8, 4, 2, 1), PLAIN_DEPTHS[bits], (most, most // 2, most // 4)):
        side, down = _warps(_slices(k), blocks * ROWS // 16, min(across, warps), warps)
        if blocks * ROWS // 16 // down % depth == 0:
            found.append(
                ExpertTiling(mode, one, source, silu, groups, blocks, 1, 1, 1, 1, early, side, down, depth, n, k)
            )
    return found


@lru_cache(maxsize=1024)
def choose(
    bits: int, device: build.Device, top_k: int, options: tuple[ExpertTiling, ...], portable: bool = False
) -> ExpertTiling | None:
    """The cut that costs least, None where none fits."""
    fitting = [cut for cut in options if cut.fits(bits, device, portable)]
    return min(fitting, key=lambda cut: (cut.cost(bits, device, top_k), cut.passes, -cut.depth, cut), default=None)


KERNELS = build.Source(
    "e8p_experts",
    ops=("e8p_experts",),
    functions=("e8p_experts", "e8p_experts_prepare", "e8p_experts_combine"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example=ExpertTiling(GATED, True, FROM_X, False, 1, 2, 1, 1, 1, 1, False, 4, 4, 4, 1536, 2048).defines(2, False),
    otherwise="Triton's run experts in E8P",
)


def supports_input(call: E8PExperts) -> bool:
    """Whether the kernels here compute it."""
    (tokens, dim), experts, pairs = call.x.shape, call.gate_up.shape[0], call.experts.numel()
    if call.x.dtype not in (torch.bfloat16, torch.float16) or not 0 < pairs <= MAX_PAIRS or call.alpha < 0:
        return False
    wide = call.gate_up.shape[1] // 2
    return tokens <= MAX_TOKENS and experts <= MAX_EXPERTS and dim % 64 == 0 and wide % 64 == 0


class ExpertVariant(NamedTuple):
    """The cuts of a call's two matrices."""

    gate_up: ExpertTiling
    down: ExpertTiling


@lru_cache(maxsize=1024)
def way(
    tokens: int, top_k: int, experts: int, dim: int, wide: int, bits: int, device: build.Device, portable: bool = False
) -> ExpertVariant | None:
    """None where no cut fits into shared memory. `portable`: of the portable form."""
    gated = wide % ROWS == 0
    one = tokens == 1 and (portable or top_k <= EACH * CLUSTER)
    every = plain_cuts if portable else cuts
    groups = 2 if tokens * top_k > CROWDED * experts and tokens > 4 else 1
    first = FROM_X if tokens <= FRESH else PREPARED
    more = {"one": one, "groups": groups, "top_k": top_k}
    gate_up = every(2 * wide, dim, bits, GATED if gated else PLAIN, first, silu=False, early=first == PREPARED, **more)
    second = FROM_GATED if gated else FROM_BOTH if tokens <= FRESH else PREPARED
    down = every(dim, wide, bits, SUMMED if one and not portable else PLAIN, second, silu=not gated, early=True, **more)
    both = [choose(bits, device, top_k, tuple(options), portable) for options in (gate_up, down)]
    return None if both[0] is None or both[1] is None else ExpertVariant(both[0], both[1])


class _Call:
    """One call on its way through the launches."""

    def __init__(self, call: E8PExperts) -> None:
        self.call, self.device = call, call.x.device.index
        self.tokens, self.top_k = call.experts.shape
        self.pairs = self.tokens * self.top_k

    def launch(self, function: str, cut: ExpertTiling, grid: tuple[int, int, int], **given: Tensor | None) -> None:
        """`function` of `KERNELS` with the tensors `given`."""
        call, launched = self.call, Launch(grid, 256, function=function)
        gelu = {"GELU": 1} if call.alpha == 0 else {}
        if function == "e8p_experts":
            shared = cut.shared(call.bits, KERNELS.is_portable(self.device))
            launched = Launch(grid, cut.warps * 32, shared, cut.cluster, function)
        launch(
            KERNELS, cut.defines(call.bits, call.x.dtype == torch.float16) | gelu, launched,
            **dict.fromkeys(VARYING) | given, experts=call.experts, weights=call.weights,
            tables=e8p_decode.resident_tables(call.codebook), tokens=self.tokens, top_k=self.top_k,
            matrices=call.gate_up.shape[0], norm=float((block(cut.n) * block(cut.k)) ** -0.5), limit=call.limit,
            alpha=call.alpha, shift=call.shift,
        )  # fmt: skip

    def prepared(self, cut: ExpertTiling, x: Tensor, in_scale: Tensor) -> dict[str, Tensor]:
        """`x`, of which a pair's row is its token's or its own, as the product takes it."""
        slices = _slices(cut.k)
        made = {
            "bytes": torch.empty(self.pairs * slices * 512, dtype=torch.uint8, device=x.device),
            "scales": torch.empty(self.pairs * slices * 2, dtype=torch.float32, device=x.device),
        }
        self.launch("e8p_experts_prepare", cut, (-(-self.pairs * slices // 8), 1, 1), x=x, in_scale=in_scale, **made)
        return made

    def product(self, cut: ExpertTiling, x: Tensor, in_scale: Tensor, y: Tensor, **weight: Tensor | None) -> Tensor:
        given = {"x": x} if cut.source != PREPARED else self.prepared(cut, x, in_scale)
        if cut.one:
            blocks = cut.tiles * cut.cluster * (1 if cut.mode == SUMMED else self.top_k)
        else:
            blocks = min(self.pairs * cut.tiles, build.device(self.device).sms)
        self.launch("e8p_experts", cut, (blocks, 1, 1), in_scale=in_scale, y=y, **given, **weight)
        return y


def experts(call: E8PExperts) -> Tensor:
    """See `onegraph.ops.e8p_experts.e8p_experts`."""
    out = compute(call) if call.x.is_cuda and supports_input(call) and KERNELS.is_built(call.x.device.index) else None
    if out is not None:
        return out
    from onegraph.ops.triton.e8p_experts import experts as fallback  # compiled or interpreted as of their import

    return fallback(call)


def compute(call: E8PExperts) -> Tensor | None:
    """`call`, which is taken. None where no cut fits into shared memory."""
    sizes = *call.experts.shape, call.gate_up.shape[0], call.x.shape[1], call.gate_up.shape[1] // 2
    index = call.x.device.index
    found = way(*sizes, call.bits, build.device(index), KERNELS.is_portable(index))
    if found is None:
        return None
    values: list[Any] = [aligned(each) if isinstance(each, Tensor) else each for each in call]
    return _run(_Call(E8PExperts(*values)), found)


def _run(run: _Call, way: ExpertVariant) -> Tensor:
    call, (tokens, dim) = run.call, run.call.x.shape
    width, cut, last = call.gate_up.shape[1], way.gate_up, way.down
    hidden = torch.empty(
        run.pairs, width // 2 if cut.mode == GATED else width, dtype=torch.float32, device=call.x.device
    )
    run.product(
        cut, call.x, call.gate_up_in_scale, hidden, codes=call.gate_up, residual=call.gate_up_residual,
        out_scale=call.gate_up_out_scale, bias=call.gate_up_bias, next_scale=call.down_in_scale,
    )  # fmt: skip
    out = torch.empty_like(call.x)
    summed = last.mode == SUMMED
    y = out if summed else torch.empty(run.pairs, dim, dtype=torch.float32, device=call.x.device)
    run.product(
        last, hidden, call.down_in_scale, y, codes=call.down, residual=call.down_residual,
        out_scale=call.down_out_scale, bias=call.down_bias, add=call.add if summed else None,
    )  # fmt: skip
    if not summed:
        run.launch("e8p_experts_combine", last, (-(-dim // 1024), tokens, 1), x=y, y=out, add=call.add)
    return out
