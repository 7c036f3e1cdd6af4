"""Checkpoints to serve: the real model, quantized once, and a tiny one that chats."""

import json
import os
from pathlib import Path

import pytest
import torch

from fuzz import tiny
from models import smollm2_gguf
from onegraph.formats.checkpoint import write_checkpoint
from onegraph.formats.e8p import E8PConfig, linear_tensors


@pytest.fixture(scope="session")
def smollm2_4bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct at 4 bits: $ONEGRAPH_SMOLLM2_4BIT, which `make vllm` sets to what the demo made."""
    given = os.environ.get("ONEGRAPH_SMOLLM2_4BIT")
    if not given or smollm2_gguf() is None:
        pytest.skip("there is no quantized SmolLM2; `make demo` makes it")
    return Path(given)


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, random codes of mixed rates, with a tokenizer and a chat template."""
    generator = torch.Generator().manual_seed(0)
    d, f, vocab = 128, 256, len(tiny.TOKENS)
    e8p = E8PConfig(bits=4, layers={"model.layers.0.mlp.up_proj": 2}, lm_head=3)
    config = tiny.CONFIG | {"hidden_size": d, "intermediate_size": f, "head_dim": 64, "max_position_embeddings": 4096}
    shapes = {"self_attn.q_proj": (256, d), "self_attn.k_proj": (128, d), "self_attn.v_proj": (128, d)}
    shapes |= {"self_attn.o_proj": (d, 256), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    found = {
        "model.norm.weight": torch.ones(d),
        "model.embed_tokens.weight": torch.randn(vocab, d, generator=generator),
    }
    linears = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    for name, (n, k) in (linears | {"lm_head": (vocab, d)}).items():
        for suffix, (shape, dtype) in linear_tensors(n, k, e8p.bits_of(name)).items():
            if dtype.is_floating_point:
                value = torch.full(shape, 0.1 * k**-0.5 if suffix == "scale" else 1.0, dtype=dtype)
            else:
                info = torch.iinfo(dtype)
                value = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
            found[f"{name}.{suffix}"] = value
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = torch.ones(d)
    path = tmp_path_factory.mktemp("tiny") / "chat"
    write_checkpoint(path, config | {"quantization_config": e8p.to_dict()}, found.items())
    settings = {"eos_token": tiny.SPECIAL[2], "bos_token": tiny.SPECIAL[1], "chat_template": tiny.TEMPLATE}
    (path / "tokenizer.json").write_text(json.dumps(tiny.tokenizer_json()))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
