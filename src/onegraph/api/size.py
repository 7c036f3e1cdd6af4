"""What a checkpoint really stores: bytes, and bits per weight with all scales counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onegraph.formats.checkpoint import Checkpoint
    from onegraph.models.loader import Loader


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a checkpoint on disk. `linears` are those inside the blocks; the rest is embedding, head and norms."""

    total_bytes: int
    linear_bytes: int
    parameters: int
    linear_parameters: int

    def as_dict(self) -> dict[str, float]:
        """As JSON."""
        return {
            "bytes": self.total_bytes,
            "linear_bytes": self.linear_bytes,
            "bits": round(self.bits, 3),
            "linear_bits": round(self.linear_bits, 3),
            "parameters": self.parameters,
        }

    def __str__(self) -> str:
        """Both averages, and what each counts."""
        return (
            f"{self.linear_bits:.2f} bits per weight in the linears (with their scales), {self.bits:.2f} over the "
            "whole model (embedding, head and norms too)"
        )

    @property
    def stored(self) -> str:
        """Bytes, and what 16 bits a parameter would take where there are fewer: a GGUF file may be small already."""
        if self.bits > 15:
            return human_bytes(self.total_bytes)
        return f"{human_bytes(self.total_bytes)} ({human_bytes(2 * self.parameters)} in 16 bits)"

    @property
    def bits(self) -> float:
        """Bits a parameter over the whole model."""
        return 8 * self.total_bytes / self.parameters

    @property
    def linear_bits(self) -> float:
        """Bits per weight of the linears inside the blocks, scales counted."""
        return 8 * self.linear_bytes / self.linear_parameters


def human_bytes(count: float) -> str:
    """98.4 MB: decimal units, as files are sold."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def human_count(count: float) -> str:
    """106.2M, 29.91B: of weights, as models are called."""
    return f"{count / 1e6:.4g}M" if count < 1e9 else f"{count / 1e9:.4g}B"


def size_of(checkpoint: Checkpoint) -> Size:
    """Counts a checkpoint.

    Parameters and bytes are the model's own, without what it does not read. A tied head counts once, also where
    quantizing has made it a matrix of its own, so that its bits show as the cost that they are.
    """
    loader, counts = _weights(checkpoint)
    ends = loader.parts.embedding[0], loader.parts.head
    spare = loader.parts.head if loader.parts.tied and not loader.own_head else None
    parameters = sum(count for layer, count in counts.items() if layer != spare)
    linear_bytes, total_bytes = 0, checkpoint.nbytes
    for name in loader.stored:
        if loader.parts.ignored(name):  # of another model in the same files: a draft layer
            total_bytes -= loader.info(name).nbytes
            continue
        owner, suffix = _owner(loader, name)
        if owner in counts:
            linear_bytes += 0 if owner in ends else loader.info(name).nbytes
        elif suffix not in NO_WEIGHTS:
            parameters += loader.info(name).nbytes // loader.info(name).dtype.itemsize
    return Size(
        total_bytes=total_bytes,
        linear_bytes=linear_bytes,
        parameters=parameters,
        linear_parameters=sum(count for layer, count in counts.items() if layer not in ends),
    )


def size_with(
    before: Checkpoint, after: Checkpoint, shapes: Mapping[str, tuple[int, ...]], layer_of: Callable[[str], str | None]
) -> tuple[Size, Size]:
    """Sizes of a model that no decoder of ours runs, unquantized and quantized; `shapes` are those of its layers."""
    parameters = sum(math.prod(before.shape(name)) for name in before.names)
    weights = sum(math.prod(shape) for shape in shapes.values())

    def of(checkpoint: Checkpoint) -> Size:
        inside = 0
        for name in checkpoint.names:
            layer, _, suffix = name.rpartition(".")
            if layer_of(name) in shapes or (layer in shapes and suffix != "bias"):
                inside += checkpoint.info(name).nbytes
        return Size(
            total_bytes=checkpoint.nbytes, linear_bytes=inside, parameters=parameters, linear_parameters=weights
        )

    return of(before), of(after)


def component_bits(checkpoint: Checkpoint) -> dict[str, float]:
    """Bits per weight, scales counted, of each component of `eval --ab`; of those that the file has (a tied
    head is none)."""
    loader, counts = _weights(checkpoint)
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    components = {layer: loader.parts.component_of(layer) for layer in counts}
    for layer in {_owner(loader, name)[0] for name in loader.stored}:
        if (component := components.get(layer)) is not None:
            weights[component] = weights.get(component, 0) + counts[layer]
    for name in loader.stored:
        layer, suffix = _owner(loader, name)
        if (component := components.get(layer)) is not None and suffix not in NO_WEIGHTS:
            sizes[component] = sizes.get(component, 0) + loader.info(name).nbytes
    return {name: round(8 * sizes[name] / weights[name], 3) for name in weights}


NO_WEIGHTS = ("inv_freq", "bias", "tid2eid", "e_score_correction_bias", "expert_bias")


def _weights(checkpoint: Checkpoint) -> tuple[Loader, dict[str, int]]:
    """A checkpoint under its family's names, and the weights of each layer that is a matrix, both ends among them."""
    import torch

    from onegraph.models.load import checkpoint_config
    from onegraph.models.loader import Loader

    loader = Loader(checkpoint, checkpoint_config(checkpoint), torch.float32)
    parts = loader.parts
    counts = {layer: n * k for layer, (n, k, _) in parts.linears.items()}
    counts |= {name: stack.experts * stack.n * stack.k for name, stack in parts.stacks.items()}
    counts[parts.embedding[0]] = math.prod(parts.embedding[1])
    helpers = ((name.rpartition("."), shape) for name, (shape, _) in parts.tensors.items())
    counts |= {layer: math.prod(shape) for (layer, _, kind), shape in helpers if kind == "weight" and len(shape) == 2}
    return loader, counts


def _owner(loader: Loader, name: str) -> tuple[str, str]:
    """The layer or stack that a tensor belongs to, and what it is of it."""
    layer, _, suffix = name.rpartition(".")
    if layer in loader.parts.stacks:
        return layer, suffix
    stack, _, part = name.rpartition("_")
    if name in loader.parts.stacks or stack in loader.parts.stacks:
        return (name, "weight") if name in loader.parts.stacks else (stack, part)
    return layer, suffix
