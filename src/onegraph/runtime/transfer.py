"""Host values in, results out, through pinned memory made beforehand; on a CPU the same calls are plain copies."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

LONG = 0.05  # seconds, more than a step takes


class Upload:
    """Pinned memory in front of a device tensor.

    A pinned buffer must not be rewritten before the copy out of it ran, and nothing tells the host when that is but an
    event: two slots in turn, each guarded by its event, so that the host waits only when it is two copies ahead.
    """

    def __init__(self, target: Tensor, depth: int = 2):
        self.target = target
        self._slots = _pinned(target, depth)
        self._turn = 0

    def __call__(self, value: Tensor) -> None:
        """Copy `value`, of the target's shape or fewer leading rows, on the current stream; `value` is free at once.

        A value that is the target's own memory stays as it is."""
        if value.data_ptr() == self.target.data_ptr():
            return
        whole = value.shape == self.target.shape
        target = self.target if whole else self.target[: len(value)]
        if not self._slots or value.is_cuda:
            target.copy_(value)
            return
        slot, copied = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        copied.synchronize()
        staged = slot if whole else slot[: len(value)]
        staged.copy_(value)
        target.copy_(staged, non_blocking=True)
        copied.record(torch.cuda.current_stream(target.device))


class Download:
    """Pinned memory behind device tensors like `like`: `start` copies without waiting, what it returns waits.

    `depth` downloads may be under way at once; the tensor that one returned is overwritten `depth` starts later. The
    copy to the host runs on a stream of its own, from a copy on the device: between two replays of a step the copy
    engine would take 10 us, the copy on the device takes 3 (H200).
    """

    def __init__(self, like: Tensor, depth: int = 2):
        self._slots = [(torch.empty_like(like), *slot) for slot in _pinned(like, depth)]
        self._stream = torch.cuda.Stream(like.device) if self._slots else None
        self._turn = 0

    def start(self, value: Tensor, look: Callable[[], object] | None = None) -> Callable[[], Tensor]:
        """Copy `value`, of the shape of `like` or fewer leading rows, as the current stream left it.

        look: called while the result is long in coming; what it raises ends the wait."""
        if self._stream is None:
            kept = value.clone()
            return lambda: kept
        kept, staged, copied = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        kept, staged = (t if value.shape == t.shape else t[: len(value)] for t in (kept, staged))
        copied.synchronize()
        kept.copy_(value)
        self._stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self._stream):
            staged.copy_(kept, non_blocking=True)
            copied.record(self._stream)

        def wait() -> Tensor:
            if look is not None:
                until(copied.query, look)
            copied.synchronize()
            return staged

        return wait


def until(done: Callable[[], bool], look: Callable[[], object]) -> None:
    """Returns when `done`; what takes longer than LONG seconds is looked after every millisecond."""
    begun = time.monotonic()
    while not done():
        long = time.monotonic() - begun > LONG
        if long:
            look()
        time.sleep(1e-3 if long else 0)  # others of this process may run


def _pinned(like: Tensor, depth: int) -> list[tuple[Tensor, torch.cuda.Event]]:
    if not like.is_cuda:
        return []
    with torch.cuda.device(like.device):
        return [(torch.empty(like.shape, dtype=like.dtype, pin_memory=True), torch.cuda.Event()) for _ in range(depth)]
