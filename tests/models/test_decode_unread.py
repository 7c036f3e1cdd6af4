"""Linears in codes that no kernel of a GPU reads are decoded at load, where memory allows; either is told in a line."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models import save_e8p
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.e8p import E8PFormat
from onegraph.formats.fp8 import FP8Format
from onegraph.formats.int4 import INT4Format
from onegraph.formats.nvfp4 import NVFP4Format
from onegraph.models import llama, memory
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.load import check_card
from onegraph.models.loader import Loader
from onegraph.ops import family, fp8, int4, nvfp4_linear
from onegraph.ops.ahead import Ahead
from onegraph.ops.cuda import build, e8p

GPU = torch.device("cuda", 0)


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3})
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        return Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.bfloat16)


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(family, "FORCED", None)
    monkeypatch.setattr(memory, "simulated", lambda device: False)
    return lambda nbytes: monkeypatch.setattr(memory, "free_memory", lambda device, reserve=0: nbytes)


def only(monkeypatch: pytest.MonkeyPatch, reads: Callable[[int, int], bool]) -> None:
    """Kernels for such n x k alone."""
    monkeypatch.setattr(e8p, "supports_weight", lambda n, k, bits, dtype, device: reads(n, k))


def test_what_no_kernel_reads_is_decoded_and_counted(loader, have, monkeypatch) -> None:
    have(1 << 40)
    only(monkeypatch, lambda n, k: n <= k)
    coded = loader.device_bytes()
    says = r"no kernel of cuda:0 multiplies by the codes of .* and \d+ others in bfloat16: decoded at load"
    with pytest.warns(UserWarning, match=says):
        memory.decode_unread(loader, GPU)
    wide = {layer for layer, (n, k, _) in loader.layers().items() if n > k and layer in loader.parts.linears}
    wide = {layer for layer in wide if loader.format_of(layer).coded}
    assert loader.decoded == wide
    for layer, nbytes in loader.device_bytes().items():
        n, k, _ = loader.layers().get(layer, (0, 0, False))
        assert nbytes == (2 * n * k if layer in wide else coded[layer])
    device = torch.device("cpu")
    for layer in loader.layers():
        if layer in loader.parts.linears and loader.format_of(layer).coded:
            made = loader.linear(layer, device)
            assert (made.format is DENSE) == (layer in wide)
            assert isinstance(made.format, E8PFormat) == (layer not in wide)


def test_codes_stay_where_memory_does_not_allow_it(loader, have, monkeypatch) -> None:
    only(monkeypatch, lambda n, k: False)
    coded = sum(loader.device_bytes().values())
    wider = max(0, sum(loader.unit_bytes) - coded)
    have(coded + max(loader.unit_bytes) + min(loader.landing_bytes, wider))
    with pytest.warns(UserWarning, match=r"slower than unquantized, and [\d.]+ GB to decode them are not free$"):
        memory.decode_unread(loader, GPU)
    assert not loader.decoded
    assert sum(loader.device_bytes().values()) == coded
    memory.check_weights(loader, GPU)


def test_a_kernel_that_cannot_be_built_after_all_is_said(loader, have, monkeypatch) -> None:
    """It is expected while it compiles; the second time it is known."""
    have(1 << 40)
    built = False

    def reads(n: int, k: int) -> bool:
        active = build.AHEAD.get()
        assert active is ahead
        return built or active.is_dry

    only(monkeypatch, reads)
    ahead = Ahead()
    unread = memory.decode_unread(loader, GPU, 1, ahead)
    assert not memory.kernels_as_expected(loader, GPU, ahead, unread)
    built = True
    assert memory.kernels_as_expected(loader, GPU, ahead, unread)
    assert not loader.decoded
    assert build.AHEAD.get() is None


def test_a_model_is_loaded_anew_where_a_kernel_is_missing_after_all(tmp_path: Path, monkeypatch) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3})
    answers = iter([False, True])
    monkeypatch.setattr(llama, "kernels_as_expected", lambda *_: next(answers))
    told: list[tuple[int, int]] = []
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint, max_context=32, progress=lambda *about: told.append(about))
        plain = Llama.load(checkpoint, max_context=16, decode=True)
    assert next(answers, None) is None
    assert model.max_context == 32
    assert [done for done, _ in told].count(0) == 2
    for (name, tensor), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert tensor.dtype == other.dtype, name


@pytest.mark.parametrize("forced", ["triton", "reference"])
def test_a_family_that_is_asked_for_runs_codes(forced, loader, have, monkeypatch) -> None:
    have(1 << 40)
    only(monkeypatch, lambda n, k: False)
    monkeypatch.setattr(family, "FORCED", forced)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.decode_unread(loader, GPU)
        monkeypatch.setattr(family, "FORCED", None)
        only(monkeypatch, lambda n, k: True)
        memory.decode_unread(loader, GPU)
    assert not loader.decoded


def test_a_card_that_nothing_is_written_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "FORCED", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    check_card(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"NVIDIA T4 is of compute capability 7\.5; kernels are for 8\.0"):
        check_card(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_card(GPU)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="NVIDIA GPUs; this torch is built for AMD's"):
        check_card(GPU)


def test_what_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and dtypes that each format's kernels are written for; none where none can be built."""
    monkeypatch.setattr(build.Source, "is_built", lambda source, device: True)
    monkeypatch.setattr(e8p, "choose", lambda *args: print)
    half, whole = torch.bfloat16, torch.float32
    assert e8p.supports_weight(4096, 14336, 2, half, 0)
    assert not e8p.supports_weight(49155, 2048, 2, half, 0)
    assert not e8p.supports_weight(4096, 14336, 2, whole, 0)
    fp4, eights, odd = NVFP4Format(), FP8Format((128, 128)), FP8Format((100, 128))
    int4_128 = INT4Format(128, torch.float16, order=False, less_one=False, symmetric=False)
    assert nvfp4_linear.WEIGHT.reads(fp4, 100, 256, half, 0)
    assert not nvfp4_linear.WEIGHT.reads(fp4, 100, 96, half, 0)
    assert not nvfp4_linear.WEIGHT.reads(fp4, 100, 256, whole, 0)
    assert fp8.WEIGHT.reads(eights, 4096, 4096, half, 0)
    assert not fp8.WEIGHT.reads(odd, 4096, 4096, half, 0)
    assert not fp8.WEIGHT.reads(eights, 4096, 4096, whole, 0)
    assert not int4.WEIGHT.reads(int4_128, 4096, 4096, whole, 0)
    monkeypatch.setattr(e8p, "choose", lambda *args: None)
    monkeypatch.setattr(build.Source, "is_built", lambda source, device: False)
    assert not e8p.supports_weight(4096, 14336, 2, half, 0)
    assert not nvfp4_linear.WEIGHT.reads(fp4, 100, 256, half, 0)
    assert not fp8.WEIGHT.reads(eights, 4096, 4096, half, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """float32 has no kernel: dense, with a word; bfloat16 has. Captured either way."""
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3}, hidden_size=384, intermediate_size=256)
    with Checkpoint.open(tmp_path / "model") as checkpoint, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = Llama.load(checkpoint, GPU, dtype)
    said = [str(each.message) for each in told if "decoded at load" in str(each.message)]
    assert len(said) == (dtype == torch.float32)
    coded = any(isinstance(getattr(each, "format", None), E8PFormat) for each in model.modules())
    assert coded == (dtype != torch.float32)
    texts = []
    for capture in (True, False):
        engine = Engine(model, max_batch=1, max_context=64, capture=capture)
        texts.append(engine.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=24, temperature=0.0)))
    assert texts[0] == texts[1]
