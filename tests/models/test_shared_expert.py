"""A shared expert that is one more of the routed ones: where it may be, that results stay, and what a step calls."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines import MODES, maker
from models import Decoder, rotated_tensors, save_hf
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.e8p import E8PConfig
from onegraph.formats.fused import stacked
from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.trellis import TrellisConfig
from onegraph.models.llama import Llama, config_of
from onegraph.models.ranks import Ranks
from onegraph.nn.block import Stream
from onegraph.nn.moe import MoE
from onegraph.nn.shared_expert import FEW
from test_moe_published import FP8_SAID, NVFP4_SAID, fp8, nvfp4, published

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
GATED, PLAIN = {"shared_expert_intermediate_size": 128}, {"n_shared_experts": 1}
TWO: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": GATED | TWO, "qwen3_next": GATED | TWO | {"mlp_only_layers": []}, "qwen2_moe": GATED,
    "glm4_moe": PLAIN, "glm4_moe_groups": PLAIN,
    "deepseek_v3": PLAIN, "mistral4": PLAIN, "glm_moe_dsa": PLAIN, "kimi_linear": PLAIN,
}  # fmt: skip
ROWS = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (41, 23, 4)]


def save(
    variant: str,
    path: Path,
    written: type[RotatedConfig] = E8PConfig,
    bits: int = 4,
    *,
    joined: bool = True,
    **changes: Any,
) -> Any:
    """A checkpoint whose experts are random codes, and transformers' model with the numbers that they stand for.
    joined: gate and up of the shared expert are rotated alike, as the quantizer has them."""
    hf = save_hf(variant, path / "dense", **SIZES | FAMILIES[variant] | changes)
    source = Checkpoint.open(path / "dense")
    parsed, scales = config_of(source), dict[str, Tensor]()
    kept = [name for name in parsed.parts.linears if "expert" not in name and name != "lm_head"]
    config = written(bits=bits, layers=dict.fromkeys(kept, 16))
    make, names = rotated_tensors(config), {parsed.family_name(name): name for name in source.names}
    tensors = {name: source.tensor(stored) for name, stored in names.items() if ".experts." not in name}
    for seed, (name, parameter) in enumerate(hf.named_parameters()):
        layer = name.removesuffix(".weight")
        if parameter.dim() == 3 and ".experts." in name:
            made = [make(*one.shape, bits, 100 * seed + i) for i, one in enumerate(parameter)]
            tensors |= stacked(config.formats[bits], name, [stored for stored, _ in made])
            dense = torch.stack([weight for _, weight in made])
        elif "shared_expert" in name and layer.endswith("_proj"):
            stored, dense = make(*parameter.shape, bits, seed)
            if layer.endswith(("gate_proj", "up_proj")) and joined:
                own, first = stored["in_scale"], scales.setdefault(layer.rpartition(".")[0], stored["in_scale"])
                stored, dense = stored | {"in_scale": first}, dense / own.float() * first.float()
            tensors |= {f"{layer}.{key}": tensor for key, tensor in stored.items()}
            del tensors[name]
        else:
            continue
        with torch.no_grad():
            parameter.copy_(dense)
    write_checkpoint(path / "coded", source.config | {"quantization_config": config.to_dict()}, tensors.items())
    return hf


Saved = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`save` of a variant as it is, and where; written once, for tests that only read it."""

    @functools.cache
    def made(variant: str) -> tuple[Any, Path]:
        path = tmp_path_factory.mktemp(variant)
        return save(variant, path), path

    return made


def load(path: Path, dtype: torch.dtype = torch.float32, decode: bool = False, **options: Any) -> Llama:
    with Checkpoint.open(path / "coded") as checkpoint:
        return Llama.load(checkpoint, "cpu", dtype, decode=decode, **options)


def halves(model: Llama) -> list[MoE]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> Tensor:
    logits: Tensor = hf(torch.tensor([row]), use_cache=False).logits[0]
    return logits


def check(hf: Any, model: Any) -> None:
    """Rows of unequal lengths in cuts of few tokens, which run all experts together, and of many."""
    decoder, found, at = Decoder(model, rows=3, max_context=64), [list[Tensor]() for _ in ROWS], [0, 0, 0]
    for cut in ((20, 3, 1), (1, 1, 1), (1, 5, 0), (19, 14, 2)):
        fed = decoder.feed([row[first : first + n] for row, first, n in zip(ROWS, at, cut, strict=True)])
        for parts, logits in zip(found, fed, strict=True):
            parts.append(logits)
        at = [first + n for first, n in zip(at, cut, strict=True)]
    assert at == [len(row) for row in ROWS]
    for row, parts in zip(ROWS, found, strict=True):
        want = truth(hf, row)
        torch.testing.assert_close(torch.cat(parts), want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def generates(hf: Any, engine: Engine) -> None:
    """Greedy text of unequal prompts in one batch: that of transformers."""
    for row, got in zip(ROWS, engine.generate(ROWS, SamplingParams(max_tokens=6)), strict=True):
        assert len(got) == 6
        want = truth(hf, [*row, *got])[len(row) - 1 : -1].argmax(1)
        assert got == want.tolist()


# ---------------------------------------------------------------------------------------------------------- together


@pytest.mark.parametrize("variant", FAMILIES)
def test_it_joins_the_routed_ones(variant: str, saved: Saved) -> None:
    hf, path = saved(variant)
    model = load(path)
    for half in halves(model):
        assert half.together
        assert half.experts.count == model.config.routed.count + 1
        shared, all_of_them = half.shared.down.codes, half.experts.down.codes
        assert shared.data_ptr() == all_of_them[-1].data_ptr(), "it is stored once"
    check(hf, model)


@pytest.mark.parametrize(("written", "bits"), [(E8PConfig, 2), (E8PConfig, 3), (TrellisConfig, 3)])
def test_it_does_in_codes_of_every_kind(written: type[RotatedConfig], bits: int, tmp_path: Path) -> None:
    hf = save("qwen3_5_moe", tmp_path, written, bits)
    model = load(tmp_path)
    assert all(half.together for half in halves(model))
    check(hf, model)


@pytest.mark.parametrize("mode", MODES)
def test_captured_is_eager(mode: str, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, path = saved("qwen3_5_moe")
    generates(hf, maker(mode, load(path), monkeypatch, max_batch=3)())


@pytest.mark.parametrize("variant", ["qwen3_next", "glm4_moe"])
def test_ranks_have_a_share_of_it(variant: str, tmp_path: Path) -> None:
    wide = {"shared_expert_intermediate_size": 256} if "qwen" in variant else {}
    wide |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64} if "qwen" in variant else {}
    hf = save(variant, tmp_path, moe_intermediate_size=256, intermediate_size=256, head_dim=32, **wide)
    with Checkpoint.open(tmp_path / "coded") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu", "cpu"], torch.float32, decode=False)
    assert all(half.together for rank in model.ranks for half in halves(rank))
    generates(hf, Engine(model, max_batch=3, max_context=64, page_size=8, chunk=16, capture=False))


# ------------------------------------------------------------------------------------------------------ what is called

VIEWS = {
    "view",
    "unbind",
    "_unsafe_view",
    "slice",
    "select",
    "alias",
    "unsqueeze",
    "squeeze",
    "t",
    "split",
    "split_with_sizes",
}
LINEARS = {"mm", "addmm"}  # of what these tests keep dense


class Calls(TorchDispatchMode):
    """The names of the ops that run inside, but for views and dense linears."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in VIEWS | LINEARS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, FEW])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_decode_step_calls_two_ops(variant: str, tokens: int, saved: Saved) -> None:
    """No sigmoid, product, sum or cast of torch, each of which is a launch on a GPU."""
    half = halves(load(saved(variant)[1], torch.bfloat16))[-1]
    stream = Stream(*torch.randn(2, tokens, 1, 128).bfloat16())
    with torch.no_grad(), Calls() as calls:
        out = half(stream)
    assert calls.names == ["normed_route", "e8p_experts"]
    assert out.delta is None, "the sum is the experts'"


def test_a_wider_router_needs_no_cast(saved: Saved) -> None:
    half = halves(load(saved("qwen3_5_moe")[1], torch.bfloat16))[0]
    assert half.gate.dtype == torch.float32, "as the file has it"
    assert half.gate.shape == (7, 128), "six experts, and the shared one's gate"


# -------------------------------------------------------------------------------------------------------------- apart


@pytest.mark.parametrize("why", ["width", "rotation", "adapter", "decoded"])
@pytest.mark.parametrize("variant", ["qwen3_next", "glm4_moe"])
def test_it_stays_apart_where_it_is_another_layer(variant: str, why: str, saved: Saved, tmp_path: Path) -> None:
    """Of another width, of gate and up that are no one layer, with an adapter, or dense on this device."""
    wide = {"shared_expert_intermediate_size": 256} if variant == "qwen3_next" else {"n_shared_experts": 2}
    if why in ("decoded", "adapter"):
        hf, path = saved(variant)
    else:
        hf, path = save(variant, tmp_path, joined=why != "rotation", **(wide if why == "width" else {})), tmp_path
    if why == "decoded":
        model = load(path, decode=True)
    else:
        model = load(path, **({"adapters": {"a": adapter(variant, tmp_path)}} if why == "adapter" else {}))
    assert [half.together for half in halves(model)] == [why == "adapter" and i > 0 for i in range(len(halves(model)))]
    check(hf, model)


def adapter(variant: str, path: Path) -> Path:
    """One that adds to the shared expert of the first block that has one."""
    name = "shared_expert" if variant == "qwen3_next" else "shared_experts"
    layer = f"base_model.model.model.layers.{0 if variant == 'qwen3_next' else 1}.mlp.{name}.up_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 128), f"{layer}.lora_B.weight": torch.ones(128, 2)}
    (path / "adapter").mkdir()
    save_file(tensors, path / "adapter" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    return path / "adapter"


def test_what_was_exchanged_runs_apart(saved: Saved) -> None:
    """As `eval --ab` exchanges the parts of a component."""
    hf, path = saved("glm4_moe")
    model = load(path)
    first, second = halves(model)
    first.shared.down = copy.deepcopy(first.shared.down)
    second.experts = copy.deepcopy(second.experts)
    assert not first.together
    assert not second.together
    check(hf, model)


@pytest.mark.parametrize(("code", "said"), [(fp8, FP8_SAID), (nvfp4, NVFP4_SAID)], ids=["fp8", "nvfp4"])
def test_published_codes_join_too(code: Any, said: dict[str, Any], tmp_path: Path) -> None:
    """Gate and up of NVFP4 have a gain each, which their rows keep."""
    hf = published("glm4_moe", tmp_path, code, said, n_shared_experts=1)
    model = load(tmp_path)
    assert all(half.together for half in halves(model))
    check(hf, model)


# -------------------------------------------------------------------------------------------------------------- a GPU


def on_gpu(path: Path) -> Llama:
    with Checkpoint.open(path / "coded") as checkpoint:
        return Llama.load(checkpoint, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["qwen3_5_moe", "glm4_moe"])
def test_on_a_gpu_together_is_apart(variant: str, tmp_path: Path) -> None:
    """Up to rounding."""
    save(variant, tmp_path)
    half = halves(on_gpu(tmp_path))[-1]
    assert half.together
    g = torch.Generator().manual_seed(0)
    for tokens in (1, 5):
        stream = Stream(*torch.randn(2, tokens, 1, 128, generator=g).cuda().bfloat16())
        with torch.inference_mode():
            one = half(stream).total()
            joined, half._one = half._one, None
            two = half(stream).total()
            half._one = joined
        assert (one - two).float().norm() < 1e-2 * two.float().norm()


@pytest.mark.gpu
def test_on_a_gpu_captured_is_eager(tmp_path: Path) -> None:
    save("glm4_moe", tmp_path)
    model, params = on_gpu(tmp_path), SamplingParams(max_tokens=20)
    texts = [
        Engine(model, max_batch=3, max_context=96, capture=capture).generate(ROWS, params) for capture in (True, False)
    ]
    assert texts[0] == texts[1]
