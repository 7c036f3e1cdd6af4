"""Hybrid models in the engine: pages for layers that attend, a slot for the others, whatever becomes of a row."""

from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import maker
from models import save_hf
from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.snapshots import Snapshots
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.nn.attention import PagedCache
from onegraph.nn.hybrid_cache import SNAPSHOTS
from onegraph.nn.state import StateKind
from tiny_decoder import TinyDecoder

# Each kind of state in captured graphs, one kind in eager steps; graphs with breaks where modes are what is tested.
CASES = [("lfm2", "captured"), ("qwen3_5_moe", "captured"), ("qwen3_5", "eager")]
in_every_mode = pytest.mark.parametrize("case", [*CASES, ("qwen3_5", "split")], indirect=True, ids="-".join)
PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8, 2, 50, 51], [100, 0, 3], [5] * 20]
PARAMS = [SamplingParams(max_tokens=10 + i, temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]
NEW = 8
TWO, THREE = (
    {"num_hidden_layers": n, "layer_types": ["linear_attention"] * (n - 1) + ["full_attention"]} for n in (2, 3)
)
CHANGES = {"qwen3_5": TWO, "qwen3_5_moe": THREE}
TURNS = {"max_context": 128, "page_size": 2}  # a snapshot in 16 tokens, while a text grows


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """A model, the mode, what transformers generates, and what an engine does without drafts: each made once."""

    @cache
    def loaded(variant: str) -> tuple[Llama, list[list[int]]]:
        path = tmp_path_factory.mktemp(variant)
        hf = save_hf(variant, path, **CHANGES.get(variant, {}))
        with Checkpoint.open(path) as checkpoint, torch.no_grad():
            return Llama.load(checkpoint), [greedy(hf, prompt) for prompt in PROMPTS]

    @cache
    def made(variant: str, mode: str) -> Any:
        model, wanted = loaded(variant)
        with pytest.MonkeyPatch.context() as patch:
            alone = maker(mode, model, patch)().generate(PROMPTS, PARAMS)
        return SimpleNamespace(model=model, mode=mode, greedy=wanted, alone=alone)

    return made


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, cases: Callable[[str, str], Any]) -> Any:
    return cases(*request.param)


def greedy(hf: Any, prompt: list[int], count: int = NEW) -> list[int]:
    """What transformers generates, through its own cache."""
    tokens = torch.tensor([prompt])
    made = hf.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


@pytest.fixture
def make(case: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return maker(case.mode, case.model, monkeypatch)


@pytest.fixture
def alone(case: Any) -> list[list[int]]:
    found: list[list[int]] = case.alone
    return found


@pytest.fixture
def unshared(case: Any, make: Any) -> list[list[int]]:
    """What `turns` gives where nothing is shared."""
    if not hasattr(case, "unshared"):
        case.unshared, shared = turns(make(**TURNS), share=False, count=3)
        assert shared == 0
    found: list[list[int]] = case.unshared
    return found


@in_every_mode
@pytest.mark.parametrize("chunk", [8, 16])
def test_greedy_tokens_are_those_of_transformers(chunk: int, make: Any, case: Any) -> None:
    """Chunks of 8 tokens become records, of 16 are solved at once."""
    engine = make(chunk=chunk)
    for _ in range(2):  # a second time, over what the first left in its slots
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=NEW)) == case.greedy


def test_a_preempted_sequence_goes_on_with_the_same_tokens(make: Any, alone: list[list[int]]) -> None:
    """Five texts in three rows and few pages, admitted while others decode: slots change hands."""
    engine = make(max_batch=3, pages=1 + 9)
    with engine.executor.running(), closing(engine.scheduler.open()) as scheduler:
        requests = [engine.request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        for request in requests:
            scheduler.add(request)
        while not scheduler.idle:
            scheduler.step()
    assert engine.stats.preemptions
    assert [request.output for request in requests] == alone


@pytest.mark.parametrize("variant", ["kimi_linear", "olmo_hybrid", "lfm2_moe", "nemotron_h", "granite4_moe"])
def test_other_hybrids_generate_what_transformers_does(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, in rows that change hands for want of pages, with drafts that are taken back."""
    hf, prompts = save_hf(variant, tmp_path), PROMPTS[::2]
    with Checkpoint.open(tmp_path) as checkpoint, torch.no_grad():
        wanted = [greedy(hf, prompt, 12) for prompt in prompts]
        make = maker("captured", Llama.load(checkpoint), monkeypatch, max_batch=3, pages=1 + 9)
    texts = [prompt + new for prompt, new in zip(prompts, wanted, strict=True)]
    engine = make(draft=partial(OracleDrafter, texts, 0.6, 131), draft_tokens=3)
    assert engine.generate(prompts, [SamplingParams(max_tokens=12, seed=i) for i in range(len(prompts))]) == wanted
    assert engine.stats.preemptions
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


@pytest.mark.parametrize(
    ("case", "chance", "count"),
    [
        *((case, 0.6, 3) for case in CASES), (CASES[0], 1.0, 1), (CASES[1], 0.0, 7), (CASES[2], 0.0, 7),
        (("qwen3_5", "split"), 0.6, 3), (("qwen3_5", "split"), 1.0, 1),
    ],
    indirect=["case"], ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_drafts_change_no_token(chance: float, count: int, make: Any, alone: list[list[int]]) -> None:
    """Greedy and sampled; drafts that are wrong are taken back, from the recurrent states too."""
    texts = [prompt + new for prompt, new in zip(PROMPTS, alone, strict=True)]
    draft = partial(OracleDrafter, texts, chance, 131)
    engine = make(draft=draft, draft_tokens=count, max_batch=3)
    assert engine.generate(PROMPTS, PARAMS) == alone
    accepted = engine.stats.accepted_tokens / max(1, engine.stats.drafted_tokens)
    assert (accepted == 0) if chance == 0 else accepted > 0.1


def test_drafts_found_in_the_text_change_no_token(make: Any, case: Any, alone: list[list[int]]) -> None:
    assert (
        make(draft=NgramDrafter, draft_tokens="auto" if case.mode == "eager" else 3).generate(PROMPTS, PARAMS) == alone
    )


def test_a_prompt_as_short_as_a_round_is_read_as_a_prompt(make: Any) -> None:
    """1 to k + 1 tokens: a prefill of them is of the shape of a verify pass, and begins with an empty state."""
    engine, plain, params = make(draft=NgramDrafter, draft_tokens=7), make(), SamplingParams(max_tokens=6)
    engine.generate([[3, 4, 5] * 6], SamplingParams(max_tokens=4))  # leaves something in the slots
    for length in (1, 8, 9):
        prompt = [(7 * i + length) % 131 for i in range(length)]
        assert engine.generate([prompt] * 3, params) == plain.generate([prompt], params) * 3, length


def test_padding_changes_no_state(make: Any) -> None:
    """Three rows in a bucket of four, and rows at their limit: slot 0 stays empty, and so does one without a text."""
    engine = make()
    engine.generate(PROMPTS[:3], PARAMS[:3])
    states = [tensor for state in engine.executor.cache.states.values() for tensor in state]
    assert states
    used = {slot for slot in range(1, 5) if any(tensor[slot].any() for tensor in states)}
    assert len(used) == 3
    assert not any(tensor[0].any() for tensor in states)


def turns(engine: Engine, share: bool, count: int = 2) -> tuple[list[list[int]], int]:
    """Two conversations of so many turns at once, each turn behind all before; outputs, and tokens that were shared."""
    texts, outputs, shared = [[7, 1, 8, 2] * 6, [7, 1, 8, 2] * 5 + [9]], [], 0
    with engine.executor.running(), closing(engine.scheduler.open(share=share)) as scheduler:
        for turn in range(count):
            params = [SamplingParams(max_tokens=20, temperature=i * 1.0, seed=turn) for i in range(len(texts))]
            requests = [engine.request(text, each) for text, each in zip(texts, params, strict=True)]
            for request in requests:
                scheduler.add(request)
            while not scheduler.idle:
                scheduler.step()
            for text, request in zip(texts, requests, strict=True):
                text += [*request.output, turn]
            outputs += [request.output for request in requests]
        shared = engine.stats.shared_tokens
    return outputs, shared


def test_a_prefix_that_is_shared_gives_the_same_tokens(make: Any, case: Any, unshared: list[list[int]]) -> None:
    """Pages together with a snapshot of the other layers' states, at the ends of chunks and on the way."""
    drafts = {} if case.mode == "eager" else {"draft": NgramDrafter, "draft_tokens": 3}
    engine = make(**TURNS, **drafts)
    outputs, shared = turns(engine, share=True)
    assert outputs == unshared[:4]
    assert shared > 60
    states = [tensor for state in engine.executor.cache.states.values() for tensor in state]
    assert not any(tensor[0].any() for tensor in states)


def test_a_snapshot_is_found_only_with_its_pages(make: Any, unshared: list[list[int]]) -> None:
    """Few pages and few snapshots, both written over again and again."""
    engine = make(**TURNS, pages=1 + 92)
    engine.scheduler.prefixes.snapshots = Snapshots(engine.executor.snapshot_slots[:2])
    outputs, shared = turns(engine, share=True, count=3)
    assert outputs == unshared
    assert shared


def test_a_long_prompt_leaves_snapshots_of_others(make: Any) -> None:
    """It has more chunks than there are snapshots."""
    engine = make(max_context=256, chunk=16)
    system, long = [3 + i % 7 for i in range(64)], [11 + i % 5 for i in range(224)]
    with engine.executor.running(), closing(engine.scheduler.open(share=True)) as scheduler:
        for prompt in ([*system, 9], long, [*system, 1, 2]):
            scheduler.add(engine.request(prompt, SamplingParams(max_tokens=1)))
            while not scheduler.idle:
                scheduler.step()
        shared = engine.stats.shared_tokens
    assert len(long) // 16 > SNAPSHOTS
    assert shared == len(system)


def test_a_draft_model_with_recurrent_layers_is_refused(make: Any, case: Any) -> None:
    with pytest.raises(ValueError, match="draft: a draft model with recurrent layers is unsupported"):
        make(draft=partial(ModelDrafter, case.model))


def test_what_a_cache_takes_is_counted_before_it_is_made(case: Any) -> None:
    cache = Engine(case.model, max_batch=3, max_context=64).executor.cache
    assert cache.nbytes == sum(t.numel() * t.element_size() for t in cache.tensors())
    states = sum(t[0].numel() * t.element_size() for state in cache.states.values() for t in state)
    assert cache.nbytes == cache.attention.nbytes + (4 + SNAPSHOTS) * states, "three rows, slot 0 and copies"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Of heads that codes can be of."""
    path = tmp_path_factory.mktemp("wide")
    save_hf("qwen3_5", path, **THREE, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint)


@pytest.mark.parametrize(
    ("kv", "capture"), [("turboquant:4", "captured"), ("turboquant:4,mode=full", "captured"), ("turboquant:4", "eager")]
)
def test_keys_in_codes_stand_beside_states(kv: str, capture: str, wide: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts as without, and near what exact keys give."""
    make = maker(capture, wide, monkeypatch, page_size=16, max_context=64, kv=kv)
    engine = make()
    assert len(engine.executor.cache.attention.layers) == 1, "of the layer that attends"
    plain = engine.generate(PROMPTS, PARAMS)
    draft = partial(OracleDrafter, [p + n for p, n in zip(PROMPTS, plain, strict=True)], 0.6, 131)
    assert make(draft=draft, draft_tokens=3).generate(PROMPTS, PARAMS) == plain
    exact = Engine(wide, max_batch=1, max_context=64, capture=False)
    assert plain[:1] == exact.generate(PROMPTS[:1], PARAMS[:1])


class Fixed(PagedCache):
    """A cache with a kind of state of which nothing can be taken back."""

    @property
    def kinds(self) -> list[StateKind]:
        return [*super().kinds, StateKind([], 0)]


class FixedDecoder(TinyDecoder):
    def new_cache(self, *, kv: Any = None, spare: int = 0, **sizes: int) -> Fixed:
        about = {"layers": len(self.layers), "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return Fixed(**about, **sizes, device="cpu", dtype=self.dtype)


def test_drafts_are_refused_where_state_cannot_be_taken_back() -> None:
    for draft in (NgramDrafter, partial(ModelDrafter, TinyDecoder())):
        with pytest.raises(ValueError, match="draft: a round takes back up to 7 tokens; the model's state allows 0"):
            Engine(FixedDecoder(), max_context=64, draft=draft)
