"""vLLM's graphs on a real GPU give the tokens of the same step without graphs; two ranks give what one gives.

Each engine is a process of its own, all of them at once, since most of a minute goes into starting one.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from test_e8p_experts import checkpoint_of
from test_mtp import save as save_mtp
from test_quant_experts import made, write_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TEXT = [int(token) for token in torch.randint(3, 266, (200,), generator=torch.Generator().manual_seed(3))]
PROGRAM = """
import json, os, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if settings.pop("plain", False):
        from onegraph.integrations.vllm import FUSED
        FUSED.clear()
    if settings.pop("their attention", False):
        from onegraph.integrations.vllm import flash
        flash.take_over = lambda *_: None
    replays = []
    if "speculative_config" in settings:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        def counted(self, desc, run=CudaGraphManager.run_fullgraph):
            replays.append(desc.uniform_token_count)
            return run(self, desc)

        CudaGraphManager.run_fullgraph = counted
    llm = LLM(skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8, dtype="bfloat16",
              gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 29, **settings)
    common = dict(ignore_eos=True, detokenize=False, prompt_logprobs=0)

    def score(tokens, given):
        return [row[token].logprob for token, row in zip(tokens, given) if row]

    def answers(prompts, **more):
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return llm.generate(given, SamplingParams(**common, **more), use_tqdm=False)

    found = []
    for batch in json.loads(sys.argv[2]):
        done = answers(batch, temperature=0, max_tokens=24, logprobs=0)
        texts = [[*d.prompt_token_ids, *d.outputs[0].token_ids] for d in done]
        for d, again in zip(done, answers(texts, max_tokens=1)):
            decoded = d.outputs[0]
            found.append({
                "tokens": list(decoded.token_ids),
                "prompt": score(d.prompt_token_ids, d.prompt_logprobs),
                "decoded": score(decoded.token_ids, decoded.logprobs),
                "again": score(again.prompt_token_ids, again.prompt_logprobs)[-24:],
            })
    for path, what in ((sys.argv[3], found), (sys.argv[3] + ".replays", replays)):
        with open(path, "w") as file:
            json.dump(what, file)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # threads that vLLM leaves behind with two ranks abort the interpreter's end ("terminate called")
"""
BATCHES = [[TEXT[:9]], [TEXT[:30], TEXT[5:12], [TEXT[0]]], [TEXT[i : i + 10 + 3 * i] for i in range(8)]]
TURBOQUANT = {"kv_cache_dtype": "turboquant:4", "attention_config": {"backend": "CUSTOM"}}


K = 3  # drafts
ROUNDS = [(1 + K) * rows for rows in range(1, 9)]  # tokens of a round of each batch that BATCHES become, unpadded


def graphs(mode: str, compiled: bool = True, tokens: list[int] | None = None) -> dict[str, Any]:
    sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": tokens or [1, 2, 4, 8]}
    return {"compilation_config": sizes if compiled else sizes | {"mode": 0}}


def served(
    path: Path, variants: Mapping[str, dict[str, Any]], folder: Path, batches: list[list[list[int]]] = BATCHES
) -> dict[str, Any]:
    """What each variant's engine answers."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_CACHE_ROOT"] = str(folder / "cache")
    if not any("tensor_parallel_size" in settings for settings in variants.values()):
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else which requests share a step is a matter of timing
    running = {}
    for name, settings in variants.items():
        given = [json.dumps({"model": str(path)} | settings), json.dumps(batches), str(folder / name)]
        with (folder / f"{name}.log").open("w") as log:
            command = [sys.executable, "-c", PROGRAM, *given]
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    for name, process in running.items():
        assert process.wait(400) == 0, (folder / f"{name}.log").read_text()[-3000:]
    return {name: json.loads((folder / name).read_text()) for name in variants}


def near(got: list[float], want: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=0.1, rtol=0.02)


def test_graphs_give_what_eager_gives(tiny_chat: Path, tmp_path: Path) -> None:
    """With and without codes in the cache. Steps are compared that round in the same places: torch.compile rounds in
    others than the eager model, and between the pieces of a graph attention is vLLM's. FULL is left out: with
    FlashAttention 3 it gave other tokens (docs/guides/vllm.md)."""
    eager = {"enforce_eager": True}
    found = served(
        tiny_chat,
        {
            "eager": eager,
            "captured": graphs("FULL_DECODE_ONLY", compiled=False),
            "compiled": graphs("NONE"),
            "default": graphs("FULL_AND_PIECEWISE"),
            "their attention": graphs("NONE") | {"their attention": True},
            "piecewise": graphs("PIECEWISE"),
            "codes eager": eager | TURBOQUANT,
            "codes captured": graphs("FULL_DECODE_ONLY", compiled=False) | TURBOQUANT,
            "codes compiled": graphs("NONE") | TURBOQUANT,
            "codes default": graphs("FULL_AND_PIECEWISE") | TURBOQUANT,
        },
        tmp_path,
    )
    tokens = {name: [row["tokens"] for row in rows] for name, rows in found.items()}
    assert tokens["captured"] == tokens["eager"]
    assert tokens["default"] == tokens["compiled"]
    assert tokens["piecewise"] == tokens["their attention"]
    assert tokens["codes captured"] == tokens["codes eager"]
    assert tokens["codes default"] == tokens["codes compiled"]
    assert found["codes eager"] != found["eager"]
    for name in ("eager", "default", "piecewise"):
        for row in found[name]:
            near(row["decoded"], row["again"])


@pytest.mark.parametrize("cache", ["exact", "codes"])
def test_rounds_with_drafts_in_full_graphs_give_what_eager_gives(cache: str, tiny_chat: Path, tmp_path: Path) -> None:
    """n-grams and a drafting model, whose rounds are full graphs of 1 + K tokens a request; with graphs of batches of
    eight, so that most requests are padding, too. A padded round's products may round otherwise: its log-probabilities
    are compared as far as the texts are one."""
    more = TURBOQUANT if cache == "codes" else {}
    found, full = {}, {}
    for name, drafter in {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "model": {"method": "draft_model", "model": str(tiny_chat)},
    }.items():
        settings = more | {"speculative_config": drafter | {"num_speculative_tokens": K}}
        variants = {
            f"{name} eager": {"enforce_eager": True},
            f"{name} captured": graphs("FULL_DECODE_ONLY", compiled=False, tokens=ROUNDS),
            f"{name} compiled": graphs("NONE"),
            f"{name} default": graphs("FULL_AND_PIECEWISE", tokens=ROUNDS),
            f"{name} padded": graphs("FULL_DECODE_ONLY", compiled=False, tokens=ROUNDS[-1:]),
        }
        found |= served(tiny_chat, {key: value | settings for key, value in variants.items()}, tmp_path)
        full |= {key: json.loads((tmp_path / f"{key}.replays").read_text()) for key in variants}
        tokens = {key: [row["tokens"] for row in found[key]] for key in variants}
        assert tokens[f"{name} captured"] == tokens[f"{name} eager"]
        assert tokens[f"{name} default"] == tokens[f"{name} compiled"]
        alike(found[f"{name} padded"], found[f"{name} eager"])
        for key in ("captured", "default", "padded"):
            assert full[f"{name} {key}"].count(1 + K) > 12, "rounds with drafts were not replayed whole"
    assert not full["ngram eager"]
    if cache == "exact":
        for row in found["ngram captured"]:
            near(row["decoded"], row["again"])


def alike(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """Texts and their log-probabilities up to the first token in which near-ties part them."""
    off = []
    for one, other in zip(got, want, strict=True):
        pairs = zip(one["tokens"], other["tokens"], strict=True)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one["tokens"]))
        off += [abs(a - b) for a, b in zip(one["decoded"][:shared], other["decoded"][:shared], strict=True)]
    assert len(off) > sum(len(row["tokens"]) for row in want) / 2
    assert statistics.median(off) < 0.05


def test_fused_layers_give_what_vllms_own_give(tiny_chat: Path, tmp_path: Path) -> None:
    """Norms, SwiGLU, sums and RoPE inside our launches, with both caches. They round in other places, so
    log-probabilities are compared; `plain` layers are vLLM's."""
    variants = {"fused": {}, "plain": {"plain": True}, "codes": TURBOQUANT, "plain codes": TURBOQUANT | {"plain": True}}
    found = served(tiny_chat, variants, tmp_path)
    for name in ("", "codes"):
        for fused, plain in zip(found[name or "fused"], found[f"plain {name}".strip()], strict=True):
            near(fused["prompt"], plain["prompt"])


def test_experts_in_graphs_give_what_eager_gives(tmp_path: Path) -> None:
    """Routed experts in codes: the same comparisons, with a router's choice in every step."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
    path = tmp_path / "m"
    checkpoint_of("qwen3_moe", path, 4, **sizes, num_hidden_layers=2, vocab_size=304, max_position_embeddings=1024)
    found = served(
        path,
        {
            "eager": {"enforce_eager": True},
            "captured": graphs("FULL_DECODE_ONLY", compiled=False),
            "compiled": graphs("NONE"),
            "default": graphs("FULL_AND_PIECEWISE"),
            "their attention": graphs("NONE") | {"their attention": True},
            "piecewise": graphs("PIECEWISE"),
        },
        tmp_path,
    )
    tokens = {name: [row["tokens"] for row in rows] for name, rows in found.items()}
    assert len({tuple(row) for row in tokens["eager"]}) > 6
    assert tokens["captured"] == tokens["eager"]
    assert tokens["default"] == tokens["compiled"]
    assert tokens["piecewise"] == tokens["their attention"]
    for name in ("eager", "default", "piecewise"):
        off = [abs(a - b) for row in found[name] for a, b in zip(row["decoded"], row["again"], strict=True)]
        # Scoring a whole text rounds otherwise than its steps did, and a router's near-tie then takes another expert.
        assert statistics.median(off) < 0.02
        assert sum(value > 0.1 for value in off) < len(off) / 20


SHORT = [[TEXT[:n]] for n in range(1, 2 + K)] + [[TEXT[n : 2 * n + 1] for n in range(1 + K)]]  # as a round of drafts is
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp"},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5 in E8P with its draft layer: heads of 256, a quarter of which rotates; heads of the delta rule of 128."""
    path = tmp_path_factory.mktemp("hybrid")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 256, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 304}
    save_mtp("qwen3_5", path, **sizes, max_position_embeddings=1024)
    write_tokenizer(path / "model")
    made(path, layers={"*": 4})
    return path / "out"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("cache", ["exact", "codes"])
def test_hybrids_in_full_graphs_give_what_eager_gives(cache: str, draft: str, hybrid: Path, tmp_path: Path) -> None:
    """Linears of recurrent layers in codes, with and without codes in the cache of the layers that attend, under full
    graphs; prompts of 1 to K + 1 tokens, which a verify pass would be taken for, and batches that are padded."""
    settings = dict[str, Any](TURBOQUANT) if cache == "codes" else {}
    if importlib.util.find_spec("flashinfer") is None:  # vLLM takes it for prompts without looking for it
        settings["additional_config"] = {"gdn_prefill_backend": "triton"}
    tokens, padded = [1, 2, 4, 8], [8]
    if DRAFTS[draft]:
        settings = settings | {"speculative_config": DRAFTS[draft] | {"num_speculative_tokens": K}}
        tokens, padded = ROUNDS, ROUNDS[-1:]
    variants = {
        "eager": {"enforce_eager": True},
        "captured": graphs("FULL_DECODE_ONLY", compiled=False, tokens=tokens),
        "padded": graphs("FULL_DECODE_ONLY", compiled=False, tokens=padded),
    }
    batches = [*SHORT, *BATCHES]
    found = served(hybrid, {name: settings | each for name, each in variants.items()}, tmp_path, batches)
    assert [row["tokens"] for row in found["captured"]] == [row["tokens"] for row in found["eager"]]
    alike(found["padded"], found["eager"])
    for name in ("captured", "padded") if DRAFTS[draft] else ():
        replays = json.loads((tmp_path / f"{name}.replays").read_text())
        assert replays.count(1 + K) > 12, "rounds with drafts were not replayed whole"
    if cache == "exact":
        prompts = [prompt for batch in batches for prompt in batch]
        scores = {name: [row[name] for row in found["captured"]] for name in ("decoded", "again")}
        texts = [prompt + row["tokens"] for prompt, row in zip(prompts, found["captured"], strict=True)]
        exact, rounded = (
            scored(hybrid, texts, len(scores["again"][0]), dtype) for dtype in (torch.float32, torch.bfloat16)
        )
        usual = (rounded - exact).abs()
        for name, given in scores.items():
            off = (torch.tensor(given) - exact).abs()
            assert off.mean() < 1.5 * usual.mean(), name
            assert off.max() < 2 * usual.max(), name


@torch.inference_mode()
def scored(path: Path, texts: list[list[int]], last: int, dtype: torch.dtype) -> torch.Tensor:
    """Log-probabilities of the last tokens of texts in transformers [texts, last], whose weights are what the codes
    stand for."""
    import onegraph.integrations.hf  # noqa: F401  # registers the method

    model, rows = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), []
    for text in texts:
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -last - 1 : -1]
        rows.append(logits.float().log_softmax(-1)[range(last), text[-last:]])
    return torch.stack(rows)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_what_one_gives(tiny_for_two: Path, tmp_path: Path) -> None:
    """Sums of two halves round otherwise than one sum, so log-probabilities are compared: with vLLM's all-reduce, and
    through inboxes of our own."""
    two = {"tensor_parallel_size": 2}
    own = two | {"additional_config": {"onegraph_exchange": True}}
    found = served(tiny_for_two, {"one": {}, "two": two, "own": own}, tmp_path)
    for name in ("two", "own"):
        for one, other in zip(found["one"], found[name], strict=True):
            near(other["prompt"], one["prompt"])
            near(other["decoded"], other["again"])
