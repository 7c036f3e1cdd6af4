"""What ranks agree on: their number, the words of their state and of the alarm (`ops/exchange.py`, `exchange.cu`), and
who has which part. Kernels' launchers read it too, so it imports nothing of ours.
"""

import torch
from torch import Tensor

MAX_RANKS = 8
ROUND, TICKET, ARMED, EXPIRED, LIMIT = range(5)  # words of a rank's state; LIMIT in nanoseconds
STATE = 8
RAISED, RECORDS = 0, 1  # words of the alarm: whether it is raised; of each rank the peer it missed + 1, and the round
ALARM = RECORDS + 2 * MAX_RANKS
LAST_ROUND = 0x7FFFFFFE  # then 1: parity goes on alternating, and no round is 0


def new_state(device: torch.device, limit: float) -> Tensor:
    """A rank's state before its first round: it is not armed. limit: seconds that it waits for a peer."""
    state = torch.zeros(STATE, dtype=torch.int64)
    state[ROUND], state[LIMIT] = 1, int(limit * 1e9)
    return state.to(device)


def part_of(size: int, unit: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first and last of `size` that a rank has, in whole units: equal parts, what is left for the last."""
    part = -(-size // unit // ranks) * unit
    return min(rank * part, size), min((rank + 1) * part, size)
