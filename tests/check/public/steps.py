"""Bugs that people met and reported in public, each rebuilt small from what its thread says, with the mended twin.

Names and sizes are ours; what breaks, and where, is the thread's.
"""

from types import SimpleNamespace
from typing import Any

import torch

WIDTH, ROWS = 8, 4


def _talker(uniform: bool) -> Any:
    """vllm-project/vllm-omni issue 4562, mended by pull request 4563: a speech model's talker keeps, in its forward,
    the rows that decode one token by a boolean mask. How many there are is known on the device alone, so capture ends
    with "operation not permitted when stream is capturing". In the captured decode every row is such a row."""
    rows = torch.arange(ROWS, device="cuda")
    spans = torch.ones(ROWS, dtype=torch.int64, device="cuda")
    feedback = torch.ones(ROWS, WIDTH, device="cuda")

    def positions(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if uniform:
            return rows, starts
        decodes = (spans == 1) & (starts >= 0)
        return rows[decodes], starts[decodes]  # hazard: CG104

    def step(hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        which, at = positions(starts)
        return hidden.index_add(0, at, feedback[which])

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.full((ROWS, WIDTH), float(i), device="cuda")
        return hidden, (torch.arange(ROWS, device="cuda") + i) % ROWS

    return step, inputs


def talker_bad() -> Any:
    return _talker(uniform=False)


def talker_mended() -> Any:
    return _talker(uniform=True)


def _denoise(persistent: bool) -> Any:
    """vllm-project/vllm pull request 51994: which requests attend causally stands in a persistent boolean buffer, but
    what builds the attention's metadata before each step casts it to int32, into a fresh tensor. The full graph reads
    the tensor of its capture for ever: silently the mask of the warm-up. Mended: the buffer is int32 to begin with."""
    causal = torch.zeros(ROWS, dtype=torch.int32 if persistent else torch.bool, device="cuda")
    metadata = SimpleNamespace(causal=None)
    context = SimpleNamespace(metadata=metadata)
    weight = torch.eye(WIDTH, device="cuda")

    def build(i: int) -> None:
        causal.copy_((torch.arange(ROWS, device="cuda") + i) % 2)
        metadata.causal = causal if causal.dtype is torch.int32 else causal.to(torch.int32)

    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = context.metadata.causal
        return torch.where(mask[:, None] == 1, x, x.flip(-1)) @ weight  # hazard: CG206

    def step(x: torch.Tensor) -> torch.Tensor:
        return attend(x)

    def inputs(i: int) -> tuple[torch.Tensor]:
        build(i)
        return (torch.arange(ROWS * WIDTH, device="cuda", dtype=torch.float32).view(ROWS, WIDTH) + i,)

    return step, inputs


def denoise_bad() -> Any:
    return _denoise(persistent=False)


def denoise_mended() -> Any:
    return _denoise(persistent=True)
