"""The TurboQuant cache inside vLLM's scheduler, on a CPU: true bytes, decoding, chunks, shared prefixes, preemption.

vLLM for CPUs takes no backend by name and 0.32 no cache dtype of ours, so the tests put the backend in the place of the
CPU's own and set the rate; 0.33 selects both by flags. What a token was given as log-probability is held to what the
exact cache gives on the same text.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import serving

from onegraph.formats.turboquant_layout import TurboQuantLayout

TEXT = [int(token) for token in torch.randint(3, 266, (90,), generator=torch.Generator().manual_seed(3))]
CLOSE = 0.4  # of the mean |difference| to another text's log-probabilities: what codes of 4 bits may make


@contextmanager
def turboquant() -> Iterator[Any]:
    """The backend in the place of the CPU's, at 4 bits."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from onegraph.integrations.vllm import turboquant as backend

    selector._cached_get_attn_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.TurboQuantBackend, "rate", (4, 4))
        patch.setattr(backend, "NAME", "CPU_ATTN")
        register_backend(AttentionBackendEnum.CPU_ATTN, "onegraph.integrations.vllm.turboquant.TurboQuantBackend")
        try:
            yield backend
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()


def given(llm: Any, prompts: list[list[int]], count: int = 1, prompt: bool = False) -> list[tuple[list[int], Any, Any]]:
    """For each prompt: the tokens that follow, their log-probabilities, and those of the prompt's tokens from the
    second on."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=1,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if prompt else None,
    )
    found = []
    for request in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
        output = request.outputs[0]
        after = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        before = None
        if prompt:
            rows = list(zip(request.prompt_token_ids, request.prompt_logprobs, strict=True))[1:]
            before = torch.tensor([row[token].logprob for token, row in rows])
        found.append((list(output.token_ids), torch.tensor(after), before))
    return found


@pytest.fixture(scope="module")
def exact(tiny_chat: Path) -> Any:
    """text -> log-probabilities of its tokens from the second on, with vLLM's own cache."""
    texts: dict[tuple[int, ...], torch.Tensor] = {}

    def score(many: list[list[int]]) -> list[torch.Tensor]:
        if missing := [text for text in many if tuple(text) not in texts]:
            with serving(tiny_chat, max_num_batched_tokens=512) as llm:
                for text, (_, _, before) in zip(missing, given(llm, missing, prompt=True), strict=True):
                    texts[tuple(text)] = before
        return [texts[tuple(text)] for text in many]

    return score


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far log-probabilities are from those of the same text, in units of how far they are from another's."""
    other = torch.cat([(got - want.roll(i)).abs() for i in range(1, len(want))])
    return float((got - want).abs().mean() / other.mean())


def test_pages_take_their_true_bytes_and_the_write_does_rope(tiny_chat: Path) -> None:
    with turboquant(), serving(tiny_chat) as llm:
        (specs,) = llm.llm_engine.model_executor.get_kv_cache_specs()
        (kinds,) = llm.apply_model(lambda model: [type(layer.self_attn).__name__ for layer in model.model.layers])
    assert kinds == ["WritesCodes"] * 2
    size = TurboQuantLayout(64, 4, 4).bytes_per_token_head
    for spec in specs.values():
        assert spec.page_size_bytes == spec.block_size * 2 * size


def test_a_prompt_in_chunks(tiny_chat: Path, exact: Any) -> None:
    (want,) = exact([TEXT])
    with turboquant(), serving(tiny_chat, max_num_batched_tokens=32) as llm:
        ((_, _, got),) = given(llm, [TEXT], prompt=True)
    assert torch.allclose(got[:31], want[:31], atol=1e-4), "the first chunk attends to exact keys"
    assert 0 < apart(got[32:], want[32:]) < CLOSE


def test_decoding_in_a_batch_and_from_a_shared_prefix(tiny_chat: Path, exact: Any) -> None:
    prompts = [TEXT[:70], TEXT[5:12], [TEXT[0]], TEXT[40:60]]
    with turboquant(), serving(tiny_chat) as llm:
        first = given(llm, prompts, 20)
        again = given(llm, [TEXT[:70], [*TEXT[:40], 9, 9]], 20)  # pages of earlier requests are found and used
    for texts, answers in ((prompts, first), ([TEXT[:70], [*TEXT[:40], 9, 9]], again)):
        whole = [text + tokens for text, (tokens, _, _) in zip(texts, answers, strict=True)]
        for text, want, (_, got, _) in zip(texts, exact(whole), answers, strict=True):
            assert apart(got, want[len(text) - 1 :]) < CLOSE


def test_preempted_requests_come_back(tiny_chat: Path, exact: Any) -> None:
    """Four requests that end at 80 tokens in a cache of 200: some give their pages away, and start again."""
    prompts = [TEXT[i : i + 20] for i in range(4)]
    with turboquant(), serving(tiny_chat, num_gpu_blocks_override=7, block_size=32, max_num_batched_tokens=512) as llm:
        answers = given(llm, prompts, 60)
    whole = [text + tokens for text, (tokens, _, _) in zip(prompts, answers, strict=True)]
    for want, (_, got, _) in zip(exact(whole), answers, strict=True):
        assert apart(got, want[19:]) < CLOSE


def test_queries_of_several_tokens(tiny_chat: Path, exact: Any) -> None:
    """Drafts, here of the same model: a step verifies three tokens of a request, against codes.

    vLLM draws other drafts, and so another text, each time: all texts are judged together, as one alone may consist of
    tokens that are about as likely as each other.
    """
    prompts = [TEXT[:12], TEXT[20:50], TEXT[60:62], TEXT[30:64]]
    drafts = {"method": "draft_model", "model": str(tiny_chat), "num_speculative_tokens": 2}
    with (
        turboquant() as backend,
        serving(tiny_chat, speculative_config=drafts) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        counts = record_queries(patch, backend)
        answers = given(llm, prompts, 40)
    assert counts.count(3) > 10
    whole = [text + tokens for text, (tokens, _, _) in zip(prompts, answers, strict=True)]
    want = [known[len(text) - 1 :] for text, known in zip(prompts, exact(whole), strict=True)]
    assert apart(torch.cat([got for _, got, _ in answers]), torch.cat(want)) < CLOSE


def record_queries(patch: pytest.MonkeyPatch, backend: Any) -> list[int]:
    """Tokens of each query that is read against codes, from here on."""
    read, counts = backend.turboquant_attention, list[int]()

    class Recorded:
        @staticmethod
        def overload(q: torch.Tensor, *rest: Any) -> Any:
            counts.append(q.shape[1])
            return read.overload(q, *rest)

    patch.setattr(backend, "turboquant_attention", Recorded)
    return counts


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"sliding_window": 64}, "a sliding window"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a soft cap of logits"),
        ({"attn_type": "encoder_decoder"}, "attention of the kind 'encoder_decoder'"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "a cache that layers share"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
    ],
)
def test_attention_that_codes_are_not_read_for_is_refused(kind: dict[str, Any], words: str) -> None:
    from onegraph.integrations.vllm.turboquant import TurboQuantImpl

    with pytest.raises(ValueError, match=f"the TurboQuant KV cache does not reach {words}; serve with"):
        TurboQuantImpl(4, 64, 0.125, kv_cache_dtype="turboquant:4", **kind)


def test_the_backend_without_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onegraph.integrations.vllm import turboquant as backend

    monkeypatch.setattr(backend.TurboQuantBackend, "rate", None)
    with pytest.raises(ValueError, match="needs --kv-cache-dtype, one of turboquant:4, "):
        backend.TurboQuantImpl(4, 64, 0.125)
