"""Ranks in parallel in one process, and what they exchange through: see `onegraph.ops.exchange`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

import torch
from torch import Tensor

from onegraph.ops.exchange import all_gather, all_reduce
from onegraph.ops.ranks import ALARM, ARMED, MAX_RANKS, MODE, RAISED, RECORDS, ROUNDS, UNARMED, new_state, part_of

PATIENCE = 5.0  # seconds that a rank waits for another: the host launches all of them within some milliseconds
ANSWER = 60.0  # seconds that a GPU may take, behind a wait in vain, for what is under way on it


class PeerError(RuntimeError):
    """A rank waited too long for another; the message says which for which."""


def _synchronize(device: torch.device) -> None:
    with suppress(RuntimeError):  # which whoever synchronizes next is told
        torch.cuda.synchronize(device)


class Peers:
    """The peer buffers and states of all ranks, at addresses that stay.

    Args:
        devices: of each rank; several may share the CPU. words: of 4 bytes, that a rank may send at once.
        patience: seconds that a rank waits for another.

    Ranks begin unarmed: each then runs alone, on its own part of every sum, so that its step can be warmed up and
    captured; `arm` them before they run in parallel. Raises ValueError where two devices cannot reach each
    other's memory.
    """

    def __init__(self, devices: Sequence[torch.device], words: int, patience: float = PATIENCE) -> None:
        if not 1 <= len(devices) <= MAX_RANKS:
            raise ValueError(f"gpus: got {len(devices)}; allowed are 1 to {MAX_RANKS}")
        self.devices, self._mode = list(devices), UNARMED
        words = -(-words // 4) * 4  # kernels write four at a time
        shape = (2, len(devices), words)
        self.inboxes = [torch.zeros(shape, dtype=torch.int64, device=device) for device in devices]
        self.states = [new_state(device, patience, words) for device in devices]
        cuda = devices[0].type == "cuda"
        self.alarm = torch.zeros(ALARM, dtype=torch.int64, pin_memory=cuda)
        if cuda:
            self._reach()

    def _reach(self) -> None:
        """Copies between two devices have torch open each one's memory to the other."""
        for a in self.inboxes:
            for b in self.inboxes:
                if a.device == b.device:
                    if a is not b:
                        raise ValueError(f"gpus: {a.device} stands twice; ranks are on GPUs of their own")
                elif not torch.cuda.can_device_access_peer(a.device, b.device):
                    raise ValueError(
                        f"{a.device} has no peer link to {b.device} (nvidia-smi topo -p2p r shows them); ranks need "
                        "one to each other: use fewer GPUs"
                    )
                else:
                    a[:1, :1, :1].copy_(b[:1, :1, :1])
        self._wait()

    def rank(self, index: int) -> Peer:
        """What the layers of a rank exchange through."""
        return Peer(self, index)

    def arm(self, on: bool = True) -> None:
        """From now on ranks exchange, as `reset` begins; with False each runs alone. Nothing may be under way."""
        self._mode = ARMED if on else UNARMED
        self.reset()

    def reset(self) -> None:
        """Begin anew, on all ranks at once: after a rank waited in vain, or was launched without the others. Waits for
        what is under way, which ends by itself; raises PeerError where a rank waited in vain and a GPU does not answer
        within `ANSWER` seconds."""
        if int(self.alarm[RAISED]):
            self._wait_for_answers()
        self._wait()
        for inbox, state in zip(self.inboxes, self.states, strict=True):
            inbox.zero_()
            state[MODE], state[ROUNDS:] = self._mode, 1
        self.alarm.zero_()
        self._wait()

    def _wait(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _wait_for_answers(self) -> None:
        """As `_wait`, which a GPU that has stopped would hold up for ever."""
        asked = {d: Thread(target=_synchronize, args=(d,), daemon=True) for d in self.devices if d.type == "cuda"}
        until = time.monotonic() + ANSWER
        for thread in asked.values():
            thread.start()
        for device, thread in asked.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise PeerError(f"{device} has not answered for {ANSWER:.0f} s: restart the process")

    def check(self) -> None:
        """Raises PeerError where a rank waited in vain. It asks no device."""
        if not int(self.alarm[RAISED]):
            return
        told = self.alarm[RECORDS:].view(MAX_RANKS, 2).tolist()
        waits = [
            f"rank {rank} ({self.devices[rank]}) waited for rank {missing - 1} ({self.devices[missing - 1]}) at "
            f"exchange {number}"
            for rank, (missing, number) in enumerate(told)
            if missing
        ]
        raise PeerError(
            f"{'; '.join(waits)}: the other GPU stopped, or the host launched nothing on it meanwhile (a debugger, "
            "CUDA_LAUNCH_BLOCKING); what the sequences had computed is lost: try again, and restart the process if it "
            "happens again"
        )


class Peer:
    """One of the ranks, as its layers see it. What does not fit into a peer buffer at once goes in parts.

    Attributes:
        index: the rank; count: how many there are. group: what ops that exchange are given last.
    """

    def __init__(self, peers: Peers, index: int) -> None:
        self.peers, self.index, self.count = peers, index, len(peers.devices)
        self.group = peers.inboxes, peers.states[index], peers.alarm, index
        self._room = peers.inboxes[index].shape[2]

    def all_reduce(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """The sum of all ranks' x [..., D], plus `add`, which is the same on all of them."""
        rows, others = x.flatten(0, -2), None if add is None else add.flatten(0, -2)
        most = _most(len(rows), self._room * 4 // (rows.shape[1] * x.element_size()))
        if len(rows) <= most:
            result: Tensor = all_reduce(x, add, *self.group)
            return result
        parts = [
            all_reduce(part, None if others is None else others[first : first + most], *self.group)
            for first, part in zip(range(0, len(rows), most), rows.split(most), strict=True)
        ]
        return torch.cat(parts).view_as(x)

    def all_gather(self, x: Tensor, width: int, unit: int = 1) -> Tensor:
        """The ranks' parts float32 [..., part] side by side, [..., width]; parts are in whole units (`part_of`)."""
        rows = x.flatten(0, -2)
        most = _most(len(rows), self._room // part_of(width, unit, self.count, 0)[1])
        parts = [all_gather(part, width, unit, *self.group) for part in rows.split(most)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(*x.shape[:-1], width)


def _most(rows: int, room: int) -> int:
    """Rows of a part, where at most `room` go at once: parts as equal as they can be."""
    count = -(-rows // max(1, room))
    return -(-rows // max(1, count))
