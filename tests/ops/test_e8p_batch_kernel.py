"""The E8P linear of 5 to 64 tokens on a CPU: its own source, each thread a fiber, blocks of a cluster at once.

What this proves: every index, mask, shuffle and copy, the bits of decoding, that stages and rings are handed on as
their barriers say, and that the order of clusters changes no bit. What it cannot: that the GPU's instructions do what
`ptx.cuh` and `wgmma_bytes.cuh` say, and that nobody reads too early; the tests marked gpu do.
"""

import shutil
from pathlib import Path

import pytest

import kernel_table
from h200 import H200
from on_cpu import host_lines
from onegraph.ops.cuda import e8p_batch

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_case_is_right_in_either_order_of_clusters(tmp_path: Path) -> None:
    cuda, own = e8p_batch.KERNELS.path.parent, HERE / "e8p_batch_on_cpu"
    for file in (e8p_batch.KERNELS.path, cuda / "e8p_common.cuh", cuda / "rotated_common.cuh", *own.glob("*.c*")):
        shutil.copy(file, tmp_path)
    lines = host_lines(own / "host.py", tmp_path)
    assert {line.split()[0] for line in lines} == {"2", "3", "4"}
    assert {line.split()[2] for line in lines} == {"8", "16", "32", "64"}
    assert {line.split()[-2] for line in lines} == {"1", "2", "4"}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nothing_spills(bits: int) -> None:
    for tokens in (8, 16, 32, 64):
        for n, k in ((4096, 14336), (28672, 4096)):
            plan = e8p_batch.plan(n, k, bits, tokens, H200)
            found = kernel_table.usage(
                e8p_batch.KERNELS, (9, 0), e8p_batch.defines(plan, n, k, bits, False, True, False)
            )
            assert (found.spilled, found.stack) == (0, 0)
            assert found.registers * plan.threads <= 65536
