"""Ranks that are processes: sums through inboxes that they open to each other, on CPUs and on GPUs."""

import json
import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.nn.processes import PeerProcess
from onegraph.ops.ranks import MAX_RANKS

SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PROGRAM = """
import json, sys, torch
import torch.distributed as distributed
from onegraph.nn.peers import PeerError
from onegraph.nn.processes import PeerProcess
from onegraph.ops.exchange import all_reduce

rank, count, store, device, leaves, out = json.loads(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=count)

def gather(told):
    found = [None] * count
    distributed.all_gather_object(found, told)
    return found

device = torch.device(device)
if device.type == "cuda":
    torch.cuda.set_device(device)
with device:  # as vLLM builds its models
    peer = PeerProcess(64 * 256, rank, count, device, gather, patience=10.0 if leaves else 60.0)

def parts(tokens, round):
    made = torch.Generator().manual_seed(1000 * tokens + round)
    return torch.randn(count + 1, tokens, 256, generator=made).to(device)

found = []
for round in range(3):
    for tokens in (1, 5, 64):
        given = parts(tokens, round)
        found.append(all_reduce(given[rank], given[count], *peer.group).tolist())
if device.type == "cuda":
    given = parts(2, 9)
    held, graph = given[rank].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gather(None)  # what is compiled is so on all ranks
    with torch.cuda.graph(graph):
        summed = all_reduce(held, None, *peer.group)
    for step in range(20):
        held.copy_(given[rank] + step)
        graph.replay()
        found.append(summed.tolist())
gather(None)
error = ""
if leaves and rank == 0:  # the others are gone
    given = parts(1, 0)
    all_reduce(given[0], None, *peer.group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    try:
        peer.check()
    except PeerError as raised:
        error = str(raised)
else:
    peer.check()
with open(out, "w") as file:
    json.dump([found, error], file)
if leaves:
    import os
    os._exit(0)
"""


def _rank(given: list[Any]) -> None:
    torch.set_num_threads(1)
    sys.argv = ["", json.dumps(given)]
    exec(PROGRAM, {})


def run(count: int, devices: list[str], leaves: bool, folder: Path) -> list[Any]:
    """What each rank found, and the error that it met. Ranks on CPUs are forks, which need not import torch first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    running: list[Any] = []
    try:
        for rank in range(count):
            given = [rank, count, str(folder / "store"), devices[rank], leaves, str(folder / f"{rank}")]
            if devices[rank] == "cpu":
                running.append(get_context("fork").Process(target=_rank, args=(given,)))
                running[-1].start()
            else:
                running.append(subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(given)], env=environment))
        for process in running:
            if isinstance(process, subprocess.Popen):
                assert process.wait(timeout=200) == 0
            else:
                process.join(200)
                assert process.exitcode == 0
    finally:
        for process in running:
            process.kill()
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(count)]


def check(count: int, devices: list[str], folder: Path) -> None:
    are_sums([rank[0] for rank in run(count, devices, False, folder)], count, devices[0] != "cpu")


def are_sums(found: list[Any], count: int, replays: bool) -> None:
    assert all(rank == found[0] for rank in found), "all ranks get the same bits"
    assert len(found[0]) == 9 + 20 * replays
    sums = iter(found[0])
    for turn in range(3):
        for tokens in (1, 5, 64):
            made = torch.Generator().manual_seed(1000 * tokens + turn)
            want = torch.randn(count + 1, tokens, 256, generator=made).sum(0)
            torch.testing.assert_close(torch.tensor(next(sums)), want, atol=1e-5, rtol=1e-5)
    given = torch.randn(count + 1, 2, 256, generator=torch.Generator().manual_seed(2009))[:count]
    for step, replayed in enumerate(sums):
        torch.testing.assert_close(torch.tensor(replayed), (given + step).sum(0), atol=1e-4, rtol=1e-5)


def test_processes_sum_through_each_others_inboxes(tmp_path: Path) -> None:
    check(3, ["cpu"] * 3, tmp_path)


def test_a_process_that_is_gone_is_named(tmp_path: Path) -> None:
    """And two that sum, before one of them goes."""
    left, gone = run(2, ["cpu"] * 2, True, tmp_path)
    are_sums([left[0], gone[0]], 2, False)
    assert left[1] == (
        "rank 0 waited 10 s for rank 1 at exchange 10: the other process stopped; start all of them again"
    )


@pytest.mark.gpu
def test_processes_sum_on_gpus(tmp_path: Path) -> None:
    """Two of one GPU, whose launches take turns, where there is no other; eager and captured."""
    check(2, ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"], tmp_path)


@pytest.mark.gpu
def test_a_process_that_is_gone_is_named_on_a_gpu(tmp_path: Path) -> None:
    left, _ = run(2, ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"], True, tmp_path)
    assert left[1].startswith("rank 0 waited 10 s for rank 1 at exchange 30:")


def test_ranks_that_cannot_exchange_are_refused() -> None:
    def elsewhere(told: Any) -> list[Any]:
        return [told, ("another", None)]

    cpu, before = torch.device("cpu"), set(SHARED.glob("onegraph-*"))
    with pytest.raises(ValueError, match="got ranks that exchange on 2 machines; allowed is one"):
        PeerProcess(64, 0, 2, cpu, elsewhere)
    with pytest.raises(ValueError, match=f"got {MAX_RANKS + 1} ranks that exchange; allowed are up to {MAX_RANKS}"):
        PeerProcess(64, 0, MAX_RANKS + 1, cpu, elsewhere)
    assert set(SHARED.glob("onegraph-*")) <= before, "nothing is left behind"
