"""Rounding to the trellis: LDLQ in tiles, weights of a Hessian's factors, whole models on disk."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import Decoder, save_hf, save_rotated
from onegraph.api.verify import verify
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.trellis import TRELLIS, UNIT, TrellisConfig, decode
from onegraph.models.llama import Llama
from onegraph.quant import trellis, two_sided_ldlq
from onegraph.quant.layer import dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.ldlq import damped, ldlq_coupling, loss, sweep
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe
from onegraph.quant.resumable import ResumableWork
from test_llama_quantized import divergence, quantized
from test_quant import VOCAB, Tiny, hessian, same
from test_two_sided_ldlq import spectrum

QUICK = trellis.AROUND_QUICK


def targets(k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A Hessian, its lower factor, and what is rounded under it."""
    source = torch.Generator().manual_seed(k)
    h, factor = damped(hessian(k, source), 0.01)
    return h, factor, torch.randn(k, n, generator=source)


def test_ldlq_in_tiles_beats_nearest_and_stores_what_it_says() -> None:
    h, factor, w = targets(96, 48)
    run, nothing = trellis.rounder(3, QUICK), ldlq_coupling(torch.eye(96, dtype=torch.float64), 16)
    nearest = sweep(w, 3, nothing, encode=run)
    rounded = sweep(w, 3, ldlq_coupling(factor, 16), encode=run)
    assert loss(rounded.value - w, h) < 0.8 * loss(nearest.value - w, h)
    assert torch.equal(decode(trellis.stored(rounded, 3)["codes"], 3).T / UNIT, rounded.value)


@pytest.mark.parametrize(("k", "n"), [(64, 48), (32, 96)])
def test_a_flat_output_factor_is_ldlq(k: int, n: int) -> None:
    _, factor, w = targets(k, n)
    run, ldlq = trellis.rounder(2, QUICK), ldlq_coupling(factor, 16)
    flat = torch.eye(n, dtype=torch.float64)
    two = two_sided_ldlq.sweep(
        w, 2, ldlq, two_sided_ldlq.output_coupling(flat.clone()), run, two_sided_ldlq.output_weights(flat)
    )
    one = sweep(w, 2, ldlq, encode=run)
    assert (one.codes[0] == two.codes[0]).float().mean() > 0.8  # sums in another order decide a tie otherwise
    assert torch.equal(decode(trellis.stored(two, 2)["codes"], 2).T / UNIT, two.value)


def test_the_second_factor_and_its_weights_lower_the_loss() -> None:
    source = torch.Generator().manual_seed(0)
    w, (h_i, lower_i) = torch.randn(96, 64, generator=source), damped(spectrum(96, 5, source), 1e-3)
    gains = torch.logspace(-0.3, 0.3, 64)[torch.randperm(64, generator=source)]  # outputs of a tile that differ
    h_o, lower_o = damped(spectrum(64, 5, source) * gains * gains[:, None], 1e-3)
    run, ldlq = trellis.rounder(2, QUICK), ldlq_coupling(lower_i, 16)

    def lost(value: Tensor) -> float:
        return (((h_i @ (value - w)) @ h_o) * (value - w)).sum().item()

    weights, coupling = two_sided_ldlq.output_weights(lower_o), two_sided_ldlq.output_coupling(lower_o)
    apart = lost(sweep(w, 2, ldlq, encode=run).value)
    plain, weighed = (lost(two_sided_ldlq.sweep(w, 2, ldlq, coupling, run, each).value) for each in (None, weights))
    assert plain < 0.8 * apart
    assert weighed < 0.97 * plain


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_a_layer_is_rounded_at_every_rate(bits: int) -> None:
    source = torch.Generator().manual_seed(bits)
    w, h = torch.randn(48, 64, generator=source) * 0.1, spectrum(64, 2, source)
    recipe = Recipe(format="trellis", bits=bits, descent=0)
    made = quantize_group([w], h, [bits], recipe, generator(0, "w"))[0]
    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == {
        key: shape for key, (shape, _) in TRELLIS[bits].layout(48, 64).items()
    }
    error = (dequantize(made, bits, "trellis") - w).square().mean() / w.square().mean()
    assert error < 1.5 * {1: 0.275, 2: 0.069, 5: 0.0012, 8: 2.5e-5}[bits]


def test_an_embedding_is_looked_up_by_row() -> None:
    table = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 64)[:, None]
    recipe = Recipe(format="trellis", bits=4)
    made = quantize_embedding(table, 4, recipe, generator(0, "e"))
    found = dequantize(made, 4, "trellis", embedding=True)
    error = (found - table).square().mean(1) / table.square().mean(1)
    assert error.max() < 0.02  # each row on a scale of its own
    with pytest.raises(ValueError, match="a linear of 50 x 48 cannot be stored as trellis at 4 bits"):
        quantize_embedding(table[:50], 4, recipe, generator(0, "e"))


def test_a_killed_job_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (8, 32), generator=torch.Generator().manual_seed(1))
    recipe = Recipe(format="trellis", bits=2, descent=0, inputs="block", correct=0.5, fisher=2, fisher_outputs=True)
    whole = quantize(Tiny(), tokens, recipe)
    calls = Tiny()
    quantize(calls, tokens, recipe)
    with ResumableWork(tmp_path / "p", "x") as partial, pytest.raises(KeyboardInterrupt):
        quantize(Tiny(kill_at=calls.calls - 2), tokens, recipe, partial)
    with ResumableWork(tmp_path / "p", "x") as partial:
        assert same(quantize(Tiny(), tokens, recipe, partial), whole)
    assert whole.config == TrellisConfig(bits=2)


@pytest.mark.parametrize(
    ("variant", "recipe"),
    [("smollm2", {"bits": 4}), ("qwen2", {"bits": 3, "layers": {"*.down_proj": 5, "*.1.mlp.up_proj": 16}})],
)
def test_a_model_is_rounded_written_and_run(variant: str, recipe: dict, tmp_path: Path) -> None:
    """Codes as they are and decoded give the same logits; what is lost is less than E8P loses at the rate."""
    recipe_options = {"inputs": "group", "correct": 0.5, "descent": 0}
    _, coded, hf = quantized(variant, tmp_path, format="trellis", **recipe_options, **recipe)
    _, other, _ = quantized(variant, tmp_path / "e8p", **recipe_options, bits=recipe["bits"])
    row = torch.randint(0, 131, (96,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(checkpoint: Checkpoint, decode: bool) -> Tensor:
        return Decoder(Llama.load(checkpoint, decode=decode), rows=1, max_context=96).feed([row])[0]

    got, plain = logits(coded, False), logits(other, True)
    assert (got - logits(coded, True)).abs().max() < 1e-4
    with torch.inference_mode():
        want = hf(torch.tensor([row])).logits[0]
    assert 0 < divergence(want, got) < 0.9 * divergence(want, plain)
    assert verify(tmp_path / "coded").ok


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("codes", lambda t: t[:, :-1], r"q_proj.codes' has shape \[6, 95\], the config needs \[6, 96\]"),
        ("codes", lambda t: t.view(-1, 16), r"q_proj.codes' has shape \[36, 16\], the config needs \[6, 96\]"),
        ("codes", lambda t: t.repeat(1, 2), r"q_proj.codes' has shape \[6, 192\], the config needs \[6, 96\]"),
        ("codes", lambda t: t.int(), "q_proj.codes' is int32, allowed is int16"),
        ("start", lambda t: torch.zeros(6, 6, dtype=torch.int16), "unexpected: '.*q_proj.start'"),
        ("scale", lambda t: -t, "q_proj.scale' is -.*; a scale is above zero"),
    ],
)
def test_bad_tensors_are_named(key: str, change: object, message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_rotated(TrellisConfig(bits=1), "smollm2", tmp_path / "coded", intermediate_size=96, num_hidden_layers=1)
    file = next((tmp_path / "coded").glob("*.safetensors"))
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.q_proj.{key}"
    tensors[name] = change(tensors.get(name)).contiguous()  # type: ignore[operator]  # of a parameter
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message), Checkpoint.open(tmp_path / "coded") as checkpoint:
        Llama.load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "bits is 9; allowed: 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"bits": 2.5}, "bits is 2.5; allowed: 1"),
        ({"state_bits": 12}, "unknown key state_bits"),
        ({"codebook": "3inst"}, "unknown key codebook"),
        ({"format": "trellis2"}, "format is 'trellis2'"),
        ({"format_version": 2}, "this version reads 1: a newer onegraph wrote it"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    save_hf("smollm2", tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"quantization_config": TrellisConfig(bits=3).to_dict() | change}))
    with pytest.raises((CheckpointError, ValueError), match=message), Checkpoint.open(tmp_path / "m") as checkpoint:
        Llama.load(checkpoint)
