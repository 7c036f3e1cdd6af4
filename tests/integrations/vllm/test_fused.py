"""Norms, SwiGLU and sums inside the linears: which layers are fused, that reloaded norms count, that ranks agree.

That fused layers give our engine's tokens is test_generate's matter.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import PROMPTS, ours, serving, tokens_of

from onegraph.ops.ranks import ROUNDS
from test_llama_quantized import quantized

PROGRAM = """
import json, sys
from test_generate import PROMPTS, exchanged, serving, tokens_of
if __name__ == "__main__":
    with serving(sys.argv[1], tensor_parallel_size=2, **json.loads(sys.argv[3])) as llm:
        found = tokens_of(llm, PROMPTS, 12)
        told = llm.apply_model(exchanged)
    json.dump([found, told], open(sys.argv[2], "w"))
"""


def kinds(llm: Any) -> list[str]:
    (found,) = llm.apply_model(lambda model: [type(layer).__name__ for layer in model.model.layers])
    return found


def other_weights(path: Path, to: Path) -> Path:
    """The checkpoint with every code and every norm changed."""
    shutil.copytree(path, to)
    (file,) = to.glob("*.safetensors")
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = (torch.rand(tensor.shape, generator=generator) + 0.5).to(tensor.dtype)
        elif tensor.dtype == torch.int16:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return to


def test_weights_that_are_reloaded_in_place(tiny_chat: Path, tmp_path: Path) -> None:
    """A linear is finished after the norm whose weight it multiplies by, whichever is loaded first."""
    second = other_weights(tiny_chat, tmp_path / "second")
    with serving(tiny_chat, enable_prefix_caching=False) as llm:
        assert kinds(llm) == ["FusedLayer"] * 2
        (before,) = llm.apply_model(addresses)
        assert tokens_of(llm, PROMPTS, 12) == ours(tiny_chat, PROMPTS, 12)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert tokens_of(llm, PROMPTS, 12) == ours(second, PROMPTS, 12) != ours(tiny_chat, PROMPTS, 12)
        first = sorted(load_file(next(tiny_chat.glob("*.safetensors"))).items(), key=lambda pair: "norm" in pair[0])
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(first)})
        assert tokens_of(llm, PROMPTS, 12) == ours(tiny_chat, PROMPTS, 12)
        assert llm.apply_model(addresses) == [before], "a captured graph would read the old place"
        linears = [pair for pair in first if "norm" not in pair[0]]
        with pytest.raises(ValueError, match=r"q_proj, .*reloaded without the norm in front"):
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(linears)})


def addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_what_does_not_suit_stays_vllms(tmp_path: Path) -> None:
    """The first layer has an unquantized k_proj, whose part of the fused linear knows no norm."""
    _, coded, _ = quantized("qwen3", tmp_path, bits=3, layers={"*.0.self_attn.k_proj": 16, "*.q_proj": 2})
    with serving(coded.path) as llm:
        found = kinds(llm)
        assert tokens_of(llm, PROMPTS, 12) == ours(coded.path, PROMPTS, 12)
    assert found == ["Qwen3DecoderLayer", *["FusedLayer"] * (len(found) - 1)]


def test_adapters_see_what_the_norm_gives() -> None:
    from onegraph.integrations.vllm.fused import fuse

    assert fuse(None, SimpleNamespace(lora_config=object())) == 0


def test_a_vllm_whose_layers_we_do_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer one runs its own layers."""
    import vllm

    from onegraph.integrations.vllm.config import OnegraphConfig

    config = OnegraphConfig.from_config({"quant_method": "onegraph", "format": "e8p", "format_version": 1, "bits": 4})
    for version, wanted in (((0, 32, 0), "OnegraphLlamaForCausalLM"), ((0, 99, 0), "LlamaForCausalLM")):
        monkeypatch.setattr(vllm, "__version_tuple__", version)
        given = SimpleNamespace(architectures=["LlamaForCausalLM"])
        config.maybe_update_config(str(tmp_path), hf_config=given)
        assert given.architectures == [wanted]
    config.maybe_update_config(str(tmp_path), hf_config=(other := SimpleNamespace(architectures=["OlmoForCausalLM"])))
    assert other.architectures == ["OlmoForCausalLM"]


def ranks(path: Path, out: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Two of them, in processes of their own; their tokens go to `out`."""
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the ranks are asked for their states
    command = [sys.executable, "-c", PROGRAM, str(path), str(out), json.dumps(settings)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "compiled"), [(False, False), (True, True)])
def test_two_ranks_give_what_one_gives(tiny_for_two: Path, exchange: bool, compiled: bool, tmp_path: Path) -> None:
    """Every linear cut; with vLLM's all-reduce, and through inboxes of our own for up to 64 tokens."""
    done = ranks(
        tiny_for_two, tmp_path / "tokens", compiled=compiled, additional_config={"onegraph_exchange": exchange}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, states = json.loads((tmp_path / "tokens").read_text())
    assert tokens == ours(tiny_for_two, PROMPTS, 12)
    if exchange:
        assert states[0] == states[1]
        assert states[0][ROUNDS] > 2 * 12, "two sums a layer and step"
    else:
        assert states == [None, None]


@pytest.mark.slow
def test_a_share_that_cuts_a_rotation_block_is_refused_by_name(tiny_chat: Path, tmp_path: Path) -> None:
    done = ranks(tiny_chat, tmp_path / "tokens")
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert re.search(r"self_attn\.k_proj: rows (0:64|64:128) of 128 cut a rotation block", told), told[-3000:]
    assert "choose a smaller tensor_parallel_size" in told
