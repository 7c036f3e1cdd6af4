"""Models with routed experts as they are published: FP8 and NVFP4 one expert at a time, gpt-oss's blocks of MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import save_hf
from onegraph.api.size import component_bits, size_of
from onegraph.api.verify import verify
from onegraph.check import declared
from onegraph.check.simulate.run import simulate_step
from onegraph.engine import executor
from onegraph.engine.ab import components_of
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.formats.nvfp4 import written_config
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.ops.mxfp4 import mxfp4_dequantize, random_weight
from onegraph.ops.nvfp4_linear import nvfp4_dequantize
from onegraph.quant.nvfp4 import quantize_weight, quantized_tensors
from test_engine_llama import PARAMS, PROMPTS, transformers_tokens
from test_graph import RecordedPool
from test_moe import load, logits_of, rng, tokens, truth

SIZED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
FP8_SAID = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
}  # fmt: skip
NVFP4_SAID = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate"],
    },
}  # fmt: skip


def fp8(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As Qwen publishes it, scales in bfloat16; and what it stands for."""
    n, k = weight.shape
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=rng(n + k)).add(0.5).mul(2.0**-8).bfloat16()
    wide = scale.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": codes, f"{layer}.weight_scale_inv": scale}, codes.float() * wide


def nvfp4(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As NVIDIA publishes it; and what it stands for."""
    made = dict(quantized_tensors([f"{layer}.weight"], lambda name: weight, [layer]))
    made[f"{layer}.input_scale"] = torch.tensor(0.01)
    if layer.endswith(("k_proj", "v_proj")):
        made[f"{layer}.{layer[-6]}_scale"] = torch.tensor(0.5)
    codes, scale, gain = quantize_weight(weight).values()
    return made, nvfp4_dequantize(codes, scale, gain.expand(len(weight)).contiguous())


def published(variant: str, path: Path, code: Any, said: dict[str, Any], **changes: Any) -> Any:
    """All linears of a tiny model but its head as `code` writes them, under `path` / "coded", what is `said` of it in
    config.json or, where that is not its place, beside it; and the transformers model of what the codes stand for."""
    wide = {"moe_intermediate_size": 128} if variant in ("qwen3_moe", "glm4_moe") else {}
    hf = save_hf(variant, path / "dense", **SIZED, **wide, **changes)
    source = Checkpoint.open(path / "dense")
    linears = [f"{name}.weight" for name in LlamaConfig.from_dict(source.config).parts.linears if name != "lm_head"]
    coded, stand_in = ({name: source.tensor(name) for name in source.names} for _ in range(2))
    for name in linears:
        made, stand_in[name] = code(name.removesuffix(".weight"), coded.pop(name))
        coded |= made
    inside = "quant_method" in said
    write_checkpoint(path / "coded", source.config | ({"quantization_config": said} if inside else {}), coded.items())
    if not inside:
        (path / "coded" / "hf_quant_config.json").write_text(json.dumps(said))
    write_checkpoint(path / "stand_in", source.config, stand_in.items())
    return type(hf).from_pretrained(path / "stand_in", attn_implementation="eager").eval()


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(("code", "said"), [(fp8, FP8_SAID), (nvfp4, NVFP4_SAID)], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_published_checkpoints_are_what_their_codes_stand_for(
    variant: str, code: Any, said: dict[str, Any], decode: bool, tmp_path: Path
) -> None:
    hf = published(variant, tmp_path, code, said)
    model = load(tmp_path / "coded", decode=decode)
    assert model.blocks[2].mlp.experts.gate_up.format.name.startswith(code.__name__)
    row = tokens(1, 30)[0].tolist()
    torch.testing.assert_close(logits_of(model, row), truth(hf, row), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("capture", [False, True, "split"])
def test_a_published_checkpoint_in_the_engine(
    capture: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unequal prompts in one batch, captured as eager: the tokens of transformers on what the codes stand for."""
    hf = published("qwen3_moe", tmp_path, fp8, FP8_SAID)
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    engine = Engine(
        load(tmp_path / "coded", decode=False), max_batch=2, max_context=64, page_size=8, chunk=16, capture=capture
    )
    assert engine.generate(PROMPTS, PARAMS) == [transformers_tokens(hf, prompt) for prompt in PROMPTS]


def test_experts_of_two_formats_in_a_layer_are_refused(tmp_path: Path) -> None:
    save_hf("mixtral", tmp_path / "dense", **SIZED)
    source = Checkpoint.open(tmp_path / "dense")
    one = "model.layers.1.block_sparse_moe.experts.3.w1"
    told = source.config | {"quantization_config": written_config(["lm_head"])}
    write_checkpoint(tmp_path / "mixed", told, quantized_tensors(source.names, source.tensor, [one]))
    with pytest.raises(CheckpointError, match=rf"{one} is nvfp4 and other experts of its layer are dense"):
        load(tmp_path / "mixed")


# -------------------------------------------------------------------------------------------------------- gpt-oss

MXFP4_SAID = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def gpt_oss(path: Path) -> Checkpoint:
    """A tiny gpt-oss at `path` as OpenAI publishes it: experts in blocks, all else in bfloat16."""
    save_hf("gpt_oss", path.with_name("dense"), hidden_size=96, intermediate_size=64)
    source, tensors = Checkpoint.open(path.with_name("dense")), {}
    for i, name in enumerate(source.names):
        tensor = source.tensor(name)
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, k, n = tensor.shape
        codes, scale = random_weight((experts, n, k), "cpu", rng(i))
        tensors |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)).contiguous(), f"{name}_scales": scale}
    write_checkpoint(path, source.config | {"quantization_config": MXFP4_SAID}, tensors.items())
    return Checkpoint.open(path)


def dequantized(path: Path) -> Any:
    """transformers' own reading of it, which on a CPU decodes the blocks; in float32, which loses nothing."""
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return hf.float().eval()


def test_gpt_oss_as_published_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "m")
    model, hf = load(tmp_path / "m"), dequantized(tmp_path / "m")
    experts = model.blocks[1].mlp.experts
    assert experts.gate_up.format.name == experts.down.format.name == "mxfp4"
    row = tokens(1, 60)[0].tolist()
    assert (logits_of(model, row) - truth(hf, row)).abs().max() < 1e-4


def test_gpt_oss_dequantized_is_the_same_model(tmp_path: Path) -> None:
    """What others publish in bfloat16: floats, transposed, under the names without `_blocks`."""
    source = gpt_oss(tmp_path / "m")
    tensors = {name: source.tensor(name) for name in source.names}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scale = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        dense = mxfp4_dequantize(blocks.flatten(2), scale).bfloat16()
        tensors[name.removesuffix("_blocks")] = dense.transpose(1, 2).contiguous()
    plain = {key: value for key, value in source.config.items() if key != "quantization_config"}
    write_checkpoint(tmp_path / "plain", plain, tensors.items())
    row = tokens(1, 30)[0].tolist()
    got, want = (logits_of(load(tmp_path / name), row) for name in ("plain", "m"))
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("capture", [False, True, "split"])
def test_gpt_oss_in_the_engine(capture: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt_oss(tmp_path / "m")
    hf = dequantized(tmp_path / "m")
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    engine = Engine(load(tmp_path / "m"), max_batch=2, max_context=64, page_size=8, chunk=16, capture=capture)
    assert engine.generate(PROMPTS, PARAMS) == [transformers_tokens(hf, prompt) for prompt in PROMPTS]


def test_sizes_bits_and_verify_know_the_stacks(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path / "m")
    size, bits = size_of(source), component_bits(source)
    experts = 3 * 6 * (128 * 96 + 96 * 64)
    attention = 3 * (2 * 96 * 96 + 2 * 32 * 96)
    assert size.linear_parameters == experts + attention + 3 * 6 * 96
    assert bits["experts"] == 4.25
    assert bits["attention qkv"] == bits["router"] == 16
    assert set(bits) == set(components_of(load(tmp_path / "m")))
    found = verify(tmp_path / "m")
    assert not found.problems
    groups = {group.layers: (group.format, group.bits, group.blocks) for group in found.layers}
    assert groups["model.layers.*.mlp.experts.gate_up_proj"] == ("mxfp4", 4.25, "0-2")
    assert groups["model.layers.*.self_attn.q_proj"][:2] == ("bfloat16", 16)


def test_a_damaged_scale_is_found(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path / "m")
    tensors = {name: source.tensor(name).clone() for name in source.names}
    tensors["model.layers.1.mlp.experts.down_proj_scales"][4, 3, 1] = 255
    write_checkpoint(tmp_path / "bad", source.config, tensors.items())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.down_proj of expert 4' has scales that are NaN"):
        load(tmp_path / "bad")
    assert any("down_proj of expert 4" in problem for problem in verify(tmp_path / "bad").problems)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path / "m")
    whole = {name: source.tensor(name) for name in source.names}
    for change, message in (
        ({"num_local_experts": 5}, r"gate_up_proj_blocks' has shape \[6, 128, 3, 16\].*\[5, 128, 3, 16\]"),
        ({"intermediate_size": 96}, r"down_proj_scales' has shape"),
        ({"num_hidden_layers": 4, "layer_types": None}, r"neither .model.layers.3.mlp.experts.gate_up_proj"),
    ):
        target = tmp_path / "-".join(change)
        write_checkpoint(target, source.config | change, whole.items())
        with pytest.raises(CheckpointError, match=message):
            load(target)
    del whole["model.layers.0.self_attn.sinks"], whole["model.layers.2.mlp.experts.down_proj_bias"]
    write_checkpoint(tmp_path / "less", source.config, whole.items())
    with pytest.raises(CheckpointError, match=r"2 missing: .*sinks.*down_proj_bias|2 missing: .*down_proj_bias.*sinks"):
        load(tmp_path / "less")


# ------------------------------------------------------------------------------------------------------ capture, GPUs

CODED = ["qwen3_moe fp8", "qwen3_moe nvfp4", "mixtral fp8", "gpt_oss mxfp4"]


def make(kind: str, path: Path) -> Any:
    """A published checkpoint under `path` / "coded", and what its codes stand for in transformers."""
    variant, code = kind.split()
    if code == "mxfp4":
        gpt_oss(path / "coded")
        return dequantized(path / "coded")
    return published(variant, path, *{"fp8": (fp8, FP8_SAID), "nvfp4": (nvfp4, NVFP4_SAID)}[code])


@pytest.mark.parametrize("kind", CODED)
def test_the_decode_step_replays_as_eager_on_a_simulated_gpu(kind: str, tmp_path: Path) -> None:
    """onegraph's own check is clean: nothing is read back, no constant is stale."""
    make(kind, tmp_path)

    def factory() -> tuple[Any, Any]:
        model = Llama.load(Checkpoint.open(tmp_path / "coded"), "cuda", torch.bfloat16)
        cache = model.new_cache(rows=2, pages=9, page_size=8, pages_per_row=4)
        cache.block_table.copy_(1 + torch.arange(8, dtype=torch.int32).view(2, 4))
        cache.counts.fill_(1)
        token = torch.zeros(2, 1, dtype=torch.int64, device="cuda")

        @torch.no_grad()
        def step(token: Tensor) -> Tensor:
            logits = model.logits(model(token, cache))
            cache.positions.add_(cache.counts)
            return logits

        return step, lambda i: (token.copy_(tokens(2, 1, seed=i)),)

    with declared("onegraph::*"):
        report = simulate_step(factory)
    assert not report.findings, [str(finding) for finding in report.findings]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CODED)
def test_on_a_gpu_codes_give_the_logits(kind: str, tmp_path: Path) -> None:
    """bfloat16, prefill and decode: a typical position no worse than transformers in bfloat16 on what the codes stand
    for. (A choice of experts that is a tie but for rounding falls otherwise at single positions, in either of the two,
    and later positions of the row attend to it: so the median is over many rows.)
    """
    hf = make(kind, tmp_path)
    model = load(tmp_path / "coded", device="cuda", dtype=torch.bfloat16)
    rows = [row.tolist() for row in tokens(8, 60)]
    want = torch.stack([truth(hf, row) for row in rows])
    got = torch.stack([logits_of(model, row).cpu() for row in rows])
    hf = hf.to("cuda", torch.bfloat16)
    with torch.inference_mode():
        given = torch.tensor(rows, device="cuda")
        theirs = torch.stack([hf(row[None], use_cache=False).logits[0].float().cpu() for row in given])
    ours, yardstick = ((logits - want).norm(dim=-1).median().item() for logits in (got, theirs))
    assert ours <= 1.3 * yardstick, (ours, yardstick)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CODED)
def test_on_a_gpu_captured_text_is_eager_text(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    model = load(tmp_path / "coded", device="cuda", dtype=torch.bfloat16)
    texts = [
        Engine(model, max_batch=2, max_context=128, page_size=16, capture=capture).generate(PROMPTS, PARAMS)
        for capture in (True, "split", False)
    ]
    assert texts[1:] == texts[:1] * 2
