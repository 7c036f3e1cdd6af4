"""`eval --ab`: one component at a time against models that were built with just that component changed."""

import json
from pathlib import Path

import pytest
import torch

from deepseek import save_hf as save_deepseek
from models import save_hf
from onegraph.api.size import component_bits
from onegraph.engine.ab import _same, components_of, costs, exchanged, in_nvfp4
from onegraph.engine.evaluate import evaluate
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.nvfp4 import NVFP4, written_config
from onegraph.models.load import load_decoder
from onegraph.models.parts import Component
from onegraph.quant.nvfp4 import quantize_weight, quantized_tensors
from test_deepseek_nvfp4 import SIZES
from test_deepseek_nvfp4 import quantized as packed_deepseek

TOKENS = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1))
WINDOW = 64


def load(path: Path):
    return load_decoder(Checkpoint.open(path), "cpu", torch.float32, max_context=256, fused=False)


def coded(source: Path, to: Path, endings: tuple[str, ...]) -> Path:
    """`source` with the linears of these endings in NVFP4."""
    with Checkpoint.open(source) as checkpoint:
        names = [name.removesuffix(".weight") for name in checkpoint.names]
        linears = [name for name in names if name.endswith(endings)]
        config = checkpoint.config | {"quantization_config": written_config([])}
        write_checkpoint(to, config, quantized_tensors(checkpoint.names, checkpoint.tensor, linears))
    return to


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ab")
    save_hf("smollm2", path / "dense", hidden_size=96, intermediate_size=112, head_dim=16)
    return path


def test_a_component_costs_what_a_model_with_it_alone_does(llama: Path) -> None:
    dense = load(llama / "dense")
    both = load(coded(llama / "dense", llama / "both", ("o_proj", "down_proj")))
    alone = {
        "attention out": load(coded(llama / "dense", llama / "out", ("o_proj",))),
        "mlp down": load(coded(llama / "dense", llama / "down", ("down_proj",))),
        "all": both,
    }
    before = {name: tensor.clone() for name, tensor in dense.named_buffers()}
    found = costs(dense, exchanged(both, dense), TOKENS, window=WINDOW)
    assert [cost.component for cost in found] == list(alone)
    for cost in found:
        wanted = evaluate(alone[cost.component], TOKENS, reference=dense, window=WINDOW)
        assert (cost.kl, cost.top1) == (wanted.kl, wanted.top1)
        assert cost.kl > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.named_buffers())


def test_nvfp4_made_here_costs_what_a_checkpoint_of_it_does(llama: Path) -> None:
    dense = load(llama / "dense")
    changes = in_nvfp4(dense)
    assert list(changes) == list(components_of(dense))
    wanted = evaluate(load(coded(llama / "dense", llama / "out2", ("o_proj",))), TOKENS, reference=dense, window=WINDOW)
    found = costs(dense, {"attention out": changes["attention out"]}, TOKENS, window=WINDOW)
    assert found[0].kl == pytest.approx(wanted.kl, rel=1e-3)


def test_what_cannot_be_compared_is_said(llama: Path, tmp_path: Path) -> None:
    dense, packed = load(llama / "dense"), load(coded(llama / "dense", tmp_path / "m", ("o_proj",)))
    with pytest.raises(ValueError, match="is quantized already"):
        in_nvfp4(packed)
    with pytest.raises(ValueError, match="same weights in every component"):
        costs(dense, exchanged(dense, dense), TOKENS, window=WINDOW)
    with pytest.raises(ValueError, match="fused=False"):
        in_nvfp4(load_decoder(Checkpoint.open(llama / "dense"), "cpu", torch.float32))


def test_a_path_that_no_block_has_is_no_component_left_out(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = load(llama / "dense")
    wrong = {**components_of(dense), "mlp down": Component(("blocks.*.mlp.downs",), r"mlp\.down_proj$")}
    monkeypatch.setattr(type(dense.config), "_components", wrong)
    with pytest.raises(AssertionError, match=r"no block has blocks\.\*\.mlp\.downs"):
        in_nvfp4(dense)


def test_components_of_deepseek_one_by_one(tmp_path: Path) -> None:
    """Every part that a precision map names, among them those that checkpoints keep dense."""
    save_deepseek("flash", tmp_path / "dense", **SIZES)
    model = load(tmp_path / "dense")
    assert evaluate(model, TOKENS, window=WINDOW).perplexity == pytest.approx(
        evaluate(model, TOKENS, window=WINDOW, batch=2).perplexity, rel=1e-5
    )
    changes = in_nvfp4(model)
    assert list(changes) == list(components_of(model))
    assert set(changes["router gate"]()) == {f"blocks.{i}.moe.gate" for i in range(5)}
    assert set(changes["indexer query"]()) == {"blocks.1.attention.index_q", "blocks.3.attention.index_q"}
    found = costs(model, changes, TOKENS, window=WINDOW)
    assert all(cost.kl > 0 for cost in found)
    assert found[-1].kl > max(cost.kl for cost in found[:-1]) / 2
    assert evaluate(model, TOKENS, reference=load(tmp_path / "dense"), window=WINDOW).kl == 0


def test_a_packed_deepseek_against_its_dense_form(tmp_path: Path) -> None:
    packed_deepseek(tmp_path, lambda layer: "wo_" in layer)
    save_deepseek("flash", tmp_path / "plain", **SIZES)
    plain, packed = load(tmp_path / "plain"), load(tmp_path / "packed")
    found = costs(plain, exchanged(packed, plain), TOKENS, window=WINDOW)
    names = ["attention qkv", "indexer query", "routed experts", "shared expert", "all"]
    assert [cost.component for cost in found] == names
    assert found[-1].kl == evaluate(packed, TOKENS, reference=plain, window=WINDOW).kl
    with Checkpoint.open(tmp_path / "packed") as checkpoint:
        bits = component_bits(checkpoint)
    assert bits["lm_head"] == bits["router gate"] == bits["attention out"] == 32
    assert all(4.5 <= bits[name] < 4.6 for name in names[:-1])
    assert set(bits) == set(components_of(packed))


def test_the_table(llama: Path, tmp_path: Path) -> None:
    from fuzz import tiny
    from test_cli import invoke

    model, text = tiny.write_model(tmp_path / "plain"), tmp_path / "text.txt"
    text.write_text("the thing in the inn, and a hat. " * 40)
    status, out, errors = invoke(["quantize", model, tmp_path / "fp4", "--format", "nvfp4", "--layer", "*.o_proj=16"])
    assert status == 0, errors
    assert "bits per weight in the linears" in out
    with Checkpoint.open(tmp_path / "fp4") as made:
        assert made.config["quantization_config"]["quant_algo"] == "NVFP4"
        assert {"model.layers.0.self_attn.o_proj", "lm_head"} <= set(made.config["quantization_config"]["ignore"])
        assert made.sidecar("tokenizer.json") == Checkpoint.open(model).sidecar("tokenizer.json")
    status, _, errors = invoke(["quantize", model, tmp_path / "quick", "--format", "nvfp4", "--recipe", "quick"])
    assert status == 0, errors
    name = "model.layers.0.mlp.up_proj.weight"
    with Checkpoint.open(model) as source, Checkpoint.open(tmp_path / "quick") as quick:
        plain, searched = (quantize_weight(source.tensor(name), search=search) for search in (False, True))
        assert torch.equal(quick.tensor(name), plain["codes"])
        assert not torch.equal(plain["codes"], searched["codes"])
    more = ["--text", text, "--tokens", 300, "--window", 100]
    rows = json.loads(invoke(["eval", tmp_path / "fp4", "--reference", model, "--ab", *more, "--json"])[1])["ab"]
    names = ["attention qkv", "mlp gate up", "mlp down", "all"]
    assert [row["component"] for row in rows] == names
    assert all(row["kl"] > 0 for row in rows)
    assert all(4.5 <= row["bits"] < 4.6 for row in rows[:-1])
    _, out, _ = invoke(["eval", model, "--ab", *more])
    lines = out.splitlines()
    assert lines[0].split()[0] == "component"
    assert [line[:22].strip() for line in lines[1:]] == [
        "embedding", "attention qkv", "attention out", "mlp gate up", "mlp down", "lm_head", "all",
    ]  # fmt: skip
    for words, says in (
        (["--kv-cache-dtype", "turboquant:4"], "it takes no --kv-cache-dtype, --needle or --generation"),
        (["--reference", model], "same weights in every component"),
    ):
        status, _, errors = invoke(["eval", model, "--ab", *more, *words])
        assert status == 2
        assert says in errors
    status, _, errors = invoke(["quantize", model, tmp_path / "x", "--format", "nvfp4", "--bits", 3])
    assert status == 2
    assert "one rate" in errors


def test_a_precision_map_for_deepseek(tmp_path: Path) -> None:
    """What `quantize --format nvfp4` writes, and what of it a pattern keeps."""
    from test_cli import invoke

    save_deepseek("flash", tmp_path / "plain", **SIZES)
    more = ["--format", "nvfp4", "--layer", "*.indexer.wq_b=16", "--layer", "model.layers.0.*=16", "--json"]
    status, out, errors = invoke(["quantize", tmp_path / "plain", tmp_path / "fp4", *more])
    assert status == 0, errors
    assert json.loads(out)["before"]["linear_bits"] == pytest.approx(32, abs=0.1)  # routing tables are counted
    plain, packed = load(tmp_path / "plain"), load(tmp_path / "fp4")
    assert packed.blocks[1].attention.q_b.format is NVFP4
    assert packed.blocks[0].attention.q_b.format is DENSE
    assert packed.blocks[3].attention.index_q.format is DENSE
    with Checkpoint.open(tmp_path / "fp4") as made:
        bits, ignored = component_bits(made), made.config["quantization_config"]["ignore"]
    assert bits["indexer query"] == bits["lm_head"] == 32
    assert 4.5 < bits["shared expert"] < 12  # one layer in five was kept
    assert any(name.endswith("indexer.wq_b") for name in ignored)
    assert not any(name.startswith("model.layers.1.") and name.endswith("wq_a") for name in ignored)
    assert 0 < evaluate(packed, TOKENS, reference=plain, window=WINDOW).kl < 0.5
    status, _, errors = invoke(["quantize", tmp_path / "fp4", tmp_path / "twice", "--format", "nvfp4"])
    assert status == 2
    assert "is quantized already" in errors


def test_parts_are_the_same_where_kind_and_numbers_are() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    layer = torch.nn.Module()
    layer.register_buffer("weight", one)
    assert _same(one, one.clone())
    assert not _same(one, other)
    assert not _same(one, layer)
    assert not _same(layer, one)
