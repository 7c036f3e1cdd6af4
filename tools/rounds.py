"""Thousands of steps, watched: memory, storage addresses, drift of the logits, texts that go round in circles.

A soak is rounds. Each round generates from new prompts, sampled, until the context is full; then the last position's
logits are computed from the state that all those steps left behind, and again from nothing, by eager passes over the
same tokens that cut the text in other pieces, down to a decode step's few tokens, and so sum in other orders all along
the text. The state must lie as close to one of them as they lie to one another.

A choice (which expert, which entries) that is a tie but for rounding may fall otherwise in the state than in each of
those passes, and all that follows differs by a thousand roundings. So a state that lies near none of them is compared
with passes whose embeddings are shaken by a few roundings, which turn such ties over and nothing else: one of them is
then where the state is, to the last roundings. None is, if the state is wrong. (In bfloat16 every text has such ties,
and passes lie as far from one another as the state does.)

Each round is one line of a file, written when it is over; rounds depend on their number and on nothing else, so a soak
that was killed goes on where the file ends.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.files import writing

MEGABYTE = 1 << 20
GROWTH = 32 * MEGABYTE  # that a process may gain after its first round: its allocators keep what new shapes needed
GPU_GROWTH = MEGABYTE  # that a device may gain, where every tensor is counted
LOOP, PERIOD = 64, 16  # a loop: so many tokens in a row that repeat with a period of at most so many
CHUNK = 256  # tokens at once of the first pass from nothing that the state is compared with
# Passes that it is compared with as well: tokens at once, and how many last ones come one by one. Products of few, of
# some and of many tokens are different kernels and sum in orders of their own.
ORDERS = ((96, 16), (33, 0), (4, 0))
TIMES = 4.0  # drift may be so many times what another order of summation does
FLOOR = 1e-5  # and that is taken for no less than this
QUIET = 1e-4  # up to here it is rounding in a typical round, beyond choices that fell otherwise
# Orders of summation may differ by so many units of the dtype's rounding in a typical round: 1.2e-4 in float32, where
# sound models make 1e-6 to 4e-6 and one whose kernel raced made 1e-3 to 1e-2 (H200, tiny DeepSeek-V4). Below float32 a
# router's choices set it, and it says nothing.
ROUNDINGS = 1000
# Shaken passes of a row at most, and by how many roundings each element in turn: in float32 they lie 1e-6 to 7e-6 from
# one that is not shaken, and two roundings turned a tie over that a GPU had turned in three passes of eight.
SHAKEN, SHAKES = 24, (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round saw.

    number, steps: of this round. run: which process, counted from 0. memory: bytes of each device (on a CPU of the
    process). moved: storages whose address is not what it was. drift: ‖logits of the state − logits from nothing‖ /
    ‖the latter‖ for the nearest pass from nothing, the largest of the rows; noise: the same of those passes, each to
    the nearest other one, the largest. looped: share of tokens in loops. tokens: the last ones of row 0, to look at.
    plain: drift from the first pass alone. shaken: passes that were shaken until one was near enough, the most of the
    rows; 0: none had to be.
    """

    number: int
    steps: int
    run: int
    memory: list[int]
    moved: list[str]
    drift: float
    noise: float
    looped: float
    tokens: list[int]
    plain: float = 0.0
    shaken: int = 0
    kv: str = ""
    joined: int = 0
    cancelled: int = 0
    preempted: int = 0


@dataclass(frozen=True)
class Verdict:
    """`problems` are sentences; none: the soak passed."""

    steps: int
    rounds: int
    growth: int
    drift: float
    noise: float
    looped: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


def soak(
    make: Callable[[bool], Engine],
    *,
    steps: int,
    path: Path,
    batch: int = 2,
    prompt: int = 16,
    seed: int = 0,
    on_round: Callable[[Round, int], None] | None = None,
) -> Verdict:
    """Run until `path` holds `steps` steps, and judge.

    Args:
        make: an engine for `batch` rows; True: the one under test, False: an eager one to compare with.
        path: the file of rounds (JSON lines). Rounds that it holds are not run again; they must be of the same seed,
            batch and prompt.
        prompt: tokens of each random prompt.
        on_round: called as on_round(round, steps done).

    Raises ValueError where the file is of another soak, FloatingPointError where the model gives NaN.
    """
    engine, other = make(True), make(False)
    if len(engine.model.ranks) > 1:
        raise ValueError("soak: got a model on several ranks; it looks into the state of one")
    room = engine.max_context - prompt
    if room < 2 or steps < 1 or batch < 1:
        raise ValueError(
            f"a context of {engine.max_context} and prompts of {prompt} leave {room} steps a round, of {steps} in "
            f"{batch} rows; a round needs 2 steps, and there must be one or more of each"
        )
    settings = {"seed": seed, "batch": batch, "prompt": prompt, "context": engine.max_context}
    rounds = read_rounds(path, settings)
    run = 1 + max((r.run for r in rounds), default=-1)
    before = addresses(engine)
    done = sum(r.steps for r in rounds)
    while done < steps:
        number, count = len(rounds), min(room, max(2, steps - done))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        prompts = torch.randint(0, engine.model.config.vocab_size, (batch, prompt), generator=generator).tolist()
        params = [
            SamplingParams(max_tokens=count, temperature=1.0, seed=seed * 1_000_003 + number * batch + i)
            for i in range(batch)
        ]
        texts = [a + b for a, b in zip(prompts, engine.generate(prompts, params), strict=True)]
        inputs = _inputs(engine)[0]
        rows = [  # what was drawn last was never read
            row_drift(engine, other, text[:-1], pages, int(slot))
            for text, pages, slot in zip(texts, inputs["table"], inputs["slots"], strict=False)
        ]
        drift, noise, plain, tried = (max(each) for each in zip(*rows, strict=True))
        now = addresses(engine)
        this = Round(
            number=number,
            steps=count,
            run=run,
            memory=memory(engine),
            moved=sorted(name for name, at in before.items() if now.get(name) != at),
            drift=drift,
            noise=noise,
            looped=sum(looped(text[prompt:]) for text in texts) / (batch * count),
            tokens=texts[0][-24:],
            plain=plain,
            shaken=int(tried),
        )
        append(path, asdict(this))
        rounds.append(this)
        done += count
        if on_round is not None:
            on_round(this, done)
    return judge(rounds, *allowed(engine))


def allowed(engine: Engine) -> tuple[int, float]:
    """For `judge`: the bytes that an engine's process or device may gain, and its dtype's rounding."""
    growth = GROWTH if engine.model.devices[0].type == "cpu" else GPU_GROWTH
    return growth, torch.finfo(engine.model.dtype).eps


def grown(rounds: Sequence[Round]) -> int:
    """Bytes that a device's memory grew by within a process, once each kind of cache had its first round: what that
    builds stays."""
    growth = 0
    for run in {r.run for r in rounds}:
        mine = [r for r in rounds if r.run == run]
        first, *rest = mine[len({r.kv for r in mine}) - 1 :]
        growth = max([growth, *(max(b - a for a, b in zip(first.memory, r.memory, strict=True)) for r in rest)])
    return growth


def memory_problems(growth: int, allowed: float) -> list[str]:
    if growth <= allowed:
        return []
    return [f"memory grew by {growth / MEGABYTE:.1f} MB after the first round, {allowed / MEGABYTE:.0f} may be"]


def judge(rounds: Sequence[Round], allowed_growth: float = GROWTH, eps: float = 2.0**-23) -> Verdict:
    """What the rounds say together, with one kind of cache. `eps`: the rounding of the model's dtype."""
    growth = grown(rounds)
    drifts = [r.drift if math.isfinite(r.drift) else math.inf for r in rounds]
    worst = rounds[drifts.index(max(drifts))]
    looped = max(r.looped for r in rounds)
    problems = memory_problems(growth, allowed_growth)
    if moved := sorted({name for r in rounds for name in r.moved}):
        problems.append(f"{len(moved)} storages moved, the first is {moved[0]}: a graph holds the old address")
    # One limit for all rounds: what rounding does where ties are rare, since those are looked for; else, as in
    # bfloat16, where every text has some, the most that was seen.
    typical = max(median_low(r.noise for r in rounds), FLOOR)
    allowed = TIMES * (typical if typical <= QUIET else max(r.noise for r in rounds))
    if not worst.drift <= allowed:
        problems.append(
            f"logits drifted by {worst.drift:.2e} in round {worst.number}; another order of summation makes "
            f"{worst.noise:.2e} there, {allowed:.2e} are let pass"
        )
    elif not (lasting := median_low(drifts)) <= TIMES * typical:
        problems.append(
            f"logits drifted by {lasting:.2e} or more in half of the rounds; another order of summation makes "
            f"{typical:.2e}, {TIMES * typical:.2e} are let pass"
        )
    if not (apart := median_low(r.noise for r in rounds)) <= ROUNDINGS * eps:
        problems.append(
            f"passes over the same tokens, cut otherwise, differ by {apart:.2e} or more in half of the rounds; "
            f"rounding makes at most {ROUNDINGS * eps:.1e}: some op differs from run to run, or between shapes"
        )
    if looped > 0.2:
        problems.append(f"{looped:.0%} of a round's tokens were loops of up to {PERIOD} tokens, though they were drawn")
    steps = sum(r.steps for r in rounds)
    return Verdict(steps, len(rounds), growth, worst.drift, worst.noise, looped, tuple(problems))


def looped(tokens: Sequence[int]) -> int:
    """How many of `tokens` lie in runs of LOOP and more that repeat with one period of at most PERIOD."""
    inside = [False] * len(tokens)
    for period in range(1, PERIOD + 1):
        length = 0
        for i in range(period, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - period]:
                length += 1
                continue
            if length + period >= LOOP:
                inside[i - length - period : i] = [True] * (length + period)
            length = 0
    return sum(inside)


def read_rounds(path: Path, settings: dict[str, Any] | None = None) -> list[Round]:
    """The rounds of an earlier run; a last line that was cut off by a kill is dropped from the file.

    A file that is not there is begun with its settings. Raises ValueError where it is of other settings; None: of any,
    and it must be there.
    """
    if settings is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, settings)
        return []
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        os.truncate(path, len(kept))
    lines = kept.decode().splitlines()
    if settings is not None and not lines:
        append(path, settings)
        return []
    try:
        first, rounds = json.loads(lines[0]), [Round(**json.loads(line)) for line in lines[1:]]
    except (ValueError, TypeError):
        raise ValueError(f"{path}: is not a file of a soak; give another directory") from None
    if settings is not None and first != settings:
        raise ValueError(f"{path}: is of a soak with {first}, this one has {settings}; give another directory")
    return rounds


def append(path: Path, value: dict[str, Any]) -> None:
    """One line more, on the disk when this returns."""
    with writing(path), path.open("a") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())


@torch.no_grad()
def row_drift(
    engine: Engine, other: Engine, read: list[int], pages: Tensor, slot: int, exact: bool = False
) -> tuple[float, float, float, int]:
    """Of one row, whose tokens `read` the engine has read into these pages and this slot, exact for being short or not:
    drift, noise, plain and shaken, as of `Round`."""
    mine = _logits(engine, read[-1:], len(read) - 1, pages, slot, exact)
    passes = [_from_nothing(other, read, *order, exact=exact) for order in ((CHUNK, 0), *ORDERS)]
    noise = [min(_error(one, two) for two in passes if two is not one) for one in passes]
    least = min((n for n in noise if n), default=0.0)  # two passes of the same kernels may have the same bits
    drift, tried = min(_error(mine, one) for one in passes), 0
    while least <= QUIET and drift > TIMES * max(least, FLOOR) and tried < SHAKEN:
        with _shaken(other, SHAKES[tried % len(SHAKES)], tried):
            drift = min(drift, _error(mine, _from_nothing(other, read, CHUNK, exact=exact)))
        tried += 1
    return drift, max(noise), _error(mine, passes[0]), tried


@contextmanager
def _shaken(engine: Engine, roundings: int, seed: int) -> Iterator[None]:
    """Meanwhile every element of the embeddings is off by up to so many roundings of its own size."""
    generator = torch.Generator().manual_seed(seed)
    reach = roundings * torch.finfo(engine.model.dtype).eps

    def shake(module: object, inputs: object, out: Tensor) -> Tensor:
        off = torch.rand(out.shape, generator=generator).mul_(2).sub_(1).mul_(reach)
        return (out.float() * (1 + off.to(out.device))).to(out.dtype)

    handle = engine.model.embed.register_forward_hook(shake)
    try:
        yield
    finally:
        handle.remove()


def _from_nothing(engine: Engine, tokens: list[int], chunk: int, single: int = 0, exact: bool = False) -> Tensor:
    """Logits [V] behind `tokens`, read in chunks as a sequence of its own, the last `single` ones one by one."""
    pages = torch.arange(1, 1 + engine.executor.sizes.per_row, dtype=torch.int32)
    ahead = max(0, len(tokens) - single)
    starts = [*range(0, ahead, chunk), *range(ahead, len(tokens))]
    parts = [(a, tokens[a:b]) for a, b in pairwise([*starts, len(tokens)])]
    return [_logits(engine, part, start, pages, 1, exact) for start, part in parts][-1]


def _logits(engine: Engine, tokens: list[int], position: int, pages: Tensor, slot: int, exact: bool = False) -> Tensor:
    """An eager pass over tokens that stand from `position` on, in these pages and this slot: the last logits [V]."""
    (model,) = engine.model.ranks
    ids = torch.tensor([tokens])
    rows = {
        "table": pages.view(1, -1),
        "positions": torch.tensor([position], dtype=torch.int32),
        "counts": torch.tensor([len(tokens)], dtype=torch.int32),
        "slots": torch.tensor([slot], dtype=torch.int32),
    }
    stream = model.enter(ids.to(model.devices[0]))
    for stage, device in enumerate(model.devices):
        seen = engine.executor.ranks[0].seen(
            stage, **{name: value.to(device) for name, value in rows.items()}, exact=exact
        )
        if stage:
            stream = stream.to(device)
        stream = model.run(stage, stream, ids.to(device), seen)
    return model.logits(model.leave(stream)[:, -1])[0]


def _inputs(engine: Engine) -> list[dict[str, Tensor]]:
    """The buffers of every stage's decode step, sampling."""
    return [stage.inputs for stage in engine.executor.step("decode", sampling=True).stages]


def _error(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    error = float((got - want).norm() / want.norm())
    return error if math.isfinite(error) else math.inf


def addresses(engine: Engine) -> dict[str, int]:
    """Where every tensor lies that a graph may hold."""
    found = {f"state {i}": t.data_ptr() for i, t in enumerate(engine.executor.cache.tensors())}
    found |= {f"model's {name}": t.data_ptr() for name, t in engine.model.named_buffers()}
    for i, inputs in enumerate(_inputs(engine)):
        found |= {f"input {name} of stage {i}": t.data_ptr() for name, t in inputs.items()}
    return found


def memory(engine: Engine) -> list[int]:
    devices = {t.device for t in engine.executor.cache.tensors()}
    if all(device.type == "cuda" for device in devices):
        for device in devices:
            torch.cuda.synchronize(device)
        return [torch.cuda.memory_allocated(device) for device in sorted(devices, key=lambda d: d.index or 0)]
    with open("/proc/self/statm") as file:  # resident pages of the process
        return [int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")]
