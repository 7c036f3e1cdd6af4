"""Requests that join and leave between steps: each gets the tokens that it gets alone, and no page is lost."""

import re
from collections import Counter
from contextlib import closing
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.scheduler import GROWTH
from onegraph.engine.sequence import StepError
from tiny_decoder import TinyDecoder

OPTIONS = {"max_batch": 3, "max_context": 40, "page_size": 4, "chunk": 8}
TURBO = {"page_size": 16, "max_context": 96, "kv": "turboquant:4,window=16"}
START = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
PROMPTS = [START, [*START, 3, 6], [*START[:8], 50, 51, 52, 53, 54], [2], [*START, *START[:9]]]


@cache
def model(head_dim=16):
    return TinyDecoder(head_dim=head_dim)


def engine(ahead=0, **options):
    made = Engine(model(64 if "kv" in options else 16), **OPTIONS | options)
    made.executor.ahead = ahead  # of eager steps, too, the tokens may be read later
    return made


@cache
def alone(prompt, params, kv=None):
    return engine(**({} if kv is None else TURBO)).generate([list(prompt)], params)[0]


def run(scheduler):
    seen = []
    while not scheduler.idle:
        seen += scheduler.step()
    return seen


def whole(e):
    """Whether nobody holds a page, a slot or the engine."""
    return e.scheduler.allocator.free == e.scheduler.allocator.capacity and sorted(e.scheduler.free_slots) == [1, 2, 3]


class Machine(RuleBasedStateMachine):
    """Requests at any moment, cancelled at any moment, in a cache that holds one long sequence and little more."""

    ahead, share, interleave = 0, True, True
    options: dict[str, object] = {"pages": 1 + 11}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.engine = engine(self.ahead, **self.options)
        self.scheduler = self.engine.scheduler.open(interleave=self.interleave, share=self.share)
        self.requests = []

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=st.integers(1, 18),
        seed=st.none() | st.integers(0, 3),
        stop=st.booleans(),
    )
    def add(self, prompt, count, seed, stop):
        warm = {} if seed is None else {"temperature": 1.2, "seed": seed}
        params = SamplingParams(max_tokens=count, stop=tuple(range(0, 101, 9)) if stop else (), **warm)
        self.requests.append(self.engine.request(prompt, params))
        self.scheduler.add(self.requests[-1])

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.scheduler.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.cancel(data.draw(st.sampled_from(self.requests)))

    @invariant()
    def pages_are_counted(self):
        held = Counter(page for s in self.scheduler.running for page in s.pages)
        allocator = self.engine.scheduler.allocator
        assert {page: n for page, n in enumerate(allocator.users) if n} == held
        assert allocator.free == allocator.capacity - len(held)
        assert len({s.slot for s in self.scheduler.running}) == len(self.scheduler.running)

    def teardown(self):
        run(self.scheduler)
        self.scheduler.step()
        for request in self.requests:
            wanted = alone(tuple(request.prompt), request.params, self.options.get("kv"))
            assert request.output == wanted[: len(request.output)]
            assert request.cancelled or request.output == wanted
        self.scheduler.close()
        assert whole(self.engine)


class MachineAhead(Machine):
    ahead = 1


class MachineTurboquant(Machine):
    ahead, interleave = 1, False
    options = TURBO | {"pages": 1 + 6}


few = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestMachine, TestMachineAhead, TestMachineTurboquant = (m.TestCase for m in (Machine, MachineAhead, MachineTurboquant))
TestMachine.settings = TestMachineAhead.settings = few
TestMachineTurboquant.settings = settings(few, max_examples=5)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kv", [None, TURBO["kv"]])
def test_the_youngest_makes_room_and_goes_on_with_the_same_tokens(ahead, kv):
    """Three texts that fit together at first and not to their end."""
    options = {"pages": 1 + 10} if kv is None else TURBO | {"pages": 1 + 5}
    e = engine(ahead, **options)
    params = SamplingParams(max_tokens=20 if kv is None else 40, temperature=1.0, seed=3, frequency_penalty=0.5)
    with closing(e.scheduler.open()) as scheduler:
        requests = [e.request(prompt, params) for prompt in PROMPTS[:3]]
        for request in requests:
            scheduler.add(request)
        finished = [request for request, _ in run(scheduler) if not request.left]
    assert e.stats.preemptions
    assert finished[0] is requests[0], "the oldest is never the one to go"
    assert [r.output for r in requests] == [alone(tuple(r.prompt), params, kv) for r in requests]
    assert whole(e)


def test_more_fit_than_pages_for_their_full_length():
    e = engine(pages=1 + 14)
    params = SamplingParams(max_tokens=20, stop=tuple(range(0, 101, 9)))
    with closing(e.scheduler.open(share=False)) as scheduler:
        for prompt in PROMPTS[:3]:
            scheduler.add(e.request(prompt, params))
        scheduler.step()
        assert len(scheduler.running) == 3, "25 pages hold their full length, 12 their prompts and a token"


def test_pages_that_nobody_will_need_are_not_kept_back():
    e = engine(pages=1 + 2 * 8)
    with closing(e.scheduler.open(interleave=False)) as scheduler:
        for prompt in PROMPTS[:2]:
            scheduler.add(e.request(prompt, SamplingParams(max_tokens=20 - (len(prompt) - 12))))
        run(scheduler)
    assert e.stats.decode_steps == 19, "both together all the way"


def test_prompts_with_the_same_beginning_read_it_once():
    e = engine(max_batch=3)
    params = SamplingParams(max_tokens=4)
    first, second = [*START, 1], [*START, 2, 3]
    with closing(e.scheduler.open()) as scheduler:
        for prompt in (first, second):
            scheduler.add(e.request(prompt, params))
            run(scheduler)
        assert e.stats.shared_tokens == 12
        assert e.stats.prefill_tokens == len(first) + len(second) - 12
        third = e.request(second + alone(tuple(second), params), params)  # the next turn of a conversation
        scheduler.add(third)
        run(scheduler)
        assert e.stats.shared_tokens == 12 + 16, "the answer's pages, too"
        assert third.output == alone(tuple(third.prompt), params)
    assert whole(e)
    with closing(e.scheduler.open(share=False)) as scheduler:
        scheduler.add(e.request(first, params))
        run(scheduler)
    assert e.stats.shared_tokens == 0


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("chunk", [3, 8, 32])
def test_prompts_that_come_together_are_read_once(chunk, ahead):
    """Up to the last full page: answers of `n`, and prompts with a beginning in common."""
    e = engine(ahead, chunk=chunk)
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    prompts = [[*START, 1], [*START, 1], [*START, 2, 3]]
    with closing(e.scheduler.open()) as scheduler:
        requests = [e.request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        for request in requests:
            scheduler.add(request)
        scheduler.step()
        assert len(scheduler.running) == 3, "they were admitted before anything was read"
        run(scheduler)
    assert e.stats.prefill_tokens == 12 + 1 + 1 + 2
    assert e.stats.shared_tokens == 2 * 12
    for request, prompt, each in zip(requests, prompts, params, strict=True):
        assert request.output == alone(tuple(prompt), each)
    assert whole(e)


def test_codes_are_not_shared():
    """Their pages depend on how a prompt was cut, and the latest tokens lie elsewhere."""
    e = engine(**TURBO)
    with closing(e.scheduler.open()) as scheduler:
        for _ in range(2):
            scheduler.add(e.request(START * 3, SamplingParams(max_tokens=2)))
            run(scheduler)
    assert e.stats.shared_tokens == 0


def test_rows_decode_between_the_chunks_of_a_long_prompt():
    e = engine(1, chunk=2)
    with closing(e.scheduler.open()) as scheduler:
        short = e.request([2], SamplingParams(max_tokens=12))
        scheduler.add(short)
        scheduler.step()
        scheduler.add(e.request([5] * 20, SamplingParams(max_tokens=1)))
        for _ in range(20):
            scheduler.step()
        assert len(short.output) >= 9, "ten chunks, a decode step between each two"


def test_a_block_table_changes_seldom(monkeypatch):
    """Rows get pages ahead, so that steps chain on the device: one rewriting in GROWTH steps and none of all rows."""
    e = engine(1, max_context=256, chunk=64)
    calls = []
    for name in ("load", "load_tables"):
        method = getattr(e.executor, name)
        monkeypatch.setattr(e.executor, name, lambda rows, name=name, method=method: (calls.append(name), method(rows)))
    e.generate([[2], [3, 4]], SamplingParams(max_tokens=200))
    assert calls == ["load", *["load_tables"] * (200 // GROWTH)]


def test_a_nan_ends_its_own_request_and_no_other():
    damaged = TinyDecoder()
    e = Engine(damaged, **OPTIONS)
    params = SamplingParams(max_tokens=12)
    wanted = [alone(tuple(prompt), params) for prompt in PROMPTS[:2]]
    bad = next(t for t in range(101) if not any(t in p + w for p, w in zip(PROMPTS, wanted, strict=False)))
    damaged.embed.weight[bad] = torch.nan
    with closing(e.scheduler.open()) as scheduler:
        sound = [e.request(prompt, params) for prompt in PROMPTS[:2]]
        for request in (sound[0], lost := e.request([bad, 1], params), sound[1]):
            scheduler.add(request)
        events = run(scheduler)
    assert (lost, -1) in events
    assert "NaN at position 2" in str(lost.error)
    assert [request.output for request in sound] == wanted
    assert whole(e)


def spoiled(bad, **options):
    """An engine whose model gives NaN for one token, and which looks at whole chunks and tables, as on a GPU."""
    damaged = TinyDecoder()
    damaged.embed.weight[bad] = torch.nan
    e = Engine(damaged, **OPTIONS | {"max_batch": 2, "pages": 1 + 10} | options)
    e.executor.trims = False
    return e


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_cancelled_prompt_left_reaches_nobody(ahead):
    """NaN in pages of somebody who left before his prompt was read: attention masks it for the next owner by 0, and
    0 * NaN is NaN where a chunk's padding is in sight."""
    params = SamplingParams(max_tokens=12)
    prompt = PROMPTS[1]
    wanted = alone(tuple(prompt), params)
    bad = next(t for t in range(101) if t not in prompt + wanted)
    e = spoiled(bad)
    e.executor.ahead = ahead
    with closing(e.scheduler.open()) as scheduler:
        scheduler.add(lost := e.request([bad] * 36, SamplingParams(max_tokens=2)))
        for _ in range(3):
            scheduler.step()
        scheduler.cancel(lost)
        for _ in range(2):
            scheduler.add(sound := e.request(prompt, params))
        run(scheduler)
    assert sound.error is None
    assert sound.output == wanted


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_nan_reaches_nobody_who_shares_the_beginning(ahead, interleave):
    """In the chunk of a NaN the tokens before it get one too, by what masks it: pages that others begin with, and that
    they may take as soon as the chunk is launched. Requests as a client sends them, together."""
    params = SamplingParams(max_tokens=12)
    prompts = [PROMPTS[1], PROMPTS[4]]
    wanted = [alone(tuple(prompt), params) for prompt in prompts]
    bad = next(t for t in range(101) if not any(t in p + w for p, w in zip(prompts, wanted, strict=True)))
    e = spoiled(bad, chunk=32, max_batch=3, pages=1 + 30)
    e.executor.ahead = ahead
    with closing(e.scheduler.open(interleave=interleave)) as scheduler:
        scheduler.add(lost := e.request([*START, bad], params))
        sound = [e.request(prompt, params) for prompt in prompts]
        for request in sound:
            scheduler.add(request)
        run(scheduler)
    assert "NaN" in str(lost.error)
    assert [request.error for request in sound] == [None, None]
    assert [request.output for request in sound] == wanted
    assert whole(e)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("broken", ["state", "prefill logprobs", "decode logprobs", "decode logprobs shaping"])
def test_a_step_that_cannot_be_built_ends_who_needs_it(broken, ahead, monkeypatch):
    """The others get their tokens: also the row that came later, and needs more than a plain step that can be built."""
    plain, counted = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, frequency_penalty=1.5)
    kind, *parts = broken.split()
    e = engine(ahead)
    build = e.executor._build

    def fails(decoding, choice, exact):
        if (kind == "decode") == decoding and all(getattr(choice, part) for part in parts):
            raise torch.OutOfMemoryError("of a graph,\nwhich is large")
        return build(decoding, choice, exact)

    if broken == "state":
        monkeypatch.setattr(e.executor, "choice_states", lambda: torch.empty(1 << 60))
    else:
        monkeypatch.setattr(e.executor, "_build", fails)
    sound = [e.request(prompt, params) for prompt, params in zip(PROMPTS, (plain, counted), strict=False)]
    lost = e.request(PROMPTS[3], SamplingParams(max_tokens=9, logprobs=1))
    with closing(e.scheduler.open(interleave=False)) as scheduler:
        for request in [*sound, lost] if "shaping" in parts else [lost, *sound]:
            scheduler.add(request)
        events = run(scheduler)
    assert (lost, -1) in events
    for request in [lost, sound.pop()] if broken == "state" else [lost]:
        assert re.search(r"the \w+ step with [\w, -]+ could not be built: [^\n]*; leave [^\n]*$", str(request.error))
    for request in sound:
        assert request.output == alone(tuple(request.prompt), request.params)
    assert whole(e)
    with pytest.raises(StepError, match="could not be built"):
        e.generate([[2]], SamplingParams(logprobs=1, presence_penalty=1))


def test_a_nan_ends_a_prompt_at_its_chunk():
    e = spoiled(3)
    with closing(e.scheduler.open()) as scheduler:
        scheduler.add(lost := e.request([1, 3] + [1] * 34, SamplingParams(max_tokens=2)))
        run(scheduler)
    assert "NaN at position 8" in str(lost.error)
    assert e.stats.prefill_tokens == 8


def test_a_step_after_the_end_may_have_met_a_nan():
    """Read a step late, a row runs on behind its stop token: what it leaves then is cleared away, too."""
    params = SamplingParams(max_tokens=12)
    wanted = alone(tuple(START), params)
    stop = next(t for t in wanted if t not in START + wanted[:1])
    e = spoiled(stop)
    e.executor.ahead = 1
    with closing(e.scheduler.open()) as scheduler:
        scheduler.add(e.request(START, SamplingParams(max_tokens=12, stop=(stop,))))
        run(scheduler)
    with closing(e.scheduler.open()):
        assert all(t.isfinite().all() for t in e.executor.cache.tensors())


def test_what_nobody_waited_for_is_cleared_away():
    e = spoiled(3)
    e.executor.ahead = 1
    with closing(e.scheduler.open()) as scheduler:
        scheduler.add(e.request([3] * 20, SamplingParams(max_tokens=2)))
        scheduler.step()
    assert not all(t.isfinite().all() for t in e.executor.cache.tensors())
    with closing(e.scheduler.open()):
        assert all(t.isfinite().all() for t in e.executor.cache.tensors())
