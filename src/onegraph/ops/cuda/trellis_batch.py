"""Trellis-coded linear for up to 64 tokens at once, which decodes each weight once: how `trellis_batch.cu` is cut over
the GPU."""

from dataclasses import dataclass

import torch

from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import MAX_K, ROWS, SLICE
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.cuda.rotated_portable import MAX_N, passes
from onegraph.ops.cuda.trellis_common import Linear

CLASSES = (16, 32, 48, 64)  # tokens that it is compiled for
AT_ONCE = CLASSES[-1]
MAX_TOKENS = 2 * AT_ONCE  # in passes; for more the weight is written out
UNIT = 128  # columns of a unit
LEAST_UNITS = 2  # of a block: fewer would bring more sums of the same rows
STAGES, PITCH, TURN_WARPS = 3, ROWS + 4, 16  # as in the kernel


@dataclass(frozen=True)
class Cut:
    """Warps of a block, blocks of an SM, and pairs of column tiles whose codes a warp has under way."""

    warps: int
    per_sm: int
    ahead: int

    @property
    def group(self) -> int:
        """Rows of a unit."""
        return self.warps * 32

    def blocks(self, n: int, k: int, sms: int) -> int:
        units = -(-k // UNIT) * -(-n // self.group)
        return min(sms * self.per_sm, max(1, units // LEAST_UNITS))

    @property
    def defines(self) -> dict[str, int]:
        return {"WARPS": self.warps, "PER_SM": self.per_sm, "AHEAD": self.ahead}


def cut(bits: int, count: int) -> Cut:
    """For up to `count` tokens, one of CLASSES: what registers hold."""
    return Cut(8, 2, 4) if bits <= 4 and count <= 32 else Cut(12, 1, 2)


def _turn_shared(k: int) -> int:
    slices = -(-k // SLICE)
    return slices * (SLICE * 2 + 4) + TURN_WARPS * 8


KERNELS = build.Source(
    "trellis_batch",
    ops=("trellis_linear",),
    functions=("trellis_batch_turn", "trellis_batch", "trellis_batch_end"),
    arguments=build.Arguments(
        pointers=("x", "codes", "in_scale", "out_scale", "bias", "add", "y", "operands", "scales", "sums"),
        floats=("norm", "eps", "inverse_k"),
        ints=("tokens", "n", "k", "blocks", "silu", "wide"),
    ),
    capabilities=build.PORTABLE,
    example={"BITS": 2, "TOKENS": 64, "HALF": 0, "CODE": 0} | cut(2, 64).defines,
    families=("hopper", "portable"),
    shared=max(_turn_shared(MAX_K), STAGES * AT_ONCE * UNIT * 2),
    otherwise="few tokens at a time have a kernel of their own; torch computes many",
)


def supports_shape(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether this kernel computes a shape."""
    fits = 0 < tokens <= MAX_TOKENS and n <= MAX_N and k <= MAX_K and n % 64 == 0 and k % 64 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def run(call: Linear) -> None:
    """`call`, whose shape `supports_shape` allows."""
    for each in passes(call, AT_ONCE):
        _run(each)


def _run(call: Linear) -> None:
    n, k, bits, tokens, device = call.n, call.k, call.bits, call.tokens, call.out.device
    count = next(size for size in CLASSES if size >= tokens)
    chosen = cut(bits, count)
    across, groups = -(-k // UNIT), -(-n // chosen.group)
    blocks = chosen.blocks(n, k, build.device(device.index).sms)
    operands, sums = across * UNIT * count * 2, (blocks + groups) * chosen.group * count * 4
    space = torch.empty(operands + sums + 8 * count, dtype=torch.uint8, device=device)
    at = space.data_ptr()
    turn, product, end = KERNELS.functions
    launch(
        KERNELS, {"BITS": bits, "TOKENS": count, "HALF": int(call.half)} | chosen.defines | call.defines,
        Launch((tokens, 1, 1), TURN_WARPS * 32, _turn_shared(k), function=turn),
        Launch((blocks, 1, 1), chosen.warps * 32, STAGES * count * UNIT * 2, function=product),
        Launch((-(-n // ROWS), -(-tokens // 8), 1), 256, 8 * PITCH * 4, function=end),
        **call.arguments, codes=call.codes, operands=at, sums=at + operands, scales=at + operands + sums, n=n, k=k,
        inverse_k=1 / k, blocks=blocks, silu=int(call.silu), wide=int(call.wide),
    )  # fmt: skip
