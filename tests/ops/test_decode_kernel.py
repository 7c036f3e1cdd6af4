"""The attention of a decode step without clusters on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask and shuffle, and that the order of blocks changes no bit. What it cannot: that the
GPU's instructions do what `ptx.cuh` says, and that blocks which run at once see each other's parts; the tests of the op
marked gpu do.
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h200 import H200, PLAIN
from on_cpu import compile_run, launch_on_cpu
from onegraph.ops.calls import PagedDecode
from onegraph.ops.cuda import build, decode_attention, decode_portable
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.registry import OPS, reference_ops

HERE = Path(__file__).parent
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
counters = torch.zeros(decode_portable.MAX_GROUPS, dtype=torch.int32)


class Kernel:
    step = 1

    def __init__(self, run: Callable[..., None], size: int, most: int) -> None:
        self.run, self.size, self.most = run, size, most

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= self.most
        assert cluster == self.size
        self.run(ctypes.c_char_p(arguments), grid[0], threads, shared, Kernel.step)


class Arrived:
    @staticmethod
    def of(device: int | None) -> int:
        return counters.data_ptr()


def compiled(folder: Path, source: Path, portable: bool = True) -> Callable[..., dict[str, Kernel]]:
    """What has the kernels of a variant, in place of the launcher's; without `portable` the form in clusters."""
    for file in (source, *source.parent.glob("decode_*.cuh"), *(HERE / "decode_on_cpu").iterdir()):
        shutil.copy(file, folder)
    for header, name in (("e8p_experts_on_cpu/ptx.cuh", "experts"), ("int4_on_cpu/nvfp4_common.cuh", "int4")):
        shutil.copy(HERE / header, folder / f"{name}.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", folder / "cpu.cuh")

    @cache
    def made(_: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
        path = folder / f"{abs(hash(defines))}.so"
        given = {**dict(defines), "PORTABLE": int(portable), "KERNEL": source.stem}
        compile_run(folder, [f"-D{name}={value}" for name, value in given.items()], path, "-shared")
        run, size = ctypes.CDLL(str(path)).run, 1 if portable else dict(defines)["SIZE"]
        return {source.stem: Kernel(run, size, build.PORTABLE_SHARED if portable else H200.shared)}

    return made


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Kernel]]:
    return compiled(tmp_path_factory.mktemp("decode"), decode_portable.KERNEL.path)


def instead(patch: pytest.MonkeyPatch, kernels: Callable[..., dict[str, Kernel]]) -> None:
    """Of a GPU, what a launcher needs."""
    patch.setattr(decode_portable, "ARRIVED", Arrived)
    launch_on_cpu(kernels, patch.setattr)


@pytest.fixture
def attend(kernel: Callable[..., dict[str, Kernel]], monkeypatch: pytest.MonkeyPatch):
    """Runs a call on the kernel in its place; `sms` of the GPU."""
    monkeypatch.setattr(decode_attention.KERNEL, "is_built", lambda device: False)
    instead(monkeypatch, kernel)

    def run(call: PagedDecode, sms: int) -> Tensor:
        monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=sms))
        rows, heads, dim = len(call.qkv), call.heads, call.k_cache.shape[3]
        out = torch.full((rows, 1, heads, dim), float("nan"), dtype=call.qkv.dtype)
        step = call.cos, call.sin, call.positions, call.counts, call.block_table, call.k_cache, call.v_cache
        decode_attention._launch(
            call.qkv, call.q_norm, call.k_norm, call.eps, *step, out, call.scale, call.window, 0, call.early, call.sinks
        )
        assert not counters.any()
        return out

    return run


# Alone, shared by two and by sixteen; windows, norms, eight heads, both types.
CASES = [
    ("smollm2_batch", 1, torch.bfloat16),
    ("smollm2_batch", 64, torch.bfloat16),
    ("llama3", 12, torch.float16),
    ("qwen3", 64, torch.bfloat16),
    ("eight", 4, torch.bfloat16),
    ("eight", 40, torch.float16),
    ("long_context", 20, torch.bfloat16),
    ("gpt_oss", 4, torch.bfloat16),
    ("gpt_oss", 60, torch.float16),
]


@pytest.mark.parametrize(("name", "sms", "dtype"), CASES)
def test_cases_of_the_op_in_any_order_of_blocks(attend, name: str, sms: int, dtype: torch.dtype) -> None:
    case = next(case for case in OPS["paged_decode"].cases if case.name == name)
    made = lambda: PagedDecode(*case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0)))  # noqa: E731
    truth, results = made(), []
    with reference_ops():
        wanted = paged_decode(*truth)
    for Kernel.step in (1, 7919):  # a prime, so that all come
        call = made()
        got = attend(call, sms)
        for ours, theirs in ((call.k_cache, truth.k_cache), (call.v_cache, truth.v_cache)):
            assert float((ours.float() - theirs.float()).abs().max()) <= 0.04  # the last bit of numbers up to 5
        results.append(got)
    assert torch.equal(*results)
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", decode_attention.DIMS)
@pytest.mark.parametrize("groups", [1, 8, 32, 128, 999, 5000])
def test_blocks_fit_and_are_as_many_as_run_at_once(dim: int, groups: int) -> None:
    warps, size = decode_portable.share(groups, dim, PLAIN)
    plan = replace(decode_portable.EXAMPLE, dim=dim, warps=warps, size=size)
    per_sm = 2 if dim == 64 else 1
    assert per_sm * (decode_portable.shared(plan) + build.RESERVED) <= PLAIN.sm_shared
    assert size == 1 or groups * size <= PLAIN.sms * per_sm
    assert size == 16 or groups > decode_portable.MAX_GROUPS or 2 * groups * size > PLAIN.sms * per_sm
