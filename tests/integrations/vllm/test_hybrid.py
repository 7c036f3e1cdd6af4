"""Hybrids in codes inside the real vLLM, on a CPU, whose gated delta rule runs in bfloat16 alone: log-probabilities are
those of transformers with the weights that the codes stand for. test_families.py has Qwen3.5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import serving

from test_mtp import save
from test_quant_experts import decoded_into, made, write_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 5, 9], [3], [5] * 4, [100, 0]]  # as short as a round with drafts, too


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Qwen3-Next, all of whose linears but rates and decays are in E8P, and the transformers model of these weights."""
    path = tmp_path_factory.mktemp("next")
    hf, _ = save("qwen3_next", path, **SIZES)
    write_tokenizer(path / "model")
    made(path, layers={"*": 4}, draft_layers=4)
    return path / "out", decoded_into(hf, path / "out", "qwen3_next", 4)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_hybrid_in_codes_scores_what_its_weights_score(checkpoint: tuple[Path, Any], drafts: int) -> None:
    """Four requests at once of unequal lengths, then again, over states that others left in their blocks; without
    drafts, and with those of a layer in codes. In bfloat16 near-ties may differ with and without drafts."""
    from vllm.sampling_params import SamplingParams

    path, hf = checkpoint
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    settings: dict[str, Any] = {}
    if drafts:  # vLLM's prefix caching of hybrids with drafts needs a kernel in Triton
        speculative = {"method": "mtp", "num_speculative_tokens": drafts}
        settings = {"enable_prefix_caching": False, "speculative_config": speculative}
    with serving(path, dtype="bfloat16", **settings) as llm:
        found = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts[::-1], params, use_tqdm=False)]
    off = []
    for request in found:
        prompt, answer = list(request.prompt_token_ids), request.outputs[0]
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + list(answer.token_ids)]), use_cache=False).logits[0]
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for token, mine, want in zip(answer.token_ids, answer.logprobs, scores, strict=True):
            off.append(abs(mine[token].logprob - float(want[token])))
            assert want.max() - want[token] < 0.3, "another token would have been much likelier"
    assert max(off) < 0.3
    assert sum(off) / len(off) < 0.04
