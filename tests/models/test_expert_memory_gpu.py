"""Experts in host memory on a GPU: the same tokens, captured and eager, and the memory that was asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, TensorInfo, write_checkpoint
from onegraph.formats.e8p import E8P, E8PConfig
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama, config_of
from onegraph.models.loader import Loader
from onegraph.nn.expert_cache import CachedExperts
from onegraph.runtime.prove import prove

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "intermediate_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "num_experts": 48, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
BITS, SLOTS = (2, 3, 4), 12
PROMPTS = [[(7 * n + 3 * k) % 509 for n in range(length)] for k, length in enumerate((1, 40, 7, 16, 90))]
GREEDY = SamplingParams(max_tokens=24)
WARM = SamplingParams(max_tokens=24, temperature=0.9, top_k=50, seed=3)


class Shapes(Checkpoint):
    """What `Loader.expected` asks of a checkpoint: experts are in stacks of codes."""

    def __init__(self, config: dict[str, Any], bits: int) -> None:
        parts = LlamaConfig.from_dict(config).parts
        infos = {
            f"{name}.{key}": TensorInfo((stack.experts, *field.shape(stack.n, stack.k)), torch.int16, 0, Path())
            for name, stack in parts.stacks.items()
            for key, field in E8P[bits].stored.items()
        }
        super().__init__(Path("shapes"), config, infos)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int, g: torch.Generator) -> Tensor:
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, shape, generator=g, dtype=dtype)
    if name.endswith(".scale"):
        wide = CONFIG["moe_intermediate_size"] if "down_proj" in name else CONFIG["hidden_size"]
        return torch.full(shape, wide**-0.5 / (16 if bits == 4 else 4), dtype=dtype)
    if len(shape) < 2 or name.endswith("_scale"):
        return torch.ones(shape, dtype=dtype)
    return (torch.randn(shape, generator=g) * (1.0 if "embed" in name else 2 * shape[1] ** -0.5)).to(dtype)


@pytest.fixture(scope="module", params=BITS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random codes."""
    bits, g = request.param, torch.Generator().manual_seed(0)
    config = CONFIG | {"quantization_config": E8PConfig(bits=bits).to_dict()}
    expected = Loader(Shapes(config, bits), LlamaConfig.from_dict(config), torch.bfloat16).expected()
    folder = tmp_path_factory.mktemp("model") / str(bits)
    tensors = ((name, value(name, shape, kinds[0], bits, g)) for name, (shape, kinds) in expected.items())
    write_checkpoint(folder, config, tensors)
    return folder


def load(path: Path, slots: int | None) -> tuple[Llama, int]:
    """The model, and the bytes on the GPU that its weights may take."""
    with Checkpoint.open(path) as checkpoint:
        loader = Loader(checkpoint, config_of(checkpoint), torch.bfloat16)
        whole = sum(loader.expert_bytes.values())
        layer = whole // CONFIG["num_hidden_layers"]
        size = whole if slots is None else layer + slots * (whole // CONFIG["num_experts"])
        model = Llama.load(checkpoint, "cuda", torch.bfloat16, expert_memory=size)
        return model, sum(loader.device_bytes().values()) - whole + size


def caches(model: Llama) -> list[CachedExperts]:
    return [module for module in model.modules() if isinstance(module, CachedExperts)]


def test_tokens_are_those_of_all_experts_on_the_gpu(path: Path) -> None:
    """Rows alone, whose experts have slots, and five rows, whose experts do not fit them, in turn: between replays
    slots change hands. What slots hold at the end is what they say."""
    whole, model = load(path, None)[0], load(path, SLOTS)[0]
    assert not caches(whole)
    assert {len(cache.resident) for cache in caches(model)} == {SLOTS}
    options: dict[str, Any] = {"max_batch": 5, "max_context": 160, "page_size": 16, "chunk": 32}
    for capture in (True, False):
        want, got = (Engine(each, capture=capture, **options) for each in (whole, model))
        for params in (GREEDY, WARM):
            before = [cache.resident.clone() for cache in caches(model)]
            for prompts in ([PROMPTS[1]], PROMPTS, [PROMPTS[4]]):
                assert got.generate(prompts, params) == want.generate(prompts, params), capture
            changed = [not torch.equal(c.resident, was) for c, was in zip(caches(model), before, strict=True)]
            assert all(changed), "the case would not show an expert that is read from another's slot"
    for cache in caches(model):
        assert len(set(cache.resident.tolist())) == SLOTS
        assert not cache.arrived.any()
        for slots, host in zip(cache._slots, cache._host, strict=True):
            assert host.is_pinned()
            assert torch.equal(slots.cpu(), host[cache.resident.long().cpu()])


def test_the_step_is_proven(path: Path) -> None:
    """A replay leaves what the eager step leaves, whichever experts have slots then."""
    model, _ = load(path, SLOTS)
    engine = Engine(model, max_batch=3, max_context=160, page_size=16, chunk=32)
    (runner,) = engine.executor.step("decode").stages
    width = runner.inputs["table"].shape[1]

    def case(seed: int, rows: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros_like(tensor[:rows], device="cpu") for name, tensor in runner.inputs.items()}
        values["drawn"] = torch.randint(0, CONFIG["vocab_size"], (rows,), generator=g)
        values["positions"] = torch.randint(0, 100, (rows,), generator=g).int()
        values["limits"].fill_(150)
        values["table"] = (1 + torch.arange(rows * width)).view(rows, width).int()
        values["slots"] = (1 + torch.arange(rows)).int()
        return values

    state = {str(i): tensor[1:] for i, tensor in enumerate(engine.executor.cache.tensors())}
    assert prove(runner, [case(seed, 1 + seed % 3) for seed in range(6)], state=state) == []


def test_loading_takes_no_more_than_was_asked_for(path: Path) -> None:
    """Not for a moment: the experts of a layer never are on the GPU together but in the room that layers share."""
    load(path, SLOTS)  # kernels are loaded, tables made
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, allowed = load(path, SLOTS)
    assert caches(model)
    beside = 8 << 20  # rotary tables, and a block's linears, whose parts are joined
    assert torch.cuda.max_memory_allocated() - before < allowed + beside
    with Checkpoint.open(path) as checkpoint:
        whole = sum(Loader(checkpoint, config_of(checkpoint), torch.bfloat16).device_bytes().values())
    assert allowed + beside < whole
