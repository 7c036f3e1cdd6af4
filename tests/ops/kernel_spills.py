"""What a thread of the CUDA sources spills, where it does: all of it in forms that Hopper and 10.x run.

Portable forms spill nothing. Hopper's are left as they are, since every figure of theirs in docs/ was measured with it:
another cut of registers is another kernel, to be timed on an H200 first. No card of 10.x has run any.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onegraph.ops.cuda import build, deepseek_hyper, deepseek_hyper_ranks, int4, nvfp4, nvfp4_one, stream
from onegraph.ops.cuda import turboquant_attention as turboquant

CARDS = build.CLUSTERS


@dataclass(frozen=True)
class Form:
    """Of a source what it is compiled with, and the bytes that a thread spills on each of `CARDS`."""

    source: build.Source
    name: str
    defines: Mapping[str, int]
    spilled: tuple[int, int, int]

    @property
    def cells(self) -> dict[tuple[int, int], int]:
        return dict(zip(CARDS, self.spilled, strict=True))


REASONS = {
    "deepseek_hyper": "448 threads, of columns of 7,168, leave 128 registers beside 96 numbers of fn",
    "deepseek_hyper_ranks": "448 threads, of columns of 7,168, leave 128 registers beside 96 numbers of fn",
    "int4_batch": "one block of 16 warps an SM leaves 128 registers, too few for the sums of 16 tokens beside the "
    "scales of many groups and the codes of two steps",
    "nvfp4": "one block of 16 warps an SM leaves 128 registers, too few for 16 tokens beside the codes of two steps",
    "nvfp4_one": "72 registers of a thread leave the launch that follows room on the same SM",
    "turboquant_attention": "two blocks of 8 warps an SM leave 128 registers, too few for queries of 128 numbers and "
    "their sums beside the codes of a tile",
}


def _int4(group: int, tiles: int, *spilled: int) -> Form:
    defines = int4.KIND | {"GROUP": group, "FLOAT32": 0, "TILES": tiles, "DEPTH": 2}
    return Form(int4.BATCH, f"groups of {group}, {8 * tiles} tokens", defines, spilled)


def _nvfp4(half: bool, group: int, *spilled: int) -> Form:
    defines = stream.Variant(stream.LINEAR, 2).defines(2) | {"HALF": int(half), "GROUP": group, "FLOAT": 0}
    return Form(
        nvfp4.STREAM.source, f"16 tokens in {'float16' if half else 'bfloat16'}, groups of {group}", defines, spilled
    )


def _one(mode: int, name: str, depth: int, *spilled: int) -> Form:
    return Form(
        nvfp4_one.KERNEL,
        f"{name}, {depth} stages",
        nvfp4_one._defines(mode, False, depth, 16, edge=mode != stream.LINEAR, wide=False),
        spilled,
    )


def _turboquant(bits: int, rows: int, dtype: int, stages: int, *spilled: int) -> Form:
    defines = turboquant.AttentionTiling(128, bits, bits, rows, dtype, 1).defines(stages)
    return Form(turboquant.KERNELS, f"{bits} bits, {rows} queries, {stages} tiles under way", defines, spilled)


def _hyper(source: build.Source, *spilled: int) -> Form:
    return Form(source, "7,168 columns", {**source.example, "DIM": 7168}, spilled)


FORMS = (
    _hyper(deepseek_hyper.KERNEL, 4, 4, 4),
    _hyper(deepseek_hyper_ranks.KERNEL, 68, 56, 56),
    _int4(128, 2, 8, 16, 16),
    _int4(64, 2, 20, 12, 12),
    _int4(32, 2, 36, 56, 56),
    _int4(32, 1, 8, 0, 0),
    _nvfp4(False, 16, 24, 0, 0),
    _nvfp4(True, 16, 32, 12, 12),
    _nvfp4(False, 32, 32, 0, 0),
    _nvfp4(True, 32, 32, 0, 0),
    _one(stream.LINEAR, "a linear", 4, 0, 16, 0),
    _one(stream.GATE_UP, "gate and up of experts", 4, 4, 4, 4),
    _one(stream.GATE_UP, "gate and up of experts", 2, 4, 0, 0),
    _one(stream.DOWN, "down of experts", 4, 4, 0, 8),
    _one(stream.DOWN, "down of experts", 2, 4, 8, 8),
    _turboquant(4, 8, 0, 2, 8, 12, 24),
    _turboquant(4, 8, 0, 1, 72, 12, 12),
    _turboquant(4, 4, 0, 2, 12, 16, 16),
    _turboquant(3, 8, 1, 3, 8, 12, 12),
    _turboquant(3, 8, 1, 1, 8, 12, 12),
    _turboquant(3, 4, 0, 3, 144, 12, 12),
)


def of_example(source: build.Source, capability: tuple[int, int]) -> int:
    """Bytes that the form spills that stands in the table of docs/how-it-works/kernels.md."""
    return next(
        (form.cells.get(capability, 0) for form in FORMS if (form.source, form.defines) == (source, source.example)), 0
    )
