"""Linears of vLLM's tensor-parallel ranks that sum over all of them in their own launch (`ops/exchange.py`).

    vllm serve MODEL --tensor-parallel-size 2 --additional-config '{"onegraph_exchange": true}'

Each rank is a process, which opens the others' inboxes: on GPUs by CUDA's handles between processes, on CPUs as shared
files. Sums of up to 64 tokens cross so, longer ones in vLLM's all-reduce. Not the default: it has run on CPUs alone.
"""

import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from onegraph.nn.peers import PeerError
from onegraph.ops.cuda import build
from onegraph.ops.exchange import all_reduce
from onegraph.ops.ranks import ALARM, ARMED, MAX_RANKS, MODE, RAISED, RECORDS, new_state

SETTING = "onegraph_exchange"
TOKENS = 64  # of a sum that crosses through inboxes
PATIENCE = 120.0  # seconds that a rank waits for another, which may be compiling
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

_LINEARS: dict[str, tuple[Any, "Exchange"]] = {}  # what an op's name stands for


class Exchange:
    """This rank's side: its inbox and state, and the inboxes of the other ranks. All ranks make it at once.

    Args:
        words: of 4 bytes, that a rank may send at once.

    Attributes:
        group: what ops that exchange are given last (`nn.peers.Peer.group`).

    Raises ValueError where the ranks are on several machines, or more than `MAX_RANKS`.
    """

    def __init__(self, words: int) -> None:
        self.ranks: Any = get_tp_group()
        rank, count, device = self.ranks.rank_in_group, self.ranks.world_size, self.ranks.device
        if count > MAX_RANKS:
            raise ValueError(f"{SETTING}: {count} ranks; allowed are up to {MAX_RANKS}: leave it out")
        words = -(-words // 4) * 4
        shape = 2, count, words
        own, told = _made(shape, device)
        found = self._gathered((socket.gethostname(), told))
        if len({host for host, _ in found}) > 1:
            raise ValueError(f"{SETTING}: the ranks are on several machines; allowed is one: leave it out")
        inboxes = [own if i == rank else _opened(each, shape, device) for i, (_, each) in enumerate(found)]
        self._gathered(None)  # everybody has opened all
        if device.type == "cpu":
            os.unlink(told)
        state = new_state(device, PATIENCE, words)
        state[MODE] = ARMED
        self.alarm = torch.zeros(ALARM, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.group = inboxes, state, self.alarm, rank

    def _gathered(self, told: Any) -> list[Any]:
        found = [None] * self.ranks.world_size
        torch.distributed.all_gather_object(found, told, group=self.ranks.cpu_group)
        return found

    def check(self) -> None:
        """Raises PeerError where this rank waited for another in vain. It asks no device."""
        if int(self.alarm[RAISED]):
            rank = self.group[3]
            missing, number = self.alarm[RECORDS + 2 * rank : RECORDS + 2 * rank + 2].tolist()
            raise PeerError(
                f"rank {rank} waited {PATIENCE:.0f} s for rank {missing - 1} at exchange {number}: the other process "
                "stopped; start vLLM again"
            )


def exchange_of(vllm_config: Any, hidden: int, dtype: torch.dtype) -> Exchange | None:
    """Of the model whose ranks' sums are [tokens, hidden] of `dtype`; None where it is not asked for."""
    asked = vllm_config.additional_config
    if not isinstance(asked, dict) or not asked.get(SETTING) or get_tp_group().world_size == 1:
        return None
    return Exchange(TOKENS * hidden * dtype.itemsize // 4)


def sum_over_ranks(linear: Any, exchange: Exchange) -> None:
    """From now on `linear`, a row-parallel one whose parts are one layer, has a name for `linear_sum`."""
    linear.onegraph_sum = f"{linear.prefix}@{exchange.ranks.unique_name}"
    _LINEARS[linear.onegraph_sum] = linear, exchange


def _run(x: Tensor, add: Tensor | None, silu: bool, name: str) -> Tensor:
    linear, exchange = _LINEARS[name]
    part = linear.onegraph_slots.parts[0]
    weight, first = linear.onegraph_slots.given(linear, None, after_norm=False), exchange.group[3] == 0
    bias, tokens = linear.bias if first else None, x.shape[:-1].numel()
    x = x.contiguous()
    if 1 <= tokens <= TOKENS:
        run = part.ops.all_reduce
        found: Tensor | None = None
        if run is not None:
            found = run(part.format, x, weight, bias, add, silu, exchange.group)
        if found is None:
            found = all_reduce(
                part.ops.linear(part.format, x, weight, bias, None, None, silu, False), add, *exchange.group
            )
        return found
    own = part.ops.linear(part.format, x, weight, bias, add if first else None, None, silu, False)
    whole: Tensor = exchange.ranks.all_reduce(own)
    return whole


def _fake(x: Tensor, add: Tensor | None, silu: bool, name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _LINEARS[name][0].output_size)


_LIBRARY = torch.library.Library("onegraph_vllm", "DEF")
_LIBRARY.define("linear_sum(Tensor x, Tensor? add, bool silu, str name) -> Tensor")
for _backend in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_sum", _run, _backend)
torch.library.register_fake("onegraph_vllm::linear_sum", _fake, lib=_LIBRARY)
linear_sum = torch.ops.onegraph_vllm.linear_sum
"""x [..., k] ([..., 2k] with `silu`) of this rank -> the sum of all ranks' linears plus `add`, [..., n]. One opaque op,
since how it crosses depends on how many tokens there are. name: `onegraph_sum` of the linear."""


# ---------------------------------------------------------------------------------------- memory that processes share


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
        made = _at(address, shape).zero_()
        torch.cuda.synchronize(device)  # before anybody writes into it
    return made, bytes(handle.reserved)


def _opened(told: Any, shape: Sequence[int], device: torch.device) -> Tensor:
    """What another rank has made."""
    if device.type == "cpu":
        return torch.from_file(told, shared=True, size=_count(shape), dtype=torch.int64).view(*shape)
    driver = build.bindings()[0]
    handle = driver.CUipcMemHandle()
    handle.reserved = told
    with torch.cuda.device(device):
        return _at(int(build.check(driver.cuIpcOpenMemHandle(handle, PEER_ACCESS))), shape)


class _Memory:
    """A place in a GPU's memory, which nobody frees before the process ends."""

    def __init__(self, address: int, shape: Sequence[int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


def _at(address: int, shape: Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(_Memory(address, shape))
    assert tensor.data_ptr() == address, "it was copied"
    return tensor


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
