"""Gemma 4 rounded to E8P: linears of two sizes of heads, keys without values, an MLP beside experts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models import Decoder, block_launches
from onegraph.api.plan import plan
from onegraph.api.verify import verify
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from test_quant_experts import TOKENS, decoded_into, made, source

SIZES: dict[str, dict[str, Any]] = {
    "gemma4": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_moe": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                   "moe_intermediate_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("variant", SIZES)
def test_the_decoder_runs_what_the_codes_stand_for(variant: str, tmp_path: Path) -> None:
    hf = source(variant, tmp_path / "model", **SIZES[variant])
    told = made(tmp_path, layers={"*": 4})
    truth = decoded_into(hf, tmp_path / "out", variant, 4)(TOKENS).logits[0].detach()
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for options in ({}, {"decode": False}, {"decode": False, "fused": False}):
            model = Llama.load(checkpoint, "cpu", torch.float32, **options)
            ours = Decoder(model, 1, 64).feed(TOKENS.tolist())[0]
            torch.testing.assert_close(ours, truth, atol=3e-4, rtol=1e-4)
        coded = {name.removesuffix(".codes") for name in checkpoint.names if name.endswith(".codes")}
        assert not [name for name in coded if "router" in name or "norm" in name]
        assert "model.layers.1.self_attn.k_proj" in coded
        assert ("model.layers.1.experts.gate_up_proj" in coded) == (variant == "gemma4_moe")
    assert verify(tmp_path / "out").ok
    found = plan(tmp_path / "model", bits=4, recipe="quick", device="cpu", tokens=256)
    assert found.after == told.after


JOINED = {
    "hidden_size": 128,
    "head_dim": 64,
    "global_head_dim": 128,
    "intermediate_size": 128,
}  # siblings are one linear
ATTENTION = ["e8p_linear", "paged_decode", "e8p_linear"]
LAUNCHES = {  # of a block, behind the first
    "gemma4": ["rms_norm", *ATTENTION, "rms_norm", "e8p_linear", "geglu", "e8p_linear"],
    "gemma4_moe": ["rms_norm", *ATTENTION, "normed_route", "e8p_experts", "e8p_experts"],
}  # fmt: skip


@pytest.mark.parametrize("variant", LAUNCHES)
def test_the_launches_of_a_block(variant: str, tmp_path: Path) -> None:
    source(variant, tmp_path / "model", **SIZES[variant] | JOINED)
    made(tmp_path, layers={"*": 4})
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.float32, decode=False)
    assert block_launches(model)[1] == [f"onegraph::{name}" for name in LAUNCHES[variant]]
