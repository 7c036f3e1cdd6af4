"""onegraph's checkpoints inside the real vLLM, on a CPU: the tokens are those of our own engine, greedy.

Needs vLLM (`make vllm` installs it and runs this); one engine a test, in this process.
"""

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from models import TILED, save_e8p, save_rotated, smollm2_gguf
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8P
from onegraph.formats.trellis import TrellisConfig
from onegraph.models.llama import Llama
from test_llama_quantized import quantized

if importlib.util.find_spec("vllm") is None:  # the folder of this file would pass for a vllm otherwise
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(path: Path, *, compiled: bool = False, **settings: Any) -> Iterator[Any]:
    """vLLM's engine on a checkpoint, in float32, told nothing of the quantization. What it would import a process of
    its own for, to inspect a model's class, is imported here already."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.entrypoints.llm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()

    known = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128, "dtype": "float32"}
    known["skip_tokenizer_init"] = True
    llm = LLM(str(path), enforce_eager=not compiled, **(known | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens_of(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm.sampling_params import SamplingParams as Params

    params = Params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done]


def exchanged(model: Any) -> list[int] | None:
    """The state of a rank that exchanges through our inboxes."""
    made = getattr(model, "onegraph_exchange", None)
    return None if made is None else made.group[1].tolist()


def ours(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    model = Llama.load(Checkpoint.open(path), device="cpu", dtype=torch.float32, max_context=128)
    return Engine(model, max_context=128).generate(prompts, SamplingParams(max_tokens=count, temperature=0))


PROMPTS = [[5, 9, 77, 3], [100, 2, 64, 8, 30, 41, 12], list(range(20, 60)), [1], [7, 7, 7]]
TINY = {
    "same rate, head and embedding, tied": ("smollm2", {"bits": 4, "lm_head": 3, "embed_tokens": 2}),
    "every rate in one layer": (
        "qwen3",
        {
            "bits": 3,
            "layers": {"*.q_proj": 2, "*.0.self_attn.v_proj": 4, "*.1.self_attn.k_proj": 16, "*.0.mlp.up_proj": 16},
        },
    ),
    "biases, head only": ("llama_bias_mha", {"bits": 2, "lm_head": 4}),
    "embedding only, tied": ("qwen2", {"bits": 4, "embed_tokens": 4}),
    "a window": ("mistral_window", {"bits": 4, "layers": {"*.q_proj": 2}, "lm_head": 4}),
    "transformers' model in vLLM": ("smollm3", {"bits": 4, "layers": {"*.q_proj": 2}, "lm_head": 4}),
}


@pytest.mark.parametrize("name", TINY)
def test_tokens_are_our_engines(name: str, tmp_path: Path) -> None:
    """Five prompts in four rows, so that one waits; 131 tokens of vocabulary, so that vLLM pads it."""
    variant, recipe = TINY[name]
    _, coded, _ = quantized(variant, tmp_path, **recipe)
    with serving(coded.path) as llm:
        assert tokens_of(llm, PROMPTS, 12) == ours(coded.path, PROMPTS, 12)


FAMILIES = {
    "gemma3": ({"bits": 4, "lm_head": 4, "embed_tokens": 3}, {"hidden_size": 192, "head_dim": 32}),
    "gemma3_256": ({"bits": 2}, {"num_attention_heads": 2, "hidden_size": 128}),
    "phi3": ({"bits": 3, "layers": {"model.layers.0.self_attn.qkv_proj": 4}}, {"hidden_size": 192, "head_dim": 32}),
}


@pytest.mark.parametrize("variant", FAMILIES)
def test_families(variant: str, tmp_path: Path) -> None:
    """Norms and scales of Gemma's own around the linears; what Phi-3's files hold as one linear."""
    rates, sizes = FAMILIES[variant]
    save_e8p(variant, tmp_path / "m", rates=rates, **sizes)
    with serving(tmp_path / "m") as llm:
        assert tokens_of(llm, PROMPTS, 12) == ours(tmp_path / "m", PROMPTS, 12)


def test_trellis(tmp_path: Path) -> None:
    """Ends and linears in tiles, of several rates in one layer of vLLM's; some left dense."""
    layers = {"self_attn.q_proj": 2, "self_attn.v_proj": 8, "mlp.up_proj": 16}
    rates = {f"model.layers.0.{name}": rate for name, rate in layers.items()}
    config = TrellisConfig(bits=3, layers=rates, lm_head=4, embed_tokens=6)
    save_rotated(config, "qwen3", tmp_path / "m", **TILED)
    with serving(tmp_path / "m") as llm:
        assert tokens_of(llm, PROMPTS, 12) == ours(tmp_path / "m", PROMPTS, 12)


def test_compiled(tmp_path: Path) -> None:
    """Each launch is one opaque op to vLLM's tracer, and what it compiles around them gives the same tokens."""
    _, coded, _ = quantized("smollm2", tmp_path, bits=4, layers={"*.up_proj": 2}, lm_head=4)
    with serving(coded.path, compiled=True) as llm:
        assert tokens_of(llm, PROMPTS, 12) == ours(coded.path, PROMPTS, 12)


def test_half_precision(tiny_chat: Path) -> None:
    """Log-probabilities of a text are those of float32, but for rounding."""
    from vllm.sampling_params import SamplingParams as Params

    text, params = PROMPTS[2], Params(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        with serving(tiny_chat, dtype=dtype) as llm:
            (done,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
        rows = list(zip(done.prompt_token_ids, done.prompt_logprobs, strict=True))[1:]
        found[dtype] = torch.tensor([row[token].logprob for token, row in rows])
    full = found.pop("float32")
    for half in found.values():
        assert 0 < float((half - full).abs().mean()) < 0.05 * float(full.std())


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="SmolLM2 is not here; `make demo` fetches it")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_smollm2(compiled: bool, smollm2_4bit: Path) -> None:
    prompts = [[1, 504, 4723, 282, 4649, 314]]  # "The capital of France is"
    with serving(smollm2_4bit, compiled=compiled) as llm:
        assert tokens_of(llm, prompts, 5) == ours(smollm2_4bit, prompts, 5)


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What we do not read is a ValueError of ours, from the same parser as our engine's."""
    import vllm

    from onegraph.integrations.vllm import register
    from onegraph.integrations.vllm.config import OnegraphConfig

    register()
    register()
    known = {"quant_method": "onegraph", "format": "e8p", "format_version": 1, "bits": 4}
    assert OnegraphConfig.from_config(known).format_of("model.layers.0.mlp.up_proj") is E8P[4]
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match="leave out --quantization"):
        OnegraphConfig.from_config(modelopt).format_of("model.layers.0.mlp.up_proj")
    with pytest.raises(ValueError, match="format_version is 2; this version reads 1"):
        OnegraphConfig.from_config(known | {"format_version": 2})
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 20, 1))
    monkeypatch.setattr(vllm, "__version__", "0.20.1")
    with pytest.raises(ValueError, match=r"onegraph serves with vLLM 0\.32 or newer .* got 0\.20\.1; upgrade vLLM"):
        OnegraphConfig.from_config(known)
