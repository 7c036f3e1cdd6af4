"""DeepSeek-V4 whose linears are NVFP4: the model equals the dense one of the numbers that the codes stand for."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deepseek import hf_model
from models import Decoder
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.dense import DENSE
from onegraph.formats.nvfp4 import NVFP4, written_config
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_names import official
from onegraph.ops.nvfp4 import nvfp4_quantize
from onegraph.ops.nvfp4_linear import nvfp4_dequantize

# Inputs of quantized layers are multiples of 16, and an expert's outputs too.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "o_lora_rank": 16, "q_lora_rank": 32}


def quantized(path, keep=lambda name: False):
    """A checkpoint of packed layers at `path`, but for those that `keep` names; the dense model of the same numbers."""
    hf = hf_model("flash", **SIZES)
    hf.save_pretrained(path / "dense")
    tensors, packed = {}, {}
    for name, tensor in load_file(path / "dense" / "model.safetensors").items():
        layer, kind = official(name).removesuffix(".weight"), name.removesuffix(".weight")
        last = layer.rpartition(".")[2]
        linear = last in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3") and "compressor" not in layer
        if not linear or keep(layer):
            tensors[name] = packed[name] = tensor
            continue
        factor = tensor.abs().amax() / (6.0 * 448.0)
        codes, scale = nvfp4_quantize(tensor, factor)
        rows = factor.expand(len(tensor)).contiguous()
        tensors[name] = nvfp4_dequantize(codes, scale, rows)
        packed |= {name: codes, f"{kind}.weight_scale": scale.view(torch.float8_e4m3fn)}
        packed[f"{kind}.weight_scale_2"] = factor.reshape(())
    config = json.loads((path / "dense" / "config.json").read_text())
    save_file(tensors, path / "dense" / "model.safetensors")
    (path / "packed").mkdir()
    save_file(packed, path / "packed" / "model.safetensors")
    config["quantization_config"] = written_config([])
    (path / "packed" / "config.json").write_text(json.dumps(config))
    return [DeepseekV4.load(Checkpoint.open(path / kind), max_context=256) for kind in ("dense", "packed")]


def logits(model):
    text = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    return Decoder(model, 1, 256, page_size=128).feed([text])[0]


def test_packed_equals_what_its_codes_stand_for(tmp_path):
    dense, packed = quantized(tmp_path)
    block = packed.blocks[1]
    attention = block.attention
    for layer in (block.moe.experts.gate_up, attention.qkv_a, attention.index_q, attention.out_a):
        assert layer.format is NVFP4
    error = (logits(packed) - logits(dense)).abs().max()
    assert error <= 1e-4, error
    assert sum(packed_bytes(packed)) < 0.5 * sum(packed_bytes(dense))


def test_few_tokens_run_the_shared_expert_among_the_others(tmp_path):
    """One to four tokens a call and more give the same, and the shared expert is stored once."""
    _, packed = quantized(tmp_path)
    moe = packed.blocks[3].moe
    assert moe.together
    assert moe.shared.down.codes.data_ptr() == moe.experts.down.codes[-1].data_ptr()
    g = torch.Generator().manual_seed(4)
    x, tokens = torch.randn(1, 9, 64, generator=g), torch.randint(0, 97, (1, 9), generator=g)
    want = moe(x, tokens)
    for few in (1, 3, 4):
        got = torch.cat([moe(*part) for part in zip(x.split(few, 1), tokens.split(few, 1), strict=True)], 1)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    moe.shared = copy.deepcopy(moe.shared)  # as `eval --ab` exchanges parts
    assert not moe.together


def test_queries_of_both_kinds_are_one_linear(tmp_path):
    """Attention's and the indexer's, in one storage; apart where one of them was exchanged since."""
    _, packed = quantized(tmp_path)
    attention = packed.blocks[1].attention
    whole, q_b, index_q = attention._one
    rows, last = q_b.out_features, index_q.out_features
    assert whole.codes.data_ptr() == q_b.codes.data_ptr()
    assert whole.codes[rows:].data_ptr() == index_q.codes.data_ptr()
    low = torch.randn(1, 3, q_b.in_features, generator=torch.Generator().manual_seed(1))
    for got, of, width in zip(attention._queries(low), (q_b, index_q), (rows, last), strict=True):
        assert got.shape[2] == width
        assert torch.allclose(got, of(low), atol=1e-6)
    attention.index_q = copy.deepcopy(index_q)
    attention.index_q.codes.zero_()
    assert not attention._queries(low)[1].any()
    assert packed.blocks[0].attention._one[0] is None, "no indexer"


def packed_bytes(model: nn.Module):
    return (b.numel() * b.element_size() for block in model.blocks for b in block.moe.experts.buffers())


def test_the_checkpoint_is_the_precision_map(tmp_path):
    """Parts that were kept are dense beside packed ones, also where two of them are read as one linear."""
    dense, packed = quantized(tmp_path, lambda layer: "wkv" in layer or "shared" in layer or "layers.2.ffn" in layer)
    assert packed.blocks[2].moe.experts.gate_up.format is DENSE
    assert packed.blocks[0].attention.q_b.format is NVFP4
    error = (logits(packed) - logits(dense)).abs().max()
    assert error <= 1e-4, error


def test_a_scale_of_another_width_is_named(tmp_path):
    quantized(tmp_path)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.attn.wq_b.weight_scale"
    tensors[name] = tensors[name].view(torch.uint8)[:, :1].contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"wq_b\.weight_scale.* has shape \[128, 1\], .* \[128, 2\]"):
        DeepseekV4.load(Checkpoint.open(tmp_path / "packed"))


def test_experts_of_two_kinds_in_a_layer_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2 is dense"):
        quantized(tmp_path, lambda layer: layer.endswith("layers.1.ffn.experts.3.w2"))
