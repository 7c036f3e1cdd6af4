"""Routed experts in codes inside the real vLLM, on a CPU: tokens and logits of our own engine, shares, refusals."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_fused import ranks
from test_generate import PROMPTS, ours, serving, tokens_of

from models import Decoder, e8p_tensors, trellis_tensors
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.e8p import E8P
from onegraph.formats.fused import STACKS, stacked
from onegraph.formats.rotated import RotatedFormat
from onegraph.formats.trellis import TRELLIS, TrellisConfig
from onegraph.formats.weight import WeightFormat
from onegraph.integrations.vllm.config import OnegraphConfig
from onegraph.models.llama import Llama
from onegraph.ops.activation import SwiGLU
from onegraph.ops.weight import weight_ops
from test_e8p_experts import checkpoint_of

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "some layers have none": ("qwen3_moe", 4, {}),
    "Mixtral": ("mixtral", 3, {"intermediate_size": 64}),
    "a shared expert": ("qwen2_moe", 2, {"hidden_size": 192}),
    "sigmoids, in groups": ("glm4_moe_groups", 4, {"num_hidden_layers": 3}),
    "trellis": ("mixtral", 3, {"written": TrellisConfig, "intermediate_size": 64}),
}
PREFIX = "model.layers.0.mlp.experts"


def methods(llm: Any) -> list[str]:
    (found,) = llm.apply_model(_methods)
    return found


def _methods(model: Any) -> list[str]:
    layers = [layer for layer in model.modules() if type(layer).__name__ == "RoutedExperts"]
    return [type(layer.quant_method).__name__ for layer in layers]


def logprobs(llm: Any, text: list[int]) -> Tensor:
    """Of each token but the first, given those before it."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    (done,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    rows = list(zip(done.prompt_token_ids, done.prompt_logprobs, strict=True))[1:]
    return torch.tensor([row[token].logprob for token, row in rows])


def our_logprobs(path: Path, text: list[int]) -> Tensor:
    model = Llama.load(Checkpoint.open(path), device="cpu", dtype=torch.float32, max_context=128)
    logits = Decoder(model, rows=1, max_context=64).feed([text])[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_our_engines(case: str, tmp_path: Path) -> None:
    variant, bits, sizes = CASES[case]
    path = tmp_path / "m"
    checkpoint_of(variant, path, bits, **SIZES | sizes)
    with serving(path) as llm:
        assert tokens_of(llm, PROMPTS, 6) == ours(path, PROMPTS, 6)
        torch.testing.assert_close(logprobs(llm, PROMPTS[2]), our_logprobs(path, PROMPTS[2]), atol=1e-4, rtol=1e-4)


def test_compiled_and_reloaded(tmp_path: Path) -> None:
    """What vLLM compiles around the layer; then other weights in the same places."""
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint_of("qwen3_moe", first, 2, **SIZES)
    checkpoint_of("qwen3_moe", second, 2, **SIZES, seed=1)
    with serving(first, compiled=True, enable_prefix_caching=False) as llm:
        assert methods(llm) == ["OnegraphExpertsMethod"]
        assert tokens_of(llm, PROMPTS, 6) == ours(first, PROMPTS, 6)
        before = llm.apply_model(places)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert llm.apply_model(places) == before, "a captured graph would read the old place"
        assert tokens_of(llm, PROMPTS, 6) == ours(second, PROMPTS, 6) != ours(first, PROMPTS, 6)


def places(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """Attention cut, nine experts placed, five and four; that cut ones add up, the layer alone tells."""
    wide = SIZES | {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    checkpoint_of("qwen3_moe", tmp_path / "m", 4, **wide, num_attention_heads=8, num_key_value_heads=8)
    done = ranks(tmp_path / "m", tmp_path / "tokens", enable_expert_parallel=True)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, _ = json.loads((tmp_path / "tokens").read_text())
    assert tokens == ours(tmp_path / "m", PROMPTS, 12)


# ------------------------------------------------------------------------------------------------- one layer, no engine

COUNT, D, F = 5, 64, 256


class Layer(nn.Module):
    """What of vLLM's layer the method looks at."""

    def __init__(self, placed: Tensor | None = None) -> None:
        super().__init__()
        self.expert_map = placed
        self.expert_map_manager = SimpleNamespace(expert_map=placed)


def config_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from onegraph.integrations.vllm import experts

    loads = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(experts, "get_current_vllm_config", lambda: loads)
    parallel = {"tp_rank": 0, "tp_size": 1, "dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False}
    parallel |= {key: changes.pop(key) for key in list(changes) if key in parallel}
    known = {"activation": MoEActivation.SILU, "swiglu_limit": None, "has_bias": False, "is_lora_enabled": False}
    return SimpleNamespace(**known | {"num_experts": COUNT} | changes, moe_parallel_config=SimpleNamespace(**parallel))


def layer_of(moe: Any, placed: Tensor | None = None, format: WeightFormat = E8P[4]) -> tuple[Any, Any]:
    from onegraph.integrations.vllm.experts import OnegraphExpertsMethod

    method, layer = OnegraphExpertsMethod(moe, PREFIX, format, weighted_inputs=False), Layer(placed)
    here = COUNT if placed is None else int((placed >= 0).sum())
    method.create_weights(layer, here, D, F // moe.moe_parallel_config.tp_size, torch.float32)
    return method, layer


def file_of(format: RotatedFormat = E8P[4]) -> dict[str, Tensor]:
    """Both stacks by their names within the layer."""
    found: dict[str, Tensor] = {}
    make = e8p_tensors if format in E8P.values() else trellis_tensors
    for seed, (name, n, k) in enumerate(zip(STACKS, (2 * F, D), (D, F), strict=True)):
        found |= stacked(format, name, [make(n, k, format.rate, 100 * seed + e)[0] for e in range(COUNT)])
    return found


def routed() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    chosen = torch.rand(7, COUNT, generator=g).argsort(1)[:, :2].contiguous()
    return torch.randn(7, D, generator=g), torch.rand(7, 2, generator=g), chosen.int()


def loaded(method: Any, layer: Any, file: dict[str, Tensor]) -> Any:
    list(layer.load_weights(file.items()))
    method.process_weights_after_loading(layer)
    return method.apply(layer, *routed(), None, None)


def computed(format: RotatedFormat) -> Tensor:
    """What the experts compute, by the op on the file's own tensors."""
    file, given = file_of(format), []
    for name in STACKS:
        one = [format.fold({key: file[f"{name}.{key}"][e] for key in format.stored}) for e in range(COUNT)]
        given.append({key: torch.stack([each[key] for each in one]) for key in format.fields})
    x, gains, chosen = routed()
    run = weight_ops(format).experts
    assert run is not None
    tables = format.constants(torch.device("cpu"))
    return run(format, x, chosen, gains, given[0] | tables, given[1] | tables, SwiGLU(), None)


@pytest.mark.parametrize("format", [E8P[4], TRELLIS[3]], ids=repr)
def test_shares_of_experts_add_up(format: RotatedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, file = [], file_of(format)
    for rank in range(2):
        method, layer = layer_of(config_of(monkeypatch, tp_rank=rank, tp_size=2), format=format)
        before = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        parts.append(loaded(method, layer, file))
        assert before == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        assert 2 * layer.w2_codes.numel() == file["down_proj.codes"].numel()
    assert float(parts[0].abs().max()) > 0.01
    torch.testing.assert_close(sum(parts), computed(format), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", [E8P[4], TRELLIS[3]], ids=repr)
def test_experts_that_are_shared_out_add_up(format: RotatedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for placed in ([0, -1, 1, -1, 2], [-1, 0, -1, 1, -1]):
        method, layer = layer_of(config_of(monkeypatch), torch.tensor(placed, dtype=torch.int32), format)
        parts.append(loaded(method, layer, file_of(format)))
    torch.testing.assert_close(sum(parts), computed(format), rtol=1e-4, atol=1e-4)


def test_a_share_that_cuts_a_rotation_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 gate rows and 64 up rows would be a block of 128, one that the file does not have."""
    method, layer = layer_of(config_of(monkeypatch, tp_rank=1, tp_size=4))
    with pytest.raises(ValueError, match=rf"{PREFIX}\.gate_up_proj: rows 64:128 of 512 cut .* tensor_parallel_size"):
        loaded(method, layer, file_of())


def test_what_the_file_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(file: dict[str, Tensor]) -> str:
        method, layer = layer_of(config_of(monkeypatch))
        with pytest.raises(ValueError, match=PREFIX) as error:
            loaded(method, layer, file)
        return str(error.value)

    file, nan = file_of(), file_of()["down_proj.scale"].clone()
    nan[3] = float("nan")
    missing = {name: tensor for name, tensor in file.items() if name != "down_proj.residual"}
    assert refusal(missing) == f"the checkpoint holds no {PREFIX}.down_proj.residual"
    assert f"{PREFIX}.down_proj.scale holds NaN" in refusal(file | {"down_proj.scale": nan})
    assert f"{PREFIX}.gate_up_proj.codes holds 4 experts; config.json says 5" in refusal(
        {name: tensor[:4] for name, tensor in file.items()}
    )
    assert "0.up_proj.weight is in the checkpoint; experts of e8p at 4 bits have no such tensor" in refusal(
        file | {"0.up_proj.weight": torch.zeros(F, D)}
    )


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("biases", {"has_bias": True}),
        ("a bound of the gate", {"swiglu_limit": 7.0}),
        ("adapters (LoRA)", {"is_lora_enabled": True}),
        ("data parallelism", {"dp_size": 2}),
    ],
)
def test_what_does_not_run_is_refused_by_name(what: str, change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{PREFIX}: experts in codes do not run with {what} in vLLM")):
        layer_of(config_of(monkeypatch, **change))


KNOWN = {"quant_method": "onegraph", "format": "e8p", "format_version": 1, "bits": 4}


def test_nothing_in_codes_is_passed_over(tmp_path: Path) -> None:
    """A layer that vLLM's model builds without asking for our method; blocks of other ranks are nobody's concern."""
    names = [f"model.layers.{i}.self_attn.{name}" for i in (0, 7) for name in ("o_proj", "q_proj")]
    stack = f"{PREFIX}.{STACKS[0]}"
    tensors = {f"{name}.codes": torch.zeros(8, 1, dtype=torch.int16) for name in (*names, stack)}
    tensors |= {"model.layers.0.mlp.gate.weight": torch.zeros(8, 8)}
    write_checkpoint(tmp_path / "m", {"model_type": "llama"}, tensors.items())
    config = OnegraphConfig.from_config(KNOWN)
    config.maybe_update_config(str(tmp_path / "m"))
    config.check_taken()
    config.taken.add(names[1])
    for missing in (stack, names[0]):
        with pytest.raises(ValueError, match=f"{re.escape(missing)}: the checkpoint holds it in codes, and vLLM's"):
            config.check_taken()
        with pytest.raises(ValueError, match=re.escape(missing)):
            config.get_checkpoint_weight_mapper()  # before vLLM's model looks for a parameter of that name
        config.taken.add(missing)
    renamed = config.get_checkpoint_weight_mapper()
    assert renamed.map_name(f"{stack}.codes") == f"{PREFIX}.routed_experts.w13_codes"
    assert all(renamed.map_name(f"{name}.codes") == f"{name}.codes" for name in names)


def test_what_of_vllms_layers_the_checkpoint_holds_in_codes(tmp_path: Path) -> None:
    """Routers, towers and other linears without codes are dense whatever the rate; a part that no file has, such as
    values that are keys, is as its siblings; experts whose module vLLM calls `mlp` are found (MiniMax-M2)."""
    block, experts = "model.layers.0", f"model.layers.0.block_sparse_moe.experts.{STACKS[1]}"
    tensors = {f"{name}.codes": torch.zeros(8, 1) for name in (f"{block}.self_attn.k_proj", experts)}
    kept = [f"{block}.router", f"{block}.per_layer_input_gate", "visual.blocks.0.attn.qkv"]
    tensors |= {f"{name}.{kind}": torch.zeros(8) for name in kept for kind in ("scale", "weight")}
    write_checkpoint(tmp_path / "m", {"model_type": "llama"}, tensors.items())
    config = OnegraphConfig.from_config(KNOWN)
    config.maybe_update_config(str(tmp_path / "m"))
    assert not any(format.coded for name in kept for format in config.stored_formats([name]).values())
    fused = config.stored_formats(config.parts_of(f"{block}.self_attn.qkv_proj"))
    assert fused == {f"{block}.self_attn.{name}_proj": E8P[4] for name in "qkv"}
    assert config.parts_of(f"{block}.mlp.experts.{STACKS[1]}") == [experts]
    assert config.parts_of(f"{block}.self_attn.o_proj") == [f"{block}.self_attn.o_proj"]


def test_blocks_of_mxfp4_beside_codes_are_refused_by_name(tmp_path: Path) -> None:
    """What `onegraph quantize` makes of gpt-oss unless its experts get a rate."""
    tensors = {f"{PREFIX}.gate_up_proj_blocks": torch.zeros(1, dtype=torch.uint8)}
    write_checkpoint(tmp_path / "m", {"model_type": "gpt_oss"}, tensors.items())
    config = OnegraphConfig.from_config(KNOWN | {"layers": {f"{PREFIX}.{stack}": 16 for stack in STACKS}})
    with pytest.raises(ValueError, match=rf"{PREFIX}\.gate_up_proj: experts in MXFP4 .* serve the published"):
        config.maybe_update_config(str(tmp_path / "m"))
