"""The engine on a CPU against a dense recomputation of every token, eager and over recorded graphs."""

import itertools
import math
import random
import time

import pytest
import torch

from engines import MODES, maker
from onegraph.engine import executor
from onegraph.engine.engine import Engine
from onegraph.engine.exact_window import NEVER_EXACT, Sizes
from onegraph.engine.pages import PageAllocator
from onegraph.engine.params import SamplingParams
from onegraph.ops.sampling import greedy, sample
from onegraph.runtime.prove import prove
from test_graph import RecordedPool
from tiny_decoder import TinyDecoder

PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
    [2],
    [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2, 3, 5, 3, 6],
    [100, 0],
]
GREEDY = SamplingParams(max_tokens=12)
WARM = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def model():
    return TinyDecoder()


@pytest.fixture(params=MODES)
def make(request, model, monkeypatch):
    return maker(request.param, model, monkeypatch)


KNOWN = {}


def dense(model, prompt, params):
    """The tokens that the definition gives: all of the sequence anew for each token. Once a model, whose weights no
    test may change afterwards: several modes are held to the same tokens."""
    key = model, tuple(prompt), repr(params)
    if key not in KNOWN:
        KNOWN[key] = tuple(recomputed(model, prompt, params.with_defaults()))
    return list(KNOWN[key])


def recomputed(model, prompt, params):
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = model.dense_logits(tokens)
        if params.temperature == 0:
            token = greedy(logits)
        else:
            row = (params.temperature, params.top_k, params.top_p, params.seed, len(tokens))
            row = [torch.tensor([value], device=logits.device) for value in row]
            token = sample(logits, row[0], row[1].int(), row[2], row[3], row[4].int())
        tokens.append(token.item())
        if tokens[-1] in params.stop:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampling"])
def test_tokens_are_those_of_the_dense_recomputation(make, model, params):
    expected = [dense(model, prompt, params) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the case would not show a mix-up of rows"
    assert max(len(set(tokens)) for tokens in expected) > 4, "the case would not show a stuck row"
    engine = make()
    assert engine.generate(PROMPTS, params) == expected
    assert [engine.generate([prompt], params)[0] for prompt in PROMPTS] == expected, "a batch must equal each alone"


def test_greedy_and_sampling_rows_share_a_batch(make, model):
    params = [GREEDY, WARM, SamplingParams(max_tokens=9, temperature=1.3, seed=1), SamplingParams(max_tokens=5)]
    expected = [dense(model, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    assert make().generate(PROMPTS, params) == expected


def test_more_prompts_than_rows_and_pages(make, model):
    """Eleven prompts through three rows and a cache that holds two of the longest: rows and pages are taken over."""
    prompts = [[n + 1, *PROMPTS[n % 4]] for n in range(11)]
    params = [SamplingParams(max_tokens=1 + 3 * (n % 5)) for n in range(11)]
    expected = [dense(model, prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    engine = make(max_batch=3, pages=1 + 2 * 9)
    assert engine.generate(prompts, params) == expected
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_gives_each_prompt_its_own_tokens(make, model, seed):
    """Random rows, pages, chunks, lengths, stops and modes; whatever the engine interleaves must not show."""
    rng = random.Random(seed)
    engine = make(
        max_batch=rng.randint(1, 5),
        page_size=rng.choice([1, 3, 8]),
        chunk=rng.randint(1, 20),
        pages=rng.choice([None, 65]),
    )
    prompts, params = [], []
    for _ in range(rng.randint(1, 9)):
        prompts.append([rng.randrange(101) for _ in range(rng.choice([1, 2, 7, 16, 30]))])
        warmth = {"temperature": rng.choice([0.3, 1.5]), "top_k": rng.choice([0, 9]), "top_p": rng.choice([0.7, 1.0])}
        params.append(
            SamplingParams(
                max_tokens=rng.randint(1, 15),
                seed=rng.randrange(2**63),
                stop=rng.sample(range(101), 5),
                **(warmth if rng.random() < 0.5 else {}),
            )
        )
    expected = [dense(model, prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    assert engine.generate(prompts, params) == expected
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


def test_a_stop_token_ends_its_row_only(make, model):
    free = [dense(model, prompt, GREEDY) for prompt in PROMPTS]
    stop = free[0][4]
    params = SamplingParams(max_tokens=12, stop=[stop])
    expected = [dense(model, prompt, params) for prompt in PROMPTS]
    assert expected[0][-1] == stop
    assert len(expected[0]) < 12
    assert max(map(len, expected)) == 12
    assert make().generate(PROMPTS, params) == expected


def test_a_sequence_may_fill_the_context_to_its_last_token(make, model):
    prompt = [n % 101 for n in range(50)]
    params = SamplingParams(max_tokens=14)
    assert make().generate([prompt], params) == [dense(model, prompt, params)]


@pytest.mark.parametrize("chunk", [1, 3, 11, 20, 64])
def test_chunks_of_any_length_prefill_alike(make, model, chunk):
    """A context of 24: the padding of the last chunk may reach beyond what the block table addresses."""
    params = SamplingParams(max_tokens=3)
    assert make(chunk=chunk, max_context=24).generate(PROMPTS, params) == [
        dense(model, prompt, params) for prompt in PROMPTS
    ]


def test_what_an_earlier_sequence_left_in_a_page_is_not_seen(make, model):
    engine = make()
    expected = engine.generate(PROMPTS, GREEDY)
    for cache in (*engine.executor.cache.keys, *engine.executor.cache.values):
        cache.fill_(30.0)  # finite, as all that a model leaves there: NaN ends in an error, which clears the cache
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_tokens_stream_in_order(make):
    seen = []
    engine = make()
    tokens = engine.generate(PROMPTS, GREEDY, on_token=lambda index, token: seen.append((index, token)))
    for index, expected in enumerate(tokens):
        assert [token for i, token in seen if i == index] == expected


def test_an_error_in_the_callback_leaves_the_engine_usable(make):
    engine = make()
    expected = engine.generate(PROMPTS, GREEDY)
    countdown = itertools.count(9, -1)

    def interrupt(index, token):
        if next(countdown) == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, on_token=interrupt)
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_a_stream_gives_the_same_tokens_one_by_one(make):
    engine = make(max_batch=2)
    expected = engine.generate(PROMPTS, WARM)
    seen = list(engine.stream(PROMPTS, WARM))
    assert [[token for i, token in seen if i == n] for n in range(len(PROMPTS))] == expected


def test_a_stream_gives_a_token_before_the_next_is_computed(make):
    """Not more than one step ahead of who reads, so that closing it saves the work."""
    engine = make()
    stream = engine.stream(PROMPTS[:1], GREEDY)
    for count in range(1, 6):
        next(stream)
        assert count - 1 <= engine.stats.decode_steps <= count + 1
    stream.close()
    assert engine.stats.decode_steps <= 6


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_ends_early_leaves_the_engine_usable(make, end):
    engine = make(max_batch=2)
    expected = engine.generate(PROMPTS, GREEDY)
    stream = engine.stream(PROMPTS, GREEDY)
    assert next(stream) == (0, expected[0][0])
    for _ in range(4):
        next(stream)
    with pytest.raises(ValueError, match="is generating already; exhaust or close the stream"):
        engine.generate(PROMPTS, GREEDY)
    with pytest.raises(ValueError, match="is generating already"):
        next(engine.stream(PROMPTS, GREEDY))
    if end == "close":
        stream.close()
    else:
        del stream
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity
    assert sorted(engine.scheduler.free_slots) == [1, 2]
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_a_wrong_prompt_is_refused_before_the_stream_begins(make):
    with pytest.raises(ValueError, match="prompt 0: got no tokens"):
        make().stream([[]], GREEDY)


def test_what_the_reader_of_a_stream_does_is_not_timed(make):
    engine = make()
    for _ in engine.stream(PROMPTS[:1], GREEDY):
        time.sleep(0.05)
    assert 0 < engine.stats.decode_seconds < 0.3


def test_seeds(make):
    engine = make()
    hot = SamplingParams(max_tokens=12, temperature=2.0)
    assert engine.generate([[1, 2]] * 2, hot)[0] != engine.generate([[1, 2]], hot)[0], "no seed: new draws each time"
    fixed = SamplingParams(max_tokens=12, temperature=2.0, seed=-5)
    first, second = engine.generate([[1, 2]] * 2, fixed)
    assert first == second == engine.generate([[1, 2]], fixed)[0]


def test_stats_count_what_was_done(make):
    engine = make()
    engine.generate(PROMPTS, GREEDY)
    stats = engine.stats
    assert stats.mode == engine.mode
    assert stats.prefill_tokens == sum(map(len, PROMPTS))
    assert stats.decode_tokens == 11 * len(PROMPTS)
    assert stats.decode_steps == 11, "all four rows in one step"
    assert 0 < stats.decode_tokens_per_second < math.inf
    assert 0 < stats.prefill_tokens_per_second < math.inf
    engine.generate([], GREEDY)
    assert engine.stats.prefill_tokens == 0
    assert engine.stats.decode_tokens_per_second == 0.0


def test_a_call_reads_what_its_prompts_have_in_common_once(make, model):
    """Also of prompts that wait for a row. The next call finds nothing: what is asked twice may be timed."""
    engine = make()
    start = PROMPTS[2]
    prompts = [*([start] * 5), [*start[:9], 50]]
    expected = [dense(model, prompt, WARM) for prompt in prompts]
    for _ in range(2):
        assert engine.generate(prompts, WARM) == expected
        assert engine.stats.shared_tokens == 4 * 16 + 8
        assert engine.stats.prefill_tokens == 20 + 4 * 4 + 2


def test_nan_never_passes(make):
    model = TinyDecoder()
    engine = make(model=model)
    expected = engine.generate(PROMPTS, GREEDY)
    bad = next(token for token in range(101) if not any(token in tokens for tokens in PROMPTS + expected))
    model.embed.weight[bad] = math.nan
    with pytest.raises(FloatingPointError, match="prompt 1: the model gives NaN at position 3"):
        engine.generate([[5], [bad] * 3, [6]], SamplingParams(max_tokens=50))
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity
    assert engine.generate(PROMPTS, GREEDY) == expected, "NaN left in a page would spread to its next owner"


def test_replays_run_no_python(model, monkeypatch):
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    engine = Engine(model, max_batch=2, max_context=64, page_size=4, capture=True)
    expected = engine.generate(PROMPTS[:2], GREEDY)
    monkeypatch.setattr(model, "run", None)
    assert engine.generate(PROMPTS[:2], GREEDY) == expected


@pytest.mark.parametrize("sampling", [False, True])
def test_the_steps_are_proven(make, sampling):
    """Replay equals eager on outputs, buffers and cache, for rows of any length and rows that stand still."""
    engine = make()
    g = torch.Generator().manual_seed(0)

    def rows(n):
        return {
            "positions": torch.randint(0, 20, (n,), generator=g).int(),
            "limits": torch.randint(0, 64, (n,), generator=g).int(),
            "table": torch.randint(1, 64, (n, 16), generator=g).int(),
            "slots": torch.arange(1, n + 1).int(),
            "temperature": torch.rand(n, generator=g),
            "top_k": torch.randint(0, 50, (n,), generator=g).int(),
            "top_p": torch.rand(n, generator=g),
            "seed": torch.randint(0, 2**60, (n,), generator=g),
        }

    def reset():
        for cache in state.values():
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))

    state = {f"keys {i}": k for i, k in enumerate(engine.executor.cache.keys)}
    state |= {f"values {i}": v for i, v in enumerate(engine.executor.cache.values)}
    (decode,) = engine.executor.step("decode", sampling=sampling).stages
    cases = [{"drawn": torch.randint(0, 101, (n,), generator=g)} | rows(n) for n in (4, 1, 3, 2)]
    assert prove(decode, cases, reset=reset, state=state) == []
    (prefill,) = engine.executor.step("prefill", sampling=sampling).stages
    cases = [{"tokens": torch.randint(0, 101, (1, 8), generator=g)} | rows(1) for _ in range(3)]
    assert prove(prefill, cases, reset=reset, state=state) == []


def test_warm_up_touches_the_sentinel_page_only(make):
    engine = make()
    for kind, sampling in itertools.product(("decode", "prefill"), (False, True)):
        engine.executor.step(kind, sampling=sampling)
    for cache in (*engine.executor.cache.keys, *engine.executor.cache.values):
        assert cache[1:].count_nonzero() == 0
        assert cache[0].isfinite().all()


# errors


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], GREEDY, "prompt 0: got no tokens"),
        ([[1], [2, 101]], GREEDY, "prompt 1: got token 101 at 1; the model's vocabulary is 0 to 100"),
        ([[1], [-1]], GREEDY, "prompt 1: got token -1"),
        ([[1.5]], GREEDY, "prompt 0: got 1.5 at 0"),
        (["text"], GREEDY, "prompt 0: got 't' at 0; allowed are token ids"),
        ([[1] * 60], GREEDY, r"60 tokens and max_tokens 12 make 72; the context is 64: set max_tokens to 4 or less"),
        ([[1] * 64], GREEDY, r"make 76; the context is 64: shorten the prompt"),
        ([[1] * 64], SamplingParams(), r"prompt 0: got 64 tokens, which leave none for an answer; the context is 64"),
        ([[1], [2]], [GREEDY], "params: got 1 for 2 prompts"),
        ([[1] * 40], GREEDY, r"51 tokens need 13 pages of 4; the cache has 10 besides the sentinel: .*pages=14"),
    ],
)
def test_wrong_prompts_say_what_is_allowed(model, prompts, params, message):
    engine = Engine(model, max_batch=4, max_context=64, page_size=4, pages=11)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params)
    assert engine.generate([[1]], GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch: got 0"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"chunk": -1}, "chunk: got -1"),
        ({"max_context": 257}, "max_context: got 257; the model was loaded for 1 to 256"),
        ({"max_context": 0}, "max_context: got 0"),
        ({"capture": "yes"}, "capture: got 'yes'; allowed are True, False, 'split'"),
        ({"pages": 1}, "pages is 1"),
    ],
)
def test_wrong_engine_arguments_say_what_is_allowed(model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_capture_needs_a_gpu(model):
    for capture in (True, "split"):
        with pytest.raises(ValueError, match="allowed is a CUDA device: pass capture=False"):
            Engine(model, capture=capture)
    assert Engine(model).mode == "eager"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"temperature": -1}, {"temperature": math.nan}, {"temperature": 1e-9},
        {"top_k": -1}, {"top_k": 2**31}, {"top_p": 0}, {"top_p": 1.1}, {"top_p": "a"}, {"seed": 2**63}, {"seed": 0.5},
        {"stop": [-1]}, {"stop": [""]}, {"stop": [1.5]}, {"min_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0},
        {"presence_penalty": 2.1}, {"frequency_penalty": math.inf}, {"n": 0}, {"n": 1.5}, {"logprobs": 21},
        {"logprobs": -1}, {"json_schema": "{"}, {"json_schema": 5}, {"regex": 5}, {"regex": "a", "json_schema": {}},
    ],
)  # fmt: skip
def test_wrong_sampling_params_name_the_field(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed is"):
        SamplingParams(**wrong)


def test_pages_are_handed_out_once():
    sizes = Sizes(1, 80, 16, 6, 5, 5, NEVER_EXACT)
    assert sizes.needed(16) == 1
    assert sizes.needed(17) == 2
    pages = PageAllocator(sizes.pages)
    first = pages.take(3)
    assert sorted(first) == [1, 2, 3]
    assert pages.take(3) is None
    assert sorted(pages.take(2)) == [4, 5]
    pages.give_back(first)
    assert pages.free == 3
    with pytest.raises(AssertionError):
        pages.give_back([1, 2, 3])
