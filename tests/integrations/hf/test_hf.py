"""onegraph checkpoints loaded by transformers: against the dense models that their codes stand for, and our engine."""

import copy
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import onegraph.integrations.hf  # noqa: F401  registers the method
from models import TILED, save_e8p, save_rotated
from onegraph.api.verify import verify
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.digests import SUMS, format_sums, read_sums, sha256
from onegraph.formats.e8p import E8P, E8PConfig
from onegraph.formats.files import CheckpointError
from onegraph.formats.trellis import TrellisConfig
from onegraph.integrations.hf.experts import CodedStack
from onegraph.integrations.hf.modules import CodedEmbedding, CodedLinear
from onegraph.models.llama import Llama
from test_e8p_experts import checkpoint_of

transformers = pytest.importorskip("transformers")
from transformers import AutoModel, AutoModelForCausalLM, CompileConfig  # noqa: E402

TOKENS = torch.tensor([[5, 17, 99, 4, 3, 2, 1, 0, 130, 7]])
CASES = {
    "tied, head kept": ("smollm2", E8PConfig(bits=4)),
    "tied, both ends coded": ("smollm2", E8PConfig(bits=3, lm_head=4, embed_tokens=2)),
    "tied, embedding coded": ("smollm2", E8PConfig(bits=4, embed_tokens=4)),
    "tied, head coded": ("smollm2", E8PConfig(bits=2, lm_head=3)),
    "biases, mixed rates": ("qwen2", E8PConfig(bits=2, layers={"model.layers.1.self_attn.k_proj": 16})),
    "all biases": ("llama_bias_mha", E8PConfig(bits=3, layers={"model.layers.0.mlp.up_proj": 4})),
    "norms of q and k": ("qwen3", E8PConfig(bits=4)),
    "SmolLM3": ("smollm3", E8PConfig(bits=4)),
    "trellis": ("qwen2", TrellisConfig(bits=3, layers={"model.layers.1.mlp.up_proj": 8}, lm_head=1, embed_tokens=6)),
}


def save_case(case: str, path: Path) -> Any:
    """The checkpoint of a case, and the dense model of its numbers."""
    variant, config = CASES[case]
    return save_rotated(config, variant, path, **(TILED if config.format == "trellis" else {}))


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def greedy(model: Any, tokens: torch.Tensor = TOKENS, count: int = 12, **options: Any) -> list[int]:
    tokens = tokens.to(model.device)
    return model.generate(tokens, max_new_tokens=count, do_sample=False, **options)[0, tokens.shape[1] :].tolist()


def damage(path: Path, change: Any) -> None:
    """Rewrites the tensors of the checkpoint at `path` as `change` leaves them."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_loads_and_equals_what_the_codes_stand_for(case: str, tmp_path: Path) -> None:
    config, dense = CASES[case][1], save_case(case, tmp_path / "model")
    model = load(tmp_path / "model")
    assert model.is_quantized
    coded = {name for name, module in model.named_modules() if isinstance(module, CodedLinear | CodedEmbedding)}
    assert ("lm_head" in coded) == (config.lm_head is not None)
    assert ("model.embed_tokens" in coded) == (config.embed_tokens is not None)
    assert not coded & {name for name, bits in config.layers.items() if bits == 16}
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert greedy(model) == greedy(dense)


@pytest.mark.parametrize("case", CASES)
def test_saving_and_loading_round_trips_bit_for_bit(case: str, tmp_path: Path) -> None:
    save_case(case, tmp_path / "model")
    model = load(tmp_path / "model")
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert_equal_tensors(after, before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again")(TOKENS).logits, model(TOKENS).logits)
    with Checkpoint.open(tmp_path / "again") as checkpoint:  # and our own reader takes what transformers wrote
        Llama.load(checkpoint)


def widened(tensors: dict[str, torch.Tensor]) -> None:
    """Norms in float32, as of a GGUF file, with bits that no half precision has; the rest in bfloat16."""
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = tensor.float() + 1e-6 * torch.arange(tensor.numel()).view_as(tensor)
        elif tensor.is_floating_point() and not name.endswith((".scale", ".row_scale", ".column_scale")):
            tensors[name] = tensor.bfloat16() if name.endswith("embed_tokens.weight") else tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["qwen2", "smollm2"])  # with biases; with a tied head
def test_saving_gives_every_tensor_back_in_any_dtype(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also over the files themselves, and from the model without its head."""
    save_e8p(variant, tmp_path / "model", rates={"bits": 3})
    damage(tmp_path / "model", widened)
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert {t.dtype for n, t in before.items() if "norm" in n} == {torch.float32}
    model = load(tmp_path / "model", dtype)
    bare = AutoModel.from_pretrained(tmp_path / "model", dtype=dtype)
    bare.save_pretrained(tmp_path / "bare")
    for place in ("again", "model", "model"):
        model.save_pretrained(tmp_path / place)
    for place in ("again", "model"):
        assert_equal_tensors(load_file(tmp_path / place / "model.safetensors"), before)
    found = {f"model.{n.removeprefix('model.')}": t for n, t in load_file(tmp_path / "bare/model.safetensors").items()}
    assert_equal_tensors(found, {name: t for name, t in before.items() if not name.startswith("lm_head")})


def test_a_tensor_that_was_changed_is_saved_as_it_is(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3})
    damage(tmp_path / "model", widened)
    model = load(tmp_path / "model", torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[3] = 0.3
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert torch.equal(after.pop("model.norm.weight"), model.model.norm.weight.float())
    del before["model.norm.weight"]
    assert_equal_tensors(after, before)


def test_without_its_files_a_model_is_saved_as_it_was_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3})
    damage(tmp_path / "model", widened)
    model = load(tmp_path / "model", torch.bfloat16)
    before = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "again")
    rounded = {name: t.bfloat16().to(t.dtype) if "norm" in name else t for name, t in before.items()}
    assert_equal_tensors(load_file(tmp_path / "again" / "model.safetensors"), rounded)
    norms = sum("norm" in name for name in before)
    assert re.search(f"^{norms} tensors that are not in codes, .*as the model rounded them", caplog.messages[-1])


def test_saving_over_a_checkpoint_leaves_it_whole(tmp_path: Path) -> None:
    """In one file and in several, by a copy too; what was not written keeps its digest, also where that is wrong."""
    path = tmp_path / "model"
    save_e8p("smollm2", path, rates={"bits": 3})
    (path / "notes.txt").write_text("a")
    (path / SUMS).write_bytes(format_sums((read_sums(path) or {}) | {"notes.txt": sha256(path / "notes.txt")}))
    whole, model = verify(path), load(path, torch.float16)
    assert whole.ok, whole.problems
    assert whole.digests >= 3
    for saved in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = (path / "config.json").read_bytes()
        saved.save_pretrained(path)
        assert verify(path).problems == ()
    assert (path / "config.json").read_bytes() == before, "the second time it is the same"
    model.save_pretrained(path, max_shard_size="100KB")
    found = verify(path)
    assert found.problems == ()
    assert found.digests > whole.digests, "each part has one"
    load(path).save_pretrained(path)
    assert verify(path).problems == (), "lines of parts that are gone are gone"
    (path / "notes.txt").write_text("b")
    model.save_pretrained(path)
    assert ["notes.txt" in line for line in verify(path).problems] == [True]
    model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / SUMS).exists()


def assert_equal_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("cache", [None, "static"])
def test_batches_beams_and_draws_are_those_of_the_dense_model(cache: str | None, tmp_path: Path) -> None:
    dense = save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "lm_head": 4})
    model = load(tmp_path / "model")
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), TOKENS[:, 3:]), dim=1)
    mask = torch.ones(2, TOKENS.shape[1], dtype=torch.long)
    mask[1, :3] = 0
    batch = model.generate(
        torch.cat((TOKENS, padded)),
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        cache_implementation=cache,
    )[:, TOKENS.shape[1] :].tolist()
    assert batch == [greedy(dense, count=8), greedy(dense, TOKENS[:, 3:], count=8)]
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 20, "temperature": 0.8}):
        found = []
        for each, implementation in ((model, cache), (dense, None)):
            torch.manual_seed(0)
            settings = {"max_new_tokens": 8, "cache_implementation": implementation, "do_sample": False} | options
            found.append(each.generate(TOKENS, **settings).tolist())
        assert found[0] == found[1]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.005), (torch.bfloat16, 0.04)])
def test_half_precision_is_near_single(dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    dense = save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "lm_head": 4, "embed_tokens": 2})
    with torch.no_grad():
        exact, found = dense(TOKENS).logits, load(tmp_path / "model", dtype)(TOKENS).logits
    assert found.dtype == dtype
    assert (found.float() - exact).norm() / exact.norm() < error


@pytest.mark.parametrize("case", ["tied, both ends coded", "biases, mixed rates", "trellis"])
def test_tokens_are_those_of_our_engine(case: str, tmp_path: Path) -> None:
    save_case(case, tmp_path / "model")
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        engine = Engine(Llama.load(checkpoint), max_batch=1, max_context=64, page_size=8)
    assert greedy(load(tmp_path / "model")) == engine.generate(TOKENS.tolist(), SamplingParams(max_tokens=12))[0]


def test_experts_in_tiles(tmp_path: Path) -> None:
    dense = checkpoint_of("mixtral", tmp_path / "model", 3, written=TrellisConfig, **TILED)
    model = load(tmp_path / "model")
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, CodedStack)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-4)


def quantized_smollm2() -> Path | None:
    """What `make demo` made of the real model, or $ONEGRAPH_SMOLLM2_4BIT."""
    given = os.environ.get("ONEGRAPH_SMOLLM2_4BIT", ".demo/SmolLM2-135M-Instruct-4bit")
    return Path(given) if Path(given, "config.json").is_file() else None


@pytest.mark.slow
@pytest.mark.skipif(quantized_smollm2() is None, reason="no quantized SmolLM2; make demo")
def test_tokens_of_the_real_model_are_those_of_our_engine() -> None:
    path = quantized_smollm2()
    assert path is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with Checkpoint.open(path) as checkpoint:
        engine = Engine(Llama.load(checkpoint), max_batch=1, max_context=256)
    ids = tokens["input_ids"]
    # Without a mask, `generate` would take the chat's <|im_end|>, which is also the padding token, for padding.
    got = greedy(load(path), ids, 12, eos_token_id=None, attention_mask=tokens["attention_mask"])
    assert got == engine.generate(ids.tolist(), SamplingParams(max_tokens=12))[0]
    assert "Paris" in tokenizer.decode(got)


@pytest.mark.parametrize("document", ["README.md", "docs/guides/transformers.md"])
def test_the_documented_example_runs(document: str, repo: Path, tmp_path: Path, capsys: Any) -> None:
    """The blocks that use transformers, one after the other, on a checkpoint with random codes and a tiny tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 4}, **sizes)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", "The", "capital", "France"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    text = (repo / document).read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "integrations.hf" in block]
    assert blocks
    example = "\n".join(blocks).replace("out/smollm2-4bit", str(tmp_path / "model")).replace('"cuda"', '"cpu"')
    exec(compile(example, document, "exec"), {})
    assert "The" in capsys.readouterr().out


@pytest.mark.parametrize("codes", [False, True], ids=["decoded at load", "codes"])
@pytest.mark.slow
def test_the_compiled_decode_path_is_one_graph(codes: bool, tmp_path: Path) -> None:
    """`generate` with a static cache compiles the step because the quantizer says that it may; no break in it."""
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "lm_head": 4, "embed_tokens": 2})
    model = load(tmp_path / "model")
    expected = greedy(model)
    if codes:  # the op itself in the graph, as on a GPU
        for module in model.modules():
            if isinstance(module, CodedLinear):
                module.dense = None
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    torch._dynamo.reset()
    assert greedy(model, cache_implementation="static", compile_config=config) == expected
    assert len(graphs) == 1
    linears = [node for node in graphs[0].graph.nodes if "e8p_linear" in str(node.target)]
    assert len(linears) == (7 * model.config.num_hidden_layers + 1 if codes else 0)


def test_moving_and_casting_leaves_the_stored_tensors_alone(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "lm_head": 4, "embed_tokens": 2})
    model = load(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "scale" in name}
    model.to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if name in before:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name])
    assert model(TOKENS).logits.dtype == torch.bfloat16


def test_dequantize_gives_plain_layers(tmp_path: Path) -> None:
    save_e8p("llama_bias_mha", tmp_path / "model", rates={"bits": 3, "lm_head": 4, "embed_tokens": 2})
    model = load(tmp_path / "model")
    with torch.no_grad():
        expected = model(TOKENS).logits
        plain = model.dequantize()
        assert not any(isinstance(m, CodedLinear | CodedEmbedding) for m in plain.modules())
        torch.testing.assert_close(plain(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("coded", [{}, {"lm_head": 4, "embed_tokens": 2}])
@pytest.mark.parametrize("loaded", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["to", "given"])
def test_dequantized_layers_have_the_dtype_of_the_rest(
    way: str, loaded: torch.dtype, coded: dict[str, int], tmp_path: Path
) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 4, **coded})
    for wanted in {torch.float16, torch.float32, torch.bfloat16} - {loaded}:
        model = load(tmp_path / "model", loaded)
        if way == "to":
            plain = model.to(wanted).dequantize()
        else:
            plain = model.dequantize(dtype=wanted)
        assert {parameter.dtype for parameter in plain.parameters()} == {wanted}
        assert plain.model.rotary_emb.inv_freq.dtype == (wanted if way == "to" else torch.float32)
        assert plain(TOKENS).logits.dtype == wanted
        assert len(greedy(plain, count=3)) == 3


def test_the_bare_model_loads_with_a_mixed_map(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 3, "layers": {"model.layers.1.mlp.up_proj": 2}})
    bare = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        want = load(tmp_path / "model").model(TOKENS).last_hidden_state
        assert torch.equal(bare(TOKENS).last_hidden_state, want)
    assert bare.layers[1].mlp.up_proj.format is E8P[2]


DAMAGE = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.out_scale"), r"no tensor 'model.layers.1.mlp.up_proj.out"),
    "narrow": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.in_scale": torch.ones(95, dtype=torch.float16)}),
        r"'model.layers.0.self_attn.q_proj.in_scale' is torch.float16 \[95\]; .* \[96\]",
    ),
    "wrong kind": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.codes": t["model.layers.0.mlp.down_proj.codes"].int()}),
        r"down_proj.codes' is torch.int32",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_tensor_that_does_not_fit_is_named(kind: str, tmp_path: Path) -> None:
    """transformers itself would warn and go on with random weights."""
    change, message = DAMAGE[kind]
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 4})
    damage(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"group_size": 64}, "unknown key group_size"),
        ({"layers": {"model.layers.9.mlp.up_proj": 2}}, "model.layers.9.mlp.up_proj"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 4})
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path / "model")


def test_offloading_is_refused_in_words(tmp_path: Path) -> None:
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 4})
    with pytest.raises(ValueError, match="device_map puts parts of the model on cpu, disk"):
        load(tmp_path / "model", device_map={"model": "cpu", "lm_head": "disk"})
