"""Counters in GPU memory that are zero between launches, for kernels whose last block ends what all brought."""

import torch

from onegraph.ops.cuda import build, launcher

SETS = 64  # of counters, a GPU


class Counters:
    """`size` counters of 32 bits, zero between the launches that use them.

    Launches that may run at the same time must not share them: each stream has a set of its own, and so has each stream
    of each capture, since a graph may be replayed on another stream than it was captured on.

    lasting: no set is ever given twice, for kernels that wait for a counter of another block and would wait forever
    where two launches share it. Sets grow by SETS outside captures. Without, there are SETS a GPU, which go round: two
    graphs share a set where so many others were captured between them.
    """

    def __init__(self, size: int, *, lasting: bool = False) -> None:
        self.size, self.lasting = size, lasting
        self._sets: dict[int, list[int]] = {}  # addresses of SETS sets each, by GPU
        self._places: dict[tuple[int, int, int], int] = {}
        self._given = 0

    def of(self, device: int) -> int:
        """Address of the counters of a launch on the current stream. Not for a GPU's first time inside a capture."""
        capturing = torch.cuda.is_current_stream_capturing()
        sets = self._sets.setdefault(device, [])
        # With the next captures in view, which nothing can be allocated in.
        if not sets or (self.lasting and not capturing and self._given + SETS > len(sets) * SETS):
            sets.append(build.resident(torch.zeros(SETS * self.size, dtype=torch.int32, device="cpu"), device))
        stream = launcher.raw_stream(device)
        key = device, stream, build.capture_id(stream) if capturing else 0
        if key not in self._places:
            if not self.lasting and len(self._places) >= SETS:
                del self._places[next(iter(self._places))]
            self._places[key] = self._given
            self._given += 1
        block, place = divmod(self._places[key] % (len(sets) * SETS), SETS)
        return sets[block] + 4 * self.size * place
