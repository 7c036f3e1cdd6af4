"""DeepSeek-V4 as it is published: the real ones by a table of their tensors, tiny ones by their logits."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_published import (
    FLASH,
    FLASH_0731,
    PRO,
    PRO_0813,
    TINY,
    TINY_BASE,
    TINY_DSPARK,
    TINY_LESS,
    make,
    nvidia,
    oracle,
    plain,
    write,
)
from fuzz import tiny
from fuzz.run import invoke
from models import Decoder
from onegraph.api.size import component_bits, size_of
from onegraph.check import check_step
from onegraph.engine import executor
from onegraph.engine.ab import costs, exchanged
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, TensorInfo
from onegraph.formats.dense import DENSE
from onegraph.formats.fp8 import FP8
from onegraph.formats.mxfp4 import MXFP4
from onegraph.formats.nvfp4 import NVFP4
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_mtp import DeepseekDraft, DraftFamily
from onegraph.models.deepseek_v4_published import Table, nbytes, published
from onegraph.models.load import parse_config
from onegraph.models.loader import Loader
from onegraph.ops.registry import reference_ops
from test_deepseek_engine import SMALL, prove_it, rows
from test_deepseek_mtp import Reference, check_drafts
from test_graph import RecordedPool

# name -> (config, tensors, bytes, of these mtp.*: tensors, bytes). DeepSeek's are those of the published indexes;
# NVIDIA's are computed from what its script changes.
PUBLISHED = {
    "Flash": (FLASH, 69_187, 159_609_485_896, 1_575, 3_593_787_756),
    "Flash-0731": (FLASH_0731, 72_317, 166_878_536_440, 4_705, 10_862_838_300),
    "Pro": (PRO, 145_116, 864_704_792_696, 2_343, 13_956_587_692),
    "Pro-0813": (PRO_0813, 149_782, 892_727_580_904, 7_009, 41_979_375_900),
    "NVIDIA Flash": (nvidia(FLASH), 135_235, 168_266_793_544, 1_575, 3_593_787_756),
    "NVIDIA Pro": (nvidia(PRO), 285_660, 913_061_485_688, 2_343, 13_956_587_692),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_and_bytes_are_those_of_the_published_indexes(name):
    config, *wanted = PUBLISHED[name]
    table = published(config)
    drafts = {tensor: what for tensor, what in table.items() if tensor.startswith("mtp.")}
    assert [len(table), nbytes(table), len(drafts), nbytes(drafts)] == wanted


def test_dtypes_of_flash():
    assert Counter(dtype for dtype, _ in published(FLASH).values()) == {
        torch.bfloat16: 433,
        torch.float32: 417,
        torch.float8_e4m3fn: 375,
        torch.float8_e8m0fnu: 34_167,
        torch.int64: 3,
        torch.int8: 33_792,
    }


def test_a_base_model_has_float32_scales_and_experts_in_fp8():
    table = published(FLASH | {"expert_dtype": "fp8"})
    assert table["layers.3.ffn.experts.7.w2.weight"] == (torch.float8_e4m3fn, (4096, 2048))
    assert table["layers.3.ffn.experts.7.w2.scale"] == (torch.float32, (32, 16))


def test_the_table_asks_for_a_known_form():
    with pytest.raises(ValueError, match="expert_dtype is 'int3'; published are 'fp4' and 'fp8'"):
        published(FLASH | {"expert_dtype": "int3"})


V41 = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "text_config": {"hidden_size": 5120, "kv_source_layer_ids": [2, 8, 14, 20], "candidate_source_layer_id": 20},
    "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [32, 32]},
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (V41, r"model_type 'deepseek_v41' \(DeepSeek-V4\.1\) is not supported: it has Engram tables"),
        (TINY | {"kv_source_layer_ids": [2]}, r"kv_source_layer_ids is \[2\]: shared key-value layers \(V4\.1\)"),
        (TINY | {"candidate_source_layer_id": 3}, r"candidate_source_layer_id is 3: candidate selection \(V4\.1\)"),
        (TINY | {"dspark_block_size": 5}, "dspark_target_layer_ids is None; it must list layers below 4"),
    ],
)
def test_what_is_not_v4_is_refused_with_the_reason(config, says):
    with pytest.raises(ValueError, match=says) as error:
        parse_config(config)
    assert "\n" not in str(error.value)


# -------------------------------------------------------------------------------------- what the loader asks of a file


class Described(Checkpoint):
    """A checkpoint of which there is nothing but the headers."""

    def __init__(self, config: Mapping[str, Any], table: Table) -> None:
        def info(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
            return TensorInfo(shape, dtype, math.prod(shape) * dtype.itemsize, Path("m.safetensors"))

        super().__init__(Path("m"), dict(config), {name: info(*what) for name, what in table.items()})


@pytest.mark.parametrize("name", ["Flash", "Flash-0731", "NVIDIA Flash", "Pro"])
def test_the_loader_asks_for_exactly_these_tensors(name):
    """Records, parts of the decoder and of the draft stages against the table, in names, shapes and dtypes. Of 16
    experts a layer: the others are alike."""
    config = PUBLISHED[name][0] | {"n_routed_experts": 16}
    table, parsed = published(config), DeepseekV4Config.from_dict(config)
    checkpoint = Described(config, table)
    decoder, draft = (Loader(checkpoint, family, torch.bfloat16) for family in (parsed, DraftFamily(parsed)))
    decoder.check()
    draft.check()
    weights = {name for name in table if not name.endswith(".input_scale")}  # activations are not rounded
    assert set(decoder.expected()) | set(draft.expected()) == weights
    routed = NVFP4 if "NVIDIA" in name else MXFP4
    for layer, format in (
        ("layers.5.attn.wq_a", FP8[128, 128]),
        ("layers.5.attn.wo_a", FP8[128, 128]),
        ("layers.5.ffn.experts.9.w2", routed),
        ("layers.5.ffn.shared_experts.w2", FP8[128, 128]),
        ("mtp.0.ffn.experts.9.w1", MXFP4),
        ("mtp.0.attn.wkv", FP8[128, 128]),
        ("head", DENSE),
    ):
        assert draft.format_of(layer) is format, layer


@pytest.mark.parametrize(
    ("tensor", "becomes", "says"),
    [
        (
            "layers.0.attn.wkv.scale",
            (torch.float8_e8m0fnu, (1, 3)),
            r"'layers\.0\.attn\.wkv\.scale' has shape \[1, 3\]",
        ),
        ("layers.0.attn.wkv.scale", None, r"'layers\.0\.attn\.wkv\.weight' is float8_e4m3fn and has no scale"),
        (
            "layers.1.attn.compressor.ape",
            (torch.float8_e4m3fn, (4, 256)),
            r"compressor\.ape' is float8_e4m3fn, allowed",
        ),
        ("layers.1.ffn.experts.2.w1.scale", (torch.int16, (128, 8)), r"w1\.scale' is int16, allowed is uint8 or"),
        ("layers.1.ffn.experts.2.w1.scale", None, r"w1\.weight' has shape \[128, 128\]"),
        ("layers.2.attn.bias", (torch.bfloat16, (3,)), r"unexpected: 'layers\.2\.attn\.bias'"),
        ("layers.0.ffn.gate.tid2eid", None, r"missing: 'layers\.0\.ffn\.gate\.tid2eid'"),
    ],
)
def test_what_does_not_fit_is_named(tensor, becomes, says):
    table = {name: what for name, what in published(TINY).items() if name != tensor}
    checkpoint = Described(TINY, table if becomes is None else table | {tensor: becomes})
    with pytest.raises(CheckpointError, match=says):
        DeepseekV4.load(checkpoint, max_context=64)


# ------------------------------------------------------------------------------------------------- tiny ones, by logits

FORMS = {"DeepSeek": TINY, "DeepSeek Base": TINY_BASE, "NVIDIA": nvidia(TINY)}


def load(path: Path, device: str = "cpu") -> DeepseekV4:
    with Checkpoint.open(path) as checkpoint:
        return DeepseekV4.load(checkpoint, device, max_context=512)


def text(n: int) -> list[int]:
    return torch.randint(0, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(2)).tolist()


@torch.no_grad()
def truth(path: Path, tokens: list[int]) -> torch.Tensor:
    return oracle(path)(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=FORMS)
def form(request, tmp_path_factory):
    """(config, directory, transformers' logits of `text(190)`). What transformers reads of them it reads from the same
    files; NVIDIA's, which it does not know, from the numbers that they stand for."""
    config, path = FORMS[request.param], tmp_path_factory.mktemp("published") / "m"
    tensors, dense = make(config)
    write(path, config, tensors)
    if request.param != "NVIDIA":
        return config, path, truth(path, text(190))
    write(path.with_name("dense"), plain(config), dense)
    return config, path, truth(path.with_name("dense"), text(190))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    assert want.std() > 0.5
    assert (got - want).abs().max() <= 1e-4, (got - want).abs().max()


def logits(model: DeepseekV4, tokens: list[int], *prefills: tuple[int, int]) -> torch.Tensor:
    """Of spans of `tokens` that are read at once, and of single ones between and behind them."""
    state, parts, at = Decoder(model, 1, 256, page_size=128), [], 0
    for first, last in (*prefills, (len(tokens), len(tokens))):
        parts += [state.feed([[token]])[0] for token in tokens[at:first]]
        parts.append(state.feed([tokens[first:last]])[0])
        at = last
    return torch.cat(parts)


def test_logits_are_those_of_transformers(form):
    """Prefill and decode over wraps of the window, entries of both compressions and a saturated selection."""
    config, path, want = form
    model = load(path)
    close(logits(model, text(190), (0, 124), (132, 184)), want)
    moe, attention = model.blocks[1].moe, model.blocks[1].attention
    routed = {"fp4": MXFP4, "fp8": FP8[128, 128]}[config["expert_dtype"]]
    routed = NVFP4 if "moe_quant_algo" in config["quantization_config"] else routed
    assert moe.experts.gate_up.format is routed
    assert moe.together == (routed is FP8[128, 128]), "the shared expert is FP8"
    for layer in (attention.qkv_a, attention.q_b, attention.out_a, attention.out_b, attention.index_q):
        assert layer.format is FP8[128, 128]
    assert moe.gate.dtype == attention.states.weight.dtype == torch.float32
    assert attention.states.format is DENSE


def test_bytes_on_a_device_are_those_of_the_loaded_model(form):
    """By which layers are placed: all but tables that are computed; vectors may be kept wider than they are counted."""
    _, path, _ = form
    with Checkpoint.open(path) as checkpoint:
        loader = Loader(checkpoint, parse_config(checkpoint.config), torch.float32)
        counted = sum(loader.device_bytes().values())
    stores = [
        b.untyped_storage() for name, b in load(path).named_buffers() if not name.endswith(("cos", "sin", "table"))
    ]
    once = {store.data_ptr(): store.nbytes() for store in stores}  # a shared expert may be one more of the routed ones
    assert sum(once.values()) == pytest.approx(counted, rel=1e-3)


def test_a_repackaged_file_is_read_by_its_tensors(form, tmp_path):
    """Without expert_dtype, with scales as float32 or as the bytes of E8M0, and an index that does not list them."""
    config, _, want = form
    tensors, _ = make(config)
    kinds = [torch.Tensor.float, lambda scale: scale.view(torch.uint8)]
    for i, name in enumerate(name for name in tensors if name.endswith(".scale")):
        if tensors[name].dtype != torch.float32:
            tensors[name] = kinds[i % 2](tensors[name])
    bare = {key: value for key, value in config.items() if key != "expert_dtype"}
    write(tmp_path / "m", bare, tensors, unlisted=r"scale")
    close(logits(load(tmp_path / "m"), text(190), (0, 190)), want)


def test_the_engine_captures_what_it_computes(form, monkeypatch):
    _, path, want = form
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    model, prompts = load(path), [text(40), text(133), text(7)]
    engines = [Engine(model, **SMALL, capture=capture) for capture in (False, True)]
    eager, captured = (engine.generate(prompts, SamplingParams(max_tokens=3)) for engine in engines)
    assert captured == eager
    assert [tokens[0] for tokens in eager] == [int(want[len(prompt) - 1].argmax()) for prompt in prompts]
    prove_it(engines[1])


@pytest.mark.parametrize("config", [TINY_LESS, nvidia(TINY_LESS)], ids=["DeepSeek", "NVIDIA"])
def test_the_decode_step_may_be_captured(config, tmp_path):
    write(tmp_path / "m", config, make(config)[0])

    def factory():
        engine = Engine(load(tmp_path / "m", "cuda"), **SMALL, capture=False)
        runner = engine.executor.step("decode")
        start = torch.tensor([3, 127, 47], dtype=torch.int32)
        values = rows(3, torch.Generator().manual_seed(1)) | {"positions": start, "limits": start + 40}
        runner.load(drawn=torch.tensor([5, 6, 7]), **values)

        def step():
            with reference_ops():
                return runner.replay(3)

        return step, lambda index: ()

    report = check_step(factory, steps=5)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


def test_forms_of_one_model_component_by_component(tmp_path):
    """`eval --ab` of NVIDIA's form against DeepSeek's: they differ in the routed experts alone, and by a rounding."""
    for name, config in (("deepseek", TINY), ("nvidia", nvidia(TINY))):
        write(tmp_path / name, config, make(config)[0])
    theirs, ours = load(tmp_path / "deepseek"), load(tmp_path / "nvidia")
    found = costs(theirs, exchanged(ours, theirs), torch.tensor(text(120)), window=64)
    assert [cost.component for cost in found] == ["routed experts", "all"]
    assert 1e-4 < found[0].kl < 0.5
    for name, bits in (("deepseek", 4.25), ("nvidia", 4.5)):
        with Checkpoint.open(tmp_path / name) as checkpoint:
            sizes = component_bits(checkpoint)
        assert sizes["routed experts"] == pytest.approx(bits, abs=0.01)
        assert sizes["attention out"] == pytest.approx(8, abs=0.01)
        assert sizes["lm_head"] == 16


def test_sizes_are_the_decoders(tmp_path):
    """The draft layer, which lies in the same files, is no part of its parameters and bytes."""
    tensors, dense = make(TINY)
    write(tmp_path / "m", TINY, tensors)
    write(tmp_path / "dense", plain(TINY), {name: t for name, t in dense.items() if not name.startswith("mtp.")})
    found, wanted = (size_of(Checkpoint.open(tmp_path / name)) for name in ("m", "dense"))
    assert found.parameters == wanted.parameters
    assert found.linear_parameters == wanted.linear_parameters
    assert found.total_bytes == sum(t.nbytes for name, t in tensors.items() if not name.startswith("mtp."))
    assert 4.25 < found.linear_bits < 8


def test_the_pages_own_command(tmp_path):
    """`onegraph generate` of NVIDIA's form, and `verify`, as docs/how-it-works/deepseek.md has them."""
    config = nvidia(TINY | {"vocab_size": tiny.CONFIG["vocab_size"]})
    write(tmp_path / "m", config, make(config)[0])
    plain_model = tiny.write_model(tmp_path / "plain")
    (tmp_path / "m" / "tokenizer.json").write_bytes((plain_model / "tokenizer.json").read_bytes())
    more = ["--prompt", "the thing", "--max-tokens", 4, "--json"]
    status, out, errors = invoke(["generate", tmp_path / "m", *more])
    assert status == 0, errors
    assert len(json.loads(out)["outputs"][0]["tokens"]) == 4
    status, out, errors = invoke(["verify", tmp_path / "m"])
    assert status == 0, out + errors


def test_stages_of_dspark_are_read_past(tmp_path):
    """The body of 0731 is Flash's: with the same numbers, the same logits."""
    found = []
    for name, config in (("flash", TINY), ("0731", TINY_DSPARK)):
        write(tmp_path / name, config, make(config)[0])
        found.append(logits(load(tmp_path / name), text(40), (0, 40)))
    assert torch.equal(*found)


def test_the_draft_layer_keeps_its_precision(tmp_path):
    """NVIDIA's form leaves mtp.* as DeepSeek has it: FP8 linears, MXFP4 experts."""
    config = nvidia(TINY)
    tensors, dense = make(config)
    write(tmp_path / "m", config, tensors)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = DeepseekV4.load(checkpoint, max_context=512)
        draft = DeepseekDraft.load(checkpoint, model)
    assert draft.block.moe.experts.gate_up.format is MXFP4
    for layer in (draft.embedding_projection, draft.stream_projection, draft.block.attention.out_a):
        assert layer.format is FP8[128, 128]
    check_drafts(model, draft, Reference(dense))


# ----------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
def test_on_a_gpu_replay_equals_eager(form):
    """Weights straight from their shards to the GPU; the decode and prefill steps replayed against eager ones."""
    _, path, want = form
    engine = Engine(load(path, "cuda:0"), **SMALL, capture=True)
    tokens = engine.generate([text(133)], SamplingParams(max_tokens=6))
    assert tokens[0][0] == int(want[132].argmax())
    prove_it(engine)
    model = load(path, "cuda:0")
    state = Decoder(model, 1, 256, page_size=128)
    got = torch.cat([state.feed([text(190)[:120]])[0], *(state.feed([[token]])[0] for token in text(190)[120:])])
    assert (got.cpu() - want).abs().max() <= 5e-3
