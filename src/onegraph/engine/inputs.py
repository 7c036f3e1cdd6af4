"""The inputs of a step: static buffers on the device, and the host's side of them; and what it reports."""

from collections.abc import Callable

import torch
from torch import Tensor

from onegraph.engine.choice import Choice, row_buffers, row_values
from onegraph.engine.sequence import Sequence

# What waits for a step's tokens, and for log-probabilities of them.
Report = tuple[Callable[[], Tensor], Callable[[], Tensor] | None]


def row_inputs(
    rows: int, per_row: int, choice: Choice, device: torch.device, *, adapted: bool = False
) -> dict[str, Tensor]:
    """What every step has of each row; zeros, which stand for a row without a sequence. adapted: whether the model has
    adapters."""

    def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return {
        "positions": tensor(torch.int32),  # where the next token of the row is written
        "limits": tensor(torch.int32),  # where the row stops: a padding row has 0
        "table": tensor(torch.int32, per_row),
        "slots": tensor(torch.int32),  # which state of fixed size is the row's: a padding row has 0
        "seed": tensor(torch.int64),
        **({"adapters": tensor(torch.int64)} if adapted else {}),  # which adapter the row has, 0 for none
        **row_buffers(rows, choice, device),
    }


def host_rows(
    active: list[Sequence], per_row: int, *, limits: list[int], choice: Choice, adapted: bool
) -> dict[str, Tensor]:
    """The host's side of `row_inputs`."""
    return {
        "positions": torch.tensor([s.read for s in active], dtype=torch.int32),
        "limits": torch.tensor(limits, dtype=torch.int32),
        "table": block_table(active, per_row),
        "slots": torch.tensor([s.slot for s in active], dtype=torch.int32),
        "seed": torch.tensor([s.seed for s in active], dtype=torch.int64),
        **({"adapters": torch.tensor([s.adapter for s in active], dtype=torch.int64)} if adapted else {}),
        **row_values([s.params for s in active], choice),
    }


def block_table(rows: list[Sequence], per_row: int) -> Tensor:
    """The pages of each row, int32 [B, per_row]."""
    table = torch.zeros(len(rows), per_row, dtype=torch.int32)
    for row, sequence in zip(table, rows, strict=True):
        row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
    return table


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8: padding costs at most a doubling of small batches and 7 rows of large ones."""
    return sorted({b for b in (1, 2, 4, *range(8, largest, 8)) if b < largest} | {largest})
