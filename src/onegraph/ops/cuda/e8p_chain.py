"""The linears between two attentions in one launch, a cluster a token: what `e8p_chain.cu` is built for, and which
calls it takes. Others run as a launch for each linear."""

from functools import lru_cache

import torch
from torch import Tensor

from onegraph.ops.calls import E8PLinear
from onegraph.ops.cuda import build, e8p
from onegraph.ops.cuda.e8p_common import SLICE, TABLES
from onegraph.ops.cuda.launcher import ALIGNMENT, Launch, launch

CLUSTER, WORKERS = 16, 12
MAX_TOKENS = 7  # clusters of 16 blocks that an H200 runs at once; an eighth would wait for the others
MAX_SLICES = 6  # of any dimension, a warp each: more would leave workers too few registers
SHARED_STRUCT = 896  # bytes of `Shared` in e8p_chain.cu
MAX_SHARED = 227 * 1024  # bytes of a block on the GPUs that the kernel is for
LINK = "codes", "rest", "in_scale", "out_scale", "bias"
LINKS = [f"link[{i}].{name}" for i in range(4) for name in LINK]
ARGUMENTS = build.Arguments(pointers=(*LINKS, "codebook", "x", "residual", "sum", "y"), floats=("eps",))

Sizes = tuple[int, int, int, int]  # k of the output linear, width, k of down, n of qkv or 0


def _link(n: int, k: int, bits: int) -> tuple[int, int]:
    """Bytes of a link's codes in a block's shared memory, and floats of its sums; `Of` in e8p_chain.cu."""
    tiles, pieces = n // 16, k // 64
    fitting = [i for i in range(1, WORKERS + 1) if -(-tiles * i // CLUSTER) <= WORKERS and pieces % i == 0]
    parts = max(fitting, default=1)
    wide = pieces // parts
    pitch = (wide | 1) * 16
    job = 16 * (pitch + {2: 0, 3: wide * 8, 4: pitch}[bits])
    return -(-tiles * parts // CLUSTER) * job, parts * n


@lru_cache(maxsize=256)
def shared(sizes: Sizes, bits: int) -> int:
    """Bytes of shared memory of a block."""
    heads, width, inner, qkv = sizes
    links = [(width, heads), (2 * inner, width), (width, inner), (qkv, width)][: 4 if qkv else 3]
    found = [_link(n, k, bits) for n, k in links]
    codes, sums = sum(link[0] for link in found), [link[1] for link in found]
    received = max(sums[::2]) + max(*sums[1::2], sums[-1])
    return TABLES[bits] + SHARED_STRUCT + codes + 4 * received + 2 * max(heads, width, inner)


def supports_shape(tokens: int, sizes: Sizes, bits: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes these shapes: few tokens, and codes that a cluster's shared memory holds."""
    whole = all(size % 64 == 0 for size in sizes) and sizes[2] % 128 == 0  # no rotation mixes gate and up
    fits = max(sizes) <= MAX_SLICES * SLICE  # so that 2 * inner rows are at most a job for each worker
    if not 0 < tokens <= MAX_TOKENS or dtype not in (torch.bfloat16, torch.float16) or not whole or not fits:
        return False
    return shared(sizes, bits) <= MAX_SHARED


def defines(sizes: Sizes, bits: int, half: bool) -> dict[str, int]:
    """What e8p_chain.cu is compiled with."""
    names = dict(zip(("HEADS", "WIDTH", "INNER", "QKV"), sizes, strict=True))
    return {"BITS": bits, "HALF": int(half), "CLUSTER": CLUSTER, **names}


KERNEL = build.Source(
    "e8p_chain",
    ops=("e8p_chain",),
    functions=("e8p_chain",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    example=defines((256, 256, 128, 384), 2, False),
    shared=MAX_SHARED,
    otherwise="each linear between two attentions is a launch of its own",
)


def chain(
    x: Tensor,
    residual: Tensor,
    codes: list[Tensor],
    rests: list[Tensor],
    codebook: Tensor,
    in_scales: list[Tensor],
    out_scales: list[Tensor],
    biases: list[Tensor | None],
    bits: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `onegraph.ops.e8p_chain.e8p_chain`."""
    n = codes[3].shape[0] if len(codes) == 4 else 0
    sizes = codes[0].shape[1] * 8, codes[0].shape[0], codes[2].shape[1] * 8, n
    x, residual = x.contiguous(), residual.contiguous()
    biases = [None if bias is None else bias.float() for bias in biases]
    read = [x, residual, *codes, *rests, codebook, *in_scales, *out_scales, *(b for b in biases if b is not None)]
    aligned = all(each.data_ptr() % ALIGNMENT == 0 for each in read)
    tokens = residual.shape[:-1].numel()
    if not aligned or not supports_shape(tokens, sizes, bits, x.dtype) or not KERNEL.is_built(x.device.index):
        return one_by_one(x, residual, codes, rests, codebook, in_scales, out_scales, biases, bits, eps)
    out, qkv = torch.empty_like(residual), x.new_empty((*x.shape[:-1], n))
    fields: dict[str, Tensor | None] = dict.fromkeys(LINKS)  # the last layer's chain has no fourth link
    for i, each in enumerate(codes):
        tensors = each, rests[i] if rests else None, in_scales[i], out_scales[i], biases[i]
        fields.update((f"link[{i}].{name}", tensor) for name, tensor in zip(LINK, tensors, strict=True))
    grid, threads = (tokens * CLUSTER, 1, 1), 32 * (WORKERS + -(-max(sizes) // SLICE))
    launch(
        KERNEL, defines(sizes, bits, x.dtype == torch.float16), Launch(grid, threads, shared(sizes, bits), CLUSTER),
        **fields, codebook=codebook, x=x, residual=residual, sum=out, y=qkv, eps=eps,
    )  # fmt: skip
    return out, qkv


def one_by_one(
    x: Tensor, residual: Tensor, codes: list[Tensor], rests: list[Tensor], codebook: Tensor, in_scales: list[Tensor],
    out_scales: list[Tensor], biases: list[Tensor | None], bits: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, a launch for each linear."""

    def link(i: int, x: Tensor, add: Tensor | None = None, eps: float | None = None, silu: bool = False) -> Tensor:
        rest = rests[i] if rests else None
        layer = x, codes[i], rest, codebook, in_scales[i], out_scales[i], biases[i], bits
        return e8p.linear(E8PLinear(*layer, add, eps, silu))

    residual = link(0, x, residual)
    residual = link(2, link(1, residual, eps=eps), residual, silu=True)
    return residual, link(3, residual, eps=eps) if len(codes) == 4 else x.new_empty((*x.shape[:-1], 0))
