"""Rounds that check drafts: whoever drafts, the text is the one without drafts; eager and over recorded graphs."""

import copy
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from engines import MODES, maker
from onegraph.engine.acceptance import Acceptance
from onegraph.engine.choice import Choice
from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.nn.linear import dense as linear
from onegraph.runtime.prove import prove
from test_engine import GREEDY, PROMPTS, WARM, dense
from tiny_decoder import TinyDecoder

KINDS = ["ngram", "same", "other", "oracle"]

# Caches in which texts of 60 tokens are mostly read from codes, which begin behind 16 tokens and a round's 8. Rows are
# in codes from the first token, or exact until they have 48.
CODES, TURNS = "turboquant:4,window=16,short=0", "turboquant:4,window=16,short=48"


def held(kv):
    """Options of an engine with this cache. Rows that turn are alone: one that turns takes the others along, wherever
    drafts have brought them."""
    return {"kv": kv, "page_size": None if kv else 16} | ({"max_batch": 1} if kv == TURNS else {})


@pytest.fixture(scope="module")
def model():
    return TinyDecoder()


@pytest.fixture(params=MODES)
def make(request, model, monkeypatch):
    return maker(request.param, model, monkeypatch)


def drafter(kind, model, texts=((0,),)):
    return {
        "ngram": NgramDrafter,
        "same": partial(ModelDrafter, model),
        "other": partial(ModelDrafter, TinyDecoder(seed=5)),
        "oracle": partial(OracleDrafter, texts, 0.8, 101),
    }[kind]


def seeded(params, prompts=PROMPTS):
    """A seed for each that tells `OracleDrafter` which text it is."""
    fields = {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    return [SamplingParams(**fields, seed=len(prompts) * 7 + i) for i in range(len(prompts))]


HOW = {"greedy": GREEDY, "sampling": WARM}


@pytest.mark.parametrize(
    ("make", "kind", "how", "counts"),
    [
        *(("eager", kind, how, (1, 7)) for kind in KINDS for how in HOW),
        *(("captured", kind, how, (7,)) for kind, how in zip(KINDS, [*HOW, *HOW], strict=True)),
        *(("split", kind, how, (1,)) for kind, how in zip(reversed(KINDS), [*HOW, *HOW], strict=True)),
    ],
    indirect=["make"],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else None,
)
def test_the_text_is_that_without_drafts(make, model, kind, how, counts):
    params = seeded(HOW[how])
    expected = [dense(model, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    for tokens in counts:
        engine = make(draft=drafter(kind, model, texts), draft_tokens=tokens)
        assert engine.generate(PROMPTS, params) == expected
    assert [engine.generate([p], q)[0] for p, q in zip(PROMPTS, params, strict=True)] == expected
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


@pytest.mark.parametrize(
    ("make", "seed"), [(mode, 4 * i + seed) for i, mode in enumerate(MODES) for seed in range(4)], indirect=["make"]
)
def test_any_mixture_gives_each_prompt_its_own_tokens(make, model, seed):
    """Rows, pages, chunks, lengths, stop tokens within what is accepted, penalties and preemptions."""
    rng, kind = random.Random(seed), KINDS[seed % 4]
    prompts, params = [], []
    count = rng.randint(2, 7)
    for i in range(count):
        prompts.append([rng.randrange(101) for _ in range(rng.choice([1, 2, 7, 16, 30]))])
        warmth = {"temperature": rng.choice([0.3, 1.5]), "top_k": rng.choice([0, 9]), "top_p": rng.choice([0.7, 1.0])}
        params.append(
            SamplingParams(
                max_tokens=rng.randint(1, 25), seed=count * rng.randrange(2**40) + i,
                stop=rng.sample(range(101), 5), **(warmth if rng.random() < 0.5 else {}),
            )
        )  # fmt: skip
    expected = [dense(model, prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    engine = make(
        draft=drafter(kind, model, texts),
        max_batch=rng.randint(1, 5),
        page_size=rng.choice([1, 3, 8]),
        chunk=rng.randint(1, 20),
        pages=rng.choice([None, 65]),
        draft_tokens=rng.choice([1, 4, 7, "auto"]),
    )
    assert engine.generate(prompts, params) == expected
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


def test_a_drafter_that_is_right_saves_steps(make, model):
    """A model that drafts for itself is always right, greedily and with the same random numbers."""
    for params in (GREEDY, WARM):
        engine = make(draft=partial(ModelDrafter, model), draft_tokens=3)
        engine.generate(PROMPTS[:1], params)
        plain = params.max_tokens - 1
        rounds = -(-plain // 4)
        # A round before anything is drafted, one that the host launched meanwhile, and one launched past the end.
        assert rounds <= engine.stats.decode_steps <= rounds + 2 + engine.executor.ahead
        assert engine.stats.decode_tokens == plain


def test_ngrams_draft_what_stood_there_before(make, model):
    """A text that repeats itself is accepted in whole rounds; the model is made to repeat by what it says next."""

    class Parrot(TinyDecoder):
        def run(self, stage, stream, tokens, cache):
            out = super().run(stage, stream, tokens, cache)
            return out * 0 + self.embed((tokens + 1) % 5)

        def leave(self, stream):
            return stream

    parrot = Parrot()
    table = parrot.embed(torch.arange(101))
    parrot.logits = lambda hidden: hidden.float() @ torch.nn.functional.normalize(table).T
    engine = make(draft=NgramDrafter, model=parrot, draft_tokens=4)
    (text,) = engine.generate([[0, 1, 2, 3, 4, 0, 1]], SamplingParams(max_tokens=40))
    assert text == [(2 + i) % 5 for i in range(40)]
    assert engine.stats.decode_steps < 40 / 3


@pytest.mark.parametrize("kind", ["ngram", "same"])
def test_what_was_rejected_is_never_read(model, kind):
    """Between rounds, all that lies behind each row's tokens is poisoned: keys, values, drafts' included."""
    params = seeded(GREEDY)
    expected = [dense(model, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    chosen = drafter(
        "other" if kind == "same" else "oracle", model, [[*p, *e] for p, e in zip(PROMPTS, expected, strict=True)]
    )
    engine = Engine(model, draft=chosen, draft_tokens=5, max_batch=4, max_context=64, page_size=4, chunk=8)
    caches = [engine.executor.cache]
    if kind == "same":
        caches.append(engine.executor.speculation.drafter.cache)
    with engine.executor.running():
        scheduler = engine.scheduler.open()
        sequences = [engine.request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        for sequence in sequences:
            scheduler.add(sequence)
        while not scheduler.idle:
            scheduler.step()
            for sequence in scheduler.running:
                for at in range(sequence.read, len(sequence.pages) * 4):
                    page, offset = sequence.pages[at // 4], at % 4
                    # The drafter reads the token before the newest one anew, and writes it first.
                    for tensor in [t for cache in caches for t in (*cache.keys, *cache.values)]:
                        tensor[page, offset] = 1e6
        scheduler.close()
    assert [s.output for s in sequences] == expected


def test_rows_come_and_go_and_are_preempted(make, model):
    """Requests that join later, few pages, one cancelled: who stays gets his own text."""
    params = seeded(SamplingParams(max_tokens=20, temperature=0.8))
    expected = [dense(model, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    for kind in ("ngram", "same"):
        engine = make(draft=drafter(kind, model), pages=1 + 14, draft_tokens=3, max_batch=3, page_size=4)
        with engine.executor.running():
            scheduler = engine.scheduler.open()
            sequences = [engine.request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
            scheduler.add(sequences[0])
            for step in range(1000):
                if scheduler.idle and step > 10:
                    break
                if step in (2, 4, 5):
                    scheduler.add(sequences[{2: 1, 4: 2, 5: 3}[step]])
                if step == 7:
                    scheduler.cancel(sequences[1])
                scheduler.step()
            scheduler.close()
        for i in (0, 2, 3):
            assert sequences[i].output == expected[i]
        assert engine.stats.preemptions > 0, kind


def alike(found, expected):
    """Texts, and the log-probabilities of their tokens, but for what a round's width rounds otherwise."""
    assert [s.output for s in found] == [s.output for s in expected]
    for a, b in zip(found, expected, strict=True):
        assert [told.token for told in a.logprobs] == [told.token for told in b.logprobs]
        for one, other in zip(a.logprobs, b.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)


def test_rows_with_penalties_take_one_token_a_round(make, model):
    params = [
        SamplingParams(max_tokens=12, repetition_penalty=1.5),
        SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2),
        SamplingParams(max_tokens=12, temperature=1.3, seed=5, min_p=0.3),
        GREEDY,
    ]
    expected = make(draft=None).complete(PROMPTS, params)
    engine = make(draft=partial(ModelDrafter, model), draft_tokens=3)
    alike(engine.complete(PROMPTS, params), expected)
    assert engine.stats.drafted_tokens == 0


def test_rounds_know_min_p_and_log_probabilities(make, model):
    """Each token of a round is told with its own place's logits; the drafter draws by min-p, too."""
    params = [
        SamplingParams(max_tokens=24, temperature=1.5, seed=3, logprobs=2, min_p=0.2),
        SamplingParams(max_tokens=17, logprobs=0),
        SamplingParams(max_tokens=20, temperature=1.5, seed=5, min_p=0.4, top_p=0.9),
        GREEDY,
    ]
    expected = make(draft=None).complete(PROMPTS, params)
    without = [replace(p, min_p=0.0) for p in params]
    assert [s.output for s in make(draft=None).complete(PROMPTS, without)] != [s.output for s in expected]
    engine = make(draft=partial(ModelDrafter, model), draft_tokens=3)
    alike(engine.complete(PROMPTS, params), expected)
    assert engine.stats.accepted_tokens > 0.8 * engine.stats.drafted_tokens > 0
    noisy = make(draft=partial(ModelDrafter, near(model)), draft_tokens=3)
    alike(noisy.complete(PROMPTS, params), expected)
    assert 0 < noisy.stats.accepted_tokens < 0.7 * noisy.stats.drafted_tokens


def near(model):
    """A model whose logits are those of `model` plus noise of half their standard deviation, fixed for each text."""
    other, weight = copy.copy(model), model.head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)).to(weight) * weight.std()
    other._modules = other._modules | {"head": linear(weight + 0.5 * noise)}
    return other


def test_draws_with_drafts_follow_the_target(model):
    """Chi-square of 5,000 draws, in texts of five tokens over many seeds, against the target's own chances. The drafter
    is often right and more often wrong, so that who keeps another token than was drawn is seen."""
    prompt, texts, length, warmth = [3, 1, 4], 1000, 5, 2.0
    engine = Engine(
        model, draft=partial(ModelDrafter, near(model)), draft_tokens=2, max_batch=100, max_context=16, page_size=4,
        chunk=8,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=length, temperature=warmth, top_k=4, seed=seed) for seed in range(texts)]
    seen = Counter(map(tuple, engine.generate([prompt] * texts, params)))
    accepted = engine.stats.accepted_at
    assert accepted[0] > 500, "the case would show little of what is accepted"
    assert accepted[1] > 50
    assert engine.stats.drafted_tokens > 2 * engine.stats.accepted_tokens, "nor would it of what is not"
    expected: dict[tuple[int, ...], float] = {(): texts}
    for _ in range(length):
        expected = {
            (*text, token): share * p
            for text, share in expected.items()
            for token, p in chances(model, [*prompt, *text], warmth)
        }
    assert set(seen) <= set(expected)
    common = [text for text, share in expected.items() if share >= 5]
    groups = [(expected[text], seen[text]) for text in common]
    groups.append((texts - sum(e for e, _ in groups), texts - sum(n for _, n in groups)))
    square = sum((n - e) ** 2 / e for e, n in groups)
    freedom = len(groups) - 1
    assert freedom > 30
    assert square < freedom + 4 * (2 * freedom) ** 0.5, "4 standard deviations of the chi-square distribution"


def chances(model, text, temperature):
    """Of the four tokens that may follow."""
    values, tokens = model.dense_logits(text)[0].topk(4)
    return list(zip(tokens.tolist(), (values / temperature).softmax(0).tolist(), strict=True))


def round_inputs(g, reach, table):
    """Inputs of a round for rows with these pages, that stand anywhere before `reach`."""
    n = len(table)
    positions = torch.randint(1, reach, (n,), generator=g).int()
    return {
        "positions": positions,
        "limits": positions + torch.randint(0, 30, (n,), generator=g).int(),
        "table": table.int(),
        "slots": torch.arange(1, n + 1).int(),
        "temperature": torch.rand(n, generator=g) + 0.1,
        "top_k": torch.randint(0, 50, (n,), generator=g).int(),
        "top_p": torch.rand(n, generator=g),
        "seed": torch.randint(0, 2**60, (n,), generator=g),
        "drawn": torch.randint(0, 101, (n,), generator=g),
    }


@pytest.mark.parametrize(
    ("make", "choice"),
    [
        ("captured", Choice()), ("split", Choice(sampling=True)),
        ("captured", Choice(sampling=True, min_p=True, logprobs=True)),
    ],
    indirect=["make"],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_the_rounds_are_proven(make, model, kind, choice):
    """Replay equals eager on outputs, buffers, caches and the drafter's state."""
    engine = make(draft=drafter(kind, model, PROMPTS), draft_tokens=3)
    g = torch.Generator().manual_seed(0)
    place = engine.executor.speculation.state
    state = {"history": place.history, "drafts": place.drafts, "found": place.found}
    caches = [engine.executor.cache, getattr(engine.executor.speculation.drafter, "cache", engine.executor.cache)]
    state |= {f"{i} {j}": t for i, cache in enumerate(caches) for j, t in enumerate([*cache.keys, *cache.values])}

    def reset():
        g = torch.Generator().manual_seed(1)
        for name, tensor in state.items():
            high = 4 if name == "found" else 3
            fresh = torch.randn(tensor.shape, generator=g) if tensor.is_floating_point() else torch.randint(
                0, high, tensor.shape, generator=g
            )  # fmt: skip
            tensor.copy_(fresh)

    for drafts in (0, 3):
        (runner,) = engine.executor.step("decode", **choice._asdict(), drafts=drafts).stages
        if choice.logprobs:
            state["told"] = engine.executor.choice_states()[0].told
        cases = [round_inputs(g, 20, torch.randint(1, 64, (n, 16), generator=g)) for n in (4, 1, 3)]
        for case in cases if choice.min_p else ():
            case["min_p"] = torch.rand(len(case["seed"]), generator=g)
        assert prove(runner, cases, reset=reset, state=state) == []


@pytest.fixture(scope="module")
def in_codes():
    """A model, and its texts of 56 tokens by cache, in single steps."""
    model, params = TinyDecoder(head_dim=64), seeded(SamplingParams(max_tokens=56))
    sizes = {"max_batch": 4, "max_context": 80, "chunk": 8}
    texts = {kv: Engine(model, **sizes | held(kv)).generate(PROMPTS, params) for kv in (None, CODES, TURNS)}
    assert texts[None] not in (texts[CODES], texts[TURNS]), "the cases would show no codes"
    return model, params, texts


@pytest.mark.parametrize("kv", [CODES, TURNS])
@pytest.mark.parametrize(
    ("mode", "kind"), [("eager", "ngram"), ("captured", "near"), ("split", "near"), ("captured", "oracle")]
)
def test_codes_roll_back_too(in_codes, mode, kind, kv, monkeypatch):
    """A TurboQuant cache, window and turn crossed with wrong drafts under way: the text of rounds is that of single
    steps."""
    model, params, texts = in_codes
    expected, make = texts[kv], maker(mode, model, monkeypatch)
    options = held(kv) | {"max_context": 80}
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    drafting = partial(ModelDrafter, near(model)) if kind == "near" else drafter(kind, model, texts)
    for tokens in {"eager": (1, 7), "captured": (7,), "split": (1,)}[mode]:
        engine = make(**options, draft=drafting, draft_tokens=tokens)
        assert engine.generate(PROMPTS, params) == expected
        assert kept_and_not(engine) > (5 if kind == "ngram" else 20)


def kept_and_not(engine):
    """How many drafts of a run were kept, or how many were not if these are fewer."""
    accepted = engine.stats.accepted_tokens
    return min(accepted, engine.stats.drafted_tokens - accepted)


def test_auto_reads_as_many_as_pay():
    sure, unsure = Acceptance(), Acceptance()
    for _ in range(20):
        sure.learn(7, 7)
        unsure.learn(7, 0)
    assert unsure.tokens(0) == 1
    assert sure.tokens(7) > 6
    assert unsure.tokens(7) < 1.2
    for _ in range(2000):
        unsure.learn(0, 0)
    assert unsure.tokens(7) == pytest.approx(Acceptance().tokens(7), rel=0.01), "doubt fades"


@pytest.mark.parametrize("costs", [(1.0, 1.7, 2.3, 3.5), (1.0, 1.65, 2.2, 2.5), (1.0, 1.15, 1.35, 1.65)])
def test_auto_finds_out_whether_drafts_pay(model, costs):
    """However dear they are, a drafter that is right is found at once, and one that is wrong costs next to nothing."""
    for right in (True, False):
        engine = Engine(model, draft=partial(ModelDrafter, model), max_batch=1, max_context=64)
        speculation, (row,) = engine.executor.speculation, [engine.request([1, 2, 3], GREEDY)]
        at = 1, False, False
        speculation.seconds[at] = dict(zip((0, 1, 3, 7), costs, strict=True))
        seconds, tokens = 0.0, 0
        for _ in range(1000):
            count = speculation.choose([row], at)
            row.drafts.learn(count, count if right else 0)
            seconds += speculation.seconds[at][count]
            tokens += 1 + (count if right else 0)
        most = max((1 + count) / cost for count, cost in speculation.seconds[at].items()) if right else 1.0
        assert tokens / seconds > 0.98 * most


def test_auto_weighs_tokens_against_time(model):
    """None where nothing waits, but of a drafter that writes as many as it is asked for; else what gives most."""
    for make_drafter, idle in ((NgramDrafter, 0), (partial(ModelDrafter, model), 7)):
        engine = Engine(model, draft=make_drafter, max_batch=1, max_context=64)
        speculation, (row,) = engine.executor.speculation, [engine.request([1, 2, 3], GREEDY)]
        at = 1, False, False
        speculation.seconds[at] = {0: 1.0, 1: 1.05, 3: 1.1, 7: 1.2}
        assert speculation.choose([row], at) == idle
        row.drafts.waiting = 7
        assert speculation.choose([row], at) == 7
        speculation.seconds[at] = {0: 1.0, 1: 1.4, 3: 2.9, 7: 5.0}
        assert speculation.choose([row], at) == 1
        tries = 0
        while count := speculation.choose([row], at):
            row.drafts.learn(count, 0)
            tries += 1
        assert 0 < tries < 8
        idle = 0
        while not speculation.choose([row], at):
            row.drafts.learn(0, 0)
            idle += 1
        assert 20 < idle < 200, "tried again, not at once"


def test_who_wants_no_more_gets_no_more(make, model):
    """Told so within a round, of which further tokens are there already."""
    (expected,) = make(draft=None).generate(PROMPTS[:1], GREEDY)
    engine = make(draft=partial(ModelDrafter, model), draft_tokens=7)
    seen: list[int] = []

    def enough(_: int, token: int) -> bool:
        seen.append(token)
        return len(seen) == 4

    assert engine.generate(PROMPTS[:1], GREEDY, enough) == [expected[:4]] == [seen]
    assert engine.generate(PROMPTS[:1], GREEDY) == [expected]
    assert engine.scheduler.allocator.free == engine.scheduler.allocator.capacity


def test_a_draft_that_gives_nan_changes_no_text(make, monkeypatch):
    """A wrong draft whose keys and values overflow: what it left in the cache is cleared, nobody is told an error."""
    broken = TinyDecoder()
    embed = broken.embed.forward
    poisoned = lambda tokens: embed(tokens).masked_fill((tokens == 100).unsqueeze(-1), torch.nan)  # noqa: E731
    monkeypatch.setattr(broken.embed, "forward", poisoned)
    prompts = [prompt for prompt in PROMPTS if 100 not in prompt]
    expected = make(draft=None, model=broken).generate(prompts, GREEDY)
    assert not any(100 in answer for answer in expected), "the case would be about the text itself"
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    for text, prompt in zip(texts, prompts, strict=True):
        text[len(prompt) + 5 :: 4] = [99] * len(text[len(prompt) + 5 :: 4])  # named 100 where the oracle errs
    engine = make(draft=partial(OracleDrafter, texts, 0.5, 101), draft_tokens=7, model=broken)
    assert engine.generate(prompts, seeded(GREEDY, prompts)) == expected
    assert engine.stats.preemptions > 0, "the case would show no such draft"


@pytest.mark.parametrize("tokens", [0, 8, "three", 2.5, True])
def test_wrong_counts_say_what_is_allowed(model, tokens):
    with pytest.raises(ValueError, match=r"draft_tokens: got .*; allowed are 1 to 7, and 'auto'"):
        Engine(model, draft=NgramDrafter, draft_tokens=tokens)


def test_a_drafting_model_must_reach_as_far(model):
    with pytest.raises(ValueError, match="loaded for 32 tokens; the engine's max_context is 64"):
        Engine(model, draft=partial(ModelDrafter, TinyDecoder(max_context=32)), max_context=64)
