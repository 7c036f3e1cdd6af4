"""Launches `turboquant_write.cu`, a decode step's write; what it does not take goes to Triton's kernel."""

import torch
from torch import Tensor

from onegraph.ops.calls import TurboQuantWrite
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

DTYPES = {torch.bfloat16: 0, torch.float16: 1}
SCALES = {"norm": 0, "matched": 1, "unbiased": 2}
MAX_DIM, MAX_GROUP = 256, 16
MAX_LENGTH = 8  # tokens of a row: a decode step, whose positions and block table earlier kernels of it do not write
MAX_TOKENS = 64  # beyond, Triton's programs of 16 vectors read the rotation less often

ARGUMENTS = build.Arguments(
    pointers=(
        "qkv", "q_norm", "k_norm", "cos", "sin", "positions", "counts", "block_table", "turn", "k_codebook",
        "v_codebook", "cache", "ring", "slots", "out",
    ),
    ints=(
        "length", "kv_heads", "table_stride", "reach", "max_position", "page_size", "page_bytes", "ring_size",
    ),
    floats=("eps",),
)  # fmt: skip
KERNEL = build.Source(
    "turboquant_write",
    ops=("turboquant_write",),
    functions=("turboquant_write",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={"DIM": 128, "KBITS": 4, "VBITS": 4, "GROUP": 4, "SCALE": 1, "DTYPE": 0, "TURNED": 128, "NORM32": 0},
    otherwise="Triton's writes TurboQuant codes",
)


def turboquant_write(call: TurboQuantWrite) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.turboquant.turboquant_write`."""
    qkv, q_norm, k_norm, eps, cos, sin, positions, counts, block_table, turn, *coded = call
    k_codebook, v_codebook, cache, ring, slots, heads, kind, exact = coded
    k_bits, v_bits = (book.numel().bit_length() - 1 for book in (k_codebook, v_codebook))
    batch, length, _ = qkv.shape
    _, kv_heads, page_bytes = cache.shape
    dim, group, tokens = turn.shape[0], heads // kv_heads, batch * length
    sizes_fit = dim <= MAX_DIM and group <= MAX_GROUP and length <= MAX_LENGTH and 0 < tokens <= MAX_TOKENS
    supported = qkv.is_cuda and qkv.dtype in DTYPES and sizes_fit and not exact
    if not supported or not KERNEL.is_built(qkv.device.index):
        from onegraph.ops.triton.turboquant import turboquant_write as fallback  # compiled as of its import

        return fallback(call)
    page_size = page_bytes * 8 // (dim * (k_bits + v_bits) + 32)
    out = torch.empty((batch, length, heads, dim), dtype=qkv.dtype, device=qkv.device)
    defines = {"DIM": dim, "KBITS": k_bits, "VBITS": v_bits, "GROUP": group}
    defines |= {"SCALE": SCALES[kind], "DTYPE": DTYPES[qkv.dtype], "TURNED": dim if cos is None else 2 * cos.shape[1]}
    defines["NORM32"] = int(q_norm is not None and q_norm.dtype == torch.float32)
    launch(
        KERNEL, defines, Launch((kv_heads, tokens, 1), dim * 2),
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, positions=positions, counts=counts,
        block_table=block_table, turn=turn, k_codebook=k_codebook, v_codebook=v_codebook, cache=cache, ring=ring,
        slots=slots, out=out, length=length, kv_heads=kv_heads, table_stride=block_table.stride(0),
        reach=block_table.shape[1] * page_size, max_position=0 if cos is None else len(cos) - 1, page_size=page_size,
        page_bytes=page_bytes, ring_size=1 if ring is None else ring.shape[1], eps=eps,
    )  # fmt: skip
    return out, out.new_empty((0, length, 2, kv_heads, dim))
