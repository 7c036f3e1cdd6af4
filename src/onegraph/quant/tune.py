"""Fine-tune the scales of a quantized model by distillation: codes stay, KL to the unquantized model's logits falls.

Every linear is y = (x * in_scale) B^T * out_scale with B = H_n Q H_k fixed; what learns are two vectors a linear, the
input one shared by siblings as the format asks. That is some 0.2 per cent of the parameters, so a few ten thousand
tokens do not overfit, and what they take over is what a layer-wise Hessian cannot see: how errors of layers add up.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from onegraph.formats.e8p import KEEP, E8PConfig
from onegraph.ops.registry import reference_ops
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.experts import put_stacks
from onegraph.quant.layer import Tensors, dequantize, generator
from onegraph.quant.recipe import TUNE_RATE, Recipe


def tune(
    model: QuantizableModel,
    tokens: Tensor,
    reference: Sequence[Tensor],
    layers: Mapping[str, Tensors],
    config: E8PConfig,
    recipe: Recipe,
    progress: Any = None,
) -> dict[str, Tensors]:
    """`layers` with in_scale and out_scale tuned.

    Args:
        tokens: int [N, T]; reference: the unquantized model's residual stream after the last block, in batches of rows.
        progress: called as progress(step, steps, loss in nats a token).

    The whole model is in memory, and activations of one batch at block boundaries. Deterministic.
    """
    assert recipe.tune is not None
    settings = recipe.tune
    blocks = [model.load_block(i) for i in range(model.num_blocks)]
    student = _Student(model, blocks, layers, config)
    target = torch.cat(list(reference))
    rate = settings.rate or TUNE_RATE[recipe.bits]
    optimizer = torch.optim.Adam(student.deltas, lr=rate, betas=(0.9, 0.99))
    order = generator(recipe.seed, "tune")
    count = tokens.shape[0]
    steps = settings.epochs * math.ceil(count / settings.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    step = 0
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for rows in torch.randperm(count, generator=order).split(settings.batch):
                loss = student.loss(tokens[rows], target[rows.to(target.device)])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                if progress is not None:
                    progress(step, steps, loss.item())
    return student.layers()


class _Student:
    """The quantized model with its scales as parameters: 1 + delta times what they were."""

    def __init__(
        self, model: QuantizableModel, blocks: list[nn.Module], layers: Mapping[str, Tensors], config: E8PConfig
    ) -> None:
        self.model, self.blocks, self.before = model, blocks, layers
        self.inside: dict[str, Tensor] = {}
        self.outside: dict[str, Tensor] = {}
        for i, block in enumerate(blocks):
            for experts in model.expert_layers(block):  # as they were rounded; what learns are scales of linears
                name = model.block_prefix(i) + experts.names[0]
                put_stacks(experts, model.block_prefix(i), layers, config.bits_of(name))
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
                    self._wrap(name, module, config.bits_of(name))
        unique = {id(delta): delta for delta in (*self.inside.values(), *self.outside.values())}
        self.deltas = list(unique.values())

    def _wrap(self, name: str, module: Any, bits: int) -> None:
        device = module.weight.device
        module.weight.copy_(dequantize({k: v.to(device) for k, v in self.before[name].items()}, bits))
        module.weight.requires_grad_(False)
        inside = self.inside[name]
        outside = module.weight.new_zeros(module.weight.shape[0], dtype=torch.float32).requires_grad_()
        self.outside[name] = outside
        bias = getattr(module, "bias", None)

        def forward(x: Tensor) -> Tensor:
            y = nn.functional.linear(x * (1 + inside).to(x.dtype), module.weight) * (1 + outside).to(x.dtype)
            return y if bias is None else y + bias

        module.forward = forward

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        """KL(unquantized || quantized), nats a token."""
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
