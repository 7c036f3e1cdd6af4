"""Penalties, min-p, constraints and log-probabilities: against transformers' processors, within the engine's steps."""

import itertools
import random
import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import test_engine_contract
from engines import MODES, maker
from onegraph.check.api import check_step
from onegraph.engine import choice as choice_module
from onegraph.engine.choice import ALWAYS, SCORING, Choice
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.ops.sampling import greedy, sample
from onegraph.ops.shaping import OUTPUT, PROMPT, adjust_logits, mask_words, min_p
from test_engine import PROMPTS
from test_sampling import filtered
from tiny_decoder import TinyDecoder

VOCABULARY = 101
ALL = Choice(sampling=True, shaping=True, min_p=True, logprobs=True)


@pytest.fixture(scope="module")
def model():
    return TinyDecoder()


@pytest.fixture(params=MODES)
def make(request, model, monkeypatch):
    return maker(request.param, model, monkeypatch, max_batch=2)


class Parity:
    """A constraint that depends on every token: after an even sum only the tokens with the remainder 1 of 3, else 2."""

    problem = ""

    def __init__(self, params):
        self.taken, self.length = [], int(params.regex)

    @property
    def done(self):
        return len(self.taken) == self.length

    def tokens(self):
        return range(1 + sum(self.taken) % 2, VOCABULARY, 3)

    def fill(self, allowed):
        words = [0] * len(allowed)
        for token in self.tokens():
            words[token // 32] |= 1 << token % 32
        allowed.copy_(torch.tensor(words).to(torch.int32))

    def take(self, token):
        assert token in self.tokens()
        self.taken.append(token)


def shaped(logits, prompt, output, params):
    """Logits [1, V] after biases, tokens held back, repetition, presence and frequency penalties, and the constraint:
    by the definitions."""
    logits = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[0, token] += bias
    if len(output) < params.min_tokens:
        logits[0, list(params.stop)] = -torch.inf
    if params.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = processor(torch.tensor([[*prompt, *output]]), logits)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCABULARY)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.regex is not None:
        constraint = Parity(params)
        constraint.taken = list(output)
        closed = torch.ones(VOCABULARY, dtype=torch.bool)
        closed[list(constraint.tokens())] = False
        logits = logits.masked_fill(closed, -torch.inf)
    return logits


def warpers(params):
    """transformers' in its order (generation/utils.py)."""
    found = [TemperatureLogitsWarper(params.temperature)]
    found += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    found += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    return found + ([MinPLogitsWarper(params.min_p)] if params.min_p else [])


def dense(model, prompt, params):
    """(tokens, model's logits at each) that the definitions give, all of the sequence anew for each token."""
    output, seen, params = [], [], params.with_defaults()
    for _ in range(params.max_tokens if params.regex is None else min(params.max_tokens, int(params.regex))):
        seen.append(model.dense_logits([*prompt, *output]))
        logits = shaped(seen[-1], prompt, output, params)
        if params.temperature == 0:
            output.append(greedy(logits).item())
        else:
            for warp in warpers(params):
                logits = warp(None, logits)
            row = [torch.ones(1), torch.zeros(1).int(), torch.ones(1), torch.tensor([params.seed])]
            output.append(sample(logits, *row, torch.tensor([len(prompt) + len(output)]).int()).item())
        if output[-1] in params.stop:
            break
    return output, seen


def test_the_kept_tokens_are_those_of_transformers():
    """Random mixtures of all that filters, min-p before top-p here and behind it there."""
    rng, g = random.Random(0), torch.Generator().manual_seed(0)
    differs = 0
    for _ in range(120):
        params = SamplingParams(
            temperature=rng.uniform(0.4, 2), top_k=rng.choice([0, 1, 3, 30]), top_p=rng.choice([1.0, 0.5, 0.9]),
            min_p=rng.choice([0.02, 0.1, 0.4, 1.0]),
        )  # fmt: skip
        logits = torch.randn(1, 200, generator=g) * 2
        expected = logits
        for warp in warpers(params):
            expected = warp(None, expected)
        row = [torch.tensor([v]) for v in (params.temperature, params.top_k, params.top_p, params.min_p)]
        mine = logits.clone()
        top_p = min_p(mine, row[0], row[1].int(), row[2], row[3])
        kept = filtered(mine[0], params.temperature, params.top_k, top_p.item()) > 0
        assert kept.equal(expected[0].isfinite()), params
        naive = filtered(mine[0], params.temperature, params.top_k, params.top_p) > 0
        differs += not naive.equal(kept)
    assert differs > 5, "the cases do not need another top_p"


def test_the_repetition_penalty_is_that_of_transformers_bit_for_bit():
    g = torch.Generator().manual_seed(1)
    logits = torch.cat((torch.randn(8, VOCABULARY - 3, generator=g) * 5, torch.zeros(8, 1), -torch.zeros(8, 1),
                        torch.full((8, 1), -torch.inf)), dim=1)  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (8, 60), generator=g)
    seen = torch.zeros(8, VOCABULARY, dtype=torch.int32)
    seen.scatter_(1, ids[:, :30], PROMPT)
    seen.scatter_add_(1, ids[:, 30:], torch.full((8, 30), OUTPUT).int())
    zeros, slots = torch.zeros(8), torch.arange(8).int()
    open_ = torch.zeros(8, mask_words(VOCABULARY), dtype=torch.int32)
    for penalty in (0.7, 1.0, 1.3, 1.1):
        rows = (torch.full((8,), -1), slots, seen, open_, torch.full((8,), penalty), zeros, zeros, zeros.int())
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
        assert adjust_logits(logits, *rows).equal(expected)


CASES = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0, "temperature": 0.6},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.8},
    "rewarded": {"frequency_penalty": -0.4, "presence_penalty": 0.5, "temperature": 1.1, "top_k": 40},
    "min_p": {"min_p": 0.2, "temperature": 1.4, "top_p": 0.8},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "min_p": 0.05, "temperature": 1.2, "top_k": 30},
    "constrained": {"regex": "9", "temperature": 1.2, "repetition_penalty": 1.2},
    "constrained greedy": {"regex": "30"},
    "biased": {"logit_bias": {5: 4.0, 0: 1.5, 77: -100}, "temperature": 1.3, "repetition_penalty": 1.1},
    "held back": {"min_tokens": 5, "stop": range(0, VOCABULARY, 2), "temperature": 1.1, "logit_bias": {4: 6.0}},
    "plain": {"temperature": 0.9, "top_p": 0.9},
    "greedy": {},
}
PARAMS = [SamplingParams(max_tokens=12, seed=7 + i, logprobs=3, **case) for i, case in enumerate(CASES.values())]


def test_any_mixture_gives_each_prompt_the_tokens_of_the_definitions(make, model):
    """Twelve kinds of rows through three, so that rows and slots change owners and steps change kinds."""
    prompts = [[n + 1, *PROMPTS[n % 4]] for n in range(len(PARAMS))]
    expected = [dense(model, prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
    plain = [dense(model, prompt, SamplingParams(max_tokens=12))[0] for prompt in prompts]
    assert sum(tokens == other for (tokens, _), other in zip(expected, plain, strict=True)) == 1, "greedy itself"
    for chosen in (make(max_batch=3), make(chunk=3, max_batch=1)):
        chosen.constrain = Parity
        for sequence, (tokens, logits) in zip(chosen.complete(prompts, PARAMS), expected, strict=True):
            assert sequence.output == tokens
            check_logprobs(sequence, logits)


def check_logprobs(sequence, logits):
    assert [told.token for told in sequence.logprobs] == sequence.output
    for told, row in zip(sequence.logprobs, logits, strict=True):
        law = row[0].double().log_softmax(0)
        best = law.topk(3)
        assert told.logprob == pytest.approx(law[told.token].item(), abs=1e-4)
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_sequence_begins_with_what_prefill_reads(make):
    """The whole answer so far where it resumes; another slot's counts stay."""
    engine = make(max_batch=4)
    engine.executor.step("decode", shaping=True)
    state = engine.executor.ranks[0].choices
    state.begin(1, [9, 9, 100, 3], [], SamplingParams())
    state.begin(3, [7, 7, 5], [5, 6, 6, 6], SamplingParams(logit_bias={1: 2.0, 5: 3.0, 6: 1.0}))
    state.begin(3, [7, 7, 5], [5, 6, 6], SamplingParams(logit_bias={9: -1.0}, min_tokens=4, stop=[8]))
    found = {slot: {i: n for i, n in enumerate(row) if n} for slot, row in enumerate(state.seen.tolist())}
    assert found == {0: {}, 1: {9: 1, 100: 1, 3: 1}, 2: {}, 3: {7: 1, 5: 3, 6: 4}, 4: {}}
    assert not state.biases[[0, 1, 2, 4]].any()
    assert state.biases[3, :, :3].T.tolist() == [[9, -1, ALWAYS], [8, -float("inf"), 3 + 4], [0, 0, 0]]


@pytest.mark.parametrize("at_once", [1 << 24, 5 * VOCABULARY])
def test_a_prompt_is_scored_as_by_the_definition(make, model, monkeypatch, at_once):
    """Whatever the row draws and whatever is in the cache of its beginning, which makes no difference to others."""
    monkeypatch.setattr(choice_module, "LOGITS_AT_ONCE", at_once)
    engine = make(max_batch=2, pages=13)
    prompt = [(7 * i) % VOCABULARY for i in range(21)]
    prompts = [prompt, prompt, [3], prompt[:9], prompt]
    params = [
        SamplingParams(max_tokens=20, prompt_logprobs=top, temperature=temperature, seed=1, logprobs=own)
        for top, temperature, own in ((3, 0, None), (0, 0.8, 2), (2, 0, None), (1, 0, None), (None, 0, None))
    ]
    found = engine.complete(prompts, params)
    assert engine.stats.preemptions, "prompts are read again"
    plain = engine.generate(prompts, [replace(p, prompt_logprobs=None) for p in params])
    assert [sequence.output for sequence in found] == plain
    for sequence, asked in zip(found, params, strict=True):
        told, top = sequence.prompt_logprobs, asked.prompt_logprobs
        assert [each.token for each in told] == ([] if top is None else sequence.prompt[1:])
        for at, each in enumerate(told):
            law = model.dense_logits(sequence.prompt[: at + 1])[0].double().log_softmax(0)
            assert each.logprob == pytest.approx(law[each.token].item(), abs=1e-4)
            assert [token for token, _ in each.top] == law.topk(top).indices.tolist()
            assert [value for _, value in each.top] == pytest.approx(law.topk(top).values.tolist(), abs=1e-4)


def test_answers_to_one_prompt_score_it_once(make):
    """Whether the others begin while the first one is scored, or later; where nothing is shared, too."""
    prompt = [(7 * i) % VOCABULARY for i in range(40)]
    params = [SamplingParams(max_tokens=4, prompt_logprobs=2, temperature=1.0, seed=seed) for seed in range(4)]
    for rows in (1, 4):
        engine = make(max_batch=rows, chunk=16)
        (alone,) = engine.complete([prompt], params[:1])
        assert engine.stats.prefill_tokens == 40
        found = engine.complete([prompt] * 4, params)
        assert [each.prompt_logprobs for each in found] == [alone.prompt_logprobs] * 4
        shared = 39 // engine.executor.sizes.page_size * engine.executor.sizes.page_size  # one token is left to read
        assert engine.stats.prefill_tokens == 40 + 3 * (40 - shared)
    plain = make(max_batch=4).generate([prompt] * 4, [replace(each, prompt_logprobs=None) for each in params])
    assert [each.output for each in found] == plain
    other = engine.complete(
        [prompt, prompt[:-1], prompt], [params[0], params[0], replace(params[0], prompt_logprobs=0)]
    )
    assert [len(each.prompt_logprobs) for each in other] == [39, 38, 39]
    assert [len(each.prompt_logprobs[0].top) for each in other] == [2, 2, 0]


def test_lower_priorities_are_admitted_first(make):
    engine, ended = make(max_batch=1), []
    params = [SamplingParams(max_tokens=2, priority=priority) for priority in (1, 0, -3, 0, 1)]
    engine.complete([PROMPTS[0]] * 5, params, on_done=lambda sequence: ended.append(sequence.index))
    assert ended == [2, 1, 3, 0, 4]


def test_the_highest_priority_value_is_preempted_and_waits_behind_lower_ones(make):
    """Though it came first: of pages for one and a half, sequences that came later get what they need."""
    engine = make(max_batch=2, pages=14)
    scheduler, ended = engine.scheduler, []
    late, *others = (
        engine.request(PROMPTS[0], SamplingParams(max_tokens=24, priority=priority)) for priority in (5, 0, 0, -1)
    )
    with engine.executor.running(), closing(scheduler.open()):
        scheduler.add(late)
        scheduler.step()
        for sequence in others:
            scheduler.add(sequence)
        while not scheduler.idle:
            ended += [sequence for sequence, _ in scheduler.step() if sequence.done]
    assert engine.stats.preemptions
    assert ended == [others[2], others[0], others[1], late]


def test_min_tokens_with_an_end_that_the_model_has_no_logits_of(make):
    (tokens,) = make().generate([[1]], SamplingParams(max_tokens=4, min_tokens=3, stop=[VOCABULARY + 7, 2]))
    assert len(tokens) >= 3


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"logit_bias": {VOCABULARY: 1}}, "logit_bias: got token 101; the model's vocabulary is 0 to 100"),
        (
            {"logit_bias": {1: 101}},
            "logit_bias: got {1: 101}; allowed is a mapping of token ids to numbers from -100",
        ),
        ({"logit_bias": dict.fromkeys(range(600), 1)}, "logit_bias: got 600 tokens; allowed are 512"),
        ({"min_tokens": 9}, "min_tokens: got 9; allowed is 0 to max_tokens"),
        (
            {"min_tokens": 2, "regex": "9"},
            "min_tokens: got 2 beside a constraint (json_schema, regex, grammar, or tools",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs: got 21; allowed is 0 to 20"),
        ({"priority": 1.5}, "priority: got 1.5; allowed is a 32-bit whole number"),
    ],
)
def test_what_cannot_be_asked_is_an_error(make, how, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make().generate([[1]], SamplingParams(max_tokens=4, **how))


def test_without_such_rows_there_is_no_state_and_no_other_step(make):
    engine = make()
    engine.generate(PROMPTS, SamplingParams(max_tokens=3, temperature=0.9, top_k=5, seed=1))
    assert engine.executor.ranks[0].choices is None
    assert {choice for _, choice, _ in engine.executor.groups} == {Choice(sampling=True)}
    assert "repetition" not in engine.executor.step("decode", sampling=True).stages[0].inputs


def test_while_a_row_is_constrained_no_step_is_launched_ahead(make):
    engine = make(max_batch=2)
    engine.constrain = Parity
    short, long = SamplingParams(max_tokens=4, regex="4"), SamplingParams(max_tokens=12)
    tokens = engine.generate(PROMPTS[:2], [short, long])
    assert [len(t) for t in tokens] == [4, 12]
    # Rows change once, when the short one ends; without it the engine is one step ahead where it captures.
    assert engine.stats.decode_steps == 11


def test_true_from_the_callback_ends_a_prompt(make):
    engine = make()
    expected = engine.generate(PROMPTS, SamplingParams(max_tokens=12))
    said = [[] for _ in PROMPTS]

    def watch(index, token):
        said[index].append(token)
        return index == 1 and len(said[1]) == 3

    tokens = engine.generate(PROMPTS, SamplingParams(max_tokens=12), on_token=watch)
    assert tokens == said == [expected[0], expected[1][:3], *expected[2:]]
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SamplingParams(n=2), "n: got 2; allowed is 1: the engine continues each prompt once, LLM takes n"),
        (SamplingParams(stop=["x"]), "stop: got 'x'; allowed are token ids"),
        (SamplingParams(regex="a"), "json_schema, regex: got one; the engine has no tokenizer"),
    ],
)
def test_what_the_engine_cannot_do_it_refuses(model, params, says):
    with pytest.raises(ValueError, match=says):
        Engine(model).generate([[1]], params)


# The capture contract.

ROWS = test_engine_contract.ROWS | {
    "slots": torch.tensor([3, 1, 2], dtype=torch.int32),
    "min_p": torch.tensor([0.2, 0.0, 0.1]),
    "repetition": torch.tensor([1.3, 1.0, 0.8]),
    "presence": torch.tensor([0.5, 0.0, -1.0]),
    "frequency": torch.tensor([0.5, 2.0, 0.0]),
    "constrained": torch.tensor([1, 0, 0], dtype=torch.int32),
}


def masks(engine):
    engine.executor.ranks[0].choices.constrain({3: Parity(SamplingParams(regex="99"))})


@pytest.mark.parametrize(
    "factory",
    [
        test_engine_contract.decode(rows=ROWS, before=masks, **ALL._asdict()),
        test_engine_contract.prefill(rows=ROWS, **ALL._asdict()),
        test_engine_contract.prefill(rows=ROWS, **SCORING._asdict()),
    ],
    ids=["decode", "prefill", "scoring"],
)
def test_the_step_may_be_captured(factory):
    report = check_step(factory)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


def test_a_parity_constraint_is_one():
    """The tests above mean little if it always allowed the same."""
    constraint = Parity(SamplingParams(regex="9"))
    allowed = torch.zeros(4, dtype=torch.int32)
    constraint.fill(allowed)
    bits = [i for i, word in itertools.product(range(VOCABULARY), [allowed]) if word[i // 32].item() >> i % 32 & 1]
    assert bits == [*range(1, VOCABULARY, 3)]


class Breaks(Parity):
    """Breaks off behind its third token."""

    @property
    def done(self):
        return bool(self.problem)

    def take(self, token):
        super().take(token)
        if len(self.taken) == 3:
            self.problem = "regex: beyond its limits"


def test_a_constraint_that_breaks_off_is_an_error(make):
    engine = make()
    engine.constrain = Breaks
    params = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, regex="9")]
    with pytest.raises(ValueError, match=r"^prompt 1: regex: beyond its limits$"):
        engine.generate(PROMPTS[:2], params)
    found = []
    with pytest.raises(ValueError, match=r"^prompt 0: regex: beyond its limits$"):
        found.extend(engine.stream(PROMPTS[:1], params[1:]))
    assert engine.generate(PROMPTS[:1], params[:1]) == make().generate(PROMPTS[:1], params[:1])
