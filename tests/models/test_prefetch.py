"""Reading ahead: every byte on its device whatever the order, bounded, and one line where the disk fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.models import prefetch
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.loader import Loader
from onegraph.models.prefetch import Block, Piece, Prefetch, Ring, blocks

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.uint8, torch.float32, torch.int64, torch.float8_e8m0fnu)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


def tensors(count: int = 40) -> dict[str, Tensor]:
    """Of many sizes and dtypes, in four units."""
    g = torch.Generator().manual_seed(0)
    made = {}
    for i in range(count):
        dtype = DTYPES[i % len(DTYPES)]
        shape = ((), (3,), (17, 5), (64, 129), (0, 4))[i // 2 % 5]
        random = torch.randint(0, 100, (*shape, dtype.itemsize), generator=g, dtype=torch.uint8)
        made[f"layers.{i % 4}.t{i}"] = random.view(dtype).squeeze(-1)
    return made


def open_checkpoint(path: Path, made: dict[str, Tensor]) -> Checkpoint:
    write_checkpoint(path, {}, made.items(), shard_bytes=40_000)
    return Checkpoint.open(path)


def prefetch_of(checkpoint: Checkpoint, **options: int) -> Prefetch:
    units = [[name for name in checkpoint.names if name.startswith(f"layers.{i}.")] for i in range(4)]
    pinned = torch.cuda.is_available()
    return Prefetch({name: checkpoint.info(name) for name in checkpoint.names}, units, pinned=pinned, **options)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-")]


@each_device
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("block_bytes", [1000, 4096, 1 << 20])
@pytest.mark.parametrize("order", ["file", "reversed", "mixed"])
def test_every_byte_arrives_in_any_order(
    tmp_path: Path, device: str, threads: int, block_bytes: int, order: str
) -> None:
    made = tensors()
    names = {
        "file": sorted(made),
        "reversed": sorted(made, reverse=True),
        "mixed": sorted(made, key=lambda name: name[::-1]),
    }[order]
    checkpoint = open_checkpoint(tmp_path / "m", made)
    ahead = prefetch_of(checkpoint, threads=threads, block_bytes=block_bytes)
    try:
        for name in names:
            got = ahead.take(name, torch.device(device))
            if not made[name].numel():
                assert got is None, "nothing to wait for"
                continue
            assert got is not None
            assert (got.dtype, got.shape, got.device) == (made[name].dtype, made[name].shape, torch.device(device))
            assert got.reshape(-1).view(torch.uint8).cpu().equal(made[name].reshape(-1).view(torch.uint8)), name
            assert ahead.take(name, torch.device(device)) is None, "each once"
    finally:
        ahead.close()
    assert not readers()
    assert not ahead._held


def test_blocks_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    made = tensors()
    checkpoint = open_checkpoint(tmp_path / "m", made)
    spans = {name: checkpoint.info(name) for name in made}
    found: dict[str, bytearray] = {name: bytearray() for name in made}
    for block in blocks(spans, list(made), 4096):
        assert block.size <= 4096
        data = block.file.read_bytes()[block.offset : block.offset + block.size]
        for name, start, first, size in block.pieces:
            assert len(found[name]) == first
            found[name] += data[start : start + size]
    for name, tensor in made.items():
        assert bytes(found[name]) == bytes(tensor.reshape(-1).view(torch.uint8).tolist()), name


def test_a_gap_is_read_along_and_a_wide_one_is_not() -> None:
    class At:
        shape, dtype, file = (10,), torch.uint8, Path("f")

        def __init__(self, offset: int) -> None:
            self.offset, self.nbytes = offset, 10

    far = 30 + prefetch.GAP
    spans = {"a": At(0), "b": At(20), "c": At(far), "d": At(far + 10 + prefetch.GAP + 1)}
    assert list(blocks(spans, ["d", "c", "b", "a"])) == [
        Block(Path("f"), 0, far + 10, (Piece("a", 0, 0, 10), Piece("b", 20, 0, 10), Piece("c", far, 0, 10))),
        Block(Path("f"), spans["d"].offset, 10, (Piece("d", 0, 0, 10),)),
    ]


def test_what_was_not_asked_for_is_dropped_with_its_unit(tmp_path: Path) -> None:
    made = tensors()
    ahead = prefetch_of(open_checkpoint(tmp_path / "m", made))
    wanted = [name for name in sorted(made) if made[name].numel()]
    first, second = ([name for name in wanted if name.startswith(f"layers.{i}.")] for i in (0, 1))
    try:
        assert ahead.take(first[0], CPU) is not None
        ahead.drop()
        assert not [name for name in ahead._landing if name in first]
        assert ahead.take(first[1], CPU) is None
        for name in second:
            assert ahead.take(name, CPU) is not None, "what was read ahead of the next unit stays"
        assert ahead._held == sum(made[name].nbytes for name in ahead._landing)
    finally:
        ahead.close()


def test_a_tensor_that_began_to_land_for_another_device_moves_before_the_rest_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is used again once the copies on the device that asked are done: none may go to another one."""
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 0)  # nothing lands but what is asked for
    made = {"layers.0.a": torch.zeros(64, dtype=torch.uint8), "layers.1.b": torch.ones(400, dtype=torch.uint8)}
    made["layers.1.c"] = torch.ones(64, dtype=torch.uint8)
    checkpoint = open_checkpoint(tmp_path / "m", made)
    spans = {name: checkpoint.info(name) for name in checkpoint.names}
    units = [["layers.0.a"], ["layers.1.b", "layers.1.c"]]
    ahead = Prefetch(spans, units, pinned=False, block_bytes=128, threads=1)
    try:
        ahead.take("layers.0.a", CPU)
        while "layers.1.b" not in ahead._landing:
            ahead._land(CPU)
        assert ahead._landing["layers.1.b"].missing
        meta = torch.device("meta")
        while ahead._landing["layers.1.b"].missing:
            ahead._land(meta)
        assert ahead._landing["layers.1.b"].target.device == meta
        assert ahead.take("layers.1.c", meta) is not None
    finally:
        ahead.close()


def test_the_host_holds_no_more_blocks_than_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes: the threads stop at the last slot."""
    (tmp_path / "f").write_bytes(bytes(range(256)) * 40)
    started = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *call: started.append(call[2]) or read(*call))
    ring = Ring(pinned=False, threads=3, slots=4, block_bytes=256)
    try:
        ring.ask(Block(tmp_path / "f", 256 * i, 256, ()) for i in range(40))
        until(lambda: len(started) == 4)
        time.sleep(0.05)
        assert len(started) == 4
        for i in range(40):
            block, slot = ring.next()
            assert (block.offset, bytes(slot.bytes)) == (256 * i, bytes(range(256))), "in the order asked for"
            ring.give_back(slot)
        assert len(started) == 40
    finally:
        ring.close()
    assert not readers()


def until(done: object) -> None:
    for _ in range(1000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("not within ten seconds")


# --------------------------------------------------------------------------------------------------- what goes wrong


SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def llama(path: Path, **changed: Tensor) -> Path:
    """A model of three layers, a shard of 32 kB each or so."""
    config = LlamaConfig.from_dict(SMALL)
    g = torch.Generator().manual_seed(0)
    expected = Loader(Checkpoint(path, {}, {}), config, torch.float32).expected()
    made = {name: torch.randn(shape, generator=g).bfloat16() for name, (shape, _) in expected.items()}
    write_checkpoint(path, SMALL, (made | changed).items(), shard_bytes=32 << 10)
    return path


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads ahead to the device meta as to a GPU, in small blocks."""
    monkeypatch.setattr(Prefetch.__init__, "__kwdefaults__", {"block_bytes": 4096, "threads": 4})


@pytest.mark.usefixtures("everywhere")
def test_a_shard_truncated_while_loading_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama(tmp_path / "m")
    with Checkpoint.open(path) as checkpoint:
        shard = checkpoint.info("model.layers.2.mlp.down_proj.weight").file
        os.truncate(shard, shard.stat().st_size - 5000)
        with pytest.raises(CheckpointError, match=r"ends at byte \d+, was longer when it was opened") as failed:
            Llama.load(checkpoint, "meta")
    assert str(shard) in str(failed.value)
    assert "\n" not in str(failed.value)
    assert not readers()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no more")])
def test_a_read_that_fails_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    path = llama(tmp_path / "m")
    read, calls = os.preadv, []

    def failing(*call: object) -> int:
        calls.append(call)
        if len(calls) > 10:
            raise error
        return read(*call)

    with Checkpoint.open(path) as checkpoint:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else MemoryError) as failed:
            Llama.load(checkpoint, "meta")
    if isinstance(error, OSError):
        assert "cannot be read at byte" in str(failed.value)
        assert "Input/output error" in str(failed.value)
    assert not readers()


@pytest.mark.usefixtures("everywhere")
def test_progress_tells_every_byte_once(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with Checkpoint.open(llama(tmp_path / "m")) as checkpoint:
        for device in ("cpu", "meta"):
            told.clear()
            Llama.load(checkpoint, device, progress=lambda done, total: told.append((done, total)))
            assert told[0] == (0, checkpoint.nbytes)
            assert told[-1] == (checkpoint.nbytes, checkpoint.nbytes)
            assert told == sorted(told)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads ahead to the CPU as to a GPU, in small blocks."""
    monkeypatch.setattr(Prefetch.__init__, "__kwdefaults__", {"block_bytes": 4096, "threads": 4})
    monkeypatch.setattr(Loader, "_sent", lambda self, device: self._reading)


@pytest.mark.parametrize("way", ["mapped", "sent", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_damaged_value_is_told_by_name(tmp_path: Path, request: pytest.FixtureRequest, way: str, where: str) -> None:
    if way == "sent":
        request.getfixturevalue("sent")
    config = LlamaConfig.from_dict(SMALL)
    shape = Loader(Checkpoint(tmp_path, {}, {}), config, torch.float32).expected()[where][0]
    damaged = torch.ones(shape).bfloat16()
    damaged.view(-1)[-1] = float("inf")
    with (
        Checkpoint.open(llama(tmp_path / "m", **{where: damaged})) as checkpoint,
        pytest.raises(CheckpointError, match=f"tensor '{where}' holds NaN or infinite values"),
    ):
        Llama.load(checkpoint, "cuda" if way == "gpu" else "cpu")
    assert not readers()


@pytest.mark.parametrize("way", ["sent", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_model_that_was_sent_is_the_one_that_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: str
) -> None:
    with Checkpoint.open(llama(tmp_path / "m")) as checkpoint:
        here = Llama.load(checkpoint, "cpu", torch.bfloat16)
        if way == "sent":
            request.getfixturevalue("sent")
        monkeypatch.delattr(Checkpoint, "unrounded")  # nothing goes through a map
        there = Llama.load(checkpoint, "cuda" if way == "gpu" else "cpu", torch.bfloat16)
    for (name, one), (_, other) in zip(here.named_buffers(), there.named_buffers(), strict=True):
        if not name.endswith(("cos", "sin")):
            assert one.equal(other.cpu()), name
    assert not readers()


# Loads from a disk on which every block takes 50 ms, and says so once it has begun.
PROGRAM = r"""
import os, signal, sys, threading, time
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.models import prefetch
from onegraph.models.prefetch import Prefetch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
Prefetch.__init__.__kwdefaults__.update(block_bytes=2048, threads=2)
read = os.preadv

def slow(*call):
    time.sleep(0.2 if begun else 0)  # the load takes seconds from "reading" on: the signal comes in time
    return read(*call)

os.preadv = slow
begun = []

def progress(done, total):
    if done and not begun:
        begun.append(print("reading", flush=True))

with Checkpoint.open(sys.argv[1]) as checkpoint:
    try:
        Llama.load(checkpoint, "meta", progress=progress)
    except KeyboardInterrupt:
        print([thread.name for thread in threading.enumerate()], flush=True)
        raise
print("loaded")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_load_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    path = llama(tmp_path / "m")
    before = sorted(file.name for file in tmp_path.rglob("*"))
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "reading\n"
    run.send_signal(number)
    said, _ = run.communicate(timeout=20)
    assert run.returncode == -number
    assert said == ("['MainThread']\n" if number == signal.SIGINT else "")
    assert sorted(file.name for file in tmp_path.rglob("*")) == before
