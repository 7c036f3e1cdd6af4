"""What ranks agree on: their number, the words of their state and of the alarm (`ops/exchange.py`, `exchange.cuh`), and
who has which part. Kernels' launchers read it too, so it imports nothing of ours.
"""

import torch
from torch import Tensor

MAX_RANKS = 8
CHUNK = 128  # words of an inbox that have a round's number of their own
# Words of a rank's state; LIMIT in nanoseconds, from ROUNDS on the number of the next round of each chunk.
MODE, LIMIT, ROUNDS = 0, 1, 4
UNARMED, ARMED, EXPIRED = range(3)  # of MODE; EXPIRED: waited for a peer in vain
RAISED, RECORDS = 0, 1  # words of the alarm: whether it is raised; of each rank the peer it missed + 1, and the round
ALARM = RECORDS + 2 * MAX_RANKS
LAST_ROUND = 0x7FFFFFFE  # then 1: parity goes on alternating, and no round is 0


def state_words(room: int) -> int:
    """Words of the state of a rank whose peer buffer takes `room` words of each rank."""
    return ROUNDS + -(-room // CHUNK)


def new_state(device: torch.device, limit: float, room: int) -> Tensor:
    """A rank's state before its first round: it is not armed. limit: seconds that it waits for a peer."""
    state = torch.ones(state_words(room), dtype=torch.int64)
    state[MODE], state[LIMIT] = UNARMED, int(limit * 1e9)
    return state.to(device)


def part_of(size: int, unit: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first and last of `size` that a rank has, in whole units: equal parts, what is left for the last."""
    part = -(-size // unit // ranks) * unit
    return min(rank * part, size), min((rank + 1) * part, size)
