"""The quantizer on a tiny decoder of its own: levers help, maps hold, a killed job resumes to the same bytes.

Past 400 lines, since all of it is asked of one tiny decoder and its calibration.
"""

import copy
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onegraph.formats.e8p import E8P
from onegraph.ops.registry import reference_ops
from onegraph.quant.calibrate import packed_tokens, sampled_tokens
from onegraph.quant.e8p import encode
from onegraph.quant.hessian import Moments, corrected, drift, gather
from onegraph.quant.layer import dequantize, quantize_embedding, quantize_group
from onegraph.quant.ldlq import damped, descent_coupling, ldlq_coupling, loss, sweep
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe, Tune
from onegraph.quant.result import Quantized
from onegraph.quant.resumable import ResumableWork, key_of

DIM, WIDE, VOCAB, BLOCKS = 64, 96, 50, 2


class Mix(nn.Module):
    """A block: causal mean of values, gated MLP. Small, but every kind of group is there."""

    def __init__(self, source: torch.Generator) -> None:
        super().__init__()

        def linear(n: int, k: int) -> nn.Linear:
            layer = nn.Linear(k, n, bias=False)
            rows = torch.rand(n, 1, generator=source) + 0.2
            layer.weight = nn.Parameter(torch.randn(n, k, generator=source) * rows * k**-0.5, requires_grad=False)
            return layer

        self.k, self.v, self.o = linear(32, DIM), linear(DIM, DIM), linear(DIM, DIM)
        self.up, self.down = linear(WIDE, DIM), linear(DIM, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (DIM,))
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        mean = self.v(y).cumsum(1) / steps * self.k(y).mean(-1, keepdim=True).sigmoid()
        x = x + self.o(mean)
        return x + self.down(nn.functional.silu(self.up(nn.functional.rms_norm(x, (DIM,)))))


class Tiny:
    num_blocks, num_drafts = BLOCKS, 0

    def __init__(self, kill_at: int = -1) -> None:
        source = torch.Generator().manual_seed(7)
        self.config: dict[str, Any] = {"model_type": "tiny"}
        self.blocks = [Mix(source) for _ in range(BLOCKS)]
        channels = torch.rand(DIM, generator=source) * 3 + 0.1
        self.table = torch.randn(VOCAB, DIM, generator=source) * channels
        self.out = torch.randn(VOCAB, DIM, generator=source)
        self.kill_at, self.calls = kill_at, 0

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        return (self.table if table is None else table)[tokens]

    def load_block(self, i: int) -> Mix:
        return copy.deepcopy(self.blocks[i])

    def run_block(self, block: Mix, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.kill_at:
            raise KeyboardInterrupt
        return block(hidden)

    kept = ()

    def shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        groups = self.linear_groups(self.blocks[i])
        return {name: tuple(module.weight.shape) for group in groups for name, module in group}

    def expert_layers(self, block: Mix) -> list[Any]:
        return []

    def linear_groups(self, block: Mix) -> list[list[tuple[str, nn.Module]]]:
        return [[("k", block.k), ("v", block.v)], [("o", block.o)], [("up", block.up)], [("down", block.down)]]

    def block_prefix(self, i: int) -> str:
        return f"blocks.{i}."

    def final_norm(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, (DIM,))

    def head(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.final_norm(hidden) @ (self.out if weight is None else weight).T

    def outer(self, name: str) -> Tensor:
        return {"model.embed_tokens.weight": self.table, "lm_head.weight": self.out}[name]


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (24, 32), generator=torch.Generator().manual_seed(1))


def same(one: Quantized, two: Quantized) -> bool:
    return list(one.layers) == list(two.layers) and all(
        torch.equal(tensor, two.layers[name][key])
        for name, tensors in one.layers.items()
        for key, tensor in tensors.items()
    )


@torch.no_grad()
def divergence(model: Tiny, made: Quantized, tokens: Tensor) -> float:
    hidden = wanted = model.embed(tokens)
    for i in range(BLOCKS):
        block = model.load_block(i)
        wanted = model.run_block(block, wanted)
        for group in model.linear_groups(block):
            for name, module in group:
                full = model.block_prefix(i) + name
                if full in made.layers:
                    module.weight.copy_(dequantize(dict(made.layers[full]), made.config.bits_of(full)))
        hidden = model.run_block(block, hidden)
    p, q = model.head(wanted).log_softmax(-1), model.head(hidden).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def hessian(k: int, source: torch.Generator) -> Tensor:
    x = torch.randn(4 * k, k, generator=source) @ torch.randn(k, k, generator=source) * k**-0.5
    return x.T @ x / (4 * k)


# ------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_ldlq_beats_nearest_and_descent_never_hurts(bits: int) -> None:
    source = torch.Generator().manual_seed(bits)
    h, factor = damped(hessian(192, source), 0.01)
    w = torch.randn(192, 48, generator=source)
    ldlq, descent = ldlq_coupling(factor), descent_coupling(h)
    nothing = copy.deepcopy(ldlq)
    nothing.matrix.zero_()
    nearest = loss(sweep(w, bits, nothing).value - w, h)
    rounded = sweep(w, bits, ldlq)
    last = loss(rounded.value - w, h)
    assert last < 0.8 * nearest
    for _ in range(3):
        rounded = sweep(w, bits, descent, rounded)
        now = loss(rounded.value - w, h)
        assert now <= last * (1 + 1e-5)
        last = now


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_descent_replaces_a_code_only_by_a_better_one(bits: int) -> None:
    """An encoder that errs on every other column changes nothing there, and the columns between gain as ever."""
    source = torch.Generator().manual_seed(bits)
    h, factor = damped(hessian(64, source), 0.01)
    w = torch.randn(64, 48, generator=source)
    ldlq, descent = ldlq_coupling(factor), descent_coupling(h)
    start = sweep(w, bits, ldlq)

    def errs(target: Tensor, bits: int, metric: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, residual, value = (x.clone() for x in encode(target, bits, metric))
        codes[::2], residual[::2] = -1, -1
        value[:, ::2] += 4
        return codes, residual, value

    ended, whole = sweep(w, bits, descent, start, errs), sweep(w, bits, descent, start)
    kinds = ((*each.codes, each.value) for each in (ended, start, whole))
    for found, before, free in zip(*kinds, strict=True):
        assert torch.equal(found[:, ::2], before[:, ::2])
        assert torch.equal(found[:, 1::2], free[:, 1::2])
    columns = [(e * (h @ e)).sum(0)[1::2] for e in (start.value - w, ended.value - w)]
    assert (columns[1] <= columns[0] * (1 + 1e-5)).all(), "a column's loss is its own, and no column gets worse"
    assert columns[1].sum() < columns[0].sum()


def test_block_ldl_factorizes_the_hessian() -> None:
    """(I + A)^T-style coupling and metric rebuild H: what the sweep assumes is algebra, not luck."""
    h, factor = damped(hessian(64, torch.Generator().manual_seed(0)), 0.01)
    ldlq, descent = ldlq_coupling(factor), descent_coupling(h)
    lower = torch.eye(64) + ldlq.matrix.T
    d = torch.block_diag(*[c.T @ c for c in ldlq.metric])
    assert torch.allclose(lower @ d @ lower.T, h, atol=1e-5)
    own = torch.block_diag(*[c.T @ c for c in descent.metric])
    assert torch.allclose(own @ (torch.eye(64) + descent.matrix), h, atol=1e-5)


def test_damping_is_raised_until_the_hessian_can_be_factorized() -> None:
    h = torch.eye(8)
    h[0, 0] = -0.05
    damped_h, _ = damped(h, 0.01)
    assert damped_h[1, 1] > 1.05
    for broken in (torch.zeros(8, 8), torch.full((8, 8), float("nan"))):
        with pytest.raises(ValueError, match="not finite"):
            damped(broken, 0.01)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_group_of_siblings(bits: int) -> None:
    source = torch.Generator().manual_seed(5)
    h = hessian(64, source)
    weights = [torch.randn(n, 64, generator=source) for n in (32, 50)]
    made = quantize_group(weights, h, [bits, bits], Recipe(bits=bits), torch.Generator().manual_seed(1))
    assert torch.equal(made[0]["in_scale"], made[1]["in_scale"])
    limit = {2: 0.1, 3: 0.035, 4: 0.0105}[bits]
    for w, tensors in zip(weights, made, strict=True):
        wanted = E8P[bits].layout(*w.shape)
        assert {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == wanted
        error = dequantize(tensors, bits) - w
        assert ((error @ h) * error).sum() / ((w @ h) * w).sum() < limit


def test_scales_help_where_rows_and_channels_differ() -> None:
    source = torch.Generator().manual_seed(2)
    h = hessian(128, source)
    w = torch.randn(64, 128, generator=source) * torch.logspace(-1, 1, 128) * torch.logspace(-1, 1, 64).unsqueeze(1)

    def error(**recipe_options: Any) -> float:
        recipe = Recipe(bits=3, **({"channel_scale": 0.0, "row_scale": 0.0, "fit_scales": False} | recipe_options))
        e = dequantize(quantize_group([w], h, [3], recipe, torch.Generator().manual_seed(1))[0], 3) - w
        return ((e @ h) * e).sum().item()

    plain = error()
    assert error(channel_scale=1.0) < 0.8 * plain
    assert error(row_scale=0.5) < 0.9 * plain
    assert error(fit_scales=True) < plain


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zero_and_huge_weights_stay_finite(bits: int) -> None:
    h = torch.eye(64)
    for w in (torch.zeros(16, 64), torch.full((16, 64), 1e-8), torch.eye(16, 64) * 1e4):
        out = dequantize(quantize_group([w], h, [bits], Recipe(bits=bits), torch.Generator())[0], bits)
        assert torch.isfinite(out).all()
        assert (out - w).norm() <= w.norm() * 0.5 + 1e-6


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_embedding_rows_stand_for_themselves(bits: int) -> None:
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 40).unsqueeze(1)
    tensors = quantize_embedding(w, bits, Recipe(), torch.Generator())
    error = (dequantize(tensors, bits, embedding=True) - w).norm(dim=1) / w.norm(dim=1)
    assert error.max() < {2: 0.45, 3: 0.25, 4: 0.14}[bits]


def test_correction_fits_the_quantized_models_inputs() -> None:
    source = torch.Generator().manual_seed(3)
    clean = torch.randn(500, 16, generator=source)
    seen = clean + 0.3 * torch.randn(500, 16, generator=source) @ torch.randn(16, 16, generator=source)
    w = torch.randn(8, 16, generator=source)
    moments = Moments(seen.T @ seen / 500, clean.T @ seen / 500)
    best = torch.linalg.lstsq(seen, clean @ w.T).solution.T
    assert torch.allclose(corrected(w, drift(moments, 1e-9), 1.0), best, atol=1e-3)
    assert torch.equal(corrected(w, drift(moments, 0.01), 0.0), w)


def test_moments_are_those_of_the_inputs(tokens: Tensor) -> None:
    model = Tiny()
    block = model.load_block(0)
    x = model.embed(tokens)
    gathered = gather(model, block, list(x.split(5)), [0, 3])
    y = nn.functional.rms_norm(x, (DIM,)).flatten(0, 1)
    moments = gathered.moments
    assert sorted(moments) == [0, 3]
    assert torch.allclose(moments[0].h, y.T @ y / y.shape[0], atol=1e-5)
    assert moments[0].cross is None
    assert torch.allclose(torch.cat(list(gathered.outputs)), model.run_block(block, x), atol=1e-5)


# -------------------------------------------------------------------------------------------------------- driver


@pytest.mark.parametrize("inputs", ["reference", "block", "group"])
def test_more_bits_are_closer(tokens: Tensor, inputs: Any) -> None:
    model = Tiny()
    kl = [divergence(model, quantize(model, tokens, Recipe(bits=b, inputs=inputs)), tokens) for b in (2, 3, 4)]
    assert kl[0] > 2 * kl[1] > 4 * kl[2] > 0


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(bits=2, inputs="reference", batch_tokens=100),
        Recipe(bits=3, inputs="group", correct=0.5, layers={"*.down": 4, "blocks.0.o": 16}),
        Recipe(bits=4, lm_head=3, embed_tokens=4, tune=Tune(epochs=3, batch=8)),
    ],
    ids=["quick", "mixed", "tuned"],
)
def test_a_killed_job_resumes_to_the_same_bytes(tokens: Tensor, recipe: Recipe, tmp_path: Any) -> None:
    whole = Tiny()
    made = quantize(whole, tokens, recipe, outer=whole.outer)
    assert same(made, quantize(Tiny(), tokens, recipe, outer=whole.outer))
    for at, kill in enumerate(sorted({1, 2, whole.calls // 3, whole.calls // 2, whole.calls - 1})):
        model = Tiny(kill_at=kill)
        with ResumableWork(tmp_path / str(at), "tiny") as partial, pytest.raises(KeyboardInterrupt):
            quantize(model, tokens, recipe, partial, outer=model.outer)
        (tmp_path / str(at)).mkdir(exist_ok=True)  # it goes with its last user where nothing was finished
        (tmp_path / str(at) / ".block-00001.safetensors.tmp").write_bytes(b"half of a piece")
        with ResumableWork(tmp_path / str(at), "tiny") as partial:
            assert same(made, quantize(Tiny(), tokens, recipe, partial, outer=model.outer))


def corrected_job(tokens: Tensor, path: Any, before: Recipe, after: Recipe) -> str:
    """What is said of a job that goes on with the work of another; its result is that of a job by itself."""
    said: list[str] = []
    with ResumableWork(path, "tiny") as partial:
        quantize(Tiny(), tokens, before, partial)
    with ResumableWork(path, "tiny", remark=said.append) as partial:
        assert same(quantize(Tiny(), tokens, after, partial), quantize(Tiny(), tokens, after))
        partial.remove()
    (line,) = said
    return line


def test_a_corrected_job_takes_over_what_it_leaves_as_it_was(tokens: Tensor, tmp_path: Any) -> None:
    path = tmp_path / "work"
    line = corrected_job(tokens, path, Recipe(), Recipe(layers={"blocks.1.down": 2}))
    assert line == f"{path}: keeps 1 block and drops 1 block, which this command asks for otherwise"
    line = corrected_job(tokens, path, Recipe(), Recipe(layers={"blocks.0.down": 2}))
    assert line == f"{path}: drops 2 blocks, which this command asks for otherwise", "Hessians of block 1 changed too"
    quick = {"inputs": "reference", "descent": 0}
    line = corrected_job(tokens, path, Recipe(**quick), Recipe(**quick, layers={"blocks.0.down": 2}))
    assert line.startswith(f"{path}: keeps the Hessians of 2 blocks, 1 block and drops 1 block")
    line = corrected_job(tokens, path, Recipe(**quick), Recipe(**quick, bits=2))
    assert line.startswith(f"{path}: keeps the Hessians of 2 blocks and drops 2 blocks")
    line = corrected_job(tokens, path, Recipe(bits=2), Recipe(bits=2, tune=Tune(epochs=1)))
    assert line == f"{path}: keeps 2 blocks"
    said: list[str] = []
    with ResumableWork(path, "tiny", remark=said.append) as partial:
        partial.save("text", "key", {"tokens": tokens})
        quantize(Tiny(), tokens, Recipe(), partial)
    assert not said, "nothing is gone on with that this job has made"


def test_hessians_are_kept_only_where_there_is_room(tokens: Tensor, tmp_path: Any) -> None:
    with ResumableWork(tmp_path / "work", "tiny", keep_inputs=False) as partial:
        made = quantize(Tiny(), tokens, Recipe(inputs="reference"), partial)
        assert sorted(f.name for f in (tmp_path / "work").glob("*.safetensors")) == [
            "block-00000.safetensors",
            "block-00001.safetensors",
        ]
        assert same(made, quantize(Tiny(), tokens, Recipe(inputs="reference")))


def test_another_model_is_refused(tmp_path: Any) -> None:
    with ResumableWork(tmp_path / "work", "a") as partial:
        partial.save("block-00000", "key", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="unfinished work on another model"):
        ResumableWork(tmp_path / "work", "b")
    ResumableWork(tmp_path / "work", "a").close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="no unfinished quantization"):
        ResumableWork(tmp_path / "mine", "a")
    assert (tmp_path / "mine" / "thesis.txt").exists()


HOLD = """
import sys, time
from onegraph.quant.resumable import ResumableWork
partial = ResumableWork(sys.argv[1], "a")
print("held", flush=True)
time.sleep(100)
"""


def test_a_second_process_is_told_who_works_there_and_a_dead_one_holds_nothing(tmp_path: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "work")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(
            ValueError, match=rf"process {process.pid} on {re.escape(socket.gethostname())} works there"
        ):
            ResumableWork(tmp_path / "work", "a")
    finally:
        process.kill()
        process.communicate()
    with ResumableWork(tmp_path / "work", "a"), pytest.raises(ValueError, match=rf"process {os.getpid()} on"):
        ResumableWork(tmp_path / "work", "a")
    assert not (tmp_path / "work").exists(), "nothing was finished, so nothing is left"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".job.tmp").write_text("half")
    (tmp_path / "work" / "lock").write_bytes(b"\xff\x00 nobody")
    ResumableWork(tmp_path / "work", "a").close()


def test_a_damaged_piece_is_named(tokens: Tensor, tmp_path: Any) -> None:
    with ResumableWork(tmp_path / "work", "job") as partial:
        quantize(Tiny(), tokens, Recipe(), partial)
        file = tmp_path / "work" / "block-00001.safetensors"
        whole = file.read_bytes()
        for damaged in (whole[:-5], whole[:-5] + bytes(byte ^ 1 for byte in whole[-5:])):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="block-00001"):
                quantize(Tiny(), tokens, Recipe(), partial)
        partial.remove()
    assert not (tmp_path / "work").exists()


def test_a_key_names_all_that_it_is_made_of() -> None:
    keys = [key_of(1, "a"), key_of(1, "b"), key_of({"a": 2, "b": 1}), key_of(torch.zeros(2)), key_of(torch.zeros(2, 1))]
    assert len(set(keys)) == len(keys)
    assert key_of({"b": 1, "a": 2}) == keys[2]


def test_rate_map(tokens: Tensor) -> None:
    made = quantize(Tiny(), tokens, Recipe(bits=4, layers={"blocks.*.down": 2, "blocks.1.down": 3, "*.k": 16}))
    assert made.config.layers == {"blocks.0.down": 2, "blocks.1.down": 3, "blocks.0.k": 16, "blocks.1.k": 16}
    assert "blocks.0.k" not in made.layers
    assert "residual" not in made.layers["blocks.0.down"]
    assert made.layers["blocks.1.down"]["residual"].dtype == torch.uint8
    with pytest.raises(ValueError, match=r"matches no linear"):
        quantize(Tiny(), tokens, Recipe(layers={"*.dwon": 2}))


def test_siblings_of_different_rates_share_their_input_scale(tokens: Tensor) -> None:
    made = quantize(Tiny(), tokens, Recipe(bits=4, layers={"*.k": 2}))
    for i in range(BLOCKS):
        assert torch.equal(made.layers[f"blocks.{i}.k"]["in_scale"], made.layers[f"blocks.{i}.v"]["in_scale"])


def test_the_seed_is_all_that_is_random(tokens: Tensor) -> None:
    one, two = (quantize(Tiny(), tokens, Recipe(seed=seed)) for seed in (0, 1))
    assert not same(one, two)
    torch.manual_seed(99)
    assert same(one, quantize(Tiny(), tokens, Recipe(seed=0)))


def test_head_and_embedding(tokens: Tensor) -> None:
    model = Tiny()
    made = quantize(model, tokens, Recipe(lm_head=4, embed_tokens=4), outer=model.outer)
    assert made.config.lm_head == made.config.embed_tokens == 4
    head = dequantize(dict(made.layers["lm_head"]), 4)
    assert (head - model.out).norm() / model.out.norm() < 0.2
    with pytest.raises(ValueError, match="outer"):
        quantize(model, tokens, Recipe(lm_head=4))


def test_tensors_of_the_new_checkpoint(tokens: Tensor) -> None:
    model = Tiny()
    names = ["model.embed_tokens.weight", "blocks.0.k.weight", "blocks.0.k.bias", "blocks.0.norm.weight"]

    def read(name: str) -> Tensor:
        return torch.full((2,), float(names.index(name)), dtype=torch.float16)

    made = quantize(model, tokens, Recipe(embed_tokens=4), outer=model.outer)
    written = dict(made.tensors(names, read))
    assert torch.equal(written["lm_head.weight"], read(names[0]))  # tied: the head keeps the weight that is replaced
    assert torch.equal(written["blocks.0.norm.weight"], read(names[3]))
    assert written["blocks.0.k.bias"].dtype == torch.float32
    assert "blocks.0.k.weight" not in written
    assert {"blocks.0.k.codes", "blocks.0.k.scale", "model.embed_tokens.codes"} <= set(written)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"bits": None},
        {"layers": {"x": 7}},
        {"lm_head": 16},
        {"damping": float("nan")},
        {"descent": -1},
        {"inputs": "none"},
        {"inputs": "reference", "correct": 0.5},
        {"batch_tokens": 0},
    ],
)
def test_recipes_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**wrong)


def test_what_cannot_be_quantized_is_named(tokens: Tensor) -> None:
    odd = Tiny()
    odd.blocks[0].o = nn.Linear(DIM - 4, DIM, bias=False)
    with pytest.raises(ValueError, match=r"o: a linear of 64 x 60.*rate 16"):
        quantize(odd, tokens, Recipe())
    damaged = Tiny()
    damaged.blocks[1].v.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.v: the weight is not finite"):
        quantize(damaged, tokens, Recipe())


def test_tokens_must_be_tokens() -> None:
    for tokens in (torch.zeros(3), torch.zeros(2, 2), torch.zeros(0, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="tokens"):
            quantize(Tiny(), tokens, Recipe())


def test_calibration_text() -> None:
    assert packed_tokens(list(range(10)), length=3, limit=8).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="calibration text"):
        packed_tokens([1, 2], length=3, limit=8)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        return [[9, 9][:count] for _ in prompts]

    assert sampled_tokens(generate, starts=[[1]] * 2, length=7).tolist() == [[1, 9, 9, 1, 9, 9, 1]] * 2
    with pytest.raises(ValueError, match="text file"):
        sampled_tokens(lambda prompts, count: [[] for _ in prompts], starts=[[1]], length=4)


def test_the_reference_path_is_what_runs_here(tokens: Tensor) -> None:
    with reference_ops():
        one = quantize(Tiny(), tokens, Recipe())
    assert same(one, quantize(Tiny(), tokens, Recipe()))


@pytest.mark.parametrize("name", ["lock", "job", ".job.tmp", "block-0.safetensors", ".block-0.safetensors.tmp"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    """A link would be written through, a pipe would be waited for."""
    folder, target = tmp_path / "out.partial", tmp_path / "target"
    folder.mkdir()
    target.write_text("mine")
    if kind == "link":
        (folder / name).symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    with pytest.raises(ValueError, match=re.escape(f"{folder / name} is not a regular file")):
        ResumableWork(folder, "source")
    assert target.read_text() == "mine"
