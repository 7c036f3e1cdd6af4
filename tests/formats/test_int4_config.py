"""The configs of INT4 checkpoints: what is read of each tool's, and what is refused, in one line each."""

from typing import Any

import pytest

from onegraph.formats.int4_config import INT4Config
from onegraph.formats.quantization import parse_quantization
from test_int4 import config, packed, rows_are, truth
from test_weight_format import Held


def group(**weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"config_groups": {"group_0": {"weights": base | weights}}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"bits": 8}, "bits is 8; AWQ is read with 4 bits"),
    ("awq", {"version": "gemv"}, "version is 'gemv'; AWQ is read in the layout 'gemm'"),
    ("awq", {"version": "marlin"}, "version is 'marlin'"),
    ("awq", {"zero_point": False}, "zero_point is False"),
    ("awq", {"zero_point": "no"}, "zero_point is 'no'; it must be true or false"),
    ("awq", {"group_size": 48}, "group_size is 48; a group is a multiple of 32"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "no list of module names"),
    ("gptq", {"bits": 8}, "bits is 8; GPTQ is read with 4 bits"),
    ("gptq", {"bits": 3}, "bits is 3; GPTQ is read with 4 bits"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("gptq", {"is_marlin_format": True}, "checkpoint_format is"),
    ("gptq", {"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
    ("gptq", {"group_size": "128"}, "group_size is '128'"),
    ("gptq", {"group_size": 0}, "group_size is 0"),
    ("gptq", {"desc_act": 1}, "desc_act is 1; it must be true or false"),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic\['\+:\.\*down\.\*'\]\.bits is 8"),
    ("gptq", {"dynamic": [1]}, "dynamic is no object"),
    ("packed", group(num_bits=8), "num_bits is 8; pack-quantized is read with 4-bit integers"),
    ("packed", group(type="float"), "num_bits is 4"),
    ("packed", group(strategy="block"), "strategy is 'block'"),
    ("packed", group(group_size=100), "group_size is 100"),
    ("packed", {"config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": {}}}}, "input_activations"),
    ("packed", {"config_groups": {}}, "config_groups is no object"),
    ("packed", {"config_groups": {"g": {"targets": []}}}, "config_groups.g.weights is no object"),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is 'given'"),
    ("packed", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is 'given'"),
    ("packed", {"ignore": ["lm_head", 1]}, "ignore is no list"),
]


@pytest.mark.parametrize(("layout", "change", "message"), REFUSED)
def test_what_is_not_read_is_refused_in_one_line(layout: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_quantization(config(layout, 32) | change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "change", "want"),
    [
        ("awq", {}, INT4Config("awq", (32,))),
        ("awq", {"group_size": 128}, INT4Config.from_dict({"quant_method": "awq"})),
        ("awq", {"bits": 4, "version": "GEMM", "modules_to_not_convert": None}, INT4Config("awq", (32,))),
        ("gptq", {}, INT4Config("gptq", (32,), less_one=True)),
        ("gptq", {"sym": True, "desc_act": True}, INT4Config("gptq", (32,), True, True, True)),
        ("gptq_v2", {"group_size": -1}, INT4Config("gptq", (-1,))),
        ("gptq", {"dynamic": {"-:.*lm.*": {}, "+:q": {"group_size": 64}}}, INT4Config("gptq", (32, 64), less_one=True)),
        ("packed", {"ignore": ["lm_head"]}, INT4Config("compressed-tensors", (32,), True, ignore=("lm_head",))),
        ("packed", {"sparsity_config": {"format": "dense"}}, INT4Config("compressed-tensors", (32,), True)),
        ("packed asymmetric", {}, INT4Config("compressed-tensors", (32,), False)),
    ],
)
def test_configs(layout: str, change: dict[str, Any], want: INT4Config) -> None:
    got = parse_quantization(config(layout, 32) | change)
    assert got == want
    assert parse_quantization(want.to_dict()) == want
    assert want.ignored("model.layers.0.self_attn.k_proj.k_scale")
    assert not want.ignored("model.layers.0.self_attn.k_proj.g_idx")
    assert want.ignored("model.layers.0.mlp.up_proj.bias") == layout.startswith("gptq")
    assert not want.ignored("model.norm.bias")


def test_a_group_that_is_symmetric_beside_one_that_is_not() -> None:
    """Which of them a layer is in is told by its zeros."""
    data = config("packed", 32)
    data["config_groups"]["group_1"] = config("packed asymmetric", 32)["config_groups"]["group_0"]
    told = INT4Config.from_dict(data)
    assert told.symmetric is None
    assert INT4Config.from_dict(told.to_dict()) == told
    for layout in ("packed", "packed asymmetric"):
        t = truth(16, 64, 32, zero=8 if layout == "packed" else None)
        held = Held(packed(layout, "a", t))
        rows_are(held, told.format_of("a", held), t.weight)
