"""The attention of a round of several tokens a row in one launch: how `decode_round.cu` is cut over the GPU.

One token is such a round too where its bits must not depend on what runs beside it (`ops/invariant.py`), and where its
heads are more than the kernels for one token take: large, partly rotating, gated, many a kv head.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.calls import PagedDecode
from onegraph.ops.cuda import build, decode_portable
from onegraph.ops.cuda.decode_plan import POINTERS, TILE
from onegraph.ops.cuda.launcher import ALIGNMENT, Launch, launch

SETS = {64: 4, 128: 4, 256: 2, 512: 1}  # of eight columns, a (token, head) pair each, that a warp's registers hold
SIZES = 8, 4, 2, 1  # blocks of a cluster
WIDE = 16, *SIZES  # of heads beyond 128, whose blocks have fewer warps
MOST_WARPS, WARPS = 16, 8  # of a block: for one set, whose warps take half of the registers, and for more
RUN = 64  # coordinates: those that rotate are a multiple of it
NORMED_DIM = 256  # least size of heads whose values are normed: a warp's chunks are one head's

ARGUMENTS = build.Arguments(
    pointers=(*POINTERS, "partial", "sums", "arrived"),
    ints=("pages", "table_stride", "reach", "max_position"),
    floats=("eps", "scale"),
)


@dataclass(frozen=True)
class VerifySplit:
    """What the kernel is compiled for: its defines, in lower case. `size` blocks of `warps` warps share the keys of a
    row and kv head for a slice of its `tokens`, of which there are `slices`. norm: 0 without, 1 with weights of q's
    dtype, 2 of float32. rope: coordinates that rotate. Strides as those of `decode_plan.DecodeSplit`.
    `steady`: a token's bits do not depend on the tokens beside it; nor on the rows, if warps and size do not. values: 0
    as they are, 1 normed, 2 normed keys."""

    half: bool
    dim: int
    group: int
    tokens: int
    slices: int
    page: int
    norm: int
    rope: int
    gated: bool
    warps: int
    size: int
    kv_heads: int
    window: int
    page_stride: int
    place_stride: int
    head_stride: int
    turn_stride: int
    steady: bool = False
    values: int = 0

    @property
    def columns(self) -> int:
        """(token, head) pairs of a block."""
        return -(-self.tokens // self.slices) * self.group

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in asdict(self).items()}

    def shared(self, clustered: bool) -> int:
        """Bytes of `Shared` in the kernel's form with clusters, or in that without."""
        sets = -(-self.columns // 8)
        sums, head = 2 * 4 * 8 * sets * self.warps, 2 * self.dim
        met = 8 * self.size * self.columns + 4 * self.columns * self.dim + 8 if clustered else 4
        return -(-(sums + met) // 128) * 128 + 8 * sets * head + (self.warps + 1 + self.steady) * 2 * TILE * head


def most_sets(dim: int, clusters: bool, steady: bool) -> int:
    """Sets of a block: where shared memory holds three warps' tiles, one, which a warp turns beside keys and values."""
    return 1 if dim > 128 and steady and not clusters else SETS[dim]


def slices(tokens: int, group: int, sets: int) -> int:
    """How many blocks, at least, share a round's tokens; `sets` that a block may have."""
    return -(-tokens // (8 * sets // group))


EXAMPLE = VerifySplit(False, 128, 4, 8, 1, 16, 0, 128, False, WARPS, 8, 8, 0, 128, 8, 1, 64)
KERNEL = build.Source(
    "decode_round",
    ops=("paged_decode",),
    functions=("decode_round",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    own=build.CLUSTERS,
    example=EXAMPLE.defines,
    shared=EXAMPLE.shared(False),
    otherwise="Triton's compute the attention of rounds that check drafts",
)


def supports_input(call: PagedDecode) -> bool:
    """Whether `attend` computes this, of a GPU's tensors."""
    qkv, norms = call.qkv, [t for t in (call.q_norm, call.k_norm) if t is not None]
    _, page, kv_heads, dim = call.k_cache.shape
    if qkv.dtype not in (torch.bfloat16, torch.float16) or dim not in SETS or call.softcap:
        return False
    clusters, turned = not KERNEL.is_portable(qkv.device.index), 0 if call.cos is None else 2 * call.cos.shape[1]
    read = [t for t in (qkv, *norms, call.cos, call.sin, call.k_cache, call.v_cache) if t is not None]
    return (
        call.heads // kv_heads <= 8 * most_sets(dim, clusters, invariant.on())
        and (dim <= 256 or clusters)  # two tiles of 512 and queries take more than a portable block has
        and page % TILE == 0
        and (dim >= NORMED_DIM or not call.value_norm)
        and turned % RUN == 0
        and len({t.dtype for t in norms}) <= 1
        and all(t.dtype in (qkv.dtype, torch.float32) for t in norms)
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
    )


def warps_of(dim: int, sets: int, clusters: bool, steady: bool) -> int:
    """Of a block: as many as shared memory has tiles for."""
    if dim <= 128:
        return MOST_WARPS if clusters and sets == 1 else WARPS
    most = WARPS if clusters else WARPS // 2 - steady
    return most if dim == 256 else most // 2


def share(
    groups: int, sets: int, device: build.Device, clusters: bool, dim: int = 128, steady: bool = False
) -> tuple[int, int]:
    """(warps of a block, blocks that share the keys of one of `groups`), one block an SM.

    As many blocks as run at once; where there are more groups than that, as many as leave the fewest SMs idle in the
    end.
    """
    if clusters:
        at_once = {size: device.clusters[size - 1] for size in (SIZES if dim <= 128 else WIDE)}
    else:
        shared = decode_portable.SIZES if groups <= device.sms else ()  # what they leave goes through memory
        at_once = {size: device.sms // size for size in (*shared, 1)}
    at_once = {size: many for size, many in at_once.items() if many}
    size = next((size for size, many in at_once.items() if groups <= many), 0)
    size = size or min(reversed(at_once), key=lambda size: -(-groups // at_once[size]) / size)
    return warps_of(dim, sets, clusters, steady), size


def attend(call: PagedDecode) -> Tensor:
    """The op, of a call that `supports_input`."""
    qkv, keys, table, cos = call.qkv, call.k_cache, call.block_table, call.cos
    device, (rows, tokens, _), (pages, page_size, kv_heads, dim) = qkv.device.index, qkv.shape, keys.shape
    group, in_clusters, found = call.heads // kv_heads, not KERNEL.is_portable(device), build.device(device)
    steady = invariant.on()
    most = most_sets(dim, in_clusters, steady)
    parts = slices(tokens, group, most)
    groups, columns = rows * kv_heads * parts, -(-tokens // parts) * group
    # What must not depend on rows and tokens is cut as for one row of many tokens.
    cut = (kv_heads, most) if steady else (groups, -(-columns // 8))
    warps, size = share(*cut, found, in_clusters, dim, steady)
    if steady and not in_clusters and size > 1 and groups > decode_portable.MAX_GROUPS:
        raise ValueError(
            f"batch_invariant: {rows} rows of {kv_heads} kv heads are {groups} groups of blocks; allowed without "
            f"clusters are {decode_portable.MAX_GROUPS}: give a smaller max_batch"
        )
    page_stride, place_stride, head_stride = (stride // dim for stride in keys.stride()[:3])
    values = 0 if not call.value_norm else 1 if qkv.shape[2] == (call.heads + 2 * kv_heads) * dim else 2
    norm = 0 if call.q_norm is None else 1 if call.q_norm.dtype == qkv.dtype else 2
    plan = VerifySplit(
        qkv.dtype == torch.float16, dim, group, tokens, parts, page_size, norm, 0 if cos is None else 2 * cos.shape[1],
        call.gated, warps, size, kv_heads, call.window, page_stride, place_stride, head_stride,
        0 if cos is None else cos.stride(0), steady, values,
    )  # fmt: skip
    out = torch.empty((rows, tokens, call.heads, dim), dtype=qkv.dtype, device=qkv.device)
    partial = sums = arrived = None
    if not in_clusters and size > 1:
        partial = torch.empty(groups * size * columns * dim, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(groups * size * columns * 2, dtype=torch.float32, device=qkv.device)
        arrived = decode_portable.ARRIVED.of(device)
    grid, shared = (groups * size, 1, 1), plan.shared(in_clusters)
    launch(
        KERNEL, plan.defines, Launch(grid, 32 * warps, shared, size if in_clusters else 1),
        qkv=qkv, q_norm=call.q_norm, k_norm=call.k_norm, cos=cos, sin=call.sin, positions=call.positions,
        counts=call.counts, table=table, keys=keys, values=call.v_cache, out=out, sinks=call.sinks, partial=partial,
        sums=sums, arrived=arrived, pages=pages, table_stride=table.stride(0), reach=table.shape[1] * page_size,
        max_position=0 if cos is None else cos.shape[0] - 1, eps=call.eps, scale=call.scale,
    )  # fmt: skip
    return out
