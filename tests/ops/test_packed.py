"""Dense weights in float16 as a CPU's torch packs them: products, what is held so, and whole models."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Decoder, hf_model, save_e8p, save_hf, smollm2_gguf
from onegraph.api.device import pick_precision
from onegraph.api.llm import LLM
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models import loader
from onegraph.models.llama import Llama
from onegraph.models.load import packable
from onegraph.nn.linear import Linear, PackedLinear, dense
from onegraph.ops.cpu import packed as packed_weights
from onegraph.ops.cpu.packed import holds, packs

pytestmark = pytest.mark.skipif(not packs(), reason="this torch packs no float16")

ROW = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- products


@pytest.mark.parametrize(("n", "k"), [(96, 64), (131, 72), (33, 577), (40, 1536)])
def test_sums_are_float32(n: int, k: int) -> None:
    """Nothing is rounded but the weight: of one that float16 holds exactly the product is float32's own."""
    weight, x, bias = randn(n, k).half().float(), randn(2, 7, k, seed=1), randn(n, seed=2)
    layer = dense(weight, bias).float16()
    assert isinstance(layer, PackedLinear)
    want = x.double() @ weight.double().T + bias
    assert (layer(x) - want).norm() < 1e-6 * want.norm()
    assert torch.equal(layer.tensors["weight"], weight)
    assert torch.equal(dense(weight).float16()(x), dense(weight, torch.zeros(n)).float16()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    layer, x = dense(randn(131, 576), randn(131, seed=2)).float16(), randn(3, 576, seed=1).to(dtype)
    assert torch.equal(layer(x), layer(x.float()).to(dtype))
    assert torch.equal(layer(x, float32=True), layer(x.float()))


def test_an_output_depends_on_its_row_alone() -> None:
    """To the last bit: not on the batch, and not on how many threads there are."""
    layer, x = dense(randn(300, 577)).float16(), randn(70, 577, seed=1)
    whole, threads = layer(x), torch.get_num_threads()
    assert torch.equal(torch.cat([layer(one) for one in x.split([1, 2, 3, 5, 7, 13, 39])]), whole)
    many = x.repeat(4, 1)  # past the rows that FBGEMM multiplies at a time
    for rows in (*range(1, 70), 121, 122, 127, 241, 280):
        assert torch.equal(layer(many[:rows]), whole.repeat(4, 1)[:rows]), rows
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(layer(x), whole)
        assert torch.equal(layer(x[:1]), whole[:1])
    finally:
        torch.set_num_threads(threads)
    assert layer(x[:0]).shape == (0, 300)


def test_a_cpu_without_avx512_gives_the_same_promise() -> None:
    """FBGEMM's AVX2 kernels for one and two rows add in another order than its others."""
    limited = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    tests = [
        f"{__file__}::{test.__name__}" for test in (test_an_output_depends_on_its_row_alone, test_sums_are_float32)
    ]
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(program, env=limited, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout


# ---- what is held


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (lambda w: w, True),
        (lambda w: w * 1e-3, True),
        (lambda w: w.index_fill(0, torch.tensor([3]), 0.0), True),
        (lambda w: w * 1e-6, False),  # most of it below float16's normal numbers
        (lambda w: w.index_fill(0, torch.tensor([3]), 7e4), False),  # infinite in it
        (lambda w: w.index_fill(0, torch.tensor([3]), 1e20), False),  # whose square float32 does not hold
        (lambda w: w.index_fill(0, torch.tensor([3]), torch.nan), False),
        (lambda w: w * 0, True),
    ],
    ids=["plain", "small", "a row of zeros", "tiny", "large", "huge", "nan", "zeros"],
)
def test_what_float16_does_not_hold_stays_float32(change: Callable[[Tensor], Tensor], held: bool) -> None:
    weight = change(randn(40, 64))
    layer, x = dense(weight).float16(), randn(3, 64, seed=1)
    assert (holds(weight), isinstance(layer, PackedLinear)) == (held, held)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-3, atol=2e-2, equal_nan=True)


def linears(model: Llama) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def save_narrow(path: Path, variant: str, dtype: torch.dtype) -> Path:
    """A dense model whose files are in `dtype`."""
    save_hf(variant, path / "wide")
    with Checkpoint.open(path / "wide") as wide:
        write_checkpoint(path / "narrow", wide.config, ((name, wide.tensor(name).to(dtype)) for name in wide.names))
    return path / "narrow"


@pytest.mark.parametrize("variant", ["smollm2", "qwen2", "gemma3", "olmo2", "phi3"])
def test_models_are_those_of_their_weights(variant: str, tmp_path: Path) -> None:
    """In prefill and in decoding; bfloat16's eight bits are among float16's eleven, so nothing is lost."""
    path = save_narrow(tmp_path, variant, torch.bfloat16)
    with Checkpoint.open(path) as checkpoint:
        assert packable(checkpoint, rounded=False)
        plain, packed = Llama.load(checkpoint), Llama.load(checkpoint, held="float16")
    assert not any(isinstance(one, PackedLinear) for one in linears(plain))
    assert all(isinstance(one, PackedLinear) for one in linears(packed))
    want = torch.cat(Decoder(plain, rows=1, max_context=40).feed([ROW]))
    decoder = Decoder(packed, rows=1, max_context=40)
    got = torch.cat([*decoder.feed([ROW[:30]]), *(decoder.feed([[token]])[0] for token in ROW[30:])])
    assert (got - want).norm() < 2e-5 * want.norm()


def test_layers_are_packed_beside_the_decoding_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has several threads: in threads of the loader's, to the same weights. Freed memory, which the next
    layer needs again, goes back to the system once."""
    save_e8p("qwen3", tmp_path / "m", rates={"bits": 4})
    pack, threads, trims = packed_weights.pack, torch.get_num_threads(), []
    packers: dict[int, set[threading.Thread]] = {}
    monkeypatch.setattr(loader, "_malloc_trim", lambda: trims.append)
    models = {}
    try:
        for count in (1, 2):
            packers[count] = set()
            torch.set_num_threads(count)

            def seen(*args: Any, to: set[threading.Thread] = packers[count]) -> packed_weights.Packed:
                to.add(threading.current_thread())
                return pack(*args)

            monkeypatch.setattr(packed_weights, "pack", seen)
            with Checkpoint.open(tmp_path / "m") as checkpoint:
                models[count] = Llama.load(checkpoint, held="float16")
    finally:
        torch.set_num_threads(threads)
    assert packers[1] == {threading.main_thread()}
    assert packers[2]
    assert threading.main_thread() not in packers[2]
    assert not any(thread.is_alive() for thread in packers[2])
    for one, other in zip(linears(models[1]), linears(models[2]), strict=True):
        assert torch.equal(one.tensors["weight"], other.tensors["weight"])
    assert len(trims) == 2


def test_codes_are_rounded_to_float16(tmp_path: Path) -> None:
    save_e8p("qwen3", tmp_path / "m", rates={"bits": 4})
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        assert not packable(checkpoint, rounded=False)  # its head is float32
        plain, packed = Llama.load(checkpoint), Llama.load(checkpoint, held="float16")
    for one, other in zip(linears(plain), linears(packed), strict=True):
        assert isinstance(other, PackedLinear)
        assert torch.equal(other.tensors["weight"], one.tensors["weight"].half().float())


def test_a_model_with_dense_experts_is_not_packed(tmp_path: Path) -> None:
    """Its experts would take the float32 of the activations: twice the memory that was asked for."""
    hf_model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        assert not packable(checkpoint, rounded=False)
        assert not packable(checkpoint, rounded=True)
    assert pick_precision("float16", torch.device("cpu"), holds=True, packable=lambda rounded: False) == (
        torch.float16,
        None,
    )


def test_what_is_asked_for(tmp_path: Path) -> None:
    """`auto` never rounds what a file has in float32, and never what a GPU runs."""
    cpu, gpu, never = torch.device("cpu"), torch.device("cuda"), lambda rounded: pytest.fail("was asked")
    assert pick_precision("auto", cpu, holds=True, packable=lambda rounded: True) == (torch.float32, "float16")
    assert pick_precision("auto", cpu, holds=True, packable=lambda rounded: rounded) == (torch.float32, None)
    assert pick_precision("float16", cpu, holds=True, packable=lambda rounded: rounded) == (torch.float32, "float16")
    assert pick_precision(torch.float16, cpu, holds=False, packable=never) == (torch.float16, None)
    assert pick_precision("auto", cpu, holds=False, packable=never) == (torch.float32, None)
    assert pick_precision("bfloat16", cpu, holds=True, packable=never) == (torch.bfloat16, None)
    assert pick_precision("auto", gpu, holds=True, packable=never) == (torch.bfloat16, None)
    assert pick_precision("float16", gpu, holds=True, packable=never) == (torch.float16, None)


@pytest.mark.skipif(smollm2_gguf() is None, reason="needs the weights of SmolLM2")
def test_the_real_model_says_the_same() -> None:
    """KL of the next token between float32 and what `auto` takes: nothing beside what 4 bits cost (.035)."""
    with LLM(smollm2_gguf(), device="cpu", dtype="float32", max_model_len=256) as llm:
        tokens = llm.tokenizer.encode(Path(__file__).parents[1].joinpath("models.py").read_text())[:256]
        want = Decoder(llm.engine.model, rows=1, max_context=256).feed([tokens])[0].log_softmax(-1)
    with LLM(smollm2_gguf(), device="cpu", max_model_len=256) as llm:
        assert llm.weights == "float16"
        got = Decoder(llm.engine.model, rows=1, max_context=256).feed([tokens])[0].log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < 1e-5
