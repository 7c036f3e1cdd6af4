"""E8P linear for 65 to 1279 tokens, and for what e8p_batch.cu does not take: how `e8p_prefill.cu` is cut over the GPU.

The weights are decoded into the tensor cores' operands and never written out; what a call needs beside its result is
the rotated activations in float16 (`SLICE`-padded) and, where k is cut, float32 partial sums.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import MAX_K, SLICE, TABLES, Linear

THREADS = 384
ROWS = 128  # of a block

ARGUMENTS = build.Arguments(
    pointers=(
        "x", "codes", "residual", "codebook", "in_scale", "out_scale", "bias", "add", "y",
        "spread", "scales", "partial",
    ),
    ints=("tokens", "n", "k", "slices", "per_split", "splits", "silu", "wide"),
    floats=("norm", "eps"),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A block makes `tokens` by ROWS, `depth` stages of 64 columns under way. k is cut into `splits` of `per_split`
    slices."""

    tokens: int
    depth: int
    per_split: int
    splits: int

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: tables, barriers and stages; the sums take their place afterwards."""
        return max(TABLES[bits] + 1024 + self.depth * self.tokens * 128, ROWS * self.tokens * 4 * 132 // 128)


def tile(n: int, k: int, tokens: int, sms: int) -> tuple[int, int]:
    """(tokens, depth) of a block: as many tokens as one decoding of the codes can serve; half as many where that fills
    the SMs with k not cut.

    512 tokens on 4096 -> 4096 take 35.7 us at 2 bits in tiles of 128, 38.9 in tiles of 256 with k cut in two, the same
    at 4 bits; on 14336 -> 4096 109 and 104; 256 tokens on 4096 -> 6144, where 96 SMs would work, 35.9 at 2 bits either
    way and 41.4 and 39.1 at 4 (docs/log.md).
    """
    if tokens <= 64:
        return (32, 12) if tokens <= 32 else (64, 8)
    halves = -(-n // ROWS) * -(-tokens // 128)
    return (128, 8) if tokens <= 128 or (3 * sms // 4 < halves <= sms and k <= 4096) else (256, 4)


@lru_cache(maxsize=1024)
def plan(n: int, k: int, tokens: int, sms: int) -> Plan:
    """k is cut until every SM has a block."""
    (width, depth), slices = tile(n, k, tokens, sms), -(-k // SLICE)
    blocks = -(-n // ROWS) * -(-tokens // width)
    per_split = -(-slices // max(1, min(slices, sms // blocks)))
    return Plan(width, depth, per_split, -(-slices // per_split))


def most(k: int) -> int:
    """Slices that a warp of e8p_rotate holds: eight warps share a token's."""
    assert k <= MAX_K
    return next(m for m in (2, 4, 8, 16) if m * 8 * SLICE >= k)


def defines(plan: Plan, k: int, bits: int, half: bool) -> dict[str, int]:
    """What e8p_prefill.cu is compiled with."""
    made = {"BITS": bits, "TOKENS": plan.tokens, "MT": ROWS // 128, "DEPTH": plan.depth}
    return made | {"HALF": int(half), "MOST": most(k)}


KERNELS = build.Source(
    "e8p_prefill",
    ops=("e8p_linear",),
    functions=("e8p_rotate", "e8p_prefill", "e8p_add_parts"),
    arguments=ARGUMENTS,
    capabilities=build.HOPPER,
    example=defines(Plan(64, 8, 16, 1), 4096, 2, False),
)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    otherwise = "the weight of an E8P linear is written out from 5 tokens on"
    return KERNELS.usable(device, otherwise)


@cache
def _kernels(plan: Plan, k: int, bits: int, half: bool, device: int) -> tuple[build.Kernel, ...]:
    return KERNELS.load(defines(plan, k, bits, half), device, plan.shared(bits))


def launch(call: Linear) -> None:
    """`call` on the current device."""
    n, k, tokens, out, device = call.n, call.k, call.tokens, call.out, call.out.device.index
    slices = -(-k // SLICE)
    chosen = plan(n, k, tokens, build.device(device).sms)
    rotate, prefill, add_parts = _kernels(chosen, k, call.bits, call.half, device)
    tiles, splits = -(-tokens // chosen.tokens), chosen.splits
    spread = torch.empty(tiles * slices * chosen.tokens * 512, dtype=torch.uint8, device=out.device)
    scales = torch.empty(tokens * 2, dtype=torch.float32, device=out.device)
    partial = torch.empty(splits * tokens * n, dtype=torch.float32, device=out.device) if splits > 1 else None
    arguments = ARGUMENTS.pack(
        x=call.x.data_ptr(),
        codes=call.codes.data_ptr(),
        residual=(call.codes if call.residual is None else call.residual).data_ptr(),
        codebook=call.codebook.data_ptr(),
        in_scale=call.in_scale.data_ptr(),
        out_scale=call.out_scale.data_ptr(),
        bias=build.pointer(call.bias),
        add=build.pointer(call.add),
        y=out.data_ptr(),
        spread=spread.data_ptr(),
        scales=scales.data_ptr(),
        partial=build.pointer(partial),
        tokens=tokens,
        n=n,
        k=k,
        slices=slices,
        per_split=chosen.per_split,
        splits=splits,
        silu=call.silu,
        wide=call.wide,
        norm=call.norm,
        eps=call.eps,
    )
    stream = torch._C._cuda_getCurrentRawStream(device)
    rotate.launch((tokens, 1, 1), 256, 0, 1, stream, arguments)
    prefill.launch((-(-n // ROWS), tiles, splits), THREADS, chosen.shared(call.bits), 1, stream, arguments)
    if splits > 1:
        add_parts.launch((-(-n // 128), -(-tokens // 8), 1), 256, 0, 1, stream, arguments)
