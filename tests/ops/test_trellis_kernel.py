"""The trellis linear on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`), and how it is cut. What this
proves and what it cannot, `test_e8p_portable.py` says."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernel_table
from h200 import H200
from on_cpu import host_lines
from onegraph.ops.cuda import build, trellis, trellis_batch, trellis_dequantize, trellis_experts, trellis_portable
from onegraph.ops.trellis_experts import trellis_experts as trellis_experts_op
from test_e8p_build import SHAPES

HERE = Path(__file__).parent
SOURCES = (
    "trellis_portable.cu", "trellis_batch.cu", "trellis_dequantize.cu", "trellis_experts.cu", "trellis_product.cuh",
    "trellis_decode.cuh", "rotated_portable.cuh", "rotated_common.cuh", "experts_common.cuh", "routes.cuh",
)  # fmt: skip
CARDS = [H200, *(replace(H200, sms=sms, shared=99 << 10, clusters=(sms,) + (0,) * 15) for sms in (20, 82, 128))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_case_is_right_in_any_order_of_blocks(tmp_path: Path) -> None:
    cuda, own = trellis_portable.KERNELS.path.parent, HERE / "trellis_on_cpu"
    for file in (*(cuda / name for name in SOURCES), own / "ptx.cuh", own / "run.cpp"):
        shutil.copy(file, tmp_path)
    shutil.copy(HERE / "e8p_portable_on_cpu" / "ptx.cuh", tmp_path / "portable.cuh")
    shutil.copy(HERE / "e8p_experts_on_cpu" / "ptx.cuh", tmp_path / "experts.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", tmp_path / "cpu.cuh")
    shutil.copy(HERE / "int4_on_cpu" / "nvfp4_common.cuh", tmp_path / "int4.cuh")
    lines = host_lines(own / "host.py", tmp_path)
    # One has no token, one a width of 32.
    assert sum("experts" in line for line in lines) == len(trellis_experts_op.cases) - 2
    assert sum("crowded" in line for line in lines) == 3
    assert sum("apart" in line for line in lines) == 2
    lines = [line for line in lines if "experts" not in line]
    for kind in ("tokens", "dense"):
        assert {line.split()[0] for line in lines if kind in line} == set("12345678")
        assert {line.split("code ")[1][0] for line in lines if kind in line} == set("0123")


@pytest.mark.parametrize("device", CARDS, ids=lambda device: f"{device.sms}")
def test_every_plan_fits_and_covers_its_matrix(device: build.Device) -> None:
    for n, k in SHAPES:
        for bits in (1, 2, 4, 5, 8):
            for tokens in (1, 2, 5, 9, 16):
                plan = trellis_portable.TrellisTiling.plan(n, k, bits, tokens, device)
                assert plan.tokens >= tokens
                assert plan.shared(bits) <= build.PORTABLE_SHARED
                assert (plan.parts - 1) * plan.across < -(-k // 256) <= plan.parts * plan.across
                assert plan.most(n) * plan.strips >= n // 16
                step = plan.ahead * plan.down
                assert plan.hold >= plan.most(n) or plan.hold % step == 0 < plan.hold
                assert not plan.whole or plan.hold >= plan.most(n) or plan.hold % 8 == 0
                most = trellis_portable.TrellisTiling.plan(n, k, bits, 16, device)
                like = trellis_portable.TrellisTiling.like_most(n, k, bits, tokens, device)
                assert replace(like, tokens=16, as_bytes=True) == most
                assert not like.by_bytes


MODELS = {"qwen3": (8, 128, 2048, 768), "mixtral": (2, 8, 4096, 14336), "gpt-oss": (4, 32, 2880, 2880)}


@pytest.mark.parametrize("device", CARDS, ids=lambda device: f"{device.sms}")
@pytest.mark.parametrize("model", MODELS)
def test_experts_have_a_plan_that_fits_and_chunks_for_every_route(model: str, device: build.Device) -> None:
    top_k, experts, dim, wide = MODELS[model]
    for tokens in (1, 2, 4, 5, 8, 16, trellis_experts.MAX_PAIRS // top_k):
        chunk, chunks = (of(tokens, top_k, experts) for of in (trellis_experts.chunk_of, trellis_experts.chunks_of))
        # All that a token chose one expert, or all tokens the same ones, or nobody shares.
        for chosen in ([[0] * top_k] * tokens, [list(range(top_k))] * tokens):
            keys = Counter((expert, row[:i].count(expert)) for row in chosen for i, expert in enumerate(row))
            assert sum(-(-count // chunk) for count in keys.values()) <= chunks
        assert min(tokens * top_k, experts) <= chunks
        for bits in (2, 4, 7):
            for n, k in ((2 * wide, dim), (dim, wide)):
                busy = min(chunks, max(tokens * top_k // chunk, experts))
                plan = trellis_experts.tiling(n, k, bits, chunk, chunks, busy, device)
                assert plan is not None, (tokens, bits, n, k)
                assert plan.turns
                assert plan.tokens == chunk
                assert plan.shared(bits) + (trellis_experts.ROUTES if chunk > 1 else 0) <= build.PORTABLE_SHARED
                assert plan.whole or chunks * -(-n // 128) <= trellis_experts.ARRIVED.size
                assert plan.most(n) * plan.strips >= n // 16


@pytest.mark.parametrize("chunk", [1, 4, 8])
@pytest.mark.parametrize(("bits", "code"), [(2, 0), (4, 0), (7, 0), (4, 2)])
def test_no_expert_kernel_spills(bits: int, code: int, chunk: int) -> None:
    for source, n, k in ((0, 1536, 2048), (1, 2048, 768)):
        plan = trellis_experts.tiling(n, k, bits, chunk, 32, 32, CARDS[2])
        assert plan is not None
        made = plan.defines(n, k, bits, False, (False, False, False, False, True))
        found = kernel_table.usage(
            trellis_experts.KERNELS, (8, 6), made | {"CODE": code, "SOURCE": source, "HALVES": 1, "GELU": 0}
        )
        assert found.spilled == 0
        assert found.shared <= trellis_experts.ROUTES
        assert found.registers * 32 * plan.warps <= 65536


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("bits", "code"), [(2, 0), (3, 0), (4, 0), (7, 0), (3, 1), (4, 2), (6, 3)])
def test_nothing_spills(bits: int, code: int, tokens: int) -> None:
    plan = trellis_portable.TrellisTiling.plan(14336, 4096, bits, tokens, CARDS[2])
    made = plan.defines(14336, 4096, bits, False, (True, False, False, True, False)) | {"CODE": code}
    found = kernel_table.usage(trellis_portable.KERNELS, (8, 6), made)
    assert (found.spilled, found.shared) == (0, 0)
    assert found.registers * 32 * plan.warps <= 65536
    if tokens == 1:
        assert (
            kernel_table.usage(trellis_dequantize.KERNEL, (8, 6), {"BITS": bits, "HALF": 0, "CODE": code}).spilled == 0
        )


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
@pytest.mark.parametrize(("bits", "tokens"), [(2, 16), (3, 32), (4, 32), (2, 48), (3, 64), (4, 64), (8, 16), (8, 64)])
def test_nothing_spills_in_a_batch(bits: int, tokens: int, capability: tuple[int, int]) -> None:
    cut = trellis_batch.cut(bits, tokens)
    made = {"BITS": bits, "TOKENS": tokens, "HALF": 0, "CODE": 0} | cut.defines
    found = kernel_table.usage(trellis_batch.KERNELS, capability, made)
    assert (found.spilled, found.shared) == (0, 0)
    assert cut.per_sm * cut.warps * 32 * found.registers <= 65536


def test_each_number_of_tokens_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.Source, "is_built", lambda self, device: True)

    def chosen(tokens: int, k: int = 512, steady: bool = False) -> object:
        return trellis.choose(tokens, 256, k, torch.bfloat16, 0, steady=steady)

    few, batch, dense = trellis_portable.run, trellis_batch.run, trellis_dequantize.run
    assert [chosen(tokens) for tokens in (1, trellis.FEW, trellis.FEW + 1, 128, 129)] == [few, few, batch, batch, dense]
    assert [chosen(tokens, steady=True) for tokens in (1, 16)] == [few, few]
    assert chosen(64, k=1 << 16) is few  # its activations would not fit into shared memory
