"""Rounding under both factors of a Hessian of the model's KL, and the factors themselves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onegraph.api import cost
from onegraph.quant import fisher, two_sided_ldlq
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.e8p import encode
from onegraph.quant.fisher import Factors, kl_factors
from onegraph.quant.hessian import gather
from onegraph.quant.layer import dequantize, generator, quantize_group
from onegraph.quant.ldlq import damped, ldlq_coupling, sweep
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe
from onegraph.quant.resumable import ResumableWork
from test_quant import VOCAB, Tiny, same


def spectrum(size: int, decay: float, source: torch.Generator) -> Tensor:
    """A second moment whose eigenvalues fall from 1 to exp(-decay)."""
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=source))
    return ((q * torch.exp(-decay * torch.arange(size) / size)) @ q.T).float()


@pytest.mark.parametrize(("k", "n"), [(64, 48), (32, 200), (128, 21)])
def test_a_flat_output_factor_is_ldlq(k: int, n: int) -> None:
    source = torch.Generator().manual_seed(k)
    w = torch.randn(k, n, generator=source)
    ldlq = ldlq_coupling(damped(spectrum(k, 5, source), 0.01)[1])
    flat = two_sided_ldlq.output_coupling(torch.eye(n, dtype=torch.float64))
    one, two = sweep(w, 3, ldlq), two_sided_ldlq.sweep(w, 3, ldlq, flat, encode)
    same_codes = (one.codes[0] == two.codes[0]) & (one.codes[1] == two.codes[1])
    assert same_codes.float().mean() > 0.95  # sums in another order decide a tie otherwise, and what follows it


def test_both_factors_take_a_third_of_the_loss_that_ldlq_leaves() -> None:
    source = torch.Generator().manual_seed(0)
    k, n = 128, 104  # n is no multiple of what is encoded together
    w, (h_i, lower_i) = torch.randn(k, n, generator=source), damped(spectrum(k, 5, source), 1e-3)
    h_o, lower_o = damped(spectrum(n, 5, source), 1e-3)
    ldlq = ldlq_coupling(lower_i)

    def loss(value: Tensor) -> float:
        e = value - w
        return ((h_i @ e @ h_o) * e).sum().item()

    both = two_sided_ldlq.sweep(w, 2, ldlq, two_sided_ldlq.output_coupling(lower_o), encode)
    assert loss(both.value) < 0.67 * loss(sweep(w, 2, ldlq).value)
    decoded = sweep(w, 2, ldlq).value  # values are what codes stand for, as LDLQ's are
    assert set(both.value.unique().tolist()) <= set(decoded.unique().tolist()) | {v / 4 for v in range(-11, 12)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_are_fitted_to_all_rows_together(device: str) -> None:
    """The layer as it is stored loses less under both factors; scaling any row by itself would lose more."""
    source = torch.Generator().manual_seed(3)
    w, h_i, h_o = torch.randn(64, 96, generator=source), spectrum(96, 4, source), spectrum(64, 6, source)
    w, h_i, h_o = w.to(device), h_i.to(device), h_o.to(device)

    def loss(value: Tensor) -> float:
        e = value - w
        return ((h_o @ e @ h_i) * e).sum().item()

    def made(outputs: list[Callable[[], Tensor]] | None, **recipe_options: object) -> Tensor:
        recipe = Recipe(bits=2, descent=0, output_damping=0.01, **recipe_options)  # type: ignore[arg-type]  # one bool
        return dequantize(quantize_group([w], h_i, [2], recipe, generator(0, "w"), outputs)[0], 2)

    apart, unfitted, fitted = made(None), made([lambda: h_o], fit_scales=False), made([lambda: h_o])
    assert loss(fitted) < loss(unfitted) < 0.8 * loss(apart)
    for row in (0, 17, 63):
        for factor in (0.98, 1.02):
            moved = fitted.clone()
            moved[row] *= factor
            assert loss(moved) > loss(fitted)


def test_factors_are_the_fisher_information_of_the_models_own_predictions() -> None:
    """Behind the last block, where `down` writes, the exact one is J^T (diag p - p p^T) J with J of norm and head."""
    model, tokens = Tiny(), torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    found = dict(kl_factors(model, tokens, seed=0, draws=100))
    assert sorted(found) == [0, 1]
    assert set(found[0].triangles) == {f"blocks.0.{name}" for name in ("k", "v", "o", "up", "down")}
    hidden = model.embed(tokens)
    for i in range(2):
        hidden = model.run_block(model.load_block(i), hidden).detach()
    exact, power = torch.zeros(64, 64), []
    for x in hidden.flatten(0, 1):
        jacobian = torch.autograd.functional.jacobian(model.head, x)
        p = model.head(x).softmax(-1)
        own = jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian
        exact += own
        power.append(own.diagonal().sum())
    exact /= exact.diagonal().mean()
    assert (found[1].of_outputs("blocks.1.down", exact.device) - exact).norm() < 0.1 * exact.norm()
    weights = torch.stack(power).view(2, 16)
    tokens_of = found[1].tokens["blocks.1.down"] / 100
    assert torch.allclose(tokens_of, weights, rtol=0.35)
    both = found[1].of_group(["blocks.1.k", "blocks.1.v"])
    exact_both = (found[1].tokens["blocks.1.k"] + found[1].tokens["blocks.1.v"]).sqrt()
    assert both is not None
    assert torch.allclose(both, exact_both / exact_both.mean())
    assert found[1].of_group(["blocks.1.k", "experts"]) is None


def test_tokens_weigh_in_the_moments_behind_quantized_blocks() -> None:
    model, tokens = Tiny(), torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    hidden = list(model.embed(tokens).split(2))
    weights = torch.rand(4, 16, generator=torch.Generator().manual_seed(2))
    parts = {2: [part.reshape(-1, 1) for part in weights.split(2)]}
    block = model.load_block(0)
    found = gather(model, block, hidden, [0, 2], (block, ActivationOffload().batches(hidden)), weights=parts).moments
    plain = gather(model, block, hidden, [0, 2]).moments
    assert torch.equal(found[0].h, plain[0].h)
    assert torch.equal(found[2].h, plain[2].h)
    assert found[0].weighed is None
    seen: list[Tensor] = []
    block.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].reshape(-1, 64)))
    model.run_block(block, torch.cat(hidden))
    exact = (seen[0] * weights.reshape(-1, 1)).T @ seen[0] / 64
    assert found[2].weighed is not None
    assert torch.allclose(found[2].weighed, exact, atol=1e-5)
    half = found[2].under(0.5)
    same_trace = exact * (plain[2].h.trace() / exact.trace())
    assert torch.allclose(half, (plain[2].h + same_trace) / 2, atol=1e-5)
    assert torch.equal(found[0].under(0.5), plain[0].h)


def test_a_job_with_factors_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (8, 32), generator=torch.Generator().manual_seed(1))
    recipe = Recipe(bits=2, descent=0, inputs="block", correct=0.5, fisher=2, fisher_outputs=True)
    whole = quantize(Tiny(), tokens, recipe)
    calls = Tiny()
    quantize(calls, tokens, recipe)
    for at in (5, calls.calls // 2, calls.calls - 1):
        told: list[str] = []
        with ResumableWork(f"{tmp_path}/{at}", "x") as partial, pytest.raises(KeyboardInterrupt):
            quantize(Tiny(kill_at=at), tokens, recipe, partial)
        with ResumableWork(f"{tmp_path}/{at}", "x", remark=told.append) as partial:
            assert same(quantize(Tiny(), tokens, recipe, partial), whole)
        assert any("keeps the gradients of" in line for line in told)
    assert not same(quantize(Tiny(), tokens, Recipe(bits=2, descent=0, inputs="block", correct=0.5)), whole)


def test_factors_leave_nothing_in_the_room_for_activations(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    held = dict(kl_factors(Tiny(), tokens, seed=0, draws=2))
    spill = ActivationOffload(tmp_path / "spilled", 4 * 16 * 64 * 4)  # one residual stream; there are five at once
    spilled = dict(kl_factors(Tiny(), tokens, seed=0, draws=2, spill=spill))
    assert spill.used
    assert spill.held == 0
    assert not list((tmp_path / "spilled").iterdir())
    assert all(torch.equal(t, spilled[i].tokens[name]) for i in held for name, t in held[i].tokens.items())


@pytest.mark.parametrize("n", [2, 8, 64])
def test_a_symmetric_matrix_is_kept_in_half_the_room(n: int) -> None:
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(n)).half()
    whole = a.tril() + a.tril(-1).T
    packed = fisher._packed(whole)
    assert packed.shape == (n * (n + 1) // 2,)
    back = Factors.of(Factors({"x": packed}).flat()).of_outputs("x", torch.device("cpu"))
    assert torch.equal(back, whole.float())


def test_linears_that_are_kept_have_no_factors() -> None:
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    made = dict(kl_factors(Tiny(), tokens, seed=0, rounded=lambda name: not name.endswith("down")))
    whole = dict(kl_factors(Tiny(), tokens, seed=0))
    for i, factors in made.items():
        assert factors.triangles.keys() == whole[i].triangles.keys() - {f"blocks.{i}.down"}
        assert all(torch.equal(t, whole[i].triangles[name]) for name, t in factors.triangles.items())


def test_factors_on_disk_are_what_a_plan_says_and_none_is_larger_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    recipe, model = Recipe(bits=2, descent=0, inputs="block", fisher=1, fisher_outputs=True), Tiny()
    linears = [(*shape, 2) for i in range(2) for shape in model.shapes(i).values()]
    widest = max(n for n, _, _ in linears)
    for largest in (widest, widest - 1):
        for module in (fisher, cost):
            monkeypatch.setattr(module, "LARGEST", largest)
        planned = cost.Work(recipe_options=recipe, groups=[], linears=linears).factors
        partial = ResumableWork(f"{tmp_path}/{largest}", "x")
        made = quantize(Tiny(), tokens, recipe, partial)
        kept = [load_file(tmp_path / str(largest) / f"fisher-{i:05d}.safetensors") for i in range(2)]
        assert sum(t.nbytes for piece in kept for name, t in piece.items() if name.startswith("o.")) == planned
        assert set(made.layers) == {f"blocks.{i}.{name}" for i in range(2) for name in model.shapes(i)}
        partial.close()
    assert planned == sum(n * (n + 1) for n, _, _ in linears if n < widest)


def test_a_linear_that_kl_does_not_depend_on_is_rounded_plainly() -> None:
    model, tokens = Tiny(), torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.blocks[1].down.weight.zero_()  # nothing behind it asks what `up` gives
    recipe = Recipe(bits=2, descent=0, inputs="block", fisher=1, fisher_outputs=True)
    found = dict(kl_factors(model, tokens, seed=0))
    assert "blocks.1.up" not in found[1].triangles | found[1].tokens
    assert "blocks.1.down" in found[1].triangles
    made = quantize(model, tokens, recipe)
    assert made.layers["blocks.1.up"]["codes"].any()
