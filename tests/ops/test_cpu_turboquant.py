"""A decode step from codes on a CPU, in C where there is GCC and in torch's calls: what the two ops give that it stands
for, and what it keeps from layer to layer."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.turboquant import DRAFTS, codebook, rotation
from onegraph.formats.turboquant_layout import TurboQuantLayout, layout_of, unpack_pages
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu import build
from onegraph.ops.cpu import turboquant as cpu
from onegraph.ops.cpu import turboquant_native as in_c
from onegraph.ops.registry import OPS, reference_ops
from onegraph.ops.turboquant_attention import eight_bit_levels
from onegraph.ops.turboquant_decode import turboquant_decode

GCC = shutil.which(os.environ.get("CC") or "gcc")
COMPILED = pytest.param("c", marks=pytest.mark.skipif(GCC is None, reason="needs gcc"))
ROTARY = torch.arange(1200).unsqueeze(1) * 10000.0 ** -(torch.arange(0, 64, 2) / 64)


@pytest.fixture(params=[COMPILED, "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In C, in torch's calls."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native", lambda *_: None)
    cpu._LOCAL.plan = None
    yield request.param
    cpu._LOCAL.plan = None


def arguments(case: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    made = next(c for c in OPS["turboquant_decode"].cases if c.name == case)
    values = made.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(1))
    return dict(zip([a.name for a in turboquant_decode.overload._schema.arguments], values, strict=True))


def sequence(
    *, dim: int = 64, heads: int = 9, kv_heads: int = 3, bits: tuple[int, int] = (4, 4), page_size: int = 16,
    kind: str = "matched", window: int = 64, limit: int = 0, pages: int = 80, rows: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a step of rows that have no tokens yet. Pages out of order, and everywhere what earlier sequences
    left: codes and norms of all ones, which are NaN, and a ring of NaN."""
    layout, ints = TurboQuantLayout(dim, *bits, page_size=page_size), torch.int32
    order = 1 + torch.randperm(rows * pages, generator=torch.Generator().manual_seed(5)).to(ints)
    turn = rotation(dim)
    angle = torch.arange(pages * page_size).unsqueeze(1) * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    books = [eight_bit_levels(codebook(dim, b)) for b in bits]
    return {
        "qkv": torch.zeros(rows, 1, (heads + 2 * kv_heads) * dim), "q_norm": None, "k_norm": None, "eps": 0.0,
        "cos": angle.cos(), "sin": angle.sin(), "positions": torch.zeros(rows, dtype=ints),
        "counts": torch.ones(rows, dtype=ints), "block_table": order.view(rows, pages), "turn": turn.T.contiguous(),
        "k_codebook": books[0], "v_codebook": books[1] if bits[0] != bits[1] else books[0],
        "cache": torch.full(layout.cache_shape(1 + rows * pages, kv_heads), 255, dtype=torch.uint8),
        "ring": torch.full((rows + 1, window + 2 * DRAFTS, 2, kv_heads, dim), torch.nan),
        "slots": torch.arange(rows, 0, -1, dtype=ints), "heads": heads, "kind": kind, "rotation": turn,
        "scale": dim**-0.5, "window": window, "limit": limit, "early": False,
    }  # fmt: skip


def copied(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in args.items()}


def coded_alike(args: dict[str, Any], left: Tensor, right: Tensor) -> None:
    """All pages but the sentinel: no code differs but one at a tie of roundings, of a million perhaps one."""
    levels = (args[name].numel() for name in ("k_codebook", "v_codebook"))
    layout = layout_of(args["turn"].shape[0], *levels, left.shape[2])
    for one, two in zip(unpack_pages(layout, left[1:]), unpack_pages(layout, right[1:]), strict=True):
        assert int((one.codes != two.codes).sum()) <= 1
        torch.testing.assert_close(one.norms, two.norms, rtol=2**-10, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", [c.name for c in OPS["turboquant_decode"].cases])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_is_the_two_ops(case: str, dtype: torch.dtype, form: str) -> None:
    mine = arguments(case, dtype)
    theirs = copied(mine)
    got = cpu.turboquant_decode(TurboQuantDecode(**mine))
    with reference_ops():
        want = turboquant_decode(*theirs.values())
    real = mine["counts"] > 0
    near = 2e-5 if dtype == torch.float32 else 2e-2
    assert (got - want)[real].float().norm() <= near * want[real].float().norm()
    coded_alike(mine, mine["cache"], theirs["cache"])
    torch.testing.assert_close(mine["ring"][1:], theirs["ring"][1:])


SETTINGS: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "llama": {"dim": 128, "heads": 8, "kv_heads": 2, "page_size": 48, "window": 16},
    "one_group": {"heads": 3, "window": 5, "kind": "norm"},
    "wide": {"dim": 96, "heads": 7, "kv_heads": 1, "kind": "unbiased", "window": 20},
    "limited": {"limit": 90, "window": 33},
    "eighty": {"dim": 80, "heads": 4, "kv_heads": 2, "window": 16},
    "unlike": {"bits": (3, 4), "window": 16},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_in_a_row_are_the_two_ops(setting: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows apart, past the window and around the ring, one of them idle for a while; pieces of a few pages."""
    monkeypatch.setattr(cpu, "AT_ONCE", 1 << 13)
    mine = sequence(rows=2, pages=12, **SETTINGS[setting])
    theirs, generator, at = copied(mine), torch.Generator().manual_seed(2), [0, 0]
    ring = mine["window"] + 2 * DRAFTS
    for step in range(max(2 * ring + 10, mine["limit"] + 40)):
        counts = [1, int(not 9 < step < 27)]
        qkv = torch.randn(mine["qkv"].shape, generator=generator)
        for args in (mine, theirs):
            args["qkv"] = qkv
            args["positions"].copy_(torch.tensor(at))
            args["counts"].copy_(torch.tensor(counts))
        got = cpu.turboquant_decode(TurboQuantDecode(**mine))
        with reference_ops():
            want = turboquant_decode(*theirs.values())
        real = torch.tensor(counts) > 0
        assert (got - want)[real].norm() <= 2e-5 * want[real].norm(), step
        coded_alike(mine, mine["cache"], theirs["cache"])
        mine["cache"].copy_(theirs["cache"])
        at = [position + count for position, count in zip(at, counts, strict=True)]
    torch.testing.assert_close(mine["ring"][1:], theirs["ring"][1:], equal_nan=True)


def test_a_long_sequence_is_read_in_pieces(form: str) -> None:
    args = sequence(pages=70)
    args["cache"].random_(0, 255, generator=torch.Generator().manual_seed(3))
    norms = args["cache"].view(-1, 3, 1088)[..., 1024:]
    norms.copy_(torch.full((32,), 0.5, dtype=torch.float16).view(torch.uint8))
    args["ring"].normal_(generator=torch.Generator().manual_seed(4))
    args["positions"].fill_(70 * 16 - 2)
    args["qkv"].normal_(generator=torch.Generator().manual_seed(6))
    with reference_ops():
        want = turboquant_decode(*copied(args).values())
    got = cpu.turboquant_decode(TurboQuantDecode(**args))
    assert (got - want).norm() <= 2e-5 * want.norm()
    if form == "torch":
        ((common, _),) = cpu._LOCAL.plan.known.values()
        assert len(common.rows[0].older) == 1
        assert common.rows[0].older[0].levels.shape[0] * 2 <= cpu.AT_ONCE


def test_layers_share_what_a_step_knows_until_somebody_writes(form: str) -> None:
    one, two = sequence(pages=12), sequence(pages=12)
    shared = "positions", "counts", "slots", "block_table", "cos", "sin", "turn", "rotation", "k_codebook", "v_codebook"
    two |= {name: one[name] for name in shared}
    one["qkv"].normal_(generator=torch.Generator().manual_seed(1))
    two["qkv"].normal_(generator=torch.Generator().manual_seed(2))
    plans = []
    for position in (0, 0, 1):
        one["positions"].fill_(position)
        for args in (one, two):
            cpu.turboquant_decode(TurboQuantDecode(**args))
            plans.append(cpu._LOCAL.plan)
    assert plans[0] is plans[1]
    assert plans[2] is plans[3]
    assert len({id(plan) for plan in plans}) == 3
    assert all(len(plan.known) == 1 for plan in plans)
    assert not one["ring"][1, :2].isnan().any()
    assert one["ring"][1, 2:].isnan().all()
    two["scale"] = 1.0  # another kind of layer
    cpu.turboquant_decode(TurboQuantDecode(**two))
    assert len(cpu._LOCAL.plan.known) == 2


def test_what_inference_mode_made_is_read_again(form: str) -> None:
    """Its tensors do not say whether somebody has written to them."""
    with torch.inference_mode():
        args = sequence(pages=12)
        args["qkv"].fill_(1.0)
        for position in range(3):
            args["positions"].fill_(position)
            cpu.turboquant_decode(TurboQuantDecode(**args))
    assert not args["ring"][1, :3].isnan().any()


def test_a_page_that_is_not_there_is_an_error(form: str) -> None:
    args = sequence(pages=12)
    args["block_table"].fill_(1000)
    with pytest.raises((IndexError, RuntimeError)):
        cpu.turboquant_decode(TurboQuantDecode(**args))


@pytest.mark.skipif(GCC is None, reason="needs gcc")
def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return SEVEN; }")
    build.library.cache_clear()
    assert build.library(source, (("SEVEN", 7),)).seven() == 7
    (kept,) = (tmp_path / "onegraph" / "cpu").iterdir()
    written = kept.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library(source, (("SEVEN", 7),)).seven() == 7
    assert build.library(source, (("SEVEN", 8),)).seven() == 8
    assert kept.stat().st_mtime_ns == written
    build.library.cache_clear()


@pytest.mark.skipif(GCC is None, reason="needs gcc")
def test_a_home_that_cannot_be_written_costs_the_compilation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    build.library.cache_clear()
    assert build.library(source, ()).seven() == 7
    build.library.cache_clear()


@pytest.mark.parametrize("trouble", ["no compiler", "refused", "reference"])
def test_without_a_library_torch_does_it(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "turboquant.c"
    source.write_bytes(in_c.SOURCE.read_bytes())
    if trouble == "no compiler":
        monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    elif trouble == "refused":
        source.write_text("no C")
    else:
        monkeypatch.setattr(build.family, "FORCED", "reference")
    monkeypatch.setattr(in_c, "SOURCE", source)
    build.library.cache_clear()
    args = sequence(pages=12)
    args["qkv"].fill_(1.0)
    assert cpu.turboquant_decode(TurboQuantDecode(**args)).isfinite().all()
    ((common, _),) = cpu._LOCAL.plan.known.values()
    assert common.native is None
    build.library.cache_clear()
