"""Second moments of the inputs of linears, gathered over calibration text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.quant.calibrate import QuantizableModel

Groups = list[list[tuple[str, Any]]]


@dataclass
class Moments:
    """Of the inputs of one group: `h` = X^T X / T of what the quantized model feeds it, `cross` = X_ref^T X / T against
    what the unquantized model would (None where that is not tracked). float32 [k, k]; sums over T are float64.
    """

    h: Tensor
    cross: Tensor | None


@contextmanager
def _inputs(groups: Groups) -> Iterator[list[Tensor | None]]:
    """While open, the latest input of each group as float32 [T, k]."""
    seen: list[Tensor | None] = [None] * len(groups)

    def hook(i: int) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[i] = args[0].detach().reshape(-1, args[0].shape[-1]).float()

        return keep

    handles = [group[0][1].register_forward_pre_hook(hook(i)) for i, group in enumerate(groups)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def gather(
    model: QuantizableModel,
    block: nn.Module,
    hidden: Sequence[Tensor],
    wanted: Sequence[int],
    reference: tuple[nn.Module, Sequence[Tensor]] | None = None,
) -> tuple[dict[int, Moments], list[Tensor]]:
    """Moments of the groups `wanted` (indices into `linear_groups`) while `block` runs over the batches of `hidden`,
    and what the block made of them.

    `reference` is the unquantized block and its own stream; with it the cross moments are gathered too.
    """
    groups = model.linear_groups(block)
    sums: dict[int, tuple[Tensor, Tensor | None]] = {}
    rows, outputs = 0, []
    with _inputs(groups) as seen:
        for at, batch in enumerate(hidden):
            others: list[Tensor | None] = [None] * len(groups)
            if reference is not None:
                with _inputs(model.linear_groups(reference[0])) as others:
                    model.run_block(reference[0], reference[1][at])
            outputs.append(model.run_block(block, batch))
            for i in wanted:
                x, other = seen[i], others[i]
                assert x is not None
                h = (x.T @ x).double()
                cross = None if other is None else (other.T @ x).double()
                before = sums.get(i, (None, None))
                sums[i] = (
                    h if before[0] is None else h + before[0],
                    cross if cross is None or before[1] is None else cross + before[1],
                )
            rows += batch.shape[0] * batch.shape[1]
    moments = {
        i: Moments((h / rows).float(), None if cross is None else (cross / rows).float())
        for i, (h, cross) in sums.items()
    }
    return moments, outputs


def corrected(weight: Tensor, moments: Moments, damping: float, strength: float) -> Tensor:
    """The weight that does best on the quantized model's inputs: argmin_V |W X_ref - V X|^2, damped towards W.

    V = W + strength W (C - H) (H + damping mean(diag H))^-1 with C the cross moments (GPTAQ, arXiv 2504.02692, solves
    the same problem column by column). weight [n, k] -> float32 [n, k].
    """
    if moments.cross is None or strength == 0:
        return weight
    h = moments.h.double()
    h.diagonal().add_(damping * h.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(h)
    if failed:
        return weight
    drift = torch.cholesky_solve((moments.cross - moments.h).double().T, factor).T
    return weight + strength * (weight @ drift.float())
