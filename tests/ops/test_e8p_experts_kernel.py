"""The CUDA kernels of experts in E8P on a CPU: their own source, each thread a fiber (`nvfp4_on_cpu`), and how they are
cut.

What this proves: every index, mask and copy, and the bits of decoding. What it cannot: that the GPU's instructions do
what `ptx.cuh` says, and that blocks of a cluster wait for each other; tests/ops/test_e8p_experts_gpu.py does.
"""

import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import kernel_table
from h200 import H200, PLAIN
from on_cpu import host_lines
from onegraph.ops.cuda import e8p_experts as kernels
from onegraph.ops.cuda.build import Device

HERE = Path(__file__).parent
SOURCES = (
    "e8p_experts.cu",
    "rotated_common.cuh",
    "experts_common.cuh",
    "e8p_common.cuh",
    "e8p_codes.cuh",
    "e8p_decode_product.cuh",
    "e8p_activations.cuh",
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("form", ["hopper", "portable"])
def test_every_case_is_right_through_all_its_launches(form: str, tmp_path: Path) -> None:
    cuda, own = kernels.KERNELS.path.parent, HERE / "e8p_experts_on_cpu"
    for file in (*(cuda / name for name in SOURCES), own / "ptx.cuh", own / "run.cpp"):
        shutil.copy(file, tmp_path)
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", tmp_path / "cpu.cuh")
    shutil.copy(HERE / "int4_on_cpu" / "nvfp4_common.cuh", tmp_path / "int4.cuh")
    lines = host_lines(own / "host.py", tmp_path, form)
    assert len(lines) == 20
    one = [line for line in lines if line.startswith(("1 tokens, 9", "1 tokens, 11"))]
    assert [line.count("product") + line.count("combine") for line in one] == [2 if form == "hopper" else 3] * 2
    launched = {re.sub(r".*16 ", "", line) for line in lines}
    assert launched == ({"product product"} if form == "hopper" else set()) | {
        "product product combine",
        "prepare product product combine",
        "prepare product prepare product combine",
    }


MODELS = {
    "qwen3": (8, 128, 2048, 768),
    "mixtral": (2, 8, 4096, 14336),
    "gpt-oss": (4, 32, 2880, 2880),
    "gemma-4": (8, 128, 2816, 704),
    "gemma-4 dense": (1, 1, 2816, 2112),
    "qwen3.5": (9, 257, 2048, 512),  # with the shared expert
    "qwen3-next": (11, 513, 2048, 512),
}


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", [H200, PLAIN], ids=["H200", "99 KB"])
def test_every_way_fits_and_covers_its_matrix(device: Device, model: str, bits: int) -> None:
    top_k, experts, dim, wide = MODELS[model]
    portable = device is PLAIN
    for tokens in range(1, kernels.MAX_TOKENS + 1):
        way = kernels.way(tokens, top_k, experts, dim, wide, bits, device, portable)
        assert way is not None
        for cut in (way.gate_up, way.down):
            assert cut.shared(bits, portable) <= device.shared
            assert not portable or cut.cluster == 1
            assert cut.warps <= kernels.WARPS
            assert cut.blocks * 8 % cut.down == 0
            assert cut.cluster <= kernels.CLUSTER
            assert cut.mode != kernels.SUMMED or (cut.slots - 1) * cut.each < top_k <= cut.slots * cut.each
            assert cut.parts * cut.slices * kernels.SLICE >= cut.k > (cut.parts - 1) * cut.slices * kernels.SLICE
            rows = cut.tiles * kernels.ROWS * (2 if cut.mode == kernels.GATED else cut.blocks)
            assert cut.n <= rows < cut.n + 256
        assert (way.down.mode == kernels.SUMMED) == (tokens == 1 and not portable)
        assert way.gate_up.early == (way.gate_up.source == kernels.PREPARED)


def test_one_token_fills_the_gpu() -> None:
    """Qwen3-30B-A3B: 8 experts of 6 tiles would leave most SMs idle."""
    for bits in (2, 3, 4):
        way = kernels.way(1, *MODELS["qwen3"], bits, H200)
        assert way is not None
        assert way.gate_up.tiles * way.gate_up.cluster * 8 >= 96
        assert way.down.tiles * way.down.cluster >= 120
        assert bits == 3 or way.down.tiles <= H200.at_once(way.down.cluster, way.down.per_sm)  # in one wave


@pytest.mark.parametrize(
    ("bits", "mode", "one", "source"), [*product((2, 4), (kernels.PLAIN, kernels.GATED), (False,), range(3))]
)
def test_every_kind_compiles(bits: int, mode: int, one: bool, source: int) -> None:
    way = kernels.way(64, *MODELS["qwen3"], bits, H200)
    assert way is not None
    cut = replace(way.gate_up, mode=mode, one=one, source=source, silu=source == 0, early=source != 1, depth=2)
    assert kernel_table.usage(kernels.KERNELS, (9, 0), cut.defines(bits, True)).registers <= kernel_table.REGISTERS
