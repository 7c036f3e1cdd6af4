"""What stands around the CUDA E8P kernels and needs no GPU: tables, plans, constants, kernels that cannot be built."""

import contextlib
import ctypes
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernel_table
from h200 import H200
from kernel_family import forget as forget_kernels
from onegraph.formats.e8p import codebook
from onegraph.ops import family
from onegraph.ops.cuda import (
    build,
    e8p_batch,
    e8p_common,
    e8p_decode,
    e8p_dequantize,
    e8p_portable,
    e8p_prefill,
    rotated_portable,
)
from onegraph.ops.cuda import e8p as cuda_e8p
from onegraph.ops.e8p import e8p_decode as decode_op

# (n, k): whole tiles and slices, tails on either side, a vocabulary
SHAPES = [
    (128, 256),
    (64, 64),
    (576, 576),
    (192, 1536),
    (1536, 576),
    (4096, 4096),
    (512, 11008),
    (320, 4160),
    (576, 192),
]
SHAPES += [(14336, 4096), (4096, 14336), (128256, 4096), (28672, 8192), (64, 32768)]


def test_the_tables_decode_every_code() -> None:
    """A word is the XOR of two lookups, index byte and sign byte, each word 32 times; its nibbles are (a + 15) / 2."""
    runs = e8p_decode.tables(codebook()).view(torch.int32).view(-1, 32).long() & 0xFFFFFFFF
    assert (runs == runs[:, :1]).all()
    words = runs[:, 0]
    nibble = torch.tensor([0, 8, 16, 24, 4, 12, 20, 28])  # of column j
    codes = torch.arange(65536)
    word = words[(codes >> 8) * 2] ^ words[(codes & 255) * 2 + 1]
    decoded = decode_op.reference(codes.to(torch.int16)[:, None], None, codebook(), 2)
    assert torch.equal(2 * (word[:, None] >> nibble & 15) - 15, decoded.long())
    assert torch.equal((words[512:, None] >> nibble & 15) - 8, codebook()[256:].long())


def test_tables_of_another_codebook_are_refused() -> None:
    with pytest.raises(ValueError, match="not the one of E8P"):
        e8p_decode.tables(torch.zeros(512, 8, dtype=torch.int8))


def test_tables_stay_on_the_gpu_that_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the codebook and stored once by the driver, whose calls are stood in for by host memory."""
    memory: list[Any] = []
    ended: list[int] = []

    class Driver:
        @staticmethod
        def cuMemAlloc(size: int) -> tuple[int, int]:
            memory.append(ctypes.create_string_buffer(size))
            return 0, ctypes.addressof(memory[-1])

        @staticmethod
        def cuMemcpyHtoD(to: int, source: int, size: int) -> tuple[int]:
            ctypes.memmove(to, source, size)
            return (0,)

        cuMemcpyDtoH = cuMemcpyHtoD

        @staticmethod
        def cuStreamSynchronize(stream: int) -> tuple[int]:
            ended.append(stream)
            return (0,)

    monkeypatch.setattr(build, "bindings", lambda: (Driver, None))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(e8p_decode, "_TABLES", {})
    book = codebook()
    e8p_decode.resident_tables(book)
    e8p_decode.resident_tables(book.clone())
    assert {None: ctypes.addressof(memory[0])} == e8p_decode._TABLES  # a CPU has no index
    assert len(memory) == 1
    assert ended == [0]
    assert bytes(memory[0]) == e8p_decode.tables(book).numpy().tobytes()


KERNELS = {"decode": e8p_decode, "batch": e8p_batch, "prefill": e8p_prefill, "dequantize": e8p_dequantize}
KERNELS |= {"portable": e8p_portable}


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    forget_kernels()
    yield
    forget_kernels()


@pytest.mark.usefixtures("forget")
def test_without_a_compiler_triton_runs_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise build.BuildError("no NVRTC here")

    monkeypatch.setattr(build, "load", refuse)
    with pytest.warns(UserWarning, match="no NVRTC here") as told:
        assert cuda_e8p.choose(1, 4096, 4096, 2, 0) is None
    assert [str(each.message).split()[0] for each in told] == ["e8p_decode.cu", "e8p_portable.cu"]
    assert "another kernel runs 1 to 64 tokens" in str(told[1].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_e8p.choose(4, 4096, 4096, 2, 0) is None
    with pytest.warns(UserWarning, match="no NVRTC here") as told:
        assert cuda_e8p.choose(64, 4096, 4096, 2, 0) is None
    assert [str(each.message).split()[0] for each in told] == ["e8p_batch.cu", "e8p_prefill.cu", "e8p_dequantize.cu"]


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("missing", "ran"),
    [
        ("", "decode decode batch batch batch prefill prefill dequantize portable"),
        ("batch", "decode decode portable portable portable prefill prefill dequantize portable"),
        ("batch portable", "decode decode prefill prefill prefill prefill prefill dequantize prefill"),
        ("batch prefill portable", f"decode decode{' dequantize' * 7}"),
        ("decode", "portable batch batch batch batch prefill prefill dequantize portable"),
        ("decode portable", "- batch batch batch batch prefill prefill dequantize prefill"),
        ("prefill dequantize", "decode decode batch batch batch - - - portable"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot be built")
def test_what_cannot_be_built_falls_to_the_next(missing: str, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1, 8, 9, 16, 17, 65, 1279 and 1280 tokens; and at 9 of 3 bits with odd rows of the residual."""

    def load(source: build.Source, *_: object) -> None:
        if source.path.stem.removeprefix("e8p_") in missing.split():
            raise build.BuildError("not here")

    monkeypatch.setattr(build, "load", load)
    assert _chosen() == ran


def _chosen() -> str:
    names = {module.run: name for name, module in KERNELS.items()} | {None: "-"}
    found = [cuda_e8p.choose(tokens, 4096, 4096, 2, 0) for tokens in (1, 8, 9, 16, 17, 65, 1279, 1280)]
    found.append(cuda_e8p.choose(9, 576, 576, 3, 0))
    return " ".join(names[launch] for launch in found)


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("forced", "capability", "ran"),
    [
        (None, (8, 9), "portable portable portable portable portable dequantize dequantize dequantize portable"),
        (None, (12, 0), "portable portable portable portable portable dequantize dequantize dequantize portable"),
        (None, (10, 0), "decode decode portable portable portable dequantize dequantize dequantize portable"),
        ("portable", (9, 0), "portable portable portable portable portable dequantize dequantize dequantize portable"),
        ("hopper", (9, 0), "decode decode batch batch batch prefill prefill dequantize prefill"),
        ("hopper", (8, 9), "- - - - - - - - -"),
        ("triton", (9, 0), "- - - - - - - - -"),
    ],
)
def test_a_family_is_what_the_gpu_has_or_what_is_forced(
    forced: str | None, capability: tuple[int, int], ran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that Hopper's kernels are not written for warns where no other kernel here is in their place."""
    monkeypatch.setattr(family, "FORCED", forced)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def load(source: build.Source, *_: object) -> None:
        if why := source.unavailable_reason(capability):
            raise build.BuildError(why)

    monkeypatch.setattr(build, "load", load)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert _chosen() == ran
    kept_back = {str(each.message).split()[0] for each in told}
    if forced == "hopper" and capability != (9, 0):
        assert kept_back == {"e8p_decode.cu", "e8p_batch.cu", "e8p_prefill.cu"}
    else:
        assert not kept_back


def test_a_gpu_without_wgmma_keeps_what_it_can_have() -> None:
    """Compute capability 10.0: the sources say it, tests/ops/test_kernel_sources.py that they are right."""
    had = {name for name, module in KERNELS.items() for each in [vars(module)] if (10, 0) in _source(each).capabilities}
    assert had == {"decode", "dequantize", "portable"}


def _source(module: dict[str, Any]) -> build.Source:
    return next(each for each in module.values() if isinstance(each, build.Source))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8])
def test_plan_covers_every_slice_once(shape: tuple[int, int], bits: int, tokens: int) -> None:
    n, k = shape
    plan = e8p_decode.plan(n, k, bits, tokens, H200)
    rows = plan.blocks * e8p_common.ROWS
    assert plan.tiles * rows >= n > (plan.tiles - 1) * rows
    owned = [
        at
        for rank in range(plan.cluster)
        for warp in range(plan.across)
        for at in range(rank * plan.per_block + warp, min((rank + 1) * plan.per_block, plan.slices), plan.across)
    ]
    assert sorted(owned) == list(range(-(-k // e8p_common.SLICE)))
    assert plan.warps <= e8p_decode.WARPS
    assert 32 * plan.warps <= plan.most_threads
    assert (plan.cluster - 1) * plan.per_block < plan.slices  # each block has a slice, so its sums are written
    assert plan.shared(bits, tokens) <= H200.shared


# The linears of a layer of Llama-3-8B and of SmolLM2-135M, and their heads, as one token was measured on an H200, 4 and
# 8 on an H100 (docs/log.md). (n, k, tokens): tiles, cluster, blocks, across, down and ahead at 2, 3 and 4 bits.
MEASURED = {
    (6144, 4096, 1): [(48, 2, 1, 8, 2, 4), (48, 2, 1, 8, 2, 2), (48, 2, 1, 8, 2, 2)],
    (6144, 4096, 4): [(24, 4, 2, 4, 4, 4), (24, 4, 2, 4, 4, 2), (24, 4, 2, 4, 4, 2)],
    (6144, 4096, 8): [(24, 4, 2, 4, 4, 2), (24, 4, 2, 4, 4, 2), (24, 4, 2, 4, 4, 2)],
    (4096, 4096, 1): [(32, 3, 1, 6, 2, 4), (32, 3, 1, 6, 2, 2), (32, 3, 1, 6, 2, 2)],
    (4096, 4096, 4): [(32, 3, 1, 6, 2, 4), (32, 3, 1, 6, 2, 2), (32, 3, 1, 6, 2, 2)],
    (4096, 4096, 8): [(16, 6, 2, 3, 4, 2), (16, 6, 2, 3, 4, 2), (16, 6, 2, 3, 4, 2)],
    (28672, 4096, 1): [(112, 1, 2, 16, 1, 4), (112, 1, 2, 16, 1, 2), (112, 1, 2, 16, 1, 2)],
    (28672, 4096, 4): [(112, 1, 2, 16, 1, 4), (112, 1, 2, 16, 1, 2), (112, 1, 2, 16, 1, 2)],
    (14336, 4096, 4): [(56, 2, 2, 8, 2, 4), (56, 2, 2, 8, 2, 2), (56, 2, 2, 8, 2, 2)],
    (14336, 4096, 8): [(28, 4, 4, 4, 4, 2), (56, 2, 2, 8, 2, 2), (28, 4, 4, 4, 4, 2)],
    (4096, 14336, 1): [(32, 3, 1, 19, 1, 4), (32, 3, 1, 19, 1, 2), (32, 3, 1, 19, 1, 2)],
    (4096, 14336, 4): [(16, 6, 2, 10, 2, 4), (16, 6, 2, 10, 2, 2), (16, 6, 2, 10, 2, 2)],
    (4096, 14336, 8): [(16, 6, 2, 10, 2, 2), (16, 6, 2, 10, 2, 1), (16, 6, 2, 10, 2, 1)],
    (128256, 4096, 1): [(126, 1, 8, 16, 1, 4), (126, 1, 8, 16, 1, 2), (126, 1, 8, 16, 1, 2)],
    (128256, 4096, 4): [(126, 1, 8, 6, 2, 2), (1002, 1, 1, 16, 1, 2), (126, 1, 8, 6, 2, 1)],
    (960, 576, 1): [(8, 1, 1, 3, 4, 2), (8, 1, 1, 3, 4, 2), (8, 1, 1, 3, 4, 2)],
    (960, 576, 4): [(8, 3, 1, 1, 8, 1), (8, 3, 1, 1, 8, 1), (8, 3, 1, 1, 8, 1)],
    (960, 576, 8): [(8, 3, 1, 1, 8, 1), (8, 3, 1, 1, 8, 1), (8, 3, 1, 1, 8, 1)],
    (576, 576, 1): [(5, 1, 1, 3, 4, 2), (5, 1, 1, 3, 4, 2), (5, 1, 1, 3, 4, 2)],
    (576, 576, 4): [(5, 3, 1, 1, 8, 1), (5, 3, 1, 1, 8, 1), (5, 3, 1, 1, 8, 1)],
    (576, 576, 8): [(5, 3, 1, 1, 8, 1), (5, 3, 1, 1, 8, 1), (5, 3, 1, 1, 8, 1)],
    (3072, 576, 1): [(24, 1, 1, 3, 4, 2), (24, 1, 1, 3, 4, 2), (24, 1, 1, 3, 4, 2)],
    (3072, 576, 4): [(24, 3, 1, 1, 8, 1), (24, 3, 1, 1, 8, 1), (24, 3, 1, 1, 8, 1)],
    (3072, 576, 8): [(24, 3, 1, 1, 8, 1), (24, 3, 1, 1, 8, 1), (24, 3, 1, 1, 8, 1)],
    (576, 1536, 1): [(5, 1, 1, 6, 2, 4), (5, 1, 1, 6, 2, 2), (5, 1, 1, 6, 2, 2)],
    (576, 1536, 4): [(5, 6, 1, 1, 8, 1), (5, 6, 1, 1, 8, 1), (5, 6, 1, 1, 8, 1)],
    (576, 1536, 8): [(5, 6, 1, 1, 8, 1), (5, 6, 1, 1, 8, 1), (5, 6, 1, 1, 8, 1)],
    (49152, 576, 1): [(128, 1, 3, 3, 4, 4), (128, 1, 3, 3, 4, 2), (128, 1, 3, 3, 4, 2)],
    (49152, 576, 4): [(128, 1, 3, 3, 4, 4), (128, 1, 3, 3, 4, 2), (128, 1, 3, 3, 4, 2)],
}


@pytest.mark.parametrize(("n", "k", "tokens"), MEASURED)
def test_plans_that_were_measured(n: int, k: int, tokens: int) -> None:
    plans = [e8p_decode.plan(n, k, bits, tokens, H200) for bits in (2, 3, 4)]
    found = [(p.tiles, p.cluster, p.blocks, p.across, p.down, p.ahead) for p in plans]
    assert found == MEASURED[n, k, tokens]


# The same from 5 tokens on, where clusters do not meet in memory: of 5 to 32 tokens, of 33 to 64: (cluster, slices of a
# block).
BATCH = {
    (6144, 4096): ((4, 4), (2, 8)),
    (4096, 4096): ((6, 3), (3, 6)),
    (28672, 4096): ((1, 16), (1, 16)),
    (128256, 4096): ((1, 16), (1, 16)),
    (960, 576): ((3, 1), (3, 1)),
    (576, 576): ((3, 1), (3, 1)),
    (3072, 576): ((3, 1), (3, 1)),
    (576, 1536): ((6, 1), (6, 1)),
    (49152, 576): ((1, 3), (1, 3)),
}


@pytest.mark.parametrize("shape", BATCH)
def test_plans_of_a_batch_that_were_measured(shape: tuple[int, int]) -> None:
    for bits, tokens in product((2, 3, 4), (5, 8, 16, 32, 33, 64)):
        plan = e8p_batch.plan(*shape, bits, tokens, H200)
        assert (plan.cluster, plan.per_block) == BATCH[shape][tokens > 32]
        assert plan.parts == 1


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_clusters_meet_in_memory_where_that_measured_best(bits: int) -> None:
    """14336 -> 4096: 128 SMs for 96. But for 32 tokens at 2 bits."""
    of_32 = (6, 1, 10) if bits == 2 else (2, 4, 7)
    for tokens, cut in ((5, (2, 4, 7)), (16, (2, 4, 7)), (32, of_32), (64, (2, 2, 14))):
        plan = e8p_batch.plan(4096, 14336, bits, tokens, H200)
        assert (plan.cluster, plan.parts, plan.per_block) == cut


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [5, 16, 32, 64])
def test_plan_of_a_batch_covers_every_slice_once(shape: tuple[int, int], bits: int, tokens: int) -> None:
    n, k = shape
    plan = e8p_batch.plan(n, k, bits, tokens, H200)
    assert plan.tokens >= tokens
    assert H200.shared // 2 < plan.shared(bits) <= H200.shared  # one block an SM, as `Plan.cost` has it
    assert plan.tiles * plan.rows >= n > (plan.tiles - 1) * plan.rows
    slices = -(-k // e8p_common.SLICE)
    assert (plan.cuts - 1) * plan.per_block < slices <= plan.cuts * plan.per_block  # each is owned
    assert plan.rotating <= 512
    assert plan.parts == 1 or plan.tiles * plan.cuts <= H200.sms


@pytest.mark.parametrize(
    ("n", "k", "tokens", "wanted"),
    [
        (4096, 4096, 17, (32, 4, 1)),  # (tokens of a tile, splits, blocks of a cluster)
        (4096, 4096, 128, (128, 4, 1)),
        (4096, 4096, 256, (128, 2, 2)),  # 32 tiles of 256 would take four splits
        (14336, 4096, 256, (256, 1, 1)),
        (6144, 4096, 256, (256, 2, 2)),
        (4096, 4096, 512, (256, 2, 2)),
        (4096, 14336, 512, (256, 2, 2)),
        (14336, 4096, 512, (256, 1, 1)),
        (1024, 4096, 512, (128, 4, 1)),
        (4096, 4096, 640, (256, 1, 1)),
    ],
)
def test_tiles_of_many_tokens(n: int, k: int, tokens: int, wanted: tuple[int, int, int]) -> None:
    plan = e8p_prefill.plan(n, k, tokens, H200)
    assert (plan.tokens, plan.splits, plan.join) == wanted


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_shared_memory_of_many_tokens(bits: int) -> None:
    """No plan needs more than a block can have; two splits are no pair where the GPU cannot hold all pairs."""
    plans = {e8p_prefill.plan(n, k, tokens, H200) for n, k in SHAPES if k <= 32768 for tokens in range(9, 1280)}
    assert {(plan.tokens, plan.join) for plan in plans} >= {(64, 1), (128, 2), (256, 1), (256, 2)}
    assert all(plan.shared(bits) <= H200.shared for plan in plans)
    few = replace(H200, clusters=(132, 63, *H200.clusters[2:]))
    assert e8p_prefill.plan(4096, 4096, 512, few).join == 1


@pytest.mark.parametrize("join", [1, 2])
@pytest.mark.parametrize("tile", [(32, 12), (128, 8), (256, 4)], ids=str)
def test_shared_memory_of_the_source(tile: tuple[int, int], join: int) -> None:
    """What a plan needs ends behind the barriers, which stand where the source says."""
    for bits in (2, 3):
        plan = e8p_prefill.PrefillTiling(*tile, 8, 2, join)
        checks = f"static_assert(END_BYTES + 64 == {plan.shared(bits)} && PITCH == {e8p_prefill.PITCH});"
        kernel_table.accepts(e8p_prefill.KERNELS, (9, 0), e8p_prefill.defines(plan, 4096, bits, False), checks)


def test_constants_agree_with_the_source() -> None:
    text = e8p_decode.KERNEL.path.with_name("e8p_common.cuh").read_text()
    for name in ("SLICE", "ROWS"):
        shared = e8p_decode.KERNEL.path.with_name("rotated_common.cuh").read_text()
        assert int(re.search(rf"constexpr int {name} = (\d+);", shared)[1]) == getattr(e8p_common, name)
    tables = re.search(r"TABLE_BYTES = (\d+) \+ \(BITS == 3 \? (\d+) \* E81B_RUN : 0\);", text)
    first, words = map(int, tables.groups())
    for module, source in ((e8p_common, text), (e8p_portable, e8p_portable.KERNELS.path.read_text())):
        run = int(re.search(r"#define E81B_RUN (\d+)", source)[1])
        assert {2: first, 3: first + words * run, 4: first} == module.TABLES
    codes = e8p_decode.KERNEL.path.with_name("e8p_codes.cuh").read_text()
    slot = re.search(
        r"constexpr int RESIDUAL = BITS == 2 \? (\d+) : BITS == 3 \? (\d+) : (\d+), SLOT = (\d+) \+ RESIDUAL;", codes
    )
    *residual, first = map(int, slot.groups())
    assert {2 + i: first + size for i, size in enumerate(residual)} == e8p_common.SLOT
    batch = e8p_batch.KERNELS.path.read_text()
    slot = re.search(r"constexpr int SLOT = BITS == 2 \? (\d+) : BITS == 3 \? (\d+) : (\d+);", batch)
    assert {2 + i: int(size) for i, size in enumerate(slot.groups())} == e8p_common.SLOT
    fields = re.search(r"Shared \{.*?\n(.*?)\};", e8p_decode.KERNEL.path.read_text(), re.DOTALL)[1]
    sizes = [
        {"float": 4, "u64": 8}[kind] * math.prod(int(size) for size in re.findall(r"\[(\d+)\]", shape))
        for kind, shape in re.findall(r"(float|u64) \w+((?:\[\d+\])+);", fields)
    ]
    assert -(-sum(sizes) // 128) * 128 == e8p_decode.SHARED_STRUCT


@pytest.mark.parametrize("module", [e8p_decode, e8p_batch, e8p_portable])
def test_a_source_makes_its_shape_of_what_it_is_given(module: Any) -> None:
    source = _source(vars(module))
    text = "".join(source.path.with_name(name).read_text() for name in (source.path.name, "rotated_portable.cuh"))
    shape = re.search(r"\nstruct Shape[^{]*\{\n  static(.*?)\n\};", text, re.DOTALL)[1]
    elsewhere = {"SLICE", "ROWS", "DOWN", "TILE_ROWS"}
    names = rotated_portable.SHAPE if module is e8p_portable else module.SHAPE
    assert set(re.findall(r"\b[A-Z_]{1,}\b", re.sub("//.*", "", shape))) - elsewhere == set(names)
    assert set(names) <= set(source.example)


def test_importing_touches_no_cuda() -> None:
    code = (
        "import sys, torch; brought = 'cuda' in sys.modules; import onegraph.ops.e8p; "
        "assert ('cuda' in sys.modules) == brought and 'onegraph.ops.cuda' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
