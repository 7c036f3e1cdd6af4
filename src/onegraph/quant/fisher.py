"""Hessians of the model's KL, not of a layer's output: factors of a linear's outputs, by one backward pass.

For a linear of inputs x and outputs y the KL of the rounded model is, to second order, E[(d^T E x)^2] / 2 with d the
gradient at y of the logits along a random direction whose covariance is that of softmax, diag(p) - p p^T: the true
Fisher information of the model's own predictions (labels of the text are not asked). As a product of two factors it is
tr(H_O E H_I E^T) with H_O = E[d d^T] (YAQA, arXiv 2505.22988, its first sketch); H_I stays what is gathered behind the
quantized blocks, so that correction for earlier layers' error goes on working. A Gaussian direction has the covariance
of a sampled label's gradient and lighter tails.

The unquantized model runs forward once, its residual stream before each block put aside (`quant/spill.py`), and
backward block by block: memory holds one block, its activations for `BATCH_TOKENS` tokens, and its factors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onegraph.ops.registry import reference_ops
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.layer import generator
from onegraph.quant.spill import Batches, Spill

BATCH_TOKENS = 2048
Factors = dict[str, Tensor]  # by full name of a linear: H_O [n, n] float32, of mean diagonal 1


def output_factors(
    model: QuantizableModel,
    tokens: Tensor,
    *,
    seed: int,
    draws: int = 1,
    spill: Spill | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Factors]]:
    """The factors of each block's linears, last block first; a linear that no token reaches has none.

    Args:
        tokens: int [N, T]. draws: random directions a token; each is a backward pass.
        progress: called with the number of blocks that are done.

    Routed experts have none: they are rounded as without. Deterministic on one machine.
    """
    spill = spill or Spill()
    rows = max(1, BATCH_TOKENS // tokens.shape[1])
    before: list[Batches] = []
    with torch.no_grad():
        stream = spill.batches(model.embed(part) for part in tokens.split(rows))
        for i in range(model.num_blocks):
            before.append(stream)
            block = model.load_block(i)
            stream = spill.batches(model.run_block(block, batch) for batch in stream)
    source = generator(seed, "fisher")
    gradients = [spill.batches(_at_the_end(model, batch, source) for batch in stream) for _ in range(draws)]
    stream.clear()
    for i in reversed(range(model.num_blocks)):
        yield i, _block(model, i, before.pop(), gradients)
        if progress is not None:
            progress(model.num_blocks - i)
    spill.close()


def _at_the_end(model: QuantizableModel, hidden: Tensor, source: torch.Generator) -> Tensor:
    """Gradient [B, T, D] at the residual stream behind the last block, along one random direction a token."""
    found = torch.empty_like(hidden)
    for row in range(len(hidden)):
        with torch.enable_grad(), reference_ops():
            x = hidden[row].detach().clone().requires_grad_()
            logits = model.head(x).float()
            p = logits.detach().softmax(-1)
            noise = torch.randn(len(p), generator=source)  # seeds: a draw of all logits on the CPU would take longest
            part = torch.Generator(p.device).manual_seed(int(noise.view(torch.int32)[0]) & 0x7FFFFFFF)
            spread = p.sqrt() * torch.randn(p.shape, generator=part, device=p.device)
            (found[row],) = torch.autograd.grad(logits, x, spread - p * spread.sum(-1, keepdim=True))
    return found


def _block(model: QuantizableModel, i: int, before: Batches, gradients: list[Batches]) -> Factors:
    """The factors of block `i`; `gradients`, behind the block, become those before it. `before` is used up."""
    block, prefix = model.load_block(i), model.block_prefix(i)
    linears = [(prefix + name, module) for group in model.linear_groups(block) for name, module in group]
    sums: dict[str, Tensor] = {}
    with _outputs(linears, partial(_add, sums)):
        for at in range(len(before)):
            with torch.enable_grad(), reference_ops(), sdpa_kernel(SDPBackend.MATH):
                x = before[at].detach().clone().requires_grad_()
                made = model.run_block(block, x)
                for draw, behind in enumerate(gradients):
                    last = draw == len(gradients) - 1
                    (behind[at],) = torch.autograd.grad(made, x, behind[at], retain_graph=not last)
    before.clear()
    return {name: (h / h.diagonal().mean().clamp_min(1e-30)).float() for name, h in sums.items()}


def _add(sums: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    d = gradient.detach().reshape(-1, gradient.shape[-1]).float()
    h = (d.T @ d).double()
    sums[name] = sums[name] + h if name in sums else h


@contextmanager
def _outputs(linears: list[tuple[str, Any]], seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While open, `seen` is called with the name of a linear and each gradient at its outputs."""

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: seen(name, gradient))

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
