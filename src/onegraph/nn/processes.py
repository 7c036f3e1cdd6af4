"""Ranks that are processes of one machine, and what they exchange through: see `onegraph.ops.exchange`.

Each process opens the others' peer buffers: on GPUs by CUDA's handles between processes, on CPUs as shared files.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.nn.peers import PeerError
from onegraph.ops.cuda import build
from onegraph.ops.ranks import ALARM, ARMED, MAX_RANKS, MODE, RAISED, RECORDS, new_state

PATIENCE = 120.0  # seconds that a rank waits for another, which may be compiling
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class PeerProcess:
    """This process's side: its peer buffer and state, and those of the other ranks. All ranks create it at once.

    Args:
        words: of 4 bytes, that a rank may send at once. rank, count: this rank, and how many there are.
        device: this rank's; several ranks may share one.
        gather: gives what all ranks gave it, in their order, and waits for all of them.
        patience: seconds that this rank waits for another.

    Attributes:
        group: what ops that exchange are given last (`nn.peers.Peer.group`).

    Raises ValueError where the ranks are on several machines, or more than `MAX_RANKS`.
    """

    def __init__(
        self,
        words: int,
        rank: int,
        count: int,
        device: torch.device,
        gather: Callable[[Any], list[Any]],
        patience: float = PATIENCE,
    ) -> None:
        if count > MAX_RANKS:
            raise ValueError(f"got {count} ranks that exchange; allowed are up to {MAX_RANKS}")
        words = -(-words // 4) * 4
        shape = 2, count, words
        own, told = _made(shape, device)
        try:
            found = gather((socket.gethostname(), told))
            if len(hosts := {host for host, _ in found}) > 1:
                raise ValueError(f"got ranks that exchange on {len(hosts)} machines; allowed is one")
            inboxes = [own if i == rank else _opened(each, shape, device) for i, (_, each) in enumerate(found)]
            gather(None)  # everybody has opened all
        finally:
            if device.type == "cpu":
                os.unlink(told)
        state = new_state(device, patience, words)
        state[MODE] = ARMED
        # The host reads it, whatever torch's default device is.
        self.alarm = torch.zeros(ALARM, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.patience = patience
        self.group = inboxes, state, self.alarm, rank

    def check(self) -> None:
        """Raises PeerError where this rank waited for another in vain. It asks no device."""
        if int(self.alarm[RAISED]):
            rank = self.group[3]
            missing, number = self.alarm[RECORDS + 2 * rank : RECORDS + 2 * rank + 2].tolist()
            raise PeerError(
                f"rank {rank} waited {self.patience:.0f} s for rank {missing - 1} at exchange {number}: the other "
                "process stopped; start all of them again"
            )


def _made(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Any]:
    """Zeros int64, and what the others open them by."""
    if device.type == "cpu":
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        handle, path = tempfile.mkstemp(prefix="onegraph-", dir=folder)
        os.ftruncate(handle, 8 * _count(shape))
        os.close(handle)
        return _opened(path, shape, device), path
    driver = build.bindings()[0]
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # a context is there
        address = int(build.check(driver.cuMemAlloc(8 * _count(shape))))  # torch's own allocations have no handle
        handle = build.check(driver.cuIpcGetMemHandle(address))
        made = _at(address, shape, device).zero_()
        torch.cuda.synchronize(device)  # before anybody writes into it
    return made, bytes(handle.reserved)


def _opened(told: Any, shape: Sequence[int], device: torch.device) -> Tensor:
    """What another rank has made."""
    if device.type == "cpu":
        return torch.from_file(told, shared=True, size=_count(shape), dtype=torch.int64, device="cpu").view(*shape)
    driver = build.bindings()[0]
    handle = driver.CUipcMemHandle()
    handle.reserved = told
    with torch.cuda.device(device):
        return _at(int(build.check(driver.cuIpcOpenMemHandle(handle, PEER_ACCESS))), shape, device)


class _Memory:
    """A place in a GPU's memory, which nobody frees before the process ends."""

    def __init__(self, address: int, shape: Sequence[int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


def _at(address: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The memory as a tensor of this rank's GPU, whose kernels reach it there: another rank's too."""
    tensor = torch.as_tensor(_Memory(address, shape), device=device)
    assert tensor.data_ptr() == address, "it was copied"
    return tensor


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
