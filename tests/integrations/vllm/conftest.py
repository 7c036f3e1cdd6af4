"""Checkpoints to serve: the real model, quantized once, and a tiny one that chats."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuzz import tiny
from models import smollm2_gguf
from onegraph.formats.checkpoint import write_checkpoint
from onegraph.formats.e8p import E8PConfig


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """What imported modules hold stays frozen: vLLM's shutdown would thaw it, and each engine asks for ten collections,
    a third of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session")
def smollm2_4bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct at 4 bits: $ONEGRAPH_SMOLLM2_4BIT, which `make vllm` sets to what the demo made."""
    given = os.environ.get("ONEGRAPH_SMOLLM2_4BIT")
    if not given or smollm2_gguf() is None:
        pytest.skip("there is no quantized SmolLM2; `make demo` makes it")
    return Path(given)


def write_chat(path: Path, *, kv_heads: int, lm_head: int | None) -> Path:
    """A Llama of 2 layers with 4 heads, random codes of mixed rates, with a tokenizer and a chat template."""
    generator = torch.Generator().manual_seed(0)
    d, f, head, vocab = 128, 256, 64, len(tiny.TOKENS)
    e8p = E8PConfig(bits=4, layers={"model.layers.0.mlp.up_proj": 2}, lm_head=lm_head)
    config = tiny.CONFIG | {"hidden_size": d, "intermediate_size": f, "head_dim": head, "num_key_value_heads": kv_heads}
    config |= {"max_position_embeddings": 4096, "tie_word_embeddings": False, "quantization_config": e8p.to_dict()}
    kv = kv_heads * head
    shapes = {"self_attn.q_proj": (4 * head, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {
        "self_attn.o_proj": (d, 4 * head),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    found = {
        "model.norm.weight": torch.ones(d),
        "model.embed_tokens.weight": torch.randn(vocab, d, generator=generator),
    }
    linears = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    for name, (n, k) in (linears | {"lm_head": (vocab, d)}).items():
        if not (format := e8p.format_of(name)).coded:
            found[f"{name}.weight"] = torch.randn(n, k, generator=generator) * k**-0.5
            continue
        for suffix, (shape, dtype) in format.layout(n, k).items():
            if dtype.is_floating_point:
                value = torch.full(shape, 0.1 * k**-0.5 if suffix == "scale" else 1.0, dtype=dtype)
            else:
                info = torch.iinfo(dtype)
                value = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
            found[f"{name}.{suffix}"] = value
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = torch.ones(d)
    write_checkpoint(path, config, found.items())
    settings = {"eos_token": tiny.SPECIAL[2], "bos_token": tiny.SPECIAL[1], "chat_template": tiny.TEMPLATE}
    (path / "tokenizer.json").write_text(json.dumps(tiny.tokenizer_json()))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that chats."""
    return write_chat(tmp_path_factory.mktemp("tiny") / "chat", kv_heads=2, lm_head=3)


@pytest.fixture(scope="session")
def tiny_for_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that two ranks can share: halves of its keys and values are whole rotation blocks."""
    return write_chat(tmp_path_factory.mktemp("tiny") / "for-two", kv_heads=4, lm_head=None)
