"""Host values in, results out, through pinned memory made beforehand; on a CPU the same calls are plain copies."""

from collections.abc import Callable

import torch
from torch import Tensor


class Upload:
    """Pinned memory in front of a device tensor.

    A pinned buffer must not be rewritten before the copy out of it ran, and nothing tells the host when that is but an
    event: two slots in turn, each guarded by its event, so that the host waits only when it is two copies ahead.
    """

    def __init__(self, target: Tensor, depth: int = 2):
        self.target = target
        self._slots: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        if target.is_cuda:
            with torch.cuda.device(target.device):
                self._slots = [
                    (torch.empty(target.shape, dtype=target.dtype, pin_memory=True), torch.cuda.Event())
                    for _ in range(depth)
                ]

    def __call__(self, value: Tensor) -> None:
        """Copy `value`, of the target's shape or fewer leading rows, on the current stream; `value` is free at once."""
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
    """Pinned memory behind a device tensor: `start` copies without waiting, the function that it returns waits.

    `depth` downloads may be under way at once; the tensor that one returned is overwritten `depth` starts later.
    """

    def __init__(self, source: Tensor, depth: int = 2):
        self.source = source
        self._slots: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        if source.is_cuda:
            with torch.cuda.device(source.device):
                self._slots = [
                    (torch.empty(source.shape, dtype=source.dtype, pin_memory=True), torch.cuda.Event())
                    for _ in range(depth)
                ]

    def start(self, rows: int) -> Callable[[], Tensor]:
        """Copy the first `rows` rows on the current stream; the result is a function that waits and returns them."""
        if not self._slots:
            kept = self.source[:rows].clone()
            return lambda: kept
        slot, copied = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot[:rows].copy_(self.source[:rows], non_blocking=True)
        copied.record(torch.cuda.current_stream(self.source.device))

        def wait() -> Tensor:
            copied.synchronize()
            return slot[:rows]

        return wait
