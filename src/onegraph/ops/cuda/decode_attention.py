"""Launches `decode_attention.cu`, where there are no clusters `decode_portable.cu`, and for several tokens a row, or
any number where results must not depend on what runs beside them or heads are more than those take, `decode_round.cu`;
what none of them takes goes to Triton's kernels."""

import torch
from torch import Tensor

from onegraph.ops import invariant
from onegraph.ops.calls import PagedDecode, StridedDecode
from onegraph.ops.cuda import build, decode_portable, decode_round
from onegraph.ops.cuda.decode_plan import POINTERS, TILE, DecodeSplit
from onegraph.ops.cuda.launcher import ALIGNMENT, Launch, launch

DIMS = (64, 128)
MAX_GROUP = 8  # heads that share a kv head: columns of the kernel's products

ARGUMENTS = build.Arguments(
    pointers=POINTERS,
    ints=("pages", "table_stride", "reach", "max_position", "ahead"),
    floats=("eps", "scale"),
)


def supports_input(dtype: torch.dtype, dim: int, group: int, page: int, *read: Tensor) -> bool:
    """Whether `decode_attention.cu` computes this; `read`: all of its inputs but positions, counts and block table."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and dim in DIMS
        and group <= MAX_GROUP
        and page % TILE == 0
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
    )


EXAMPLE = DecodeSplit(False, 128, 4, 16, False, 128, False, 16, 8, 8, 0, 128, 8, 1, 64)
KERNEL = build.Source(
    "decode_attention",
    ops=("paged_decode", "strided_decode"),
    functions=("decode_attention",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    example=EXAMPLE.defines,
    shared=EXAMPLE.shared,
    otherwise="another kernel computes the attention of decode steps",
)


def available(device: int) -> bool:
    """Whether a GPU can have a kernel of either form; warns once where not."""
    return KERNEL.is_built(device) or decode_portable.KERNEL.is_built(device)


def share(groups: int, device: build.Device) -> tuple[int, int]:
    """(warps of a block, blocks that share the keys of one of `groups` (row, kv head) pairs).

    As many blocks as run at once, one an SM; two an SM where there are more groups than that.
    """
    for size in (8, 4, 2):
        if groups <= device.at_once(size):
            return 16, size
    return 8, 2


def paged_decode(call: PagedDecode) -> Tensor:
    """See `onegraph.ops.decode_attention.paged_decode`."""
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, _, *numbers = call
    heads, scale, window, early, sinks, softcap, gated, value_norm = numbers
    rows, tokens, _ = qkv.shape
    kv_heads, dim = k_cache.shape[2:]
    norms = [t for t in (q_norm, k_norm) if t is not None]
    read = [t for t in (qkv, *norms, cos, sin, k_cache, v_cache) if t is not None]
    # The kernels for one token know neither bounds of scores, gates nor norms of values, and turn whole heads.
    plain = softcap == 0 and not (gated or value_norm) and (cos is None or 2 * cos.shape[1] == dim)
    alone = (
        qkv.is_cuda
        and rows > 0
        and tokens == 1
        and not invariant.on()
        and plain
        and supports_input(qkv.dtype, dim, heads // kv_heads, k_cache.shape[1], *read)
        and all(t.dtype == qkv.dtype for t in norms)
        and available(qkv.device.index)
    )
    if not alone:
        on_gpu = qkv.is_cuda and rows > 0 and decode_round.KERNEL.is_built(qkv.device.index)
        if on_gpu and decode_round.supports_input(call):
            return decode_round.attend(call)
        from onegraph.ops.triton.decode_attention import paged_decode as fallback  # compiled as of its import

        return fallback(call)
    out = torch.empty((rows, 1, heads, dim), dtype=qkv.dtype, device=qkv.device)
    _launch(
        qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, out, scale, window,
        ahead=0, early=early, sinks=sinks,
    )  # fmt: skip
    return out


def strided_decode(call: StridedDecode) -> None:
    """See `onegraph.ops.strided_decode.strided_decode`. Raises ValueError for what the kernel does not take."""
    qkv, table, lengths, block_table, keys, values, out, scale = call
    page, dim, group = keys.shape[1], keys.shape[3], out.shape[1] // keys.shape[2]
    if not supports_input(qkv.dtype, dim, group, page, qkv, table, keys, values):
        raise ValueError(
            f"strided_decode: {qkv.dtype} heads of {dim}, {group} a kv head, pages of {page} tokens; on a GPU it takes "
            f"bfloat16 and float16, sizes {DIMS}, up to {MAX_GROUP} a kv head, pages of multiples of {TILE}, at "
            f"multiples of {ALIGNMENT} bytes: use rope_cache_write"
        )
    if qkv.shape[0] > 0:
        cos, sin = table.chunk(2, dim=1)
        _launch(
            qkv,
            None,
            None,
            0.0,
            cos,
            sin,
            lengths,
            lengths,
            block_table,
            keys,
            values,
            out,
            scale,
            window=0,
            ahead=1,
            early=False,
        )


def _launch(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    ahead: int,
    early: bool,
    sinks: Tensor | None = None,
) -> None:
    """As the kernel's `Arguments` say."""
    device, rows = qkv.device.index, qkv.shape[0]
    pages, page_size, kv_heads, dim = k_cache.shape
    group, pairs, in_clusters = out.numel() // (rows * kv_heads * dim), rows * kv_heads, KERNEL.is_built(device)
    if in_clusters:
        warps, size = share(pairs, build.device(device))
    else:
        warps, size = decode_portable.share(pairs, dim, build.device(device))
    page_stride, place_stride, head_stride = (stride // dim for stride in k_cache.stride()[:3])
    plan = DecodeSplit(
        qkv.dtype == torch.float16, dim, group, page_size, q_norm is not None, 0 if cos is None else dim, early, warps,
        size, kv_heads, window, page_stride, place_stride, head_stride, 0 if cos is None else cos.stride(0),
    )  # fmt: skip
    arguments = {
        "qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin, "positions": positions,
        "counts": counts, "table": block_table, "keys": k_cache, "values": v_cache, "out": out, "sinks": sinks,
        "pages": pages,
        "table_stride": block_table.stride(0), "reach": block_table.shape[1] * page_size,
        "max_position": 0 if cos is None else cos.shape[0] - 1, "ahead": ahead, "eps": eps, "scale": scale,
    }  # fmt: skip
    grid, threads = (pairs * size, 1, 1), 32 * warps
    if in_clusters:
        launch(KERNEL, plan.defines, Launch(grid, threads, plan.shared, size), **arguments)
        return
    space = decode_portable.workspace(plan, pairs, out.device)
    launch(
        decode_portable.KERNEL, plan.defines, Launch(grid, threads, decode_portable.shared(plan)),
        **arguments, **space, arrived=decode_portable.ARRIVED.of(device),
    )  # fmt: skip
