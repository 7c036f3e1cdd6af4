"""Rates within a budget: the knapsack against every choice there is, costs against the whole job, and the command."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import tiny
from fuzz.run import invoke
from onegraph import plan, quantize
from onegraph.api import measured
from onegraph.api import quantize as api
from onegraph.api.budget import AVERAGE
from onegraph.quant import allocate
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.allocate import ERRORS, Knapsack, Option
from onegraph.quant.layer import dequantize
from onegraph.quant.quantize import quantize as quantize_blocks
from onegraph.quant.recipe import Recipe
from onegraph.quant.result import Quantized
from onegraph.quant.sensitivity import NODES, Cost, measure, quick
from test_quant import VOCAB, Tiny

TEXT = "the thing in the inn, and a hat. " * 200
SMALL: dict[str, Any] = {"calibration": TEXT, "tokens": 512, "sequence": 64, "recipe": "quick", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("allocate") / "plain")


# ------------------------------------------------------------------------------------------------------ allocation


@pytest.mark.parametrize("steps", [1 << 14, 40])
def test_no_other_choice_within_a_budget_loses_less(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "STEPS", steps)
    draw = random.Random(0)
    parts = [[Option({f"{i}": r}, r * (i + 3), draw.random() / r) for r in (2, 3, 4, 16)] for i in range(5)]
    whole = Knapsack(parts, 1 << 40)
    for budget in range(whole.floor, whole.ceiling + 9, 7):
        found = whole.within(budget)
        every = [sum(o.loss for o in each) for each in product(*parts) if sum(o.cost for o in each) <= budget]
        assert found.cost <= budget
        assert sum(rate * (int(i) + 3) for i, rate in found.rates.items()) == found.cost
        if steps > whole.ceiling:
            assert found.loss == pytest.approx(min(every))
        elif budget > 1.2 * whole.floor:  # costs are rounded up to a coarse unit: close to the best, never beyond
            assert found.loss <= 1.35 * min(every)
    with pytest.raises(ValueError, match="under the least that there is"):
        whole.within(whole.floor - 1)


class Scaled(Tiny):
    """`Tiny` whose errors have another size: t times what rounding made of each weight."""

    def __init__(self, made: Quantized, sizes: dict[str, float]) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            for name, module in (each for group in self.linear_groups(block) for each in group):
                full = self.block_prefix(i) + name
                if full in made.layers:
                    rounded = dequantize(dict(made.layers[full]), made.config.bits_of(full))
                    module.weight.lerp_(rounded, sizes.get(full, sizes[""]))

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).double()


def test_the_slope_of_a_part_is_what_kl_gains_with_its_errors_beside_those_of_all(tmp_path: Path) -> None:
    plain, tokens = Tiny(), torch.randint(0, VOCAB, (12, 32), generator=torch.Generator().manual_seed(1))
    names = [plain.block_prefix(i) + name for i in range(2) for name in plain.shapes(i)]
    recipe, probe = quick(Recipe(bits=4, descent=2), 3), tokens[:3]
    kept = "blocks.0.o"
    costs = measure(plain, tokens, recipe, {name: name != kept for name in names}, probed=3)
    on_disk = ActivationOffload(tmp_path / "spilled", 0)
    assert costs == measure(plain, tokens, recipe, {name: name != kept for name in names}, probed=3, spill=on_disk)
    made = quantize_blocks(plain, tokens, Recipe(**recipe.to_dict() | {"layers": {kept: 16}}))
    want = Scaled(made, {"": 0.0}).logits(probe).log_softmax(-1)

    def kl(sizes: dict[str, float]) -> float:
        got = Scaled(made, sizes).logits(probe).log_softmax(-1)
        return (want.exp() * (want - got)).sum(-1).mean().item()

    for parts, cost in costs.items():
        for t, slope in zip(NODES, cost.slopes, strict=True):
            above, below = (kl({"": t} | dict.fromkeys(parts, t + step)) for step in (1e-2, -1e-2))
            # residual streams lie in bfloat16
            assert slope == pytest.approx((above - below) / 2e-2, rel=0.02, abs=2e-5), (parts, t)
    # Shares add up to the whole.
    assert sum(cost.loss(cost.error) for cost in costs.values()) == pytest.approx(kl({"": 1.0}), rel=0.02)


def test_losses_fall_with_the_rate_whatever_the_slopes() -> None:
    errors = [ERRORS["trellis"][rate] for rate in range(8, 1, -1)]
    for slopes in ((1.0, 2.0), (1.0, 0.5), (0.3, -0.1), (-0.1, 0.4), (0.0, 0.0)):
        losses = [Cost(ERRORS["trellis"][3], slopes).loss(error) for error in errors]
        assert losses == sorted(losses)
        assert losses[0] >= 0
    quadratic = Cost(0.0175, (0.5, 1.0))
    for error in errors:
        assert quadratic.loss(error) == pytest.approx(0.5 * error / 0.0175)


def test_parts_and_ends_have_costs() -> None:
    tiny_model, tokens = Tiny(), torch.randint(0, VOCAB, (12, 32), generator=torch.Generator().manual_seed(1))
    names = [tiny_model.block_prefix(i) + name for i in range(2) for name in tiny_model.shapes(i)]
    ends = {"lm_head": True, "model.embed_tokens": True}
    free = {name: name != "blocks.0.o" for name in names} | ends
    costs = measure(tiny_model, tokens, quick(Recipe(bits=4), 2), free, probed=3, outer=tiny_model.outer)
    parts = {names for names in costs if names[0].startswith("blocks")}
    assert parts == {(f"blocks.{i}.{n}",) for i in range(2) for n in ("o", "up", "down")} - {("blocks.0.o",)} | {
        ("blocks.0.k", "blocks.0.v"), ("blocks.1.k", "blocks.1.v")
    }  # fmt: skip
    error = ERRORS["e8p"][2]
    assert costs["lm_head",].loss(error) > 0 < costs["model.embed_tokens",].loss(error)
    # With the head alone: what the model loses with it.
    alone = measure(tiny_model, tokens, quick(Recipe(bits=4), 4), {"lm_head": True}, probed=3, outer=tiny_model.outer)
    assert list(alone) == [("lm_head",)]
    made = quantize_blocks(
        tiny_model, tokens, Recipe(descent=0, inputs="reference", lm_head=4, layers={"*": 16}), outer=tiny_model.outer
    )
    hidden = tiny_model.embed(tokens[:3])
    for block in tiny_model.blocks:
        hidden = block(hidden)
    want = tiny_model.head(hidden).log_softmax(-1)
    got = tiny_model.head(hidden, dequantize(dict(made.layers["lm_head"]), 4)).log_softmax(-1)
    lost = (want.exp() * (want - got)).sum(-1).mean().item()
    assert alone["lm_head",].loss(ERRORS["e8p"][4]) == pytest.approx(lost, rel=0.02)


# -------------------------------------------------------------------------------------------------------- commands


def average(config: dict[str, Any]) -> float:
    sizes = {name.removesuffix(".weight"): t.numel() for name, t in tiny.tensors().items() if "_proj" in name}
    return sum(config["layers"].get(name, config["bits"]) * size for name, size in sizes.items()) / sum(sizes.values())


def test_bits_between_rates_are_met_by_siblings_of_one_rate_and_a_killed_job_does_not_measure_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(api, "quantize_blocks", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, tmp_path / "out", bits=2.6, **SMALL)
    monkeypatch.setattr(measured, "measure", lambda *_, **__: pytest.fail("it measured again"))
    said: list[str] = []
    made = quantize(model, tmp_path / "out", bits=2.6, remark=said.append, **SMALL)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == made.config
    assert 2.5 < average(config) <= 2.6
    rates = [config["layers"].get(name.removesuffix(".weight"), config["bits"]) for name in tiny.tensors()]
    assert len(set(rates)) > 1
    for i in range(2):
        for siblings in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({config["layers"].get(f"model.layers.{i}.{n}", config["bits"]) for n in siblings}) == 1
    assert sum("<- chosen" in line for line in said) == 1
    bits, losses = zip(*made.curve, strict=True)
    assert (bits[0], bits[-1]) == (2, 4)
    assert sorted(losses, reverse=True) == list(losses)
    told = json.loads((tmp_path / "out" / "onegraph.json").read_text())["allocation"]
    assert all(cost >= 0 for cost in told["costs"].values())
    assert plan(model, bits=2.6, **SMALL).after.total_bytes == pytest.approx(made.after.total_bytes, rel=0.02)


@pytest.mark.parametrize("more", [{}, {"lm_head": 16, "embed_tokens": 16}, {"layers": {"*.o_proj": 16}}], ids=str)
def test_a_size_is_met_with_both_ends_in_it(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    least = plan(model, size=10**9, **SMALL | more).after.total_bytes  # all at 4 bits, ends as they are
    size = round(least * 0.85)
    made = quantize(model, tmp_path / "out", size=size, **SMALL | more)
    assert 0.93 * size < made.after.total_bytes <= size
    stored = sum(t.stat().st_size for t in (tmp_path / "out").glob("*.safetensors"))
    assert made.after.total_bytes <= stored < made.after.total_bytes + 8192  # the header
    if more.get("lm_head") == 16:
        assert (made.config["lm_head"], made.config["embed_tokens"]) == (None, None)
    above = {"lm_head": "embed_tokens, lm_head", "layers": "linears whose rate is set"}.get(next(iter(more), ""))
    lower = f"ask for that, or for lower rates of {above}$" if above else "ask for that; all that can be"
    with pytest.raises(ValueError, match=rf"size: got 1\.0 kB; this model takes .* at the least: {lower}"):
        plan(model, size=1000, **SMALL | more)


def test_each_linear_may_have_its_rate(model: Path, tmp_path: Path) -> None:
    made = quantize(model, tmp_path / "out", bits=3, per_linear=True, **SMALL)
    assert 2.9 < average(made.config) <= 3
    names = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkv"]
    assert len({made.config["layers"].get(name, made.config["bits"]) for name in names}) > 1
    costs = json.loads((tmp_path / "out" / "onegraph.json").read_text())["allocation"]["costs"]
    assert set(names) <= set(costs), "no two of them are one part"
    with pytest.raises(ValueError, match="per_linear: got True, and nvfp4 has one rate"):
        plan(model, format="nvfp4", per_linear=True)


def test_a_trellis_has_rates_up_to_8(model: Path, tmp_path: Path) -> None:
    options = SMALL | {"tokens": 128, "format": "trellis", "layers": {"model.layers.0.*": 16}}
    made = quantize(model, tmp_path / "out", bits=5.6, **options)
    rates = {made.config["bits"], *(rate for name, rate in made.config["layers"].items() if ".1." in name)}
    assert max(rates) > 5.6 > min(rates)
    bits, _ = zip(*made.curve, strict=True)
    assert (bits[0], bits[-1]) == (2, 8)
    size = round(0.97 * plan(model, size=10**9, **options).after.total_bytes)
    fitted = plan(model, size=size, **options)
    assert fitted.after.total_bytes <= size
    assert set(fitted.weights) <= set(range(2, 9)), "an embedding of 266 rows is no whole number of tiles: it is kept"


def test_the_command_line_tells_the_curve_and_refuses_in_a_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    command = ["quantize", model, tmp_path / "out", "--calibration", tmp_path / "text", "--tokens", 256]
    command += ["--calibration-seq-len", 64, "--recipe", "quick", "--device", "cpu"]
    for more, says in (
        (["--bits", "8.5"], "got '8.5'; allowed is a number from 1 to 8"),
        (["--bits", "4.5"], "--bits: got 4.5; allowed is a number from 2 to 4, and from 1 to 8 with format 'trellis'"),
        (["--size", "3.2 GiB"], "'3.2 GiB' is no size; give e.g. 3.2GB"),
        (["--size", "3GB", "--bits", "3"], "not allowed with argument"),
        (["--lm-head", "9"], "'9' is no rate of an end"),
        (["--lm-head", "5"], "--lm-head: got 5; allowed is 2, 3, 4, 16 to keep it"),
        (
            ["--bits", "2", "--lm-head", "auto", "--layer", "*=3"],
            "2.81 at the least: ask for that, or for lower rates of linears whose",
        ),
        (["--bits", "2.5", "--layer", "*=16"], "2.5 bits on average: no rate is left to be chosen"),
        (["--size", "1GB", "--format", "nvfp4"], "it takes no other bits, no size"),
    ):
        status, out, errors = invoke([*command, *more])
        assert (status, out) == (2, ""), errors
        assert says in errors.splitlines()[-1]
        assert errors.splitlines()[-1].startswith("onegraph: error: ")
    status, out, errors = invoke([*command, "--bits", "3", "--lm-head", "auto", "--json"])
    assert status == 0, errors
    found = json.loads(out)
    assert found["bits"] == 3
    assert [sorted(point) for point in found["curve"]] == [["bits", "kl"]] * 21
    assert "<- chosen" in errors
    assert AVERAGE in errors.splitlines()
    status, out, errors = invoke([*command[:2], tmp_path / "other", *command[3:], "--size", "150kB", "--dry-run"])
    assert status == 0, errors
    assert AVERAGE in out.splitlines(), "what is said of the average"
    assert "bits per weight in the linears (with their scales)" in out
