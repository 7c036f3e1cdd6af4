"""`quantize --format auto`: what is estimated, what is chosen, and what is said of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuzz import tiny
from onegraph.api import auto
from onegraph.api.auto import Estimate, pick
from onegraph.api.plan import plan
from onegraph.api.quantize import quantize
from onegraph.quant.allocate import ERRORS

FEW: dict[str, Any] = {"recipe": "quick", "num_calibration_tokens": 128, "calibration_seq_len": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("auto") / "plain")


def test_both_estimates_are_one_line(model: Path) -> None:
    found = plan(model, format="auto", bits=3, **FEW)
    assert (found.format, found.weights) == ("trellis", {3: 73728})
    line = found.notes[0]
    assert line.startswith("format auto, prefer quality: trellis ")
    assert "1.8 % squared error; not e8p " in line
    assert line.endswith("(error: of a Gaussian source; a CPU decodes weights at load: the speed is the same)")
    speed = plan(model, format="auto", prefer="speed", bits=3, layers={"*.down_proj": 16}, **FEW)
    assert speed.format == "trellis", "where both are as fast, the error decides"
    assert speed.weights == {3: 73728 - 2 * 64 * 128}


def test_rates_that_one_format_has(model: Path) -> None:
    found = plan(model, format="auto", prefer="speed", bits=6, **FEW)
    assert found.format == "trellis"
    assert (
        "; e8p is unsupported: bits: got 6; allowed is a number from 2 to 4, and from 1 to 8 with format 'trellis' ("
        in found.notes[0]
    )
    with pytest.raises(ValueError, match=r"bits: got 9; allowed is a number from 1 to 8"):
        plan(model, format="auto", bits=9, **FEW)


def test_sizes_that_one_format_has(model: Path, tmp_path: Path) -> None:
    """Tiles of 16 rows: a head of 266 is none, so the model is rounded to E8P."""
    told: list[str] = []
    made = quantize(model, tmp_path / "out", format="auto", bits=2, lm_head=4, on_message=told.append, **FEW)
    assert (made.format, made.config["format"], made.config["lm_head"]) == ("e8p", "e8p", 4)
    assert "; trellis is unsupported: " in told[0]
    assert "a linear of 266 x 64 cannot be stored as trellis at 4 bits" in told[0]


def test_what_it_decides_by() -> None:
    better, faster = Estimate("trellis", 100, 0.0045, 18.0), Estimate("e8p", 100, 0.0079, 10.0)
    assert pick([faster, better], "quality") is better
    assert pick([faster, better], "speed") is faster
    slow = Estimate("e8p", 100, 0.0079, 17.9)  # as fast, but for what estimates cannot tell
    assert pick([slow, better], "speed") is better


GPUS = {  # nominal: SMs, kHz, bits, kHz
    "H200": SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000, memory_bus_width=6144,
        memory_clock_rate=3_201_000,
    ),
    "RTX 4090": SimpleNamespace(
        major=8, minor=9, multi_processor_count=128, clock_rate=2_520_000, memory_bus_width=384,
        memory_clock_rate=10_501_000,
    ),
    "an older torch": SimpleNamespace(major=9, minor=0, multi_processor_count=132),
}  # fmt: skip


def test_times_of_gpus(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 gives what was measured there; where memory is slow both formats wait for it."""

    def times(name: str) -> dict[str, float]:
        monkeypatch.setattr(auto.torch.cuda, "get_device_properties", lambda device: GPUS[name])
        found = {}
        for format in ("e8p", "trellis"):
            one = SimpleNamespace(format=format, weights={4: auto.WEIGHTS}, after=SimpleNamespace(total_bytes=0))
            made = auto.estimate(one, auto.torch.device("cuda"))  # type: ignore[arg-type]
            assert made.error == ERRORS[format][4]
            assert made.time is not None
            found[format] = made.time
        return found

    assert times("H200") == times("an older torch") == {"e8p": 10.5, "trellis": 15.0}
    slow = times("RTX 4090")
    assert slow["e8p"] == slow["trellis"] == pytest.approx(auto.WEIGHTS / 2 / 0.9 / 1.008e12 * 1e6, rel=0.01)


def test_wrong_preferences(model: Path) -> None:
    with pytest.raises(ValueError, match=r"prefer: got 'size'; .*'quality', 'speed', or None"):
        plan(model, format="auto", prefer="size")
    with pytest.raises(ValueError, match=r"prefer: got 'speed' with the format 'e8p'; it is for format 'auto'"):
        plan(model, prefer="speed")
