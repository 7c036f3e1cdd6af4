"""E8P linear for 65 to 1279 tokens, and for what e8p_batch.cu does not take: how `e8p_prefill.cu` is cut over the GPU.

The weights are decoded into the tensor cores' operands and never written out; what a call needs beside its result is
the rotated activations in float16 (`SLICE`-padded) and, where k is cut into more than two, float32 partial sums.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import MAX_K, ROWS, SLICE, TABLES, Linear
from onegraph.ops.cuda.launcher import Launch, launch

THREADS = 384
PITCH = ROWS + 4  # floats of a token in the epilogue

ARGUMENTS = build.Arguments(
    pointers=(
        "x", "codes", "residual", "codebook", "in_scale", "out_scale", "bias", "add", "y",
        "spread", "scales", "partial",
    ),
    ints=("tokens", "n", "k", "slices", "per_split", "splits", "parts", "ratio", "silu", "wide"),
    floats=("norm", "eps"),
)  # fmt: skip


@dataclass(frozen=True)
class PrefillTiling:
    """A block makes `tokens` by ROWS, `depth` stages of 64 columns under way. k is cut into `splits` of `per_split`
    slices; `join` is 2 where two blocks of a cluster exchange their sums, or 1."""

    tokens: int
    depth: int
    per_split: int
    splits: int
    join: int

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: tables, barriers and stages; sums, scales and biases take their place afterwards.
        Behind them a barrier for each warp."""
        sums = self.tokens + (self.tokens // 2 if self.join == 2 else 0)
        return max(TABLES[bits] + 1024 + self.depth * self.tokens * 128, sums * PITCH * 4 + 2 * ROWS * 4) + 64


def tile(n: int, tokens: int, sms: int) -> tuple[int, int]:
    """(tokens, depth) of a block: as many tokens as one decoding of the codes can serve; half of them where all SMs
    work only with k cut into more than two splits, whose sums go through memory.

    On 4096 -> 4096 at 2 bits 256 tokens take 20.0 us in tiles of 128, 27.3 in tiles of 256; 512 tokens 32.9 and 31.2
    (docs/log.md).
    """
    if tokens <= 64:
        return (32, 12) if tokens <= 32 else (64, 8)
    blocks = -(-n // ROWS) * -(-tokens // 256)
    return (128, 8) if tokens <= 128 or sms // blocks > 2 else (256, 4)


@lru_cache(maxsize=1024)
def plan(n: int, k: int, tokens: int, device: build.Device) -> PrefillTiling:
    """k is cut until every SM has a block; two splits are a pair of blocks where all pairs run at once."""
    (width, depth), slices = tile(n, tokens, device.sms), -(-k // SLICE)
    blocks = -(-n // ROWS) * -(-tokens // width)
    per_split = -(-slices // max(1, min(slices, device.sms // blocks)))
    splits = -(-slices // per_split)
    return PrefillTiling(width, depth, per_split, splits, 2 if splits == 2 and blocks <= device.clusters[1] else 1)


def most(k: int) -> int:
    """Slices that a warp of e8p_rotate holds: eight warps share a token's."""
    assert k <= MAX_K
    return next(m for m in (1, 2, 3, 4, 6, 7, 8, 12, 16) if m * 8 * SLICE >= k)


def defines(plan: PrefillTiling, k: int, bits: int, half: bool) -> dict[str, int]:
    """What e8p_prefill.cu is compiled with."""
    made = {"BITS": bits, "TOKENS": plan.tokens, "DEPTH": plan.depth, "JOIN": plan.join}
    return made | {"HALF": int(half), "MOST": most(k)}


KERNELS = build.Source(
    "e8p_prefill",
    ops=("e8p_linear",),
    functions=("e8p_rotate", "e8p_prefill", "e8p_add_parts"),
    arguments=ARGUMENTS,
    capabilities=build.HOPPER,
    example=defines(PrefillTiling(64, 8, 8, 2, 2), 4096, 2, False),
    otherwise="the weight of an E8P linear is written out from 5 tokens on",
)


def run(call: Linear) -> None:
    """`call`, of any number of tokens."""
    n, k, tokens, bits, device = call.n, call.k, call.tokens, call.bits, call.out.device
    slices = -(-k // SLICE)
    chosen = plan(n, k, tokens, build.device(device.index))
    tiles, parts, across = -(-tokens // chosen.tokens), chosen.splits // chosen.join, -(-n // ROWS)
    spread = torch.empty(tiles * slices * chosen.tokens * 512, dtype=torch.uint8, device=device)
    scales = torch.empty(tokens * 2, dtype=torch.float32, device=device)
    partial = torch.empty(parts * tokens * n, dtype=torch.float32, device=device) if parts > 1 else None
    launches = [
        Launch((tokens, 1, 1), 256, function="e8p_rotate"),
        Launch((across * chosen.join, tiles, parts), THREADS, chosen.shared(bits), chosen.join, "e8p_prefill"),
    ]
    if parts > 1:
        launches.append(Launch((across, -(-tokens // 16), 1), 256, function="e8p_add_parts"))
    launch(
        KERNELS, defines(chosen, k, bits, call.half), *launches,
        **call.arguments, **call.stages, codebook=call.codebook, spread=spread, scales=scales, partial=partial,
        n=n, k=k, slices=slices, per_split=chosen.per_split, splits=chosen.splits, parts=parts,
        ratio=4 if bits == 4 else 2, silu=call.silu, wide=call.wide,
    )  # fmt: skip
