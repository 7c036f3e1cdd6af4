"""The portable E8P linear on a CPU: its own source, each thread a fiber (`nvfp4_on_cpu`), and how it is cut.

What this proves: every index, mask and shuffle, the bits of decoding, and that the order of blocks changes no bit. What
it cannot: that the GPU's instructions do what `ptx.cuh` says, and that blocks which run at once see each other's sums;
the tests marked gpu do.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernel_table
from h200 import H200
from on_cpu import host_lines
from onegraph.ops.cuda import build, e8p_portable, launcher, rotated_portable, workspace
from test_e8p_build import SHAPES

HERE = Path(__file__).parent
SOURCES = (
    "e8p_portable.cu",
    "rotated_portable.cuh",
    "rotated_common.cuh",
    "e8p_common.cuh",
    "e8p_codes.cuh",
    "e8p_decode_product.cuh",
    "e8p_activations.cuh",
)
CARDS = [H200, *(replace(H200, sms=sms, shared=99 << 10, clusters=(sms,) + (0,) * 15) for sms in (20, 82, 108, 128))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_case_is_right_in_any_order_of_blocks(tmp_path: Path) -> None:
    cuda, own = e8p_portable.KERNELS.path.parent, HERE / "e8p_portable_on_cpu"
    for file in (*(cuda / name for name in SOURCES), own / "ptx.cuh", own / "run.cpp"):
        shutil.copy(file, tmp_path)
    shutil.copy(HERE / "e8p_experts_on_cpu" / "ptx.cuh", tmp_path / "experts.cuh")
    shutil.copy(HERE / "nvfp4_on_cpu" / "nvfp4_common.cuh", tmp_path / "cpu.cuh")
    shutil.copy(HERE / "int4_on_cpu" / "nvfp4_common.cuh", tmp_path / "int4.cuh")
    lines = host_lines(own / "host.py", tmp_path)
    assert {line.split()[0] for line in lines} == {"2", "3", "4"}
    assert sum("alike" in line for line in lines) == 2
    assert any("alone" in line for line in lines)
    assert any("2 passes" in line for line in lines)
    assert any("turned in front" in line for line in lines)
    assert any("blocks" in line and " 1 rounds" not in line for line in lines)


@pytest.mark.parametrize("device", CARDS, ids=lambda device: f"{device.sms}")
def test_every_plan_fits_and_covers_its_matrix(device: build.Device) -> None:
    for n, k in SHAPES:
        for bits in (2, 3, 4):
            for tokens in range(1, 17):
                plan = e8p_portable.E8PTiling.plan(n, k, bits, tokens, device)
                assert plan.tokens >= tokens
                assert plan.shared(bits) <= build.PORTABLE_SHARED
                assert plan.warps <= rotated_portable.WARPS[plan.tokens]
                assert (plan.parts - 1) * plan.across < -(-k // 256) <= plan.parts * plan.across
                assert plan.most(n) * plan.strips >= n // 16
                # Unless all sums of a strip are held at a time, a round ends where the registers begin again.
                step = plan.ahead * plan.down
                assert plan.hold >= plan.most(n) or plan.hold % step == 0 < plan.hold
                assert not plan.whole or plan.hold >= plan.most(n) or plan.hold % 8 == 0


@pytest.mark.parametrize("device", CARDS, ids=lambda device: f"{device.sms}")
def test_fewer_tokens_can_be_cut_as_16_are(device: build.Device) -> None:
    for n, k in SHAPES:
        for bits in (2, 3, 4):
            most = e8p_portable.E8PTiling.plan(n, k, bits, 16, device)
            for tokens in range(1, 17):
                plan = e8p_portable.E8PTiling.like_most(n, k, bits, tokens, device)
                assert replace(plan, tokens=16) == most
                assert tokens <= plan.tokens
                assert plan.shared(bits) <= build.PORTABLE_SHARED
                assert plan.warps <= rotated_portable.WARPS[plan.tokens]


@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (4096, 14336), (4096, 4096)])
def test_the_work_of_a_layer_is_even(n: int, k: int) -> None:
    """One wave, in which no SM has more than a quarter above its share: blocks that end their rows alone are worth
    some SMs that idle, whose bandwidth the others have."""
    for device in CARDS[1:]:
        for bits in (2, 3, 4):
            plan = e8p_portable.E8PTiling.plan(n, k, bits, 1, device)
            assert plan.strips * plan.parts <= device.sms
            share = n // 16 * (k // 256) / device.sms
            assert plan.most(n) * plan.across <= share * 5 / 4


@pytest.mark.parametrize("tokens", rotated_portable.CLASSES)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nothing_spills(bits: int, tokens: int) -> None:
    """At every rate and number of tokens, with all that stands around a linear but its bias."""
    plan = e8p_portable.E8PTiling.plan(14336, 4096, bits, tokens, CARDS[2])
    made = plan.defines(14336, 4096, bits, False, (True, False, False, True, False))
    found = kernel_table.usage(e8p_portable.KERNELS, (12, 0) if bits == 3 else (8, 6), made)
    assert (found.spilled, found.shared) == (0, 0)
    assert found.registers * 32 * plan.warps <= 65536


def test_streams_and_captures_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(build, "resident", lambda data, device: made.append(data) or 4096)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capture))
    monkeypatch.setattr(build, "capture_id", lambda stream: capture)
    monkeypatch.setattr(launcher, "raw_stream", lambda device: stream)
    counters, capture, stream = workspace.Counters(100), 0, 7
    eager = counters.of(0)
    assert counters.of(0) == eager
    assert [each.numel() for each in made] == [workspace.SETS * 100]
    assert not made[0].any()
    capture = 1
    first = counters.of(0)
    capture = 2
    second = counters.of(0)
    stream = 8
    beside = counters.of(0)
    assert len({eager, first, second, beside}) == 4
    stream = 7
    assert counters.of(0) == second
    capture = 0
    assert counters.of(0) == eager
    places = set()
    for stream in range(100, 1100):  # noqa: B007 - the current one, as `raw_stream` tells it
        places.add((counters.of(0) - 4096) // 400)
    assert len(made) == 1
    assert places == set(range(workspace.SETS))


def test_lasting_counters_are_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures take what an eager launch in front of them has seen to."""
    made: list[int] = []
    monkeypatch.setattr(build, "resident", lambda data, device: made.append(data.numel()) or 100_000 * len(made))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capture))
    monkeypatch.setattr(build, "capture_id", lambda stream: capture)
    monkeypatch.setattr(launcher, "raw_stream", lambda device: 7)
    counters, found = workspace.Counters(100, lasting=True), list[int]()
    for model in range(5):
        capture = 0
        eager = counters.of(0)
        for capture in range(1 + 40 * model, 41 + 40 * model):  # noqa: B007 - the current one, as `capture_id` tells it
            found.append(counters.of(0))
            assert counters.of(0) == found[-1]
    assert len({eager, *found}) == 201
    assert set(made) == {workspace.SETS * 100}
    assert len(made) <= 5
