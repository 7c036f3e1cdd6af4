"""The E8P linear of 1 to 8 tokens on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`).

What this proves: every index, mask, shuffle and copy, the bits of decoding, that blocks send each other what they are
told to wait for, and that ranks, each in a thread of its own, come to the same sum. What it cannot: that the GPU's
instructions do what `ptx.cuh` says, and that nobody reads too early; the tests marked gpu do.
"""

import shutil
from pathlib import Path

import pytest

import kernel_table
from h200 import H200
from on_cpu import host_lines
from onegraph.ops.cuda import e8p_decode

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_case_is_right(tmp_path: Path) -> None:
    cuda, own = e8p_decode.KERNEL.path.parent, HERE / "e8p_decode_on_cpu"
    for file in (
        e8p_decode.KERNEL.path,
        *cuda.glob("e8p_*.cuh"),
        cuda / "rotated_common.cuh",
        cuda / "exchange.cuh",
        *own.glob("*.c*"),
    ):
        shutil.copy(file, tmp_path)
    shutil.copy(HERE / "exchange_on_cpu" / "system.cuh", tmp_path)
    shutil.copy(HERE / "e8p_experts_on_cpu" / "ptx.cuh", tmp_path / "experts.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", tmp_path / "cpu.cuh")
    shutil.copy(HERE / "int4_on_cpu" / "nvfp4_common.cuh", tmp_path / "int4.cuh")
    lines = host_lines(own / "host.py", tmp_path)
    assert {line.split()[0] for line in lines} == {"2", "3", "4"}
    assert {line.split()[2] for line in lines} == set("12345678")
    assert any("clusters of 3" in line for line in lines)
    assert any("4 warps a slice" in line for line in lines)
    assert {line.split()[-2] for line in lines} == {"1", "2", "3"}


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nothing_spills(bits: int, tokens: int) -> None:
    """At every rate and number of tokens, of 16 warps a block: 20 have 96 registers each."""
    for n, k in ((14336, 4096), (4096, 4096)):
        plan = e8p_decode.plan(n, k, bits, tokens, H200)
        made = e8p_decode.defines(plan, n, k, bits, tokens, False, (True, False, False, True, False, 1))
        found = kernel_table.usage(e8p_decode.KERNEL, (9, 0), made)
        assert plan.most_threads == 512
        assert (found.spilled, found.shared) == (0, 0)
        assert found.registers <= 128
