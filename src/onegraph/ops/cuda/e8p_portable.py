"""E8P linear for 1 to 64 tokens, 16 at once, on every GPU since Ampere: what `e8p_portable.cu` adds to
`rotated_portable.py`."""

from dataclasses import dataclass

from onegraph.ops.cuda import build, rotated_portable
from onegraph.ops.cuda.e8p_common import SLOT, Linear
from onegraph.ops.cuda.rotated_portable import AT_ONCE, MAX_N, MAX_TOKENS, PortableTiling

# More than these are slower: each is a copy of the loop, which the first turn has to fetch.
AHEAD = 2
AHEAD_AT_ONCE = {2: 3, 3: 2, 4: 1}  # of AT_ONCE tokens, by bits
TABLES = {2: 65536, 3: 65536 + 16384, 4: 65536}  # bytes that codes are decoded with, in shared memory
ISSUE = {2: 129, 3: 223, 4: 240}


@dataclass(frozen=True, order=True)
class E8PTiling(PortableTiling):
    kept = 512
    alone_factor = 3.5

    @classmethod
    def aheads(cls, bits: int, count: int) -> tuple[int, ...]:
        return tuple(range(AHEAD_AT_ONCE[bits] if count == AT_ONCE else AHEAD, 0, -1))

    def tables(self, bits: int) -> int:
        return TABLES[bits]

    def slot(self, bits: int) -> int:
        return SLOT[bits]

    def issue(self, bits: int) -> int:
        return ISSUE[bits] + 15 * (1 if bits == 2 else 2) * (self.tokens // 4)


KERNELS = build.Source(
    "e8p_portable",
    ops=("e8p_linear", "e8p_chain"),  # whose linears are launches of their own without clusters
    functions=("e8p_portable", "e8p_portable_turn"),
    arguments=build.Arguments(
        pointers=("x", "codes", "residual", "codebook", "in_scale", "out_scale", "bias", "add", "y", "kept", "scales",
                  "squares", "sums", "arrived"),
        floats=("norm", "eps", "inverse_k"),
        ints=("tokens",),
    ),
    capabilities=build.PORTABLE,
    example=E8PTiling(4, 4, True, 33, 2, 1, 8, 2, 8).defines(4096, 4096, 2, False, (True, False, True, True, False))
    | {"START": 0},
    families=("portable",),
    shared=build.PORTABLE_SHARED,
    otherwise="another kernel runs 1 to 64 tokens of an E8P linear",
)  # fmt: skip


def supports_shape(tokens: int, n: int) -> bool:
    """Whether this kernel computes a shape that `e8p.supports_shape` allows."""
    return tokens <= MAX_TOKENS and n <= MAX_N


def run(call: Linear) -> None:
    """`call`, whose shape `supports_shape` allows."""
    rotated_portable.run(KERNELS, E8PTiling, call, **call.stages, codebook=call.codebook)
