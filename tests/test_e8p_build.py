"""What stands around the CUDA E8P kernels and needs no GPU: tables, cuts, constants, a missing compiler."""

import contextlib
import ctypes
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onegraph.formats.e8p import codebook
from onegraph.ops.cuda import build, e8p_dense, e8p_few, e8p_many
from onegraph.ops.cuda import e8p as cuda_e8p
from onegraph.ops.e8p import e8p_decode

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
    runs = cuda_e8p.tables(codebook()).view(torch.int32).view(-1, 32).long() & 0xFFFFFFFF
    assert (runs == runs[:, :1]).all()
    words = runs[:, 0]
    nibble = torch.tensor([0, 8, 16, 24, 4, 12, 20, 28])  # of column j
    codes = torch.arange(65536)
    word = words[(codes >> 8) * 2] ^ words[(codes & 255) * 2 + 1]
    decoded = e8p_decode.reference(codes.to(torch.int16)[:, None], None, codebook(), 2)
    assert torch.equal(2 * (word[:, None] >> nibble & 15) - 15, decoded.long())
    assert torch.equal((words[512:, None] >> nibble & 15) - 8, codebook()[256:].long())


def test_tables_of_another_codebook_are_refused() -> None:
    with pytest.raises(ValueError, match="not the one of E8P"):
        cuda_e8p.tables(torch.zeros(512, 8, dtype=torch.int8))


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

    monkeypatch.setattr(build, "_bindings", lambda: (Driver, None))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cuda_e8p, "_TABLES", {})
    book = codebook()
    cuda_e8p._have_tables(book)
    cuda_e8p._have_tables(book.clone())
    assert {None: ctypes.addressof(memory[0])} == cuda_e8p._TABLES  # a CPU has no index
    assert len(memory) == 1
    assert ended == [0]
    assert bytes(memory[0]) == cuda_e8p.tables(book).numpy().tobytes()


def test_without_a_compiler_triton_runs_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise build.BuildError("no NVRTC here")

    monkeypatch.setattr(build, "load", refuse)
    cuda_e8p.available.cache_clear()
    cuda_e8p._kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no NVRTC here"):
            assert not cuda_e8p.available(0)
        assert not cuda_e8p.available(0)
    finally:
        cuda_e8p.available.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
def test_plan_covers_every_slice_once(shape: tuple[int, int], bits: int, tokens: int) -> None:
    n, k = shape
    cut = cuda_e8p.plan(n, k, bits, tokens, 132)
    rows = cut.blocks * cuda_e8p.ROWS
    assert cut.tiles * rows >= n > (cut.tiles - 1) * rows
    owned = [
        at
        for rank in range(cut.cluster)
        for warp in range(cut.across)
        for at in range(rank * cut.per_block + warp, min((rank + 1) * cut.per_block, cut.slices), cut.across)
    ]
    assert sorted(owned) == list(range(-(-k // cuda_e8p.SLICE)))
    assert cut.warps <= cuda_e8p.WARPS[cuda_e8p._pass(tokens)]
    assert 32 * cut.warps <= cut.most_threads
    assert (cut.cluster - 1) * cut.per_block < cut.slices  # each block has a slice, so its sums are written
    assert cut.shared(bits, tokens) <= cuda_e8p.SHARED_LIMIT


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k", "cluster"), [(6144, 4096, 2), (4096, 4096, 3), (28672, 4096, 1), (4096, 14336, 3)])
def test_plan_of_what_was_measured(n: int, k: int, cluster: int, bits: int) -> None:
    """One token in a layer of 8B: docs/log.md, run cutsatt-1."""
    assert cuda_e8p.plan(n, k, bits, 1, 132).cluster == cluster


ROOM = (132, 66, 39, 30, 22, 17, 15, 15)  # clusters of 1, 2, .. blocks that an H200 holds


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [5, 16, 32, 64])
def test_plan_for_few_tokens_covers_every_slice_once(shape: tuple[int, int], bits: int, tokens: int) -> None:
    n, k = shape
    form = e8p_few.form(bits, tokens)
    cut = e8p_few.plan(n, k, form.rows, ROOM)
    assert form.tokens >= tokens
    assert e8p_few.SHARED_LIMIT // 2 < form.shared(bits) <= e8p_few.SHARED_LIMIT  # one block an SM: `_room`
    assert cut.tiles * form.rows >= n > (cut.tiles - 1) * form.rows
    slices = -(-k // e8p_few.SLICE)
    assert (cut.cluster - 1) * cut.per_block < slices <= cut.cluster * cut.per_block  # each is owned


@pytest.mark.parametrize(
    ("n", "k", "tokens", "wanted"),
    [
        (4096, 4096, 17, 32),
        (4096, 4096, 128, 128),
        (4096, 4096, 256, 256),  # 64 tiles of 128 leave half of the SMs idle
        (4096, 4096, 512, 128),
        (4096, 14336, 512, 256),
        (4096, 4096, 640, 256),  # 160 tiles of 128 are two rounds
        (14336, 4096, 512, 256),
        (6144, 4096, 256, 256),
    ],
)
def test_tiles_of_many_tokens(n: int, k: int, tokens: int, wanted: int) -> None:
    assert e8p_many.tile(n, k, tokens, 132).tokens == wanted
    if wanted == 128 < tokens:
        assert e8p_many.splits(n, k, tokens, 132)[1] == 1


def test_constants_agree_with_the_source() -> None:
    text = cuda_e8p.SOURCE.with_name("e8p_common.cuh").read_text()
    for name in ("SLICE", "ROWS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", text)[1]) == getattr(cuda_e8p, name)
    ring = cuda_e8p.SOURCE.with_name("e8p_ring.cuh").read_text()
    slot = re.search(
        r"constexpr int RESIDUAL = BITS == 2 \? (\d+) : BITS == 3 \? (\d+) : (\d+), SLOT = (\d+) \+ RESIDUAL;", ring
    )
    *residual, first = map(int, slot.groups())
    assert {2 + i: first + size for i, size in enumerate(residual)} == cuda_e8p.SLOT
    few = e8p_few.SOURCE.read_text()
    slot = re.search(r"constexpr int SLOT = BITS == 2 \? (\d+) : BITS == 3 \? (\d+) : (\d+);", few)
    assert {2 + i: int(size) for i, size in enumerate(slot.groups())} == e8p_few.SLOT
    fields = re.search(r"Shared \{.*?\n(.*?)\};", cuda_e8p.SOURCE.read_text(), re.DOTALL)[1]
    sizes = [
        {"float": 4, "u64": 8}[kind] * math.prod(int(size) for size in re.findall(r"\[(\d+)\]", shape))
        for kind, shape in re.findall(r"(float|u64) \w+((?:\[\d+\])+);", fields)
    ]
    assert -(-sum(sizes) // 128) * 128 == cuda_e8p.SHARED_STRUCT


@pytest.mark.parametrize("name", ["e8p", "e8p_few", "e8p_many", "e8p_dense"])
def test_a_source_is_given_what_it_sets_when_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher defines the names that the head of the source tells, and no other."""
    defined: list[set[str]] = []
    monkeypatch.setattr(build, "load", lambda source, defines, *_: defined.append(set(defines)) or (None,) * 3)
    make = {
        "e8p": lambda: cuda_e8p._kernels.__wrapped__(2, 8, False, (4, 2, 512, 1), 1, (), 0),
        "e8p_few": lambda: e8p_few._kernels.__wrapped__(2, e8p_few.form(2, 16), False, (4096, 4096, 16, 1, 0, 0), 0),
        "e8p_many": lambda: e8p_many._kernels.__wrapped__(2, e8p_many.tile(128, 256, 17, 132), False, 2, 0),
        "e8p_dense": lambda: e8p_dense._kernel.__wrapped__(2, False, 0),
    }
    make[name]()
    text = cuda_e8p.SOURCE.with_name(f"{name}.cu").read_text().replace("\n//", "")
    told = re.search(r"Set when compiled:(.*)", text)[1]
    shape = set(e8p_few.KNOWN) if name == "e8p_few" else set()
    assert set(re.findall(r"\b[A-Z]{2,}\b(?= \(|,)", told)) == defined[0] - shape


@pytest.mark.parametrize("module", [cuda_e8p, e8p_few])
def test_a_source_makes_its_shape_of_what_it_is_given(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defined: list[dict[str, int]] = []
    monkeypatch.setattr(build, "load", lambda source, defines, *_: defined.append(dict(defines)) or (None,) * 2)
    known = tuple(range(len(module.KNOWN)))
    if module is cuda_e8p:
        module._kernels.__wrapped__(2, 1, False, (4, 2, 512, 1), 1, known, 0)
    else:
        module._kernels.__wrapped__(2, module.form(2, 16), False, known, 0)
    shape = re.search(r"\nstruct Shape[^{]*\{\n  static(.*?)\n\};", module.SOURCE.read_text(), re.DOTALL)[1]
    elsewhere = {"SLICE", "ROWS", "DOWN", "TILE_ROWS"}
    assert set(re.findall(r"\b[A-Z_]{1,}\b", re.sub("//.*", "", shape))) - elsewhere == set(module.KNOWN)
    assert dict(zip(module.KNOWN, known, strict=True)).items() <= defined[0].items()


def test_importing_touches_no_cuda() -> None:
    code = "import onegraph.ops.e8p, sys; assert 'cuda' not in sys.modules and 'onegraph.ops.cuda' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
