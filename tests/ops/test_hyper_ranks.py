"""Hyper-connections that sum over ranks: reference and CUDA source on a CPU, where ranks are threads; within graphs."""

import ctypes
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpus import Chains, devices
from h200 import H200
from on_cpu import compile_run
from onegraph.nn.peers import PeerError, Peers
from onegraph.ops.cuda import deepseek_hyper_ranks as launcher
from onegraph.ops.deepseek_hyper import hyper_mix, hyper_update, mix_arguments
from onegraph.ops.deepseek_hyper_ranks import hyper_all_reduce
from onegraph.ops.ranks import ROUNDS
from test_exchange import parts, peers, summed, together

HERE = Path(__file__).parent
FOLDER = Path(launcher.__file__).parent
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def given(
    tokens: int, dim: int, dtype: torch.dtype = torch.float32, wide: bool = False
) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of `hyper_update_mix`, of which the matrix is what stands second behind them as logits."""
    g = torch.Generator().manual_seed(0)
    streams, x, post, _, *rest = mix_arguments((tokens,), 4, dim, wide, torch.device("cpu"), dtype, g)
    logits = torch.randn(tokens, 4, 4, generator=g)
    return (streams, x, post, *rest), logits


def one_behind_the_other(args: tuple[Any, ...], logits: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    """What the op stands for, by other ops."""
    streams, _, post, *weights = args
    streams, (*weights, iterations) = streams.clone(), weights
    hyper_update(streams, summed(x), post, logits, weights[5], iterations)
    return *hyper_mix(streams, *weights, 0), streams


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (2, 3), (3, 16)])
def test_ranks_together_have_what_one_would(ranks: int, tokens: int, dtype: torch.dtype) -> None:
    args, logits = given(tokens, 80, dtype)
    group, x = peers(ranks, 2048), parts(ranks, tokens, 80, dtype=dtype)

    def work(peer: Any) -> tuple[Tensor, ...]:
        streams = args[0].clone()
        return *hyper_all_reduce(streams, x[peer.index], args[2], logits, *args[3:], *peer.group), streams

    got, want = together(group, work), one_behind_the_other(args, logits, x)
    assert all(torch.equal(mine, theirs) for each in got for mine, theirs in zip(each, want, strict=True))


def test_logits_become_the_matrix_that_a_mix_gives() -> None:
    """A sublayer that gets logits, and one that gets what Sinkhorn makes of them, write the same streams."""
    (streams, x, _, *weights), _ = given(3, 64)
    out = [hyper_mix(streams, *weights[:-1], iterations) for iterations in (weights[-1], 0)]
    first, second = streams.clone(), streams.clone()
    hyper_update(first, x, *out[0][1:], 0.0, 0)
    hyper_update(second, x, *out[1][1:], weights[-2], weights[-1])
    assert torch.equal(first, second)
    assert not torch.equal(out[0][2], out[1][2])
    assert torch.allclose(out[0][2].sum(-2), torch.ones(3, 4), atol=1e-5)


def test_what_cannot_cross_is_refused() -> None:
    args, logits = given(17, 64)
    with pytest.raises(ValueError, match="streams are of 17 tokens; allowed are up to 16: run all_reduce, hyper_upda"):
        hyper_all_reduce(*args[:3], logits, *args[3:], *peers(1, 2048).rank(0).group)
    args, logits = given(3, 64)
    with pytest.raises(
        ValueError, match="hyper_all_reduce: a rank sends 192 words of 4 bytes, a peer buffer has room for"
    ):
        hyper_all_reduce(*args[:3], logits, *args[3:], *peers(1, 128).rank(0).group)
    with pytest.raises(ValueError, match="iterations is 0; at least one column normalisation is needed"):
        hyper_all_reduce(*args[:3], logits, *args[3:-1], 0, *peers(1, 2048).rank(0).group)


# --------------------------------------------------------------------------------------------------- the CUDA source


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("hyper")
    for name in ("deepseek_hyper_ranks.cu", "deepseek_hyper.cuh", "exchange.cuh"):
        shutil.copy(FOLDER / name, path)
    for file in ("hyper_on_cpu/ptx.cuh", "hyper_on_cpu/run.cpp", "exchange_on_cpu/system.cuh"):
        shutil.copy(HERE / file, path)

    @cache
    def made(**defines: int) -> Any:
        out = path / f"run-{'-'.join(map(str, defines.values()))}.so"
        gcc = ["g++", "-O1", "-std=c++20", "-w", "-fPIC", "-shared", "-pthread"]
        compile_run(path, [f"-D{name}={value}" for name, value in defines.items()], out, gcc=gcc)
        return ctypes.CDLL(str(out)).run

    return made


class Launches:
    """The launches of all ranks; `run` does them at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks, self.defines, self.blocks = list[bytes](), dict[str, int](), 0
        monkeypatch.setattr(launcher.KERNEL, "is_built", lambda device: True)
        monkeypatch.setattr(launcher.build, "device", lambda device: H200)
        monkeypatch.setattr(launcher, "launch", self.add)

    def add(self, source: Any, defines: dict[str, int], launch: Any, **arguments: Any) -> None:
        self.defines, self.blocks = defines, launch.grid[0]
        self.ranks.append(source.arguments.pack(**arguments))

    def run(self, build: Any) -> None:
        build(**self.defines)(ctypes.c_char_p(b"".join(self.ranks)), self.blocks)


def called(args: Any, logits: Tensor, group: Peers, x: list[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """Each rank's call, of its own copy of the streams and its part: the copies, and where results come."""
    streams = [args[0].clone() for _ in x]
    return streams, [
        launcher.hyper_all_reduce(
            streams[i], part, args[2], logits, *args[3:], group.inboxes, group.states[i], group.alarm, i
        )
        for i, part in enumerate(x)
    ]


@pytest.mark.parametrize(
    ("ranks", "tokens", "dim", "dtype", "wide"),
    [
        (2, 1, 1024, torch.bfloat16, True),
        (3, 2, 1024, torch.float16, False),
        (2, 9, 1024, torch.bfloat16, True),  # two tokens a cluster, the last one alone
        (2, 1, 5120, torch.bfloat16, True),  # two chunks a block, the second one in part
    ],
)
def test_the_kernel_sums_and_mixes_as_the_reference_does(build, monkeypatch, ranks, tokens, dim, dtype, wide) -> None:
    args, logits = given(tokens, dim, dtype, wide)
    group, x = peers(ranks, launcher.words(tokens, dim)), parts(ranks, tokens, dim, dtype=dtype)
    launches = Launches(monkeypatch)
    streams, out = called(args, logits, group, x)
    want = one_behind_the_other(args, logits, x)
    rounds = 3 if dim == 1024 else 1
    for _ in range(rounds):
        for i, each in enumerate(streams):
            each.copy_(args[0])
            for tensor in out[i]:
                tensor.fill_(float("nan"))
        launches.run(build)
        for i in range(ranks):
            for mine, first, right in zip((*out[i], streams[i]), (*out[0], streams[0]), want, strict=True):
                assert torch.equal(mine, first)
                assert distance(mine, right) <= TOLERANCE[dtype]
    group.check()
    for state in group.states:
        told = state[ROUNDS:].tolist()
        assert told == [1 + rounds] * len(told)


def test_the_kernel_goes_on_alone_where_it_is_not_armed(build, monkeypatch) -> None:
    args, logits = given(1, 1024, torch.bfloat16)
    group, launches = peers(2, launcher.words(1, 1024)), Launches(monkeypatch)
    group.arm(False)
    streams, out = called(args, logits, group, [args[1]] * 2)
    launches.run(build)
    want = one_behind_the_other(args, logits, [args[1]])
    for mine, right in zip((*out[1], streams[1]), want, strict=True):
        assert distance(mine, right) <= TOLERANCE[torch.bfloat16]


def test_the_kernel_names_who_stays_away(build, monkeypatch) -> None:
    args, logits = given(1, 1024, torch.bfloat16)
    group, launches = peers(2, launcher.words(1, 1024), patience=0.05), Launches(monkeypatch)
    group.states[1][0] = 0  # it sends nothing, and waits for nobody
    alive = called(args, logits, group, [args[1]] * 2)
    launches.run(build)
    with pytest.raises(PeerError, match=r"rank 0 \(cpu\) waited for rank 1 \(cpu\) at exchange 1"):
        group.check()
    assert len(alive[1]) == 2, "what the launches wrote to"


# --------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 4])
def test_sums_within_graphs(count: int, dtype: torch.dtype) -> None:
    """Of one token to sixteen, of sizes that one block's chunk holds and that it does not, and of a size that goes
    through other launches, one behind the other many times: the same bits on all GPUs, and what their parts give."""
    places = devices(count)
    group = Peers(places, 16 * 16 * 256)
    cases = []
    for tokens, dim in ((1, 4096), (2, 7168), (4, 4096), (9, 1024), (16, 4096), (1, 7168), (3, 80)):
        args, logits = given(tokens, dim, dtype, wide=True)
        cases.append((args, logits, parts(count, tokens, dim, dtype=dtype)))

    def moved(args: tuple[Any, ...], place: torch.device) -> tuple[Any, ...]:
        return tuple(a.to(place) if isinstance(a, Tensor) else a for a in args)

    held = [
        [(moved(args, place), logits.to(place), x[i].to(place)) for args, logits, x in cases]
        for i, place in enumerate(places)
    ]

    def work(peer: Any) -> list[Tensor]:
        found = []
        for _ in range(5):
            for args, logits, x in held[peer.index]:
                streams = args[0].clone()
                out = hyper_all_reduce(streams, x, args[2], logits, *args[3:], *peer.group)
                found += [*out, streams.clone()]
                hyper_all_reduce(streams, *out, *args[3:], *peer.group)
                found.append(streams)
        return found

    chains = Chains(group, work)
    wanted = [one_behind_the_other(args, logits, x) for args, logits, x in cases]
    for _ in range(20):
        for _ in range(10):
            chains.replay()
        chains.wait()
        group.check()
        first = [out.cpu() for out in chains.out[0]]
        assert all(torch.equal(a, b.cpu()) for rank in chains.out[1:] for a, b in zip(first, rank, strict=True))
    for i, want in enumerate(wanted):
        for mine, right in zip(first[5 * i : 5 * i + 4], want, strict=True):
            assert distance(mine, right) <= TOLERANCE[dtype]
