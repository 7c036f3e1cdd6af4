"""A soak of everything that happens to requests: they join, leave, are cancelled and make room for each other.

A round drives a scheduler for so many decode steps with requests of every length, some with penalties, in a cache that
is too small for all of them. At its end the rows that decode are held to eager passes from nothing (`tools/rounds.py`),
and when all have left every page and slot must be free. Caches of several kinds take turns, an engine each. A round
depends on its number and on nothing else, so that a soak which was stopped goes on where its file ends.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from onegraph.engine.decoder import Model
from onegraph.engine.engine import Engine
from onegraph.engine.exact_window import page_size_of
from onegraph.engine.inputs import block_table
from onegraph.engine.params import SamplingParams
from onegraph.engine.sequence import Sequence as Request
from onegraph.formats.turboquant import parse_kv
from tools.rounds import (
    Round,
    Verdict,
    addresses,
    allowed,
    append,
    grown,
    judge,
    looped,
    memory,
    memory_problems,
    read_rounds,
    row_drift,
)

EXACT = "exact"  # keys and values in the model's dtype
ROWS = 2  # that are held to passes from nothing, which cost more than the steps: the longest
CROWD = 2  # requests that wait, besides those that have a row
CANCELLED = 1 / 64  # of steps before which somebody goes
Make = Callable[[bool, str], Engine]


def soak_traffic(
    make: Make,
    *,
    kvs: Sequence[str],
    steps: int,
    path: Path,
    per_round: int,
    seed: int = 0,
    seconds: float | None = None,
    on_round: Callable[[Round, int], None] | None = None,
) -> Verdict:
    """Run until `path` holds `steps` decode steps, or a round, the first or a later one, ends after `seconds`; judge
    what there is.

    Args:
        make: an engine with a cache of the second argument's kind; True: the one under test, which should have fewer
            pages than its rows can fill, False: an eager one of one row to compare with.
        path: the file of rounds, as of `soak`. per_round: decode steps of a round.

    Raises ValueError where the file is of another soak, FloatingPointError where the model gives NaN.
    """
    engines = {kv: (make(True, kv), make(False, kv)) for kv in kvs}
    one = engines[kvs[0]][0]
    settings = {"seed": seed, "rows": one.max_batch, "context": one.max_context, "kvs": list(kvs), "round": per_round}
    rounds = read_rounds(path, settings)
    run = 1 + max((r.run for r in rounds), default=-1)
    if sum(r.steps for r in rounds) < steps:  # all that is built later would be growth
        for engine, _ in engines.values():
            _drive(engine, random.Random(seed), 4)
    before = {kv: addresses(engine) for kv, (engine, _) in engines.items()}
    began, kept = monotonic(), len(rounds)
    while (done := sum(r.steps for r in rounds)) < steps:
        if seconds is not None and len(rounds) > kept and monotonic() - began >= seconds:
            break
        number = len(rounds)
        kv = kvs[number % len(kvs)]
        engine, other = engines[kv]
        with engine.executor.running(), closing(engine.scheduler.open()) as scheduler:
            seen = _traffic(engine, random.Random(seed * 1_000_003 + number), min(per_round, steps - done))
            cancelled = sum(request.cancelled for request in seen)
            drift, noise, plain, shaken = _held(engine, other)
            for request in [*scheduler.running, *scheduler.waiting]:
                scheduler.cancel(request)
            scheduler.step()
            _all_free(engine)
            stats = scheduler.stats
        now = addresses(engine)
        texts = [request.output for request in seen if request.output]
        this = Round(
            number=number, steps=stats.decode_steps, run=run, memory=memory(engine), kv=kv,
            moved=sorted(name for name, at in before[kv].items() if now.get(name) != at),
            drift=drift, noise=noise, plain=plain, shaken=shaken,
            looped=sum(map(looped, texts)) / max(1, sum(map(len, texts))), tokens=texts[0][-24:],
            joined=len(seen), cancelled=cancelled, preempted=stats.preemptions,
        )  # fmt: skip
        append(path, asdict(this))
        rounds.append(this)
        if on_round is not None:
            on_round(this, done + this.steps)
    return _judged(rounds, *allowed(one))


def crowded(model: Model, rows: int, context: int, kv: str, tested: bool) -> dict[str, Any]:
    """What an `Engine` of a soak is made with: a cache of this kind, under test of half the pages that its rows may
    fill and enough for one of them."""
    per_row = -(-context // page_size_of(model, parse_kv(kv)))
    pages = {"pages": 1 + max(per_row, rows * per_row // 2)} if tested else {}
    return {"kv": None if kv == EXACT else kv, **pages}


def _drive(engine: Engine, draw: random.Random, steps: int) -> None:
    with engine.executor.running(), closing(engine.scheduler.open()):
        _traffic(engine, draw, steps)


def _traffic(engine: Engine, draw: random.Random, steps: int) -> list[Request]:
    """So many decode steps; every request that was there, those that were cancelled on the way marked so."""
    scheduler, seen = engine.scheduler, list[Request]()
    while scheduler.stats.decode_steps < steps:
        while len(scheduler.running) + len(scheduler.waiting) < engine.max_batch + CROWD:
            seen.append(_request(engine, draw))
            scheduler.add(seen[-1])
        if draw.random() < CANCELLED:
            scheduler.cancel(draw.choice([*scheduler.running, *scheduler.waiting]))
        for request, _ in scheduler.step():
            if request.error is not None:
                raise request.error
    return seen


def _request(engine: Engine, draw: random.Random) -> Request:
    """Of any length that fits, drawn at temperature 1; one in four with a penalty."""
    room = engine.max_context
    length = draw.randint(2, room // 2)
    count = draw.randint(1, room - length)
    prompt = [draw.randrange(engine.model.config.vocab_size) for _ in range(length)]
    penalty = draw.choice((0.0, 0.0, 0.0, 0.5))
    seed = draw.randrange(2**31)
    return engine.request(
        prompt, SamplingParams(max_tokens=count, temperature=1.0, seed=seed, frequency_penalty=penalty)
    )


def _held(engine: Engine, other: Engine) -> tuple[float, float, float, int]:
    """Drift, noise, plain and shaken of the longest rows that decode, the largest of each."""
    scheduler, per_row = engine.scheduler, engine.executor.sizes.per_row
    scheduler.drain()
    rows = sorted((s for s in scheduler.running if s.decoding), key=lambda s: s.read)[-ROWS:]
    found = [row_drift(engine, other, s.tokens(0, s.read), block_table([s], per_row)[0], s.slot, s.exact) for s in rows]
    return tuple(max(each) for each in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0, 0)


def _all_free(engine: Engine) -> None:
    """Raises RuntimeError for pages or slots that nobody has and nobody can have."""
    allocator, slots = engine.scheduler.allocator, len(engine.scheduler.free_slots)
    if allocator.free != allocator.capacity or slots != engine.max_batch:
        raise RuntimeError(
            f"after all requests left {allocator.free} of {allocator.capacity} pages and {slots} of "
            f"{engine.max_batch} slots are free: the scheduler loses some"
        )


def _judged(rounds: Sequence[Round], allowed_growth: int, eps: float) -> Verdict:
    """Each kind of cache by itself, but for memory, which is the process's. Codes that are a tie but for rounding fall
    either way, as a router's choices do: how far orders of summation lie apart then says nothing of the dtype."""
    by_kv = {
        kv: judge([r for r in rounds if r.kv == kv], inf, eps if kv == EXACT else inf)
        for kv in dict.fromkeys(r.kv for r in rounds)
    }
    found, growth = list(by_kv.values()), grown(rounds)
    problems = [f"{kv}: {problem}" for kv, each in by_kv.items() for problem in each.problems]
    return Verdict(
        steps=sum(each.steps for each in found),
        rounds=len(rounds),
        growth=growth,
        drift=max(each.drift for each in found),
        noise=max(each.noise for each in found),
        looped=max(each.looped for each in found),
        problems=(*memory_problems(growth, allowed_growth), *problems),
    )
