"""DeepSeek-V4 as it is published: the real ones by a table of their tensors, tiny ones by their logits."""

from collections import Counter

import pytest
import torch

from deepseek_published import FLASH, FLASH_0731, PRO, PRO_0813, TINY, nvidia
from onegraph.models.deepseek_v4_published import nbytes, published
from onegraph.models.load import parse_config

# name -> (config, tensors, bytes, of these mtp.*: tensors, bytes). DeepSeek's are those of the published indexes;
# NVIDIA's are computed from what its script changes.
PUBLISHED = {
    "Flash": (FLASH, 69_187, 159_609_485_896, 1_575, 3_593_787_756),
    "Flash-0731": (FLASH_0731, 72_317, 166_878_536_440, 4_705, 10_862_838_300),
    "Pro": (PRO, 145_116, 864_704_792_696, 2_343, 13_956_587_692),
    "Pro-0813": (PRO_0813, 149_782, 892_727_580_904, 7_009, 41_979_375_900),
    "NVIDIA Flash": (nvidia(FLASH), 135_235, 168_266_793_544, 1_575, 3_593_787_756),
    "NVIDIA Pro": (nvidia(PRO), 285_660, 913_061_485_688, 2_343, 13_956_587_692),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_and_bytes_are_those_of_the_published_indexes(name):
    config, *wanted = PUBLISHED[name]
    table = published(config)
    drafts = {tensor: what for tensor, what in table.items() if tensor.startswith("mtp.")}
    assert [len(table), nbytes(table), len(drafts), nbytes(drafts)] == wanted


def test_dtypes_of_flash():
    assert Counter(dtype for dtype, _ in published(FLASH).values()) == {
        torch.bfloat16: 433,
        torch.float32: 417,
        torch.float8_e4m3fn: 375,
        torch.float8_e8m0fnu: 34_167,
        torch.int64: 3,
        torch.int8: 33_792,
    }


def test_a_base_model_has_float32_scales_and_experts_in_fp8():
    table = published(FLASH | {"expert_dtype": "fp8"})
    assert table["layers.3.ffn.experts.7.w2.weight"] == (torch.float8_e4m3fn, (4096, 2048))
    assert table["layers.3.ffn.experts.7.w2.scale"] == (torch.float32, (32, 16))


def test_the_table_asks_for_a_known_form():
    with pytest.raises(ValueError, match="expert_dtype is 'int3'; published are 'fp4' and 'fp8'"):
        published(FLASH | {"expert_dtype": "int3"})


V41 = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "text_config": {"hidden_size": 5120, "kv_source_layer_ids": [2, 8, 14, 20], "candidate_source_layer_id": 20},
    "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [32, 32]},
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (V41, r"model_type 'deepseek_v41' \(DeepSeek-V4\.1\) is not supported: it has Engram tables"),
        (TINY | {"kv_source_layer_ids": [2]}, r"kv_source_layer_ids is \[2\]: shared key-value layers \(V4\.1\)"),
        (TINY | {"candidate_source_layer_id": 3}, r"candidate_source_layer_id is 3: candidate selection \(V4\.1\)"),
        (TINY | {"dspark_block_size": 5}, "dspark_target_layer_ids is None; it must list layers"),
    ],
)
def test_what_is_not_v4_is_refused_with_the_reason(config, says):
    with pytest.raises(ValueError, match=says) as error:
        parse_config(config)
    assert "\n" not in str(error.value)
