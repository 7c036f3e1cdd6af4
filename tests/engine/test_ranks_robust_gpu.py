"""Ranks on real GPUs when something goes wrong: a rank that is late, one that dies, a killed process, a neighbour."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import onegraph
from gpus import devices
from models import save_hf
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models import ranks
from onegraph.models.ranks import Ranks
from onegraph.nn.peers import PeerError, Peers
from onegraph.runtime.group import RankGroup
from test_ranks import PARAMS, text
from test_ranks_gpu import SIZES

pytestmark = pytest.mark.gpu
PATIENCE = 0.5  # seconds, of ranks that are to give up
DEADLINE = 240.0  # seconds, of a wait for another process: it imports, compiles, builds graphs
PROMPTS = [text(19), text(3, 1), text(8, 2), text(1, 3)]
LONG = [SamplingParams(max_tokens=150 + 7 * i, temperature=1.0, seed=i) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_hf("qwen3", path, **SIZES)
    return path


def engine_of(folder: Path, gpus: int, **sizes: Any) -> Engine:
    places = devices(gpus)
    with Checkpoint.open(folder) as checkpoint:
        model = Ranks.load(checkpoint, places, torch.bfloat16)
    return Engine(model, **{"max_batch": 3, "max_context": 256, "chunk": 8, "page_size": 16} | sizes)


@cache
def cycles() -> float:
    """That a GPU counts in a second."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):  # the first ones raise the clock
        begin.record()
        torch.cuda._sleep(50_000_000)
        end.record()
        end.synchronize()
    return 50_000_000 / begin.elapsed_time(end) * 1e3


def nap(device: torch.device, seconds: float) -> None:
    """The device's current stream, within a run its rank's, stands still; the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * cycles()))


def before_each_step(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """From now on act(number of the step) is called before all ranks' parts of it are launched."""
    ran, number = RankGroup.replay, count()

    def replay(self: RankGroup, bucket: int | None = None) -> Any:
        act(next(number))
        return ran(self, bucket)

    patch.setattr(RankGroup, "replay", replay)


# ------------------------------------------------------------------------------------------------------- one is late


@pytest.mark.parametrize("gpus", [2, 4])
def test_whoever_is_late_the_tokens_are_the_same(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank in turn, by 10 ms before one step in four: prefill and decode, with one step launched ahead."""
    engine = engine_of(folder, gpus)
    want = engine.generate(PROMPTS, PARAMS)
    places = engine.executor.devices

    def late(device: torch.device, point: int, step: int) -> None:
        if step % 4 == point:
            nap(device, 0.01)

    for rank, device in enumerate(places):
        for point in range(4):
            with monkeypatch.context() as patch:
                before_each_step(patch, partial(late, device, point))
                assert engine.generate(PROMPTS, PARAMS) == want, (rank, point)


@pytest.mark.parametrize("gpus", [2, 4])
def test_all_may_be_late_by_turns(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By up to a millisecond each, another time at every step."""
    engine = engine_of(folder, gpus)
    prompts = [text(1 + 3 * i, i) for i in range(len(LONG))]
    want = engine.generate(prompts, LONG)
    random = torch.Generator().manual_seed(1)

    def late(step: int) -> None:
        for device, seconds in zip(engine.executor.devices, torch.rand(gpus, generator=random).tolist(), strict=True):
            nap(device, seconds / 1000)

    for _ in range(3):
        with monkeypatch.context() as patch:
            before_each_step(patch, late)
            assert engine.generate(prompts, LONG) == want


# ---------------------------------------------------------------------------------------------------------- one dies


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Peers", partial(Peers, patience=PATIENCE))


def blocked(patch: pytest.MonkeyPatch, engine: Engine, rank: int, at: int) -> None:
    """What runs on this rank's stream outlasts the others' patience."""
    before_each_step(patch, lambda step: nap(engine.executor.devices[rank], 4 * PATIENCE) if step == at else None)


def not_launched(patch: pytest.MonkeyPatch, engine: Engine, rank: int, at: int) -> None:
    """From a step on, this rank runs no more."""
    ran, number = RankGroup.replay, count()

    def replay(self: RankGroup, bucket: int | None = None) -> Any:
        everyone = self.ranks
        if next(number) >= at:
            self.ranks = [each for i, each in enumerate(everyone) if i != rank]
        try:
            return ran(self, bucket)
        finally:
            self.ranks = everyone

    patch.setattr(RankGroup, "replay", replay)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("at", [1, 9])  # while prompts are read; while rows decode
@pytest.mark.parametrize(
    ("die", "gpus", "rank"),
    [(blocked, 2, 0), (blocked, 2, 1), (not_launched, 2, 1), (blocked, 4, 2), (not_launched, 4, 3)],
)
def test_the_death_of_a_rank_ends_the_run_and_the_next_one_is_right(
    folder: Path, die: Any, gpus: int, rank: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one error that names it, within a second after the patience; twice, in the same process."""
    engine = engine_of(folder, gpus)
    cycles()
    want = engine.generate(PROMPTS, PARAMS)
    for _ in range(2):
        with monkeypatch.context() as patch:
            die(patch, engine, rank, at)
            started = time.perf_counter()
            with pytest.raises(PeerError, match=rf"waited for rank {rank} \(cuda:{rank}\) at exchange \d+"):
                engine.generate(PROMPTS, PARAMS)
            assert time.perf_counter() - started < PATIENCE + 1.0
        assert engine.generate(PROMPTS, PARAMS) == want


# --------------------------------------------------------------------------------------------------------- processes


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"{what}: not after {DEADLINE:.0f} s"
        time.sleep(0.02)


def work(folder: Path, place: Path, seconds: float) -> None:
    """A worker's: build an engine on the two GPUs that it sees, tell, and generate for some time when told to go."""
    engine = engine_of(folder, 2)
    prompts = [text(1 + 3 * i, i) for i in range(len(LONG))]
    texts = engine.generate(prompts, LONG)
    (place / "ready").touch()
    until((place / "go").exists, "go")
    end, runs = time.monotonic() + seconds, 0
    while not runs or time.monotonic() < end:
        assert engine.generate(prompts, LONG) == texts, f"run {runs} gives other tokens"
        runs += 1
    (place / "texts").write_text(json.dumps(texts))


class Worker:
    """A process with two of this one's GPUs; `place` is the folder in which the two of them talk."""

    def __init__(self, folder: Path, place: Path, gpus: tuple[int, int], seconds: float) -> None:
        place.mkdir()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus),
            "PYTHONPATH": os.pathsep.join([str(Path(onegraph.__file__).parents[1]), *sys.path]),
        }
        words = [sys.executable, "-m", "test_ranks_robust_gpu", str(folder), str(place), str(seconds)]
        self.place, self._log = place, place / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)

    def has(self, name: str) -> bool:
        """Whether it is so far; it must be alive, or be done."""
        found = (self.place / name).exists()
        assert found or self.process.poll() is None, self._log.read_text()[-4000:]
        return found

    def go(self) -> None:
        until(lambda: self.has("ready"), "ready")
        (self.place / "go").touch()

    def texts(self) -> list[list[int]]:
        until(lambda: self.has("texts"), "texts")
        assert self.process.wait(60) == 0, self._log.read_text()[-4000:]
        found: list[list[int]] = json.loads((self.place / "texts").read_text())
        return found


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers, none of which outlives the test."""
    workers: list[Worker] = []

    def make(gpus: tuple[int, int], seconds: float = 0.0) -> Worker:
        workers.append(Worker(folder, tmp_path / f"worker{len(workers)}", gpus, seconds))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()
        worker.process.wait(60)


def alone(worker: Worker) -> list[list[int]]:
    worker.go()
    return worker.texts()


def test_a_killed_process_leaves_the_gpus_usable(start: Callable[..., Worker]) -> None:
    """In the midst of generating, while its ranks wait for each other."""
    devices(2)
    want = alone(start((0, 1)))
    assert [len(each) for each in want] == [p.max_tokens for p in LONG]
    killed = start((0, 1), seconds=DEADLINE)
    killed.go()
    time.sleep(0.5)
    assert not killed.has("texts")
    killed.process.send_signal(signal.SIGKILL)
    assert killed.process.wait(60) == -signal.SIGKILL
    assert alone(start((0, 1))) == want


def test_two_processes_on_other_gpus_do_not_disturb_each_other(start: Callable[..., Worker]) -> None:
    devices(4)
    want = alone(start((0, 1)))
    pair = [start((0, 1), seconds=5.0), start((2, 3), seconds=5.0)]
    for worker in pair:
        until(partial(worker.has, "ready"), "ready")
    for worker in pair:
        worker.go()
    assert [worker.texts() for worker in pair] == [want, want]


# -------------------------------------------------------------------------------------------------------------- load


def test_a_hundred_thousand_steps_end_and_ranks_agree(folder: Path) -> None:
    """One ahead of the host, in bfloat16: every twentieth step a row leaves and a prompt is read in between. What ranks
    have drawn is held against each other all along, by copies in the order of their streams."""
    engine = engine_of(folder, 2, max_batch=8, chunk=32)
    rows = range(5700)
    params = [SamplingParams(max_tokens=100 + 13 * (i % 9), temperature=1.0, seed=i) for i in rows]
    runner: Any = engine.executor.step("decode", sampling=True)
    drawn = [stages[0].inputs["drawn"] for stages in runner.ranks]
    kept = [torch.zeros(1000, 8, dtype=torch.int64, device=device) for device in engine.executor.devices]
    told = count()

    def look(index: int, token: int) -> None:
        at, now = divmod(next(told), 1000)
        if now == 999:  # not the first ones, which a prompt has given: rows hold what ranks alone made of padding
            with engine.executor.running():  # who takes tokens works on streams of his own
                for own, there in zip(kept, drawn, strict=True):
                    own[at].copy_(there)

    texts = engine.generate([text(1 + i % 30, i) for i in rows], params, look)
    assert engine.mode == "captured"
    assert [len(each) for each in texts] == [p.max_tokens for p in params]
    assert engine.stats.decode_steps > 100_000
    first, second = (own.cpu() for own in kept)
    looks = next(told) // 1000
    assert len(first[:looks].unique(dim=0)) > looks // 2, "copies are of steps that differ"
    assert torch.equal(first, second)
    assert torch.equal(*(each.cpu() for each in drawn))


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
