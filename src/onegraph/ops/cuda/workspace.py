"""Counters in GPU memory that are zero between launches, for kernels whose last block ends what all brought."""

import torch

from onegraph.ops.cuda import build, launcher

SETS = 64  # of counters, a GPU


class Counters:
    """`size` counters of 32 bits, zero between the launches that use them.

    Launches that may run at the same time must not share them: each stream has a set of its own, and so has each stream
    of each capture, since a graph may be replayed on another stream than it was captured on. There are SETS a GPU,
    which go round: two graphs share a set where so many others were captured between them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sets: dict[int, int] = {}  # address, by GPU
        self._places: dict[tuple[int, int, int], int] = {}
        self._given = 0

    def of(self, device: int) -> int:
        """Address of the counters of a launch on the current stream. Not for a GPU's first time inside a capture."""
        if device not in self._sets:
            self._sets[device] = build.resident(torch.zeros(SETS * self.size, dtype=torch.int32, device="cpu"), device)
        stream = launcher.raw_stream(device)
        capture = build.capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
        key = device, stream, capture
        if key not in self._places:
            if len(self._places) >= SETS:
                del self._places[next(iter(self._places))]
            self._places[key] = self._given % SETS
            self._given += 1
        return self._sets[device] + 4 * self.size * self._places[key]
