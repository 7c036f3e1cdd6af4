"""Hessians of the model's KL, not of a layer's output: which tokens and which outputs matter, by a backward pass.

For a linear of inputs x and outputs y the KL of the rounded model is, to second order, E[(d^T E x)^2] / 2 with d the
gradient at y of the logits along a random direction whose covariance is that of softmax, diag(p) - p p^T: the true
Fisher information of the model's own predictions (labels of the text are not asked). A Gaussian direction has the
covariance of a sampled label's gradient and lighter tails. Tokens count as independent. As a product of two factors it
is tr(H_O E H_I E^T), with

    H_O = E[d d^T] ,     H_I = E[|d|^2 x x^T] / E[|d|^2]

(one step of power iteration for either from the identity; YAQA, arXiv 2505.22988, goes on from there). Kept of H_I is
|d|^2 of each token alone: moments of inputs are gathered under weights behind the quantized blocks, as others are, so
that the correction for earlier layers' error goes on working. The weights are |d|, summed in squares over linears that
share an input: |d|^2 itself is so heavy-tailed (first tokens, which all others attend to) that a hundredth to a third
of a text would count, and rounding fits those (docs/log.md).

The unquantized model runs forward once, its residual stream before each block put aside in bfloat16
(`quant/activation_offload.py`), and backward block by block: memory holds one block, its activations for `batch_tokens`
tokens, and its factors.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onegraph.ops.registry import reference_ops
from onegraph.quant.activation_offload import ActivationOffload, Batches
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.layer import generator

LARGEST = 16384  # outputs that a linear with a second factor may have: it takes n^2 bytes on disk, 20 n^2 to round by


def batch_tokens(device: torch.device, width: int) -> int:
    """Tokens of a residual stream of `width` numbers that go through a block at once: on a GPU as many as keep it busy
    behind the host's launches."""
    return min(8192, max(2048, 2**23 // width)) if device.type == "cuda" else 2048


@dataclass
class Factors:
    """By full name of a linear: H_O, float16 of mean diagonal 1 (so no number of it is above n), as `_packed` has it;
    and |d|^2 of tokens, float32 [N, T]. A linear whose outputs KL does not depend on has neither."""

    triangles: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)

    def flat(self) -> dict[str, Tensor]:
        """As a piece on disk has it."""
        return {f"o.{k}": v for k, v in self.triangles.items()} | {f"t.{k}": v for k, v in self.tokens.items()}

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> "Factors":
        triangles, tokens = ({k[2:]: v for k, v in flat.items() if k.startswith(kind)} for kind in ("o.", "t."))
        return cls(triangles, tokens)

    def of_outputs(self, name: str, device: torch.device) -> Tensor:
        """H_O of a linear, float32 [n, n]."""
        return _unpacked(self.triangles[name].to(device))

    def of_group(self, names: Sequence[str]) -> Tensor | None:
        """Weights [N, T] of mean 1 for linears that share an input; None where nothing is known of one."""
        if not names or any(name not in self.tokens for name in names):
            return None
        weights = torch.stack([self.tokens[name] for name in names]).sum(0).sqrt()
        return weights / weights.mean().clamp_min(1e-30)


def _packed(h: Tensor) -> Tensor:
    """Each number of a symmetric matrix [n, n] once, for even n: [n (n + 1) / 2].

    In halves [[A, .], [B, C]]: B, then the lower triangle of A under the upper one of C (LAPACK's rectangular full
    packed format; no table of places, which would take eight times the room).
    """
    half = len(h) // 2
    both = h.new_zeros(half + 1, half)
    both[1:] = h[:half, :half].tril()
    both[:half] += h[half:, half:].tril().T
    return torch.cat((h[half:, :half].flatten(), both.flatten()))


def _unpacked(packed: Tensor) -> Tensor:
    """float32 [n, n]."""
    half = math.isqrt(packed.numel() // 2)
    square, both = packed[: half * half].view(half, half), packed[half * half :].view(half + 1, half)
    h = torch.zeros(2 * half, 2 * half, device=packed.device)
    h[half:, :half] = square
    h[:half, :half] = both[1:].tril()
    h[half:, half:] = both[:half].triu().T
    return h.add_(h.tril(-1).T)


def kl_factors(
    model: QuantizableModel,
    tokens: Tensor,
    *,
    seed: int,
    draws: int = 1,
    outputs: bool = True,
    rounded: Callable[[str], bool] = lambda name: True,
    spill: ActivationOffload | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Factors]]:
    """The factors of each block's linears, last block first; a linear that no token reaches has none.

    Args:
        tokens: int [N, T]. draws: random directions a token; each is a backward pass. outputs: False for weights of
            tokens alone, which take next to no room. rounded: which linears are asked for, by full name.
        progress: called with the number of blocks that are done.

    Routed experts have none, linears of more than `LARGEST` outputs no H_O: they, and those that share an input with
    them, are rounded as without. Deterministic on one machine.
    """
    spill = spill or ActivationOffload()
    first = model.embed(tokens[:1, :1])
    rows = max(1, batch_tokens(first.device, first.shape[-1]) // tokens.shape[1])
    before: list[Batches] = []
    with torch.no_grad():
        stream = spill.batches(model.embed(part) for part in tokens.split(rows))
        for i in range(model.num_blocks):
            before.append(spill.batches(batch.bfloat16() for batch in stream))
            block = model.load_block(i)
            for at in range(len(stream)):
                stream[at] = model.run_block(block, stream[at])
    source = generator(seed, "fisher")
    begin_backward(first.device)
    gradients = [spill.batches(_at_the_end(model, batch, source) for batch in stream) for _ in range(draws)]
    stream.clear()
    for i in reversed(range(model.num_blocks)):
        yield i, _block(model, i, before.pop(), gradients, outputs, rounded, first.dtype)
        if progress is not None:
            progress(model.num_blocks - i)
    for each in gradients:
        each.clear()


def begin_backward(device: torch.device) -> None:
    """A backward pass without a product: torch runs them on a thread of its own, which warns where cuBLAS is the first
    thing that it calls."""
    with torch.enable_grad():
        torch.ones(1, device=device, requires_grad=True).exp().backward()


def _at_the_end(model: QuantizableModel, hidden: Tensor, source: torch.Generator) -> Tensor:
    """Gradient [B, T, D] at the residual stream behind the last block, along one random direction a token."""
    found = torch.empty_like(hidden)
    for row in range(len(hidden)):
        with torch.enable_grad(), reference_ops():
            x = hidden[row : row + 1].detach().clone().requires_grad_()
            logits = model.head(x).float()
            p = logits.detach().softmax(-1)
            seed = int(
                torch.randint(1 << 31, (1,), generator=source)
            )  # drawing all logits on the CPU would take longest
            noise = torch.randn(p.shape, generator=torch.Generator(p.device).manual_seed(seed), device=p.device)
            spread = p.sqrt() * noise
            (found[row : row + 1],) = torch.autograd.grad(logits, x, spread - p * spread.sum(-1, keepdim=True))
    return found


class _Sums:
    """What gradients at the outputs of a block's linears add up to: by name, d^T d and, batch by batch, |d|^2."""

    def __init__(self, outputs: bool) -> None:
        self.outputs = outputs
        self.outer: dict[str, Tensor] = {}
        self.power: dict[str, list[Tensor]] = {}
        self.fresh = True  # the next gradients are the first ones of a batch

    def add(self, name: str, gradient: Tensor) -> None:
        d = gradient.detach().float()
        flat = d.reshape(-1, d.shape[-1])
        if self.outputs and d.shape[-1] <= LARGEST:
            if name not in self.outer:
                self.outer[name] = flat.new_zeros(d.shape[-1], d.shape[-1])
            self.outer[name].addmm_(flat.T, flat)
        power, found = flat.square().sum(-1), self.power.setdefault(name, [])
        if self.fresh:
            found.append(power)
        else:
            found[-1] = found[-1] + power

    def factors(self, rows: int, length: int) -> Factors:
        """Of a text [rows, length]; a linear that not every token reaches has no weights of tokens."""
        made = Factors()
        for name in list(self.outer):
            outer = self.outer.pop(name)
            if (mean := outer.diagonal().mean()) > 0:
                made.triangles[name] = _packed(outer.div_(mean).half())
        for name, found in self.power.items():
            power = torch.cat(found)
            if power.numel() == rows * length and power.any():
                made.tokens[name] = power.view(rows, length)
        return made


def _block(
    model: QuantizableModel, i: int, before: Batches, gradients: list[Batches], outputs: bool,
    rounded: Callable[[str], bool], dtype: torch.dtype,
) -> Factors:  # fmt: skip
    """The factors of block `i`; `gradients`, behind the block, become those before it. `before` is used up."""
    block, prefix = model.load_block(i), model.block_prefix(i)
    linears = [(prefix + name, module) for group in model.linear_groups(block) for name, module in group]
    linears = [(name, module) for name, module in linears if rounded(name)]
    sums = _Sums(outputs)
    with _outputs(linears, sums.add):
        for at in range(len(before)):
            with torch.enable_grad(), reference_ops(), sdpa_kernel(SDPBackend.MATH):
                x = before[at].to(dtype).requires_grad_()
                made = model.run_block(block, x)
                for draw, behind in enumerate(gradients):
                    sums.fresh, last = draw == 0, draw == len(gradients) - 1
                    (behind[at],) = torch.autograd.grad(made, x, behind[at], retain_graph=not last)
    rows, length = sum(len(batch) for batch in before), before[0].shape[1]
    before.clear()
    return sums.factors(rows, length)


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
