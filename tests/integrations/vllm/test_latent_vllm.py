"""Multi-head latent attention in codes inside the real vLLM, on a CPU: tokens of our own engine. Decode steps read the
products that vLLM absorbs `kv_b_proj` into, prompts run the linear itself."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_experts import places
from test_fused import ranks
from test_generate import PROMPTS, ours, serving, tokens_of

from onegraph.formats.trellis import TrellisConfig
from test_e8p_experts import checkpoint_of

# vLLM's decode kernel on a CPU takes latents of 512 and 64 numbers alone; its model reads `topk_method`, which published
# files have and transformers' class does not.
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": None, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
REFERENCE = {"attention_backend": "CPU_MLA"}  # that of CPUs without AMX, on each CPU
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", SIZES | PUBLISHED),
    "Kimi-K2": ("deepseek_v3", SIZES | PUBLISHED | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "queries without a low rank, trellis": (
        "deepseek_v3", SIZES | PUBLISHED | {"q_lora_rank": None, "written": TrellisConfig},
    ),
}  # fmt: skip


def save(case: str, path: Path, **changes: Any) -> Path:
    variant, sizes = CASES[case]
    checkpoint_of(variant, path, 4, **sizes | changes)
    if case == "Kimi-K2":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    return path


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_our_engines(case: str, tmp_path: Path) -> None:
    """A dense block and one of experts beside shared ones, chosen by sigmoids with a bias, in groups."""
    path = save(case, tmp_path / "m")
    with serving(path, **REFERENCE) as llm:
        assert tokens_of(llm, PROMPTS, 8) == ours(path, PROMPTS, 8)


def test_compiled_and_reloaded(tmp_path: Path) -> None:
    """The absorbed products follow the weights, in the same places."""
    first, second = save("DeepSeek-V3", tmp_path / "first"), save("DeepSeek-V3", tmp_path / "second", seed=1)
    with serving(first, compiled=True, **REFERENCE) as llm:
        before = llm.apply_model(places)
        assert tokens_of(llm, PROMPTS, 6) == ours(first, PROMPTS, 6)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert llm.apply_model(places) == before
        assert tokens_of(llm, PROMPTS, 6) == ours(second, PROMPTS, 6) != ours(first, PROMPTS, 6)


def test_mistral4_runs_as_plain_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' model inside vLLM, whose latent attention does not take its sizes."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    checkpoint_of("mistral4", tmp_path / "m", 4, **SIZES | {"kv_lora_rank": 256, "v_head_dim": 128})
    with serving(tmp_path / "m") as llm:
        assert tokens_of(llm, PROMPTS, 8) == ours(tmp_path / "m", PROMPTS, 8)


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """Heads cut, whole experts placed."""
    wide = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 128}
    path = save("DeepSeek-V3", tmp_path / "m", **wide)
    done = ranks(path, tmp_path / "tokens", enable_expert_parallel=True, **REFERENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, _ = json.loads((tmp_path / "tokens").read_text())
    assert tokens == ours(path, PROMPTS, 12)
