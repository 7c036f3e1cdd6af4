"""What ranks hand each other: the op's reference, each rank a thread; its CUDA source on a CPU, likewise."""

import ctypes
import shutil
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h200 import H200
from on_cpu import compile_run
from onegraph.nn.peers import PeerError, Peers
from onegraph.ops.cuda import exchange as launcher
from onegraph.ops.exchange import all_gather, all_reduce
from onegraph.ops.ranks import CHUNK, EXPIRED, LAST_ROUND, MODE, RAISED, ROUNDS, UNARMED, part_of

HERE = Path(__file__).parent


def peers(count: int, words: int = 256, patience: float = 20.0) -> Peers:
    made = Peers([torch.device("cpu")] * count, words, patience)
    made.arm()
    return made


def together(group: Peers, work: Any, ranks: Any = None) -> list[Any]:
    """What `work(peer)` gives on each rank, all at once."""
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        found[index] = work(group.rank(index))

    threads = [threading.Thread(target=run, args=(i,)) for i in ranks or range(len(group.devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[i] for i in sorted(found)]


def parts(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def summed(each: list[Tensor], add: Tensor | None = None) -> Tensor:
    """In float32, in the order of ranks, rounded once."""
    total = torch.zeros_like(each[0], dtype=torch.float32)
    for one in [*each, *([] if add is None else [add])]:
        total = total + one.float()
    return total.to(each[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_ranks_have_the_same_sum(count: int, dtype: torch.dtype) -> None:
    group, x, add = peers(count), parts(count, 3, 8, dtype=dtype), parts(1, 3, 8, dtype=dtype)[0]
    for other in (None, add):
        for got in together(group, lambda peer, other=other: peer.all_reduce(x[peer.index], other)):
            assert torch.equal(got, summed(x, other))


def test_rounds_follow_each_other_at_every_ranks_own_pace() -> None:
    """A hundred rounds without a pause between them: two buffers are enough, also where numbers begin anew."""
    group, x = peers(3), parts(3, 100, 2, 8)
    for state in group.states:
        state[ROUNDS:] = LAST_ROUND - 50
    got = together(group, lambda peer: [peer.all_reduce(each) for each in x[peer.index]])
    for i in range(100):
        assert all(torch.equal(rank[i], summed([each[i] for each in x])) for rank in got)
    assert {int(state[ROUNDS]) for state in group.states} == {50}


def test_chunks_count_their_own_rounds() -> None:
    """Sums of one chunk and of three in turns, and parts of rows between them, without a pause."""
    group, sizes = peers(2, 4 * CHUNK), (CHUNK, 3 * CHUNK, 40, 2 * CHUNK)
    x = [parts(2, 1, sizes[i % 4]) for i in range(60)]

    def work(peer: Any) -> list[Tensor]:
        found = []
        for i, each in enumerate(x):
            found.append(peer.all_reduce(each[peer.index]))
            if i % 7 == 0:
                found.append(peer.all_gather(each[peer.index], 2 * each[0].shape[1]))
        return found

    first, second = together(group, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[-1], summed(x[-1]))
    told = group.states[0][ROUNDS:].tolist()
    assert len(set(told)) > 2
    assert told == group.states[1][ROUNDS:].tolist()


def test_more_than_an_inbox_takes_goes_in_parts() -> None:
    group, x = peers(2, words=16), parts(2, 5, 8)
    assert all(torch.equal(got, summed(x)) for got in together(group, lambda peer: peer.all_reduce(x[peer.index])))
    whole = parts(1, 3, 20)[0]

    def gather(peer: Any) -> Tensor:
        return peer.all_gather(whole[:, slice(*part_of(20, 1, 2, peer.index))].contiguous(), 20)

    assert all(torch.equal(got, whole) for got in together(group, gather))


@pytest.mark.parametrize(("count", "width", "unit"), [(2, 33, 1), (3, 40, 8), (4, 48, 16)])
def test_parts_of_unequal_size_come_side_by_side(count: int, width: int, unit: int) -> None:
    spans = [part_of(width, unit, count, rank) for rank in range(count)]
    assert [span[0] for span in spans[1:]] == [span[1] for span in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, width)
    if any(first == last for first, last in spans):
        return  # who cuts so sees to it that everybody has some
    whole = parts(1, 2, width)[0].view(2, 1, width)
    group = peers(count)
    got = together(group, lambda peer: peer.all_gather(whole[..., slice(*spans[peer.index])].contiguous(), width, unit))
    assert all(torch.equal(each, whole) for each in got)


def test_a_rank_that_stays_away_is_named_and_nobody_hangs() -> None:
    group, x = peers(3, patience=0.05), parts(3, 2, 8)
    group.check()
    got = together(group, lambda peer: [peer.all_reduce(x[peer.index]) for _ in range(50)], ranks=[0, 2])
    assert len(got) == 2, "both ended, and did not wait in each of the rounds"
    with pytest.raises(PeerError, match=r"rank [02] \(cpu\) waited for rank 1 \(cpu\) at exchange 1"):
        group.check()
    group.reset()
    group.check()
    assert all(torch.equal(out, summed(x)) for out in together(group, lambda peer: peer.all_reduce(x[peer.index])))


def test_a_gpu_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    group, stopped = peers(2), threading.Event()
    group.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr("onegraph.nn.peers.ANSWER", 0.05)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: stopped.wait() if device.index == 1 else None)
    group.alarm[RAISED] = 1
    with pytest.raises(PeerError, match=r"cuda:1 has not answered for .*: restart the process"):
        group.reset()
    stopped.set()
    group.reset()
    group.check()


def test_a_rank_that_is_not_armed_goes_on_alone() -> None:
    group, x = peers(2), parts(2, 2, 8)
    group.arm(False)
    assert torch.equal(group.rank(1).all_reduce(x[1]), x[1])
    part = group.rank(1).all_gather(x[1], 16)
    assert torch.equal(part, torch.cat((torch.zeros(2, 8), x[1]), dim=1))
    group.arm()
    assert {int(state[ROUNDS]) for state in group.states} == {1}, "what one of them counted is forgotten"
    assert all(torch.equal(out, summed(x)) for out in together(group, lambda peer: peer.all_reduce(x[peer.index])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, dtype=torch.bfloat16)}, r"x is torch.bfloat16 \(3,\); it must be .* in whole words"),
        ({"x": torch.zeros(4, dtype=torch.int32)}, "x is torch.int32"),
        ({"add": torch.zeros(5)}, r"add is .*\(5,\); it must be as x, \(4,\)"),
        ({"rank": 2}, "rank 2 of 2; allowed are 1 to 8 ranks"),
        ({"inboxes": [torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)]}, "a peer buffer is torch.float32"),
        ({"state": torch.zeros(4, dtype=torch.int64)}, r"state is torch.int64 \(4,\); it must be int64 \[6\]"),
        ({"x": torch.zeros(300), "add": None}, "a rank sends 300 words of 4 bytes, a peer buffer has room for 256"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(change: dict[str, Any], words: str) -> None:
    group = peers(2)
    given = {"x": torch.zeros(4), "add": torch.zeros(4), "inboxes": group.inboxes, "state": group.states[0]}
    with pytest.raises(ValueError, match=words):
        all_reduce(**given | {"alarm": group.alarm, "rank": 0} | change)


def test_nobody_may_have_nothing_to_send() -> None:
    """Others would not wait for such a rank, and write over what it has not read."""
    group = peers(3)
    with pytest.raises(ValueError, match="9 in units of 8 leave nothing for the last of 3 ranks; take a smaller unit"):
        all_gather(torch.zeros(2, 8), 9, 8, group.inboxes, group.states[0], group.alarm, 0)


def test_parts_of_another_size_are_refused() -> None:
    group = peers(2)
    with pytest.raises(
        ValueError, match=r"x is torch.float32 \(2, 9\); rank 0 must give contiguous float32 \[rows, 8\]"
    ):
        all_gather(torch.zeros(2, 9), 16, 1, group.inboxes, group.states[0], group.alarm, 0)


# --------------------------------------------------------------------------------------------------- the CUDA source


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("exchange")
    for source in (launcher.KERNEL.path, launcher.KERNEL.path.with_suffix(".cuh")):
        shutil.copy(source, path)
    for file in ("system.cuh", "run.cpp"):
        shutil.copy(HERE / "exchange_on_cpu" / file, path)

    @cache
    def made(world: int, item: int) -> Any:
        out = path / f"run-{world}-{item}.so"
        gcc = ["g++", "-O1", "-std=c++20", "-w", "-fPIC", "-shared", "-pthread", "-include", "memory"]
        compile_run(path, [f"-DWORLD={world}", f"-DITEM={item}"], out, gcc=gcc)
        return ctypes.CDLL(str(out)).run

    return made


class Launches:
    """The launcher's arguments of every rank; `run` does a round."""

    def __init__(self, group: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group, self.function, self.ranks = group, 0, list[bytes]()
        monkeypatch.setattr(launcher.build, "device", lambda device: H200)
        monkeypatch.setattr(launcher, "launch", self.add)

    def add(self, source: Any, defines: Any, launch: Any, **arguments: Any) -> None:
        self.function = source.functions.index(launch.function)
        self.ranks.append(source.arguments.pack(**arguments))

    def run(self, program: Any, present: list[int], blocks: int, threads: int) -> None:
        flags = (ctypes.c_int * len(present))(*present)
        program(ctypes.c_char_p(b"".join(self.ranks)), flags, self.function, blocks, threads)


def launched(group: Peers, monkeypatch: pytest.MonkeyPatch, call: Any, ranks: int) -> tuple[Launches, list[Tensor]]:
    launches = Launches(group, monkeypatch)
    return launches, [call(rank, (group.inboxes, group.states[rank], group.alarm, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(("world", "item"), [(2, 1), (3, 0), (2, 2)])
def test_the_kernel_sums_as_the_reference_does(build, monkeypatch, world: int, item: int) -> None:  # type: ignore[no-untyped-def]
    dtype = [torch.float32, torch.bfloat16, torch.float16][item]
    size = 5, CHUNK  # some chunks, the last one not whole
    group, x, add = peers(world, 1024), parts(world, *size, dtype=dtype), parts(1, *size, dtype=dtype)[0]
    for other in (None, add):
        call = lambda rank, rest, other=other: launcher.all_reduce(x[rank], other, *rest)  # noqa: E731
        launch, out = launched(group, monkeypatch, call, world)
        for _ in range(4):
            for each in out:
                each.fill_(float("nan"))
            launch.run(build(world, item), [1] * world, blocks=2, threads=CHUNK)
            assert all(torch.equal(each, summed(x, other)) for each in out)
    chunks = -(-5 * dtype.itemsize // 4)
    for state in group.states:
        assert state[ROUNDS:].tolist() == [9] * chunks + [1] * (1024 // CHUNK - chunks)


def test_the_kernel_gathers_as_the_reference_does(build, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    group, whole = peers(3), parts(1, 2, 20)[0]
    own = [whole[:, slice(*part_of(20, 1, 3, rank))].contiguous() for rank in range(3)]
    call = lambda rank, rest: launcher.all_gather(own[rank], 20, 1, *rest)  # noqa: E731
    launch, out = launched(group, monkeypatch, call, 3)
    launch.run(build(3, 0), [1, 1, 1], blocks=2, threads=CHUNK)
    assert all(torch.equal(each, whole) for each in out)


def test_the_kernel_names_who_stays_away_and_waits_no_more(build, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    group, x = peers(3, patience=0.05), parts(3, 2, 8)
    launch, out = launched(group, monkeypatch, lambda rank, rest: launcher.all_reduce(x[rank], None, *rest), 3)
    launch.run(build(3, 0), [1, 0, 1], blocks=1, threads=CHUNK)
    with pytest.raises(PeerError, match=r"rank [02] \(cpu\) waited for rank 1 \(cpu\) at exchange 1"):
        group.check()
    assert [int(state[MODE]) == EXPIRED for state in group.states] == [True, False, True]
    launch.run(build(3, 0), [1, 0, 1], blocks=1, threads=CHUNK)
    assert torch.equal(out[0], x[0]), "from then on each goes on alone"


def test_the_kernel_runs_alone_where_it_is_not_armed(build, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    group, x = peers(2), parts(2, 2, 8)
    group.arm(False)
    launch, out = launched(group, monkeypatch, lambda rank, rest: launcher.all_reduce(x[rank], None, *rest), 2)
    launch.run(build(2, 0), [0, 1], blocks=1, threads=CHUNK)
    assert torch.equal(out[1], x[1])
    assert [int(state[ROUNDS]) for state in group.states] == [1, 2]
    assert all(int(state[MODE]) == UNARMED for state in group.states)
