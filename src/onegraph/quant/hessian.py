"""Second moments of the inputs of linears, gathered over calibration text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.quant.activation_offload import ActivationOffload, Batches
from onegraph.quant.calibrate import ExpertLayer, QuantizableModel

Groups = list[list[tuple[str, Any]]]


@dataclass
class Moments:
    """Of the inputs of one group: `h` = X^T X / T of what the quantized model feeds it, `cross` = X_ref^T X / T against
    what the unquantized model would, `weighed` = X^T diag(w) X / T under weights of tokens (None where those are not
    tracked). float32 [k, k].
    """

    h: Tensor
    cross: Tensor | None
    weighed: Tensor | None = None

    def under(self, share: float) -> Tensor:
        """What to round under: `share` of the weighed moments and the rest plain, both as if of one trace."""
        if self.weighed is None:
            return self.h
        scale = self.h.diagonal().mean() / self.weighed.diagonal().mean().clamp_min(1e-30)
        return (1 - share) * self.h + share * scale * self.weighed


@dataclass
class Seen:
    """What a layer of experts was given over the text: inputs x [T, D] and choices int [T, K] by batch, and the inputs
    that the unquantized model has for the same tokens (None where that is not tracked)."""

    x: Batches
    chosen: list[Tensor]
    reference: Batches | None

    def routed(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Inputs [n, D] of the tokens that chose the expert, and the unquantized model's."""
        rows = [(chosen == expert).any(-1) for chosen in self.chosen]

        def those(batches: Batches) -> Tensor:
            return torch.cat([batch[at] for batch, at in zip(batches, rows, strict=True)])

        return those(self.x), None if self.reference is None else those(self.reference)

    def spread(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Inputs of all tokens, or of about so many of them, evenly spread."""
        step = max(1, sum(len(chosen) for chosen in self.chosen) // rows)
        x = torch.cat([batch[::step] for batch in self.x])
        return x, None if self.reference is None else torch.cat([batch[::step] for batch in self.reference])

    def counts(self, experts: int) -> Tensor:
        """Tokens that chose each expert, int64 [E] on the CPU."""
        hits = [torch.stack([(chosen == e).any(-1).sum() for e in range(experts)]) for chosen in self.chosen]
        return torch.stack(hits).sum(0).cpu()

    def clear(self) -> None:
        self.x.clear()
        if self.reference is not None:
            self.reference.clear()


@dataclass
class Gathered:
    """Moments by index of the linear group (none of one that no batch reached), what expert layers saw by their
    index, and what the block made."""

    moments: dict[int, Moments]
    experts: dict[int, Seen]
    outputs: Batches


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


@contextmanager
def _choices(layers: Sequence[ExpertLayer]) -> Iterator[list[tuple[Tensor, Tensor] | None]]:
    """While open, the latest input of each expert layer as float32 [T, D], and its choices int [T, K]."""
    seen: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)

    def hook(i: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, chosen = (*args, *kwargs.values())[:2]
            seen[i] = x.detach().reshape(-1, x.shape[-1]).float(), chosen.reshape(-1, chosen.shape[-1])

        return keep

    handles = [layer.module.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def gather(
    model: QuantizableModel,
    block: nn.Module,
    hidden: Batches | Sequence[Tensor],
    wanted: Sequence[int],
    reference: tuple[nn.Module, Batches] | None = None,
    *,
    weights: Mapping[int, Sequence[Tensor]] | None = None,
    experts: Sequence[int] = (),
    spill: ActivationOffload | None = None,
) -> Gathered:
    """Moments of the groups `wanted` (indices into `linear_groups`) and what `experts` (indices into `expert_layers`)
    saw while `block` ran over the batches of `hidden`, and what the block made of them.

    `reference` is the unquantized block and its own stream; with it the cross moments are gathered too. `weights`: of
    the tokens of each batch [B * T, 1], by group; with them the weighed moments are too.
    """
    spill = spill or ActivationOffload()
    groups, layers = model.linear_groups(block), [model.expert_layers(block)[i] for i in experts]
    sums: dict[int, list[Tensor | None]] = {}  # of h, cross, weighed
    rows, outputs = 0, spill.batches()
    seen_by = {i: Seen(spill.batches(), [], None if reference is None else spill.batches()) for i in experts}
    with _inputs(groups) as seen, _choices(layers) as routed:
        for at, batch in enumerate(hidden):
            others: list[Tensor | None] = [None] * len(groups)
            if reference is not None:
                twins = [model.expert_layers(reference[0])[i] for i in experts]
                with _inputs(model.linear_groups(reference[0])) as others, _choices(twins) as there:
                    model.run_block(reference[0], reference[1][at])
                for i, twin in zip(experts, there, strict=True):
                    kept = seen_by[i].reference
                    assert kept is not None
                    assert twin is not None
                    kept.append(twin[0])
            seen[:], routed[:] = [None] * len(groups), [None] * len(layers)  # a batch need not reach all of them
            outputs.append(model.run_block(block, batch))
            for i, layer, given in zip(experts, layers, routed, strict=True):
                if given is None:
                    raise ValueError(
                        f"{layer.names[0]}: rows of the calibration text do not reach it; keep it with the rate 16"
                    )
                seen_by[i].x.append(given[0])
                seen_by[i].chosen.append(given[1])
            for i in wanted:
                x, other = seen[i], others[i]
                if x is None or (reference is not None and other is None):
                    continue
                heavy = None if weights is None or i not in weights else x * weights[i][at].to(x.device)
                lefts = (x, other, heavy)
                if i not in sums:
                    sums[i] = [None if left is None else x.new_zeros(x.shape[1], x.shape[1]) for left in lefts]
                for whole, left in zip(sums[i], lefts, strict=True):
                    if whole is not None and left is not None:
                        whole.addmm_(left.T, x)
            rows += batch.shape[0] * batch.shape[1]
    moments = {}
    for i, found in sums.items():
        h, cross, weighed = (None if each is None else each.div_(rows) for each in found)
        assert h is not None
        moments[i] = Moments(h, cross, weighed)
    return Gathered(moments, seen_by, outputs)


def drift(moments: Moments, damping: float) -> Tensor | None:
    """How far the weight that does best on the quantized model's inputs is from W, over W: argmin_V |W X_ref - V X|^2,
    damped towards W, is W + W drift. None where there is nothing to correct.

    drift = (C - H) (H + damping mean(diag H))^-1 with C the cross moments (GPTAQ, arXiv 2504.02692, solves the same
    problem column by column). float32 [k, k].
    """
    if moments.cross is None:
        return None
    h = moments.h.double()
    h.diagonal().add_(damping * h.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(h)
    if failed:
        return None
    del h
    off = moments.cross - moments.h
    for rows in off.split(1024):  # in place, some at once: of 14,336 columns each matrix in float64 takes 1.6 GB
        rows.copy_(torch.cholesky_solve(rows.T.double(), factor).T)
    return off


def corrected(weight: Tensor, drift: Tensor | None, strength: float) -> Tensor:
    """`weight` [n, k] as `drift` has it, float32."""
    return weight if drift is None or strength == 0 else weight + strength * (weight @ drift)
