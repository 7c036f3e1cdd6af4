"""Launches `decode_attention.cu`; what it does not take goes to Triton's kernel."""

import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_suffix(".cu")
DIMS = (64, 128)
MAX_GROUP = 8  # heads that share a kv head: columns of the kernel's products
MAX_CLUSTER, TILE = 16, 16  # blocks that the kernel has room for; keys that a warp takes at a time
GPCS, GPC = 7, 18  # of an H200: a cluster lies in one GPC of 18 SMs, each with room for 16 warps
ALIGNMENT = 16  # bytes, of what is read as 16 bytes at once


def takes(dtype: torch.dtype, dim: int, group: int, *read: Tensor) -> bool:
    """Whether `decode_attention.cu` computes this; `read`: all of its inputs but positions, counts and block table."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and dim in DIMS
        and group <= MAX_GROUP
        and all(t.data_ptr() % ALIGNMENT == 0 for t in read)
    )


@cache
def _kernel(
    half: bool, dim: int, group: int, page: int, norm: bool, rope: bool, warps: int, device: int
) -> build.Kernel:
    defines = {"HALF": half, "DIM": dim, "GROUP": group, "PAGE": page, "NORM": norm, "ROPE": rope, "WARPS": warps}
    sizes = {name: int(value) for name, value in defines.items()}
    return build.load(SOURCE, sizes, ("decode_attention",), device, shared(dim, group, warps))[0]


@cache
def available(device: int) -> bool:
    """Whether the kernel can be built for this GPU; warns once where not."""
    return build.usable(lambda: _kernel(False, 128, 4, 16, False, True, 16, device))


def shared(dim: int, group: int, warps: int) -> int:
    """Bytes of `Shared` in the kernel."""
    sums, outputs, tile = 2 * 4 * 8 * (warps + MAX_CLUSTER), 4 * group * dim, 2 * TILE * 2 * dim
    return -(-(sums + outputs) // 128) * 128 + warps * tile


def cut(groups: int) -> tuple[int, int]:
    """(warps of a block, blocks that share the keys of one of `groups` (row, kv head) pairs).

    As many blocks as run at once, one an SM; two an SM where there are more groups than that.
    """
    for size in (8, 4, 2):
        if groups <= GPCS * (GPC // size):
            return 16, size
    return 8, 2


def paged_decode(
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
    tickets: Tensor,
    heads: int,
    scale: float,
    window: int,
) -> Tensor:
    """See `onegraph.ops.decode_attention.paged_decode`."""
    rows = qkv.shape[0]
    kv_heads, dim = k_cache.shape[2:]
    group = heads // kv_heads
    norms = [t for t in (q_norm, k_norm) if t is not None]
    read = [t for t in (qkv, *norms, cos, sin, k_cache, v_cache) if t is not None]
    usable = qkv.is_cuda and rows > 0 and takes(qkv.dtype, dim, group, *read)
    if not usable or any(t.dtype != qkv.dtype for t in norms) or not available(qkv.device.index):
        from onegraph.ops.triton.decode_attention import paged_decode as fallback  # compiled as of its import

        return fallback(
            qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, tickets, heads,
            scale, window,
        )  # fmt: skip
    out = torch.empty((rows, 1, heads, dim), dtype=qkv.dtype, device=qkv.device)
    _launch(
        qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, k_cache, v_cache, out, scale, window,
        ahead=0,
    )  # fmt: skip
    return out


def strided_decode(
    qkv: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    """See `onegraph.ops.strided_decode.strided_decode`. Raises ValueError for what the kernel does not take."""
    dim, group = keys.shape[3], out.shape[1] // keys.shape[2]
    if not takes(qkv.dtype, dim, group, qkv, table, keys, values):
        raise ValueError(
            f"strided_decode: {qkv.dtype} heads of {dim}, {group} a kv head; on a GPU it takes bfloat16 and float16, "
            f"sizes {DIMS}, up to {MAX_GROUP} a kv head, at multiples of {ALIGNMENT} bytes: use rope_slots_write"
        )
    if qkv.shape[0] > 0:
        cos, sin = table.chunk(2, dim=1)
        _launch(
            qkv, None, None, 0.0, cos, sin, lengths, lengths, block_table, keys, values, out, scale, window=0, ahead=1
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
) -> None:
    """As the kernel's `Arguments` say."""
    device, rows = qkv.device.index, qkv.shape[0]
    pages, page_size, kv_heads, dim = k_cache.shape
    group = out.numel() // (rows * kv_heads * dim)
    warps, size = cut(rows * kv_heads)
    norm, rope = q_norm is not None, cos is not None
    kernel = _kernel(qkv.dtype == torch.float16, dim, group, page_size, norm, rope, warps, device)
    tensors = (qkv, q_norm, k_norm, cos, sin, positions, counts, block_table, k_cache, v_cache, out)
    arguments = struct.pack(
        "11Q11i2f4x",  # as long as the struct, whose pointers align it to 8 bytes
        *(0 if t is None else t.data_ptr() for t in tensors),
        kv_heads,
        pages,
        *(stride // dim for stride in k_cache.stride()[:3]),
        block_table.stride(0),
        block_table.shape[1] * page_size,
        *((0, 0) if cos is None else (cos.stride(0), cos.shape[0] - 1)),
        window,
        ahead,
        eps,
        scale,
    )
    launch = (rows * kv_heads * size, 1, 1), 32 * warps, shared(dim, group, warps), size
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch.cuda.current_device() == device:
        kernel.launch(*launch, stream, arguments)
    else:
        with torch.cuda.device(qkv.device):  # the driver launches in the current context
            kernel.launch(*launch, stream, arguments)
