"""The quantizer's parts by themselves, on numbers that can be worked out: what test_quant's whole jobs do not tell."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onegraph.formats.e8p import codebook
from onegraph.ops.e8p import e8p_decode
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.calibrate import packed_tokens, pieces, sampled_tokens
from onegraph.quant.e8p import nearest_per_shift
from onegraph.quant.hessian import Moments, corrected, drift, gather
from onegraph.quant.layer import dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.ldlq import damped, loss
from onegraph.quant.precision import tensor_cores
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import RHO, Recipe, Tune
from onegraph.quant.resumable import ResumableWork, key_of
from test_quant import BLOCKS, VOCAB, Tiny

# ------------------------------------------------------------------------------------------------------ Hessians


def test_a_damped_hessian_is_relative_to_its_mean_and_comes_with_its_factor() -> None:
    h = torch.tensor([[6.0, 2.0], [2.0, 2.0]])
    found, factor = damped(h, 0.5)
    assert torch.equal(found, torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    assert found.dtype == torch.float32
    assert torch.allclose(factor @ factor.T, found.double())


def test_damping_grows_tenfold_up_to_ten() -> None:
    indefinite = torch.tensor([[1.0, 4.0], [4.0, 1.0]])  # eigenvalues 5 and -3
    found, _ = damped(indefinite, 0.01)
    assert torch.allclose(found, indefinite + 10 * torch.eye(2))
    assert torch.allclose(damped(torch.tensor([[1.0, 1.5], [1.5, 1.0]]), 0.1)[0].diagonal(), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="even with damping 10"):
        damped(torch.tensor([[1.0, 20.0], [20.0, 1.0]]), 0.01)
    for broken in (torch.full((2, 2), float("inf")), -torch.eye(2)):
        with pytest.raises(ValueError, match="zero or not finite"):
            damped(broken, 0.01)


def test_the_loss_is_the_quadratic_form_of_the_error() -> None:
    h = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    error = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])
    assert loss(error, h).item() == 2 + 3 + (8 - 4 + 3)


class Line:
    """A model of one block with one group."""

    def linear_groups(self, block: Any) -> list[list[tuple[str, Any]]]:
        return [[("first", block[0])], [("second", block[1])]]

    def expert_layers(self, block: Any) -> list[Any]:
        return []

    def run_block(self, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden)


def test_cross_moments_are_of_the_unquantized_models_inputs_with_ours() -> None:
    source = torch.Generator().manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2)]
    for block in blocks:
        for layer in block:
            layer.weight.data = torch.randn(4, 4, generator=source)
    ours, theirs = (list(torch.randn(5, 3, 4, generator=source).split(2)) for _ in range(2))
    gathered = gather(Line(), blocks[0], ours, [1], (blocks[1], theirs))
    moments, outputs = gathered.moments, list(gathered.outputs)
    assert list(moments) == [1]
    pairs = zip(blocks, (ours, theirs), strict=True)
    x, reference = (block[0](torch.cat(batches)).flatten(0, 1) for block, batches in pairs)
    assert torch.allclose(moments[1].h, x.T @ x / 15, atol=1e-5)
    assert moments[1].cross is not None
    assert torch.allclose(moments[1].cross, reference.T @ x / 15, atol=1e-5)
    assert torch.allclose(torch.cat(outputs), blocks[0](torch.cat(ours)), atol=1e-5)
    assert not any(layer._forward_pre_hooks for block in blocks for layer in block)


def test_a_batch_that_does_not_reach_a_linear_is_not_counted_for_it() -> None:
    class Sometimes(Line):
        def run_block(self, block: Any, hidden: Tensor) -> Tensor:
            return block(hidden) if hidden[0, 0, 0] > 0 else block[0](hidden)

    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    there = torch.ones(1, 3, 4)
    moments = gather(Sometimes(), block, [there, -there], [0, 1]).moments
    x = block[0](there)[0]
    assert torch.allclose(moments[0].h, torch.ones(4, 4))
    assert torch.allclose(moments[1].h, x.T @ x / 6, atol=1e-6)
    assert list(gather(Sometimes(), block, [-there], [0, 1]).moments) == [0]


def test_a_linear_that_no_text_reaches_is_named_unless_it_is_kept(tokens: Tensor) -> None:
    class Unreached(Tiny):
        def linear_groups(self, block: Any) -> Any:
            return [*super().linear_groups(block)[:-1], [("down", nn.Linear(*block.down.weight.shape[::-1]))]]

    with pytest.raises(ValueError, match=r"blocks\.0\.down: no row of the calibration text reaches it"):
        quantize(Unreached(), tokens, Recipe(bits=2))
    quantize(Unreached(), tokens, Recipe(bits=2, layers={"*.down": 16}))


def test_a_correction_is_damped_and_of_the_strength_that_is_asked() -> None:
    h, weight = 4 * torch.eye(2), torch.tensor([[1.0, 2.0]])
    moments = Moments(h, 2 * h)
    assert torch.allclose(corrected(weight, drift(moments, 0.0), 1.0), 2 * weight)
    assert torch.allclose(corrected(weight, drift(moments, 1.0), 0.5), 1.25 * weight)
    assert torch.equal(moments.h, 4 * torch.eye(2)), "the moments are left as they were"
    assert corrected(weight, drift(Moments(-torch.eye(2), torch.eye(2)), 0.0), 1.0) is weight, (
        "no Hessian: no correction"
    )
    assert corrected(weight, drift(Moments(h, None), 0.0), 1.0) is weight


# ------------------------------------------------------------------------------------------------------- nearest


def test_nearest_around_the_longest_vectors_whatever_their_signs() -> None:
    """The 29 explicit vectors of norm 12 exist for one parity of signs: with the other, one coordinate gives way."""
    source = torch.Generator().manual_seed(0)
    codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = e8p_decode(codes.view(-1, 1), None, codebook(), 2).double() / 4
    longest = (codebook()[227:256].float() - 1).abs().div(4).repeat(50, 1)
    signs = torch.randint(0, 2, longest.shape, generator=source) * 2 - 1
    x = (longest * signs * (1 + 0.3 * torch.rand(len(longest), 1, generator=source))).T
    x = (x + 0.35 * torch.randn(x.shape, generator=source)).contiguous()
    per_shift, both = nearest_per_shift(x)
    for i, shift in enumerate((0.25, -0.25)):
        some = every[((every - shift) * 2 % 2 == 1).all(1)]
        truth = torch.cdist(x.T.double(), some).amin(1).square()
        assert (((x - both[:, i]).double().square().sum(0) - truth) <= 2e-6 * (1 + truth)).all()
        assert torch.equal(every[per_shift[i].to(torch.int16).long() + 2**15].T, both[:, i].double())


# -------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "beyond"),
    [
        ("damping", 1e-8, 10, (9e-9, 10.1, float("inf"))),
        ("channel_scale", 0, 2, (-0.1, 2.1, float("nan"))),
        ("row_scale", 0, 2, (-0.1, 2.1)),
        ("correct", 0, 1, (-0.1, 1.1)),
        ("descent", 0, 100, (-1, 101)),
        ("batch_tokens", 1, 10**9, (0, -5)),
        ("bits", 2, 4, (1, 5, 16, None)),
        ("lm_head", 2, 4, (1, 5, 16)),
        ("embed_tokens", 2, 4, (1, 5, 16)),
    ],
)
def test_what_a_recipe_allows(name: str, lowest: Any, highest: Any, beyond: tuple[Any, ...]) -> None:
    for value in (lowest, highest):
        assert getattr(Recipe(**{name: value}), name) == value
    for value in beyond:
        with pytest.raises(ValueError, match=rf"^{name} is "):
            Recipe(**{name: value})


def test_exceptions_of_a_recipe() -> None:
    layers = {"a": 2, "b": 3, "c": 4, "d": 16}
    assert Recipe(layers=layers).to_dict()["layers"] == layers
    with pytest.raises(ValueError, match="layers has 8 for 'x'; allowed: 2, 3, 4, or 16"):
        Recipe(layers={"x": 8})
    assert Recipe(lm_head=None, embed_tokens=None) == Recipe()
    for inputs in ("reference", "block", "group"):
        assert Recipe(inputs=inputs).inputs == inputs
    with pytest.raises(ValueError, match="inputs is 'all'; allowed: reference, block, group"):
        Recipe(inputs="all")


def test_presets_and_rates() -> None:
    quick, good, best = (Recipe.preset(name) for name in ("quick", "good", "best"))
    assert quick == Recipe(descent=0, inputs="reference")
    assert good == Recipe(descent=2, wide=True, inputs="group", correct=0.5, fisher=2, fisher_outputs=True)
    assert best == replace(good, tune=Tune())
    assert Recipe.preset("quick", descent=1, bits=2) == Recipe(descent=1, inputs="reference", bits=2)
    with pytest.raises(ValueError, match="there is no recipe 'fast'; recipes: quick, good, best"):
        Recipe.preset("fast")
    assert [Recipe(rho={3: 0.5}).rho_of(bits) for bits in (2, 3, 4)] == [RHO[2], 0.5, RHO[4]]


# ----------------------------------------------------------------------------------------------- calibration text


def test_a_text_is_cut_into_whole_rows() -> None:
    assert packed_tokens([1, 2, 3], length=3, limit=9).tolist() == [[1, 2, 3]]
    assert packed_tokens(list(range(9)), length=3, limit=6).tolist() == [[0, 1, 2], [3, 4, 5]]
    for tokens, limit in (([1, 2], 9), ([1, 2, 3], 2)):
        with pytest.raises(ValueError, match=f"has {len(tokens)} tokens; it needs at least 3"):
            packed_tokens(tokens, length=3, limit=limit)


def test_only_rows_that_are_short_are_gone_on_with() -> None:
    asked: list[tuple[list[list[int]], int]] = []

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        asked.append((prompts, count))
        return [[7] * count, [8, 8]][: len(prompts)] if len(asked) == 1 else [[9] * count for _ in prompts]

    found = sampled_tokens(generate, starts=[[0, 1]] * 2, length=6)
    assert found.tolist() == [[0, 1, 7, 7, 7, 7], [0, 1, 8, 8, 0, 1]]
    assert found.dtype == torch.int64
    assert asked == [([[0, 1], [0, 1]], 6), ([[0, 1]], 2)]
    for wrong in ({"length": 0}, {"starts": []}, {"starts": [[1], []]}):
        with pytest.raises(ValueError, match="each needs at least 1"):
            sampled_tokens(generate, **({"length": 1, "starts": [[1]]} | wrong))


def test_a_row_that_ends_at_once_is_begun_again_and_a_model_that_never_writes_is_refused() -> None:
    rounds = iter([[[], [7]], [[8], []], [[]]])
    found = sampled_tokens(lambda prompts, count: next(rounds), starts=[[0, 1], [2, 3]], length=5)
    assert found.tolist() == [[0, 1, 0, 1, 8], [2, 3, 7, 2, 3]]
    with pytest.raises(ValueError, match="ends each text before its first token"):
        sampled_tokens(lambda prompts, count: [[] for _ in prompts], starts=[[0]] * 2, length=5)


def test_rows_go_on_with_pieces_from_all_of_a_text() -> None:
    text = list(range(10, 21))
    assert pieces(text, length=2, count=5) == [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]
    assert pieces(text, length=2, count=2) == [[10, 11], [14, 15]]
    assert pieces(text, length=5, count=3) == [[10, 11, 12, 13, 14]] * 2 + [[15, 16, 17, 18, 19]]
    with pytest.raises(ValueError, match="the text has 11 tokens; a piece to go on with has 12"):
        pieces(text, length=12, count=1)
    starts = pieces(text, length=2, count=2)
    found = sampled_tokens(lambda prompts, count: [[p[0] + 50] * (count - 2) for p in prompts], starts=starts, length=5)
    assert found.tolist() == [[10, 11, 60, 60, 60], [14, 15, 64, 64, 64]]


# -------------------------------------------------------------------------------------------------- work on disk


def test_a_key_is_of_values_and_of_tokens_in_their_shape() -> None:
    tokens = torch.arange(6).view(2, 3)
    name = key_of("a", {"bits": 4, "seed": 0}, tokens)
    assert key_of("a", {"seed": 0, "bits": 4}, tokens) == name
    assert key_of("a", {"bits": 4, "seed": 0}, tokens.T.contiguous().T) == name
    others = [("b", {"bits": 4, "seed": 0}, tokens), ("a", {"bits": 3, "seed": 0}, tokens)]
    others += [("a", {"bits": 4, "seed": 0}, tokens.view(3, 2)), ("a", {"bits": 4, "seed": 0}, tokens.flip(0))]
    assert len({name, *(key_of(*other) for other in others)}) == 5


def test_a_piece_comes_back_and_none_that_is_another(tmp_path: Any) -> None:
    work = ResumableWork(tmp_path / "deep" / "work", "job")
    piece = {"b": torch.arange(6, dtype=torch.int16).view(2, 3).T, "a": torch.tensor(0.5, dtype=torch.bfloat16)}
    assert work.load("one", "key") is None
    work.save("one", "key", piece)
    work.close()
    work = ResumableWork(tmp_path / "deep" / "work", "job")
    assert work.load("one", "another") is None
    found = work.load("one", "key")
    assert found is not None
    assert found.keys() == piece.keys()
    assert all(torch.equal(found[key], piece[key]) and found[key].dtype == piece[key].dtype for key in piece)
    assert sorted(path.name for path in work.path.iterdir()) == ["job", "lock", "one.safetensors"], "half-made"
    file = work.path / "one.safetensors"
    kept = load_file(file)
    changed = (kept["b"] + 1, kept["b"].view(torch.uint16), kept["b"].reshape(2, 3))
    for change in (*({"b": other} for other in changed), {"c": kept["a"].clone()}):
        label = {"digest": _digest_in(file), "key": "key"}
        save_file(kept | change, tmp_path / "other.safetensors", metadata=label)
        original = file.read_bytes()
        file.write_bytes((tmp_path / "other.safetensors").read_bytes())
        with pytest.raises(ValueError, match="digest is another"):
            work.load("one", "key")
        file.write_bytes(original)
    assert work.load("one", "key") is not None


def _digest_in(file: Any) -> str:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as piece:
        return piece.metadata()["digest"]


def test_an_empty_directory_may_be_worked_in_and_one_without_a_label_not(tmp_path: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert ResumableWork(tmp_path / "empty", "job").path.joinpath("job").read_text() == "job\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is no unfinished quantization"):
        ResumableWork(tmp_path / "mine", "job")


# ---------------------------------------------------------------------------------------------- a job and its parts


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (24, 32), generator=torch.Generator().manual_seed(1))


def test_progress_names_every_group_and_what_was_done_before(tokens: Tensor, tmp_path: Any) -> None:
    groups = [f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("k", "o", "up", "down")]
    done = (2, 3, 4, 5, 7, 8, 9, 10)  # linears, of which k and v share a group
    steps = [(count, 10, name) for count, name in zip(done, groups, strict=True)]
    told: list[tuple[int, int, str]] = []
    work = ResumableWork(tmp_path / "work", "job")
    quantize(Tiny(), tokens, Recipe(bits=2), work, progress=lambda *step: told.append(step))
    assert told == steps
    told.clear()
    (work.path / "block-00001.safetensors").unlink()
    quantize(Tiny(), tokens, Recipe(bits=2), work, progress=lambda *step: told.append(step))
    assert told == [(5, 10, "block 0 was done before"), *steps[4:]]


def test_a_job_that_fails_leaves_no_activations(tokens: Tensor, tmp_path: Any) -> None:
    spill, seen = ActivationOffload(tmp_path / "spilled"), []

    def stop(*_: Any) -> None:
        seen.append(spill.used)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        quantize(Tiny(), tokens, Recipe(bits=2), progress=stop, spill=spill)
    assert seen == [True]
    assert not (tmp_path / "spilled").exists()


@pytest.mark.parametrize(("batch_tokens", "rows"), [(1, 1), (63, 1), (64, 2), (8192, 24)])
def test_as_many_rows_run_at_once_as_tokens_are_allowed(tokens: Tensor, batch_tokens: int, rows: int) -> None:
    class Counting(Tiny):
        def run_block(self, block: Any, hidden: Tensor) -> Tensor:
            seen.add(hidden.shape[0])
            return super().run_block(block, hidden)

    seen: set[int] = set()
    quantize(Counting(), tokens, Recipe(bits=2, descent=0, inputs="reference", batch_tokens=batch_tokens))
    assert seen == {rows}


def test_every_piece_of_a_job_has_its_file(tokens: Tensor, tmp_path: Any) -> None:
    model, recipe = Tiny(), Recipe(bits=2, lm_head=2, embed_tokens=2, tune=Tune(epochs=1, batch=24))
    quantize(model, tokens, recipe, ResumableWork(tmp_path / "work", "job"), outer=model.outer)
    pieces = ["block-00000", "block-00001", "embed", "head", "tuned"]
    assert sorted(path.stem for path in (tmp_path / "work").glob("*.safetensors")) == pieces


@pytest.mark.parametrize("inputs", ["block", "group"])
def test_the_correction_reaches_the_codes_of_the_second_block(tokens: Tensor, inputs: Any) -> None:
    plain, corrected_ = (quantize(Tiny(), tokens, Recipe(bits=2, inputs=inputs, correct=c)) for c in (0.0, 1.0))
    name = "blocks.1.down"
    assert not torch.equal(plain.layers[name]["codes"], corrected_.layers[name]["codes"])


def test_signs_depend_on_the_seed_and_on_the_name_alone(tokens: Tensor) -> None:
    model = Tiny()
    made = quantize(model, tokens, Recipe(bits=2, seed=5, lm_head=2, embed_tokens=2), outer=model.outer)
    first = {"k": "k", "v": "k", "o": "o", "up": "up", "down": "down"}  # siblings share those of the first
    names = {f"blocks.{i}.{name}": f"blocks.{i}.{of}" for i in range(BLOCKS) for name, of in first.items()}
    for name, of in (names | {"lm_head": "lm_head", "model.embed_tokens": "model.embed_tokens"}).items():
        scale = made.layers[name]["in_scale"]
        drawn = torch.randint(0, 2, scale.shape, generator=generator(5, of)) * 2 - 1
        assert torch.equal(scale.sign(), drawn.half()), name


def test_rows_rounded_in_parts_are_those_rounded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(1)
    weight, x = torch.randn(40, 64, generator=source), torch.randn(256, 64, generator=source)

    def both() -> list[dict[str, Tensor]]:
        one = quantize_group([weight], x.T @ x / 256, [3], Recipe(bits=3), torch.Generator().manual_seed(2))[0]
        return [one, quantize_embedding(weight, 3, Recipe(), torch.Generator().manual_seed(2))]

    whole = both()
    monkeypatch.setattr("onegraph.quant.layer._ROWS", 16)
    for parts, at_once in zip(both(), whole, strict=True):
        assert parts.keys() == at_once.keys()
        assert torch.equal(parts["in_scale"], at_once["in_scale"])
        # A product of other size may round otherwise, and a near-tie then falls the other way.
        assert (parts["codes"] == at_once["codes"]).float().mean() > 0.95
        assert torch.allclose(parts["out_scale"], at_once["out_scale"], rtol=0.05)


def test_a_wide_choice_brings_an_embedding_of_four_bits_closer() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    errors = []
    for wide in (False, True):
        tensors = quantize_embedding(weight, 4, Recipe(wide=wide), torch.Generator().manual_seed(2))
        errors.append((dequantize(tensors, 4, embedding=True) - weight).norm().item())
    assert errors[1] < errors[0]


def test_products_are_rounded_on_a_gpu_alone_and_no_longer_than_asked() -> None:
    torch.set_float32_matmul_precision("highest")
    with tensor_cores(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"

    def damaged() -> None:
        with tensor_cores(torch.device("cuda")):
            raise KeyError(torch.get_float32_matmul_precision())

    with pytest.raises(KeyError, match="high"):
        damaged()
    assert torch.get_float32_matmul_precision() == "highest"
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        for device in ("cpu", "cuda"):
            with tensor_cores(torch.device(device)):
                assert torch.backends.cuda.matmul.fp32_precision == "tf32", "a process that has set it keeps it"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
