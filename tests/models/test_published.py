"""Checkpoints in the layouts that others publish, each against transformers with the numbers that it holds."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import Decoder, is_greedy
from onegraph.api.verify import verify
from onegraph.check import check_step
from onegraph.engine.ab import costs, exchanged
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.exl3 import EXL3
from onegraph.formats.files import CheckpointError
from onegraph.formats.fp8 import FP8
from onegraph.formats.int4 import int4
from onegraph.formats.mxfp4 import MXFP4
from onegraph.formats.mxfp8 import MXFP8
from onegraph.formats.nvfp4 import NVFP4
from onegraph.formats.published import Published
from onegraph.formats.quantization import parse_quantization
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.load import load_decoder
from onegraph.models.loader import Loader
from onegraph.nn.linear import Linear
from onegraph.ops.registry import reference_ops
from published import EVEN, LAYOUTS, Layout, change, code, deepseek, fp8, list_all, qwen, save
from test_engine_contract import ROWS

PROMPTS = [[5, 17, 99, 4, 3, 2, 1, 0, 130, 7, 7, 7, 21], [9]]
# what q_proj, up_proj and lm_head of each layout are
FORMATS = {
    "Qwen3-FP8, bfloat16 scales": (FP8[128, 128], FP8[128, 128], DENSE),
    "Qwen3-FP8, float16 scales": (FP8[128, 128], FP8[128, 128], DENSE),
    "Qwen3-FP8, float32 scales": (FP8[128, 128], FP8[128, 128], DENSE),
    "MiniMax's config": (FP8[128, 128], FP8[128, 128], DENSE),
    "DeepSeek's scales": (FP8[128, 128], FP8[128, 128], DENSE),
    "blocks of 32": (FP8[32, 32], FP8[32, 32], DENSE),
    "DeepSeek's FP4 beside FP8": (FP8[128, 128], MXFP4, DENSE),
    "transformers' MXFP8": (MXFP8, MXFP8, DENSE),
    "NVIDIA FP8": (FP8[None], FP8[None], DENSE),
    "NVIDIA FP8 without a method": (FP8[None], FP8[None], DENSE),
    "FP8_PB_WO": (FP8[128, 128], FP8[128, 128], DENSE),
    "FP8_PER_CHANNEL_PER_TOKEN": (FP8[None], FP8[None], DENSE),
    "NVIDIA NVFP4": (NVFP4, NVFP4, DENSE),
    "NVIDIA NVFP4 in config.json": (DENSE, NVFP4, DENSE),
    "NVIDIA MIXED": (FP8[None], NVFP4, NVFP4),
    "NVIDIA MIXED of MXFP8": (MXFP8, NVFP4, DENSE),
    "compressed-tensors FP8 per channel": (FP8[None], FP8[None], DENSE),
    "compressed-tensors FP8 per tensor": (FP8[None], FP8[None], DENSE),
    "compressed-tensors FP8 blocks": (FP8[128, 128], FP8[128, 128], DENSE),
    "compressed-tensors naive": (FP8[None], FP8[None], DENSE),
    "compressed-tensors NVFP4": (NVFP4, NVFP4, DENSE),
    "compressed-tensors MXFP4": (MXFP4, MXFP4, DENSE),
    "compressed-tensors mixed": (FP8[None], NVFP4, MXFP8),
    "compressed-tensors mixed with INT4": (FP8[None], int4(32, torch.float16, symmetric=True), DENSE),
    "EXL3": (EXL3[8, "3inst"], EXL3[4, "3inst"], EXL3[6, "3inst"]),
    "EXL3 padded": (EXL3[5, "mul1"], EXL3[4, "mul1"], EXL3[6, "mul1"]),
    "EXL3 mcg": (EXL3[3, "mcg"], EXL3[4, "mcg"], EXL3[6, "mcg"]),
    "EXL3 mul1": (EXL3[1, "mul1"], EXL3[4, "mul1"], EXL3[6, "mul1"]),
    "DeepSeek-V3 FP8": (FP8[128, 128], FP8[128, 128], DENSE),
    "Kimi-K2 INT4 experts": (DENSE, int4(32, torch.float16, symmetric=True), DENSE),
    "NVIDIA DeepSeek-R1 NVFP4": (FP8[128, 128], NVFP4, DENSE),
    "Qwen3-MoE FP8": (FP8[128, 128], FP8[128, 128], DENSE),
    "NVIDIA Qwen3-MoE NVFP4": (NVFP4, NVFP4, DENSE),
    "NVIDIA Qwen3-MoE MIXED": (FP8[None], NVFP4, NVFP4),
    "compressed-tensors Qwen3-MoE MXFP4": (DENSE, MXFP4, DENSE),
    "NVIDIA Mixtral FP8": (FP8[None], FP8[None], DENSE),
}
EXPERT = {
    "deepseek_v3": "model.layers.1.mlp.experts.4.up_proj",
    "qwen3_moe": "model.layers.1.mlp.experts.4.up_proj",
    "mixtral": "model.layers.1.block_sparse_moe.experts.4.w3",
}
Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
QUERIES = {"deepseek_v3": "model.layers.1.self_attn.q_b_proj"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Name of a layout -> its checkpoint, which no test changes, and transformers' model of its numbers."""
    root = tmp_path_factory.mktemp("published")

    @functools.cache
    def made(name: str) -> tuple[Path, Any]:
        path = root / str(list(LAYOUTS).index(name))
        return path, save(LAYOUTS[name], path)

    return made


def logits_agree(path: Path, hf: Any, decode: bool) -> Llama:
    row = torch.randint(0, 131, (24,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = hf(row.unsqueeze(0)).logits[0]
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint, decode=decode)
    decoder = Decoder(model, rows=1, max_context=32)
    got = torch.cat([decoder.feed([part])[0] for part in (row[:20].tolist(), *([t] for t in row[20:].tolist()))])
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_the_model_of_its_numbers(name: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    """Prefill, decode steps one token at a time, and the engine's greedy tokens; in codes, and decoded at load."""
    path, hf = saved(name)
    with Checkpoint.open(path) as checkpoint:
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        up, q = EXPERT.get(LAYOUTS[name].variant, UP), QUERIES.get(LAYOUTS[name].variant, Q)
        assert tuple(loader.format_of(layer) for layer in (q, up, "lm_head")) == FORMATS[name]
    logits_agree(path, hf, decode=True)
    model = logits_agree(path, hf, decode=False)
    found = verify(path)
    assert found.ok, found.problems
    assert {group.format for group in found.layers} - {"float32"} == {str(f) for f in FORMATS[name] if f.coded}
    engine = Engine(model, max_batch=2, max_context=64, page_size=8, chunk=16, capture=False)
    found_tokens = engine.generate(PROMPTS, SamplingParams(max_tokens=8))  # over the ends of a page
    assert [len(tokens) for tokens in found_tokens] == [8, 8]
    for prompt, tokens in zip(PROMPTS, found_tokens, strict=True):
        assert is_greedy(hf, prompt, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_transformers_reads_the_same_directory(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its own reader of quant_method fp8 dequantizes on a CPU: it holds our writer to the layout."""
    import transformers

    moe = {"moe_intermediate_size": 128}
    for layout in (qwen(dtype, EVEN), dataclasses.replace(qwen(dtype, EVEN | moe), variant="qwen3_moe")):
        path = tmp_path / layout.variant
        ours = save(layout, path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for (name, mine), found in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, found), name
        logits_agree(path, theirs, decode=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_a_gpu_the_kernels_give_the_logits(name: str, tmp_path: Path) -> None:
    """float32 to its last digits; bfloat16 as near as its rounding lets it (measured on a CPU: .01 to .03, with routers
    .05, with groups of experts .11, where transformers' own bfloat16 is .15 away); and the captured step gives the
    tokens of the eager one."""
    hf = save(LAYOUTS[name], tmp_path / "m")
    row = torch.randint(0, 131, (24,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = hf(row.unsqueeze(0)).logits[0]
    rounding = 0.15 if name == "DeepSeek-V3 FP8" else 0.1
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, rounding)):
        with Checkpoint.open(tmp_path / "m") as checkpoint:
            model = Llama.load(checkpoint, "cuda:0", dtype)
        decoder = Decoder(model, rows=1, max_context=32)
        got = torch.cat([decoder.feed([part])[0] for part in (row[:20].tolist(), *([t] for t in row[20:].tolist()))])
        assert (got.cpu() - want).norm() <= error * want.norm()
        sizes: dict[str, Any] = {"max_batch": 2, "max_context": 64, "page_size": 8, "chunk": 16}
        tokens = [
            Engine(model, **sizes, capture=capture).generate(PROMPTS, SamplingParams(max_tokens=10))
            for capture in (True, False)
        ]
        assert tokens[0] == tokens[1]


def test_siblings_of_whole_blocks_are_one_layer(tmp_path: Path) -> None:
    """Also of per-tensor scales, which are not the same for q, k and v."""
    for layout, joined in (
        (qwen(torch.bfloat16, EVEN), True),
        (qwen(torch.bfloat16), False),
        (LAYOUTS["NVIDIA FP8"], True),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        save(layout, path)
        with Checkpoint.open(path) as checkpoint:
            model = Llama.load(checkpoint, decode=False)
        for block in model.blocks:
            assert isinstance(block.qkv.linear, Linear) is joined
            assert isinstance(block.mlp.gate_up.linear, Linear) is joined


def test_groups_of_rows_end_with_a_block(tmp_path: Path) -> None:
    """Rows of a grouped linear are cut like any part: 384 are three groups, and two would cut a block."""
    save(qwen(torch.bfloat16, EVEN), tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        loader = Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.float32)
        cpu, x = torch.device("cpu"), torch.randn(2, 3, 256)
        whole, grouped = loader.linear(UP, cpu), loader.grouped(UP, 3, cpu)
        want = torch.stack([whole.part(rows=(128 * g, 128 * g + 128))(x[:, g].contiguous()) for g in range(3)], 1)
        assert (grouped(x) - want).norm() <= 1e-6 * want.norm()
        with pytest.raises(ValueError, match=r"rows 0:192 cuts a group of 128"):
            loader.grouped(UP, 2, cpu)


@pytest.mark.parametrize(
    "name",
    ["Qwen3-FP8, bfloat16 scales", "NVIDIA FP8", "NVIDIA MIXED of MXFP8", "Qwen3-MoE FP8", "EXL3 mcg", "EXL3 padded"],
)
def test_the_step_may_be_captured(name: str, tmp_path: Path) -> None:
    save(LAYOUTS[name], tmp_path / "m")

    def factory() -> Any:
        with Checkpoint.open(tmp_path / "m") as checkpoint:
            model = Llama.load(checkpoint, "cuda", decode=False)
        runner = Engine(model, max_batch=4, max_context=48, page_size=4, chunk=8, capture=False).executor.step("decode")
        runner.load(drawn=torch.tensor([5, 6, 7]), **ROWS)

        def step() -> Any:
            with reference_ops():  # the ops as plain torch, which the simulation sees into
                return runner.replay(4)

        return step, lambda index: ()

    report = check_step(factory, steps=5)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


def test_components_of_a_mixed_checkpoint_one_by_one(tmp_path: Path) -> None:
    """`eval --ab` against the dense model: FP8 costs less than FP4, each what its numbers cost."""
    layout = dataclasses.replace(LAYOUTS["NVIDIA MIXED"])
    save(Layout({}, variant="qwen3"), tmp_path / "dense")
    hf = save(layout, tmp_path / "coded")
    dense, coded = (
        load_decoder(Checkpoint.open(tmp_path / kind), "cpu", torch.float32, max_context=64, fused=False)
        for kind in ("dense", "coded")
    )
    tokens = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1))
    found = {cost.component: cost for cost in costs(dense, exchanged(coded, dense), tokens, window=30)}
    assert list(found) == ["attention qkv", "attention out", "mlp gate up", "mlp down", "lm_head", "all"]
    with torch.no_grad():
        plain = load_decoder(Checkpoint.open(tmp_path / "dense"), "cpu", torch.float32, max_context=64)
        want = Decoder(plain, rows=1, max_context=64).feed([tokens[:30].tolist()])[0].log_softmax(-1)
        got = hf(tokens[None, :30]).logits[0].log_softmax(-1)
    assert (want.exp() * (want - got)).sum(-1).mean() == pytest.approx(found["all"].kl, rel=0.5)
    assert found["attention qkv"].kl < found["mlp gate up"].kl


def test_the_commands_take_an_fp8_checkpoint(tmp_path: Path) -> None:
    """`eval --ab`, with the bits that a weight takes, and `generate`."""
    from fuzz import tiny
    from test_cli import invoke

    model, text = tiny.write_model(tmp_path / "plain"), tmp_path / "text.txt"
    text.write_text("the thing in the inn, and a hat. " * 40)
    block = fp8(128, 128, "weight_scale_inv", torch.bfloat16)
    path = code(model, tmp_path / "fp8", block, deepseek(), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"))
    more = ["--text", text, "--tokens", 300, "--window", 100]
    status, out, errors = invoke(["eval", path, "--reference", model, "--ab", *more, "--json"])
    assert status == 0, errors
    rows = {row["component"]: row for row in json.loads(out)["ab"]}
    assert list(rows) == ["attention qkv", "attention out", "mlp down", "all"]
    assert all(0 < row["kl"] < 0.1 and 8 < row["bits"] < 8.1 for name, row in rows.items() if name != "all")
    status, out, errors = invoke(["generate", path, "--raw", "--prompt", "the", "--max-tokens", 3])
    assert status == 0, errors
    assert out.strip()


# ------------------------------------------------------------------------------------------------------ what is wrong


def refused(path: Path, message: str) -> None:
    with Checkpoint.open(path) as checkpoint, pytest.raises(ValueError, match=message) as caught:
        Llama.load(checkpoint)
    assert "\n" not in str(caught.value)


E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
QWEN = "Qwen3-FP8, bfloat16 scales"
DAMAGE: list[tuple[str, str, str, Any, str]] = [
    ("no scale", QWEN, f"{Q}.weight_scale_inv", None, rf"'{Q}.weight' is float8_e4m3fn and has no scale"),
    (
        "scales of blocks of 32",
        QWEN,
        f"{Q}.weight_scale_inv",
        torch.ones(6, 6),
        rf"'{Q}.weight_scale_inv' has shape \[6, 6\]; scales of a weight of 192 x 192 are \[2, 2\]",
    ),
    ("transposed", QWEN, f"{UP}.weight_scale_inv", torch.ones(2, 3), r"up_proj.weight_scale_inv' has shape \[2, 3\]"),
    (
        "codes of another size",
        QWEN,
        f"{Q}.weight",
        torch.zeros(200, 192).to(E4M3),
        rf"'{Q}.weight' has shape \[200, 192\], the config needs \[192, 192\]",
    ),
    ("a NaN code", QWEN, f"{Q}.weight", torch.full((192, 192), math.nan).to(E4M3), rf"'{Q}.weight' holds NaN codes"),
    ("a scale of zero", QWEN, f"{Q}.weight_scale_inv", torch.zeros(2, 2), rf"'{Q}.weight_scale_inv' holds scales that"),
    ("a scale below zero", QWEN, f"{Q}.weight_scale_inv", -torch.ones(2, 2), rf"'{Q}.weight_scale_inv' holds scales"),
    (
        "an infinite scale",
        QWEN,
        f"{Q}.weight_scale_inv",
        torch.full((2, 2), math.inf),
        rf"'{Q}.weight_scale_inv' holds NaN or infinite values",
    ),
    (
        "an exponent that is NaN",
        "DeepSeek's scales",
        f"{Q}.scale",
        torch.full((2, 2), 255, dtype=torch.uint8).view(E8M0),
        rf"'{Q}.scale' holds scales that are zero, negative, infinite or NaN",
    ),
    (
        "scales that are integers",
        QWEN,
        f"{Q}.weight_scale_inv",
        torch.ones(2, 2, dtype=torch.int32),
        rf"'{Q}.weight_scale_inv' is int32, allowed is float32 or bfloat16",
    ),
    (
        "a scale a row in bytes",
        "NVIDIA FP8",
        f"{Q}.weight_scale",
        torch.tensor(127, dtype=torch.uint8),
        rf"'{Q}.weight_scale' is uint8, allowed is float32",
    ),
    ("E5M2", QWEN, f"{Q}.weight", torch.ones(192, 192).to(torch.float8_e5m2), rf"'{Q}.weight' is float8_e5m2"),
    ("no scale of FP4", "NVIDIA NVFP4", f"{Q}.weight_scale", None, rf"1 missing: '{Q}.weight_scale'"),
    (
        "bytes without a scale",
        QWEN,
        "lm_head.weight",
        torch.zeros(131, 192, dtype=torch.uint8),
        r"'lm_head.weight' is uint8, allowed is float32",
    ),
    ("no global scale", "NVIDIA NVFP4", f"{Q}.weight_scale_2", None, rf"1 missing: '{Q}.weight_scale_2'"),
    ("AWQ's input scale", "NVIDIA NVFP4", f"{Q}.pre_quant_scale", torch.ones(192), r"unexpected: .*pre_quant_scale'"),
    ("a zero point", QWEN, f"{Q}.weight_zero_point", torch.ones(2, 2), r"unexpected: .*weight_zero_point'"),
    ("two scales", QWEN, f"{Q}.weight_scale", torch.ones(2, 2), r"unexpected: .*weight_scale'"),
    ("a scale of a dense layer", QWEN, "lm_head.weight_scale_inv", torch.ones(2, 2), r"unexpected: 'lm_head.weight_sc"),
    (
        "FP4 with a scale that is no power of two",
        "DeepSeek's FP4 beside FP8",
        f"{UP}.scale",
        torch.full((320, 6), 0.3),
        rf"'{UP}' is in MXFP4 and has scales that are no powers of two",
    ),
]


@pytest.mark.parametrize(("layout", "name", "made", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_what_does_not_fit_is_named(
    layout: str, name: str, made: Any, message: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """In checkpoints that load as they are: `test_a_layout_is_the_model_of_its_numbers`."""
    shutil.copytree(saved(layout)[0], tmp_path / "m")
    list_all(tmp_path / "m")
    change(tmp_path / "m", name, made)
    refused(tmp_path / "m", message)


def test_blocks_of_another_size_than_the_config_says(tmp_path: Path) -> None:
    layout = dataclasses.replace(
        LAYOUTS["blocks of 32"], config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    save(layout, tmp_path / "m")
    refused(tmp_path / "m", r"q_proj.scale' has shape \[6, 6\]; scales of a weight of 192 x 192 are \[2, 2\]")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    save(LAYOUTS[QWEN], tmp_path / "m")
    shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{shard.name}: .*the file is damaged"):
        Checkpoint.open(tmp_path / "m")


def test_codes_without_a_config_are_named(tmp_path: Path) -> None:
    save(LAYOUTS["NVIDIA FP8"], tmp_path / "m")
    (tmp_path / "m" / "hf_quant_config.json").unlink()
    refused(tmp_path / "m", r"self_attn.q_proj.weight' is float8_e4m3fn, allowed is float32")


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"quant_method": "modelopt", "quant_algo": name}, f"quant_algo '{name}', which is not supported")
        for name in ("NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "INT8_SQ")
    ),
    ({"quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo 'W4A8_AWQ'"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4_AWQ"}},
        },
        "quant_algo 'NVFP4_AWQ'",
    ),
    ({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, r"quant_algo \['FP8'\]"),
    ({"quant_method": "modelopt", "quantized_layers": ["a"]}, "no object of layer name"),
    ({"quant_method": "modelopt", "quantized_layers": {"a": "FP8"}}, "no object of layer name"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; NVFP4 has groups of 16"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "W4A16_NVFP4", "group_size": 128}},
        },
        "group_size is 128; W4A16_NVFP4 has groups of 16",
    ),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; supported are \[128, "),
    ({"quant_method": "fp8", "weight_block_size": [[128], 128]}, "weight_block_size is"),
    ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size is '128'"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "no list of module names"),
    ({"quant_method": "fp8", "modules_to_not_convert": [7]}, "no list of module names"),
    *(
        ({"quant_method": "compressed-tensors", "format": name}, f"format '{name}', which is not supported")
        for name in ("int-quantized", "marlin-24", "sparse-24-bitmask")
    ),
    ({"quant_method": "compressed-tensors"}, "format None"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"a": {"format": "float-quantized"}, "b": {"format": "marlin-24"}},
        },
        "format 'marlin-24'",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"a": {"format": "pack-quantized", "weights": {"num_bits": 8, "type": "int"}}},
        },
        "pack-quantized is read with 4-bit integers",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "naive-quantized",
            "config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}},
        },
        "type 'int' and 8 bits in naive-quantized",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"a": {"weights": {"type": "float", "num_bits": 6}}},
        },
        "and 6 bits in float-quantized",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"a": {"weights": {"block_structure": [64, 128]}}},
        },
        r"block_structure is \[64, 128\]",
    ),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": [1]}, "no object of groups"),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config": {"format": "2:4"}},
        "sparsity_config, which is not supported",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "transform_config": {"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}},
        },
        "transform at 'q_attn', which is not supported",
    ),
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', which is not supported"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_quantization(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "block", "kept"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["a"]}, (128, 128), ("a",)),
        ({"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": None}, None, ()),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "exclude_modules": ["*gate*"]}, None, ("*gate*",)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "nvfp4", "exclude_modules": ["b"]}}, None, ("b",)),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None, ()),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {"block_structure": "128x128"}}},
                "transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}},
                "sparsity_config": {},
                "kv_cache_scheme": "FP8",
            },
            (128, 128),
            (),
        ),
    ],
)
def test_what_a_config_says(data: dict[str, Any], block: Any, kept: tuple[str, ...]) -> None:
    config = parse_quantization(json.loads(json.dumps(data)))
    assert isinstance(config, Published)
    assert (config.block, config.ignore) == (block, kept)
    assert config.to_dict() == data
    assert config.renamed(dict) == config
    for unread in ("input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale"):
        assert config.ignored(f"model.layers.0.self_attn.k_proj.{unread}")
    for asked in ("weight_scale", "weight_zero_point", "pre_quant_scale", "weight", "bias"):
        assert not config.ignored(f"model.layers.0.self_attn.k_proj.{asked}")
