"""Fine-tune the scales of a quantized model by distillation: codes stay, KL to the unquantized model's logits falls.

Every linear is y = (x * in_scale) B^T * out_scale with B = H_n Q H_k fixed; what learns are two vectors a linear, the
input one shared by siblings as the format asks. That is some 0.2 per cent of the parameters, so a few ten thousand
tokens hardly overfit, and what they take over is what a layer-wise Hessian cannot see: how errors of layers add up. A
norm in front of linears is tuned with them: its weight multiplies the inputs that in_scale multiplies.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from onegraph.formats.rotated import KEEP, RotatedConfig
from onegraph.formats.weight import Tensors
from onegraph.ops.registry import reference_ops
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.experts import put_stacks
from onegraph.quant.layer import dequantize, generator
from onegraph.quant.partial import Piece
from onegraph.quant.recipe import TUNE_RATE, Recipe, Tune

PATIENCE = 2  # epochs that may pass without a lower KL on the sequences held out


def tune(
    model: QuantizableModel,
    tokens: Tensor,
    reference: Sequence[Tensor],
    layers: Mapping[str, Tensors],
    config: RotatedConfig,
    recipe: Recipe,
    progress: Any = None,
    piece: Piece | None = None,
) -> dict[str, Tensors]:
    """`layers` with in_scale and out_scale tuned.

    Sequences that are held out judge each epoch: the scales of the best one are kept, those before the first included,
    and tuning ends where `PATIENCE` epochs bring nothing.

    Args:
        tokens: int [N, T]; reference: the unquantized model's residual stream after the last block, in batches of rows.
        progress: called as progress(step, steps, loss in nats per token).
        piece: where the state behind each epoch is kept, so that a killed job goes on with the next one.

    The whole model is in memory, and activations of one batch at block boundaries. Deterministic, killed or not.
    """
    assert recipe.tune is not None
    settings = recipe.tune
    blocks = [model.load_block(i) for i in range(model.num_blocks)]
    student = _Student(model, blocks, layers, config)
    target = torch.cat(list(reference))
    held, learnt = held_out(len(tokens), settings, recipe.seed)
    each = math.ceil(len(learnt) / settings.batch)
    steps = settings.epochs * each
    rate = settings.rate or TUNE_RATE[recipe.bits]
    optimizer = torch.optim.Adam(student.deltas, lr=rate, betas=(0.9, 0.99))

    def judged() -> float:
        parts = held.split(settings.batch)
        return sum(student.loss(tokens[r], target[r.to(target.device)]).item() * len(r) for r in parts) / len(held)

    found = None if piece is None else piece.load()
    best = _Best(student.deltas) if found is None else _restore(found, student.deltas, optimizer)
    if found is None and len(held):
        best.look(judged())
    for epoch in range(best.epochs, settings.epochs):
        if best.idle >= PATIENCE:
            break
        order = learnt[torch.randperm(len(learnt), generator=generator(recipe.seed, f"tune-{epoch}"))]
        for i, rows in enumerate(order.split(settings.batch), epoch * each):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (i + 1) / 10) * 0.5 * (1 + math.cos(math.pi * i / steps))
            with torch.enable_grad():
                loss = student.loss(tokens[rows], target[rows.to(target.device)])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            if progress is not None:
                progress(i + 1, steps, loss.item())
        best.epochs += 1
        best.look(judged() if len(held) else -math.inf)
        if piece is not None:
            piece.save(_state(best, student.deltas, optimizer))
    if progress is not None and best.epochs < settings.epochs:
        progress(best.epochs * each, best.epochs * each, best.kl)
    best.put_back()
    return student.layers()


def held_out(count: int, settings: Tune, seed: int) -> tuple[Tensor, Tensor]:
    """Of `count` sequences those that judge, and those that are learnt from, each int64 in order.

    None judge where one of them would be more than twice the share that is asked for.
    """
    order = torch.randperm(count, generator=generator(seed, "tune"))
    most = count * settings.held_out
    kept = min(max(1, round(most)), count - 1) if most >= 0.5 else 0
    return order[:kept].sort().values, order[kept:].sort().values


class _Best:
    """The deltas of the epoch with the lowest KL so far; without sequences held out, of the last."""

    def __init__(self, deltas: list[Tensor]) -> None:
        self.now, self.kept = deltas, [delta.detach().clone() for delta in deltas]
        self.kl, self.idle, self.epochs = math.inf, 0, 0

    def look(self, kl: float) -> None:
        if kl < self.kl or kl == -math.inf:
            self.kl, self.idle = kl, 0
            self.kept = [delta.detach().clone() for delta in self.now]
        else:
            self.idle += 1

    def put_back(self) -> None:
        with torch.no_grad():
            for delta, kept in zip(self.now, self.kept, strict=True):
                delta.copy_(kept)


def _state(best: _Best, deltas: list[Tensor], optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    """All that the next epoch depends on."""
    made = {"best": torch.tensor([best.kl, best.idle, best.epochs], dtype=torch.float64)}
    for i, (delta, kept) in enumerate(zip(deltas, best.kept, strict=True)):
        made |= {f"{i}.delta": delta, f"{i}.kept": kept}
        made |= {f"{i}.{name}": value for name, value in optimizer.state[delta].items()}
    return made


@torch.no_grad()
def _restore(found: Mapping[str, Tensor], deltas: list[Tensor], optimizer: torch.optim.Adam) -> _Best:
    best = _Best(deltas)
    kl, idle, epochs = found["best"].tolist()
    best.kl, best.idle, best.epochs = kl, int(idle), int(epochs)
    for i, delta in enumerate(deltas):
        delta.copy_(found[f"{i}.delta"])
        best.kept[i].copy_(found[f"{i}.kept"])
        if f"{i}.step" not in found:  # no token has reached it
            continue
        optimizer.state[delta] = {
            name: found[f"{i}.{name}"].to("cpu" if name == "step" else delta.device)
            for name in ("step", "exp_avg", "exp_avg_sq")
        }
    return best


class _Student:
    """The quantized model with its scales as parameters: 1 + delta times what they were."""

    def __init__(
        self, model: QuantizableModel, blocks: list[nn.Module], layers: Mapping[str, Tensors], config: RotatedConfig
    ) -> None:
        self.model, self.blocks, self.before = model, blocks, layers
        self.inside: dict[str, Tensor] = {}
        self.outside: dict[str, Tensor] = {}
        for i, block in enumerate(blocks):
            for experts in model.expert_layers(block):  # as they were rounded; what learns are scales of linears
                name = model.block_prefix(i) + experts.names[0]
                put_stacks(experts, model.block_prefix(i), layers, config.bits_of(name), config.format)
            for group in model.linear_groups(block):
                shared: Tensor | None = None
                for local, module in group:
                    name = model.block_prefix(i) + local
                    if config.bits_of(name) == KEEP:
                        continue
                    if shared is None:
                        shared = module.weight.new_zeros(module.weight.shape[1], dtype=torch.float32)
                        shared.requires_grad_()
                    self.inside[name] = shared
                    self._wrap(name, module, config.bits_of(name), config.format)
        unique = {id(delta): delta for delta in (*self.inside.values(), *self.outside.values())}
        self.deltas = list(unique.values())

    def _wrap(self, name: str, module: Any, bits: int, format: str) -> None:
        device = module.weight.device
        stored = {k: v.to(device) for k, v in self.before[name].items()}
        module.weight.copy_(dequantize(stored, bits, format))
        module.weight.requires_grad_(False)
        inside = self.inside[name]
        outside = module.weight.new_zeros(module.weight.shape[0], dtype=torch.float32).requires_grad_()
        self.outside[name] = outside
        bias = getattr(module, "bias", None)

        def forward(x: Tensor) -> Tensor:
            y = nn.functional.linear(x * (1 + inside).to(x.dtype), module.weight) * (1 + outside).to(x.dtype)
            result: Tensor = y if bias is None else y + bias
            return result

        module.forward = forward

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        """KL(unquantized || quantized), nats per token."""
        hidden = self.model.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(self._run, block, hidden, use_reentrant=False)
        with torch.no_grad():
            wanted = self.model.head(target).flatten(0, -2).float().log_softmax(-1)
        with reference_ops():
            got = self.model.head(hidden).flatten(0, -2).float().log_softmax(-1)
        return nn.functional.kl_div(got, wanted, log_target=True, reduction="batchmean")

    def _run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The block by references, which autograd can follow; set here, as the backward pass reruns it on a thread of
        its own. MATH: the backward pass of the fused attentions adds in an order that changes from run to run."""
        with reference_ops(), sdpa_kernel(SDPBackend.MATH):
            return self.model.run_block(block, hidden)

    @torch.no_grad()
    def layers(self) -> dict[str, Tensors]:
        made = {}
        for name, tensors in self.before.items():
            if name not in self.inside:
                made[name] = dict(tensors)
                continue
            changed = dict(tensors)
            for key, delta in (("in_scale", self.inside[name]), ("out_scale", self.outside[name])):
                changed[key] = (tensors[key].float() * (1 + delta.cpu())).half()
            made[name] = changed
        return made
