"""What both kernels of a decode step's attention are compiled for and given."""

from dataclasses import asdict, dataclass

TILE = 16  # keys that a warp takes at a time, all in one page
POINTERS = (
    "qkv", "q_norm", "k_norm", "cos", "sin", "positions", "counts", "table", "keys", "values", "out", "sinks",
)  # fmt: skip


@dataclass(frozen=True)
class DecodeSplit:
    """What the kernel is compiled for: its defines, in lower case. Blocks have `warps` warps, and `size` of them share
    the keys of a (row, kv head) pair. `rope`: `dim`, or 0 where nothing rotates. `early`: the next launch is let go in
    the first line. Strides of the cache are in units of `dim`."""

    half: bool
    dim: int
    group: int
    page: int
    norm: bool
    rope: int
    early: bool
    warps: int
    size: int
    kv_heads: int
    window: int
    page_stride: int
    place_stride: int
    head_stride: int
    turn_stride: int

    @property
    def shared(self) -> int:
        """Bytes of `Shared` in the kernel."""
        sums, outputs = 2 * 4 * 8 * (self.warps + self.size), 4 * self.group * self.dim + 8
        return -(-(sums + outputs) // 128) * 128 + self.warps * 2 * TILE * 2 * self.dim

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in asdict(self).items()}
