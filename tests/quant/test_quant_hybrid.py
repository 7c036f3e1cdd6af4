"""Hybrid models rounded to E8P: what is never rounded, what shares a Hessian, and what runs of the result."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models import Decoder
from onegraph.api.plan import plan
from onegraph.api.verify import verify
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.nn.linear import Linear
from onegraph.nn.recurrent import Inputs
from test_quant_experts import TOKENS, decoded_into, made, source

SIZES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "intermediate_size": 96, "block_multiple_of": 32},
    "qwen3_5": {"num_hidden_layers": 4},
    "qwen3_5_moe": {"num_hidden_layers": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_next": {
        "num_hidden_layers": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
    },
    "lfm2_moe": {"num_hidden_layers": 3, "moe_intermediate_size": 32},
    "olmo_hybrid": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "kimi_linear": {"num_hidden_layers": 3, "moe_intermediate_size": 32, "num_key_value_heads": 4},
    "nemotron_h": {"num_hidden_layers": None, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    "granite4_moe": {"num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_head": 32, "shared_intermediate_size": 64},
    "granite4_h": {"num_hidden_layers": 3, "mamba_n_heads": 4, "shared_intermediate_size": 64},
}  # fmt: skip
NEVER = (
    ".b_proj", ".a_proj", "f_a_proj", "g_a_proj", "in_proj_a", "in_proj_b.", "in_proj_ba", "conv1d", "conv.conv",
    "A_log", "dt_bias", "norm", "mlp.gate.weight", "feed_forward.gate", "shared_expert_gate",
    "block_sparse_moe.router",
)  # fmt: skip


@pytest.mark.parametrize("variant", SIZES)
def test_the_decoder_and_transformers_run_what_the_codes_stand_for(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import onegraph.integrations.hf  # noqa: F401  # registers the method

    hf = source(variant, tmp_path / "model", **SIZES[variant])
    told = made(tmp_path, layers={"*": 4})
    truth = decoded_into(hf, tmp_path / "out", variant, 4)(TOKENS).logits[0].detach()
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for options in ({}, {"decode": False}, {"decode": False, "fused": False}):
            model = Llama.load(checkpoint, "cpu", torch.float32, **options)
            ours = Decoder(model, 1, 64).feed(TOKENS.tolist())[0]
            torch.testing.assert_close(ours, truth, atol=2e-4, rtol=1e-4)
        coded = {name.removesuffix(".codes") for name in checkpoint.names if name.endswith(".codes")}
        assert not [name for name in coded if any(part in name for part in NEVER)]
        assert {name.removesuffix(".weight") for name in checkpoint.names} & coded == set()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits[0], truth, atol=2e-4, rtol=1e-4)
    assert verify(tmp_path / "out").ok
    found = plan(tmp_path / "model", bits=4, recipe="quick", device="cpu", tokens=256)
    assert found.after == told.after


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_next"])
def test_linears_of_one_input_share_a_hessian(variant: str, tmp_path: Path) -> None:
    """q, k, v and z are one group, in whichever linears files hold them; beta and decay are in none."""
    source(variant, tmp_path, **SIZES[variant])
    with Checkpoint.open(tmp_path) as checkpoint:
        model = LlamaSource(checkpoint)
        first = model.linear_groups(model.load_block(0))
    names = [[name.rpartition(".")[2] for name, _ in group] for group in first]
    inputs = ["in_proj_qkvz"] if variant == "qwen3_next" else ["in_proj_qkv", "in_proj_z"]
    assert names[:2] == [inputs, ["out_proj"]]
    assert all(name.rpartition(".")[2].startswith(("in_proj_a", "in_proj_b")) for name in model.kept)
    assert len(model.kept) == 3 * len(inputs)


def test_a_calibration_text_begins_with_no_state(tmp_path: Path) -> None:
    """A row of the text gives the same behind any other: states are not carried from one to the next."""
    source("qwen3_5", tmp_path, **SIZES["qwen3_5"])
    with Checkpoint.open(tmp_path) as checkpoint:
        model = LlamaSource(checkpoint)
        block, text = model.load_block(0), torch.randint(0, 131, (3, 20))
        together = model.run_block(block, model.embed(text))
        alone = [model.run_block(block, model.embed(row.unsqueeze(0))) for row in text]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_heads_of_whole_blocks_are_one_linear(tmp_path: Path) -> None:
    """Rows of Qwen3-Next come grouped by head of keys; heads of 128 become one linear in the order of the layer."""
    sizes = SIZES["qwen3_next"] | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    hf = source("qwen3_next", tmp_path / "model", **sizes)
    made(tmp_path)
    truth = decoded_into(hf, tmp_path / "out", "qwen3_next", 4)(TOKENS).logits[0].detach()
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        model = Llama.load(checkpoint, "cpu", torch.float32, decode=False)
    inputs = model.blocks[0].qkv
    assert isinstance(inputs, Inputs)
    assert isinstance(inputs.linear, Linear)
    assert inputs.main.fused
    assert inputs.rates.format is DENSE
    ours = Decoder(model, 1, 64).feed(TOKENS.tolist())[0]
    torch.testing.assert_close(ours, truth, atol=2e-4, rtol=1e-4)


def test_other_recipes_round_a_hybrid(tmp_path: Path) -> None:
    """Under Hessians of the KL, by backward passes through the recurrence."""
    hf = source("qwen3_5", tmp_path / "model", **SIZES["qwen3_5"])
    before, found = hf(TOKENS).logits[0].log_softmax(-1).detach(), {}
    for recipe in ("quick", "good"):
        made(tmp_path, recipe=recipe, tokens=1024)
        with Checkpoint.open(tmp_path / "out") as checkpoint:
            logits = Decoder(Llama.load(checkpoint), 1, 64).feed(TOKENS.tolist())[0].log_softmax(-1)
        found[recipe] = float((before.exp() * (before - logits)).sum(-1).mean())
        (tmp_path / "out").rename(tmp_path / recipe)
    assert 0 < found["good"] < 1.1 * found["quick"] < 1, found
