"""What a checkpoint really stores: bytes, and bits a weight with all scales counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onegraph.formats.checkpoint import Checkpoint


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

    @property
    def bits(self) -> float:
        """Bits a parameter over the whole model."""
        return 8 * self.total_bytes / self.parameters

    @property
    def linear_bits(self) -> float:
        """Bits a weight of the linears inside the blocks, scales counted."""
        return 8 * self.linear_bytes / self.linear_parameters


def size_of(checkpoint: Checkpoint) -> Size:
    """Counts a checkpoint.

    Parameters are the model's own: a tied head counts once, also where quantizing has made it a matrix of its own, so
    that its bits show as the cost that they are.
    """
    file = _Weights.of(checkpoint)
    parameters = sum(count for layer, count in file.counts.items() if layer not in file.spare)
    linear_bytes = 0
    for name, stored in file.stored.items():
        owner, _, suffix = name.rpartition(".")
        if owner in file.counts:
            linear_bytes += 0 if owner in file.ends else checkpoint.info(stored).nbytes
        elif owner not in file.spare and suffix not in NO_WEIGHTS:
            parameters += checkpoint.info(stored).nbytes // checkpoint.dtype(stored).itemsize
    return Size(
        total_bytes=checkpoint.nbytes,
        linear_bytes=linear_bytes,
        parameters=parameters,
        linear_parameters=sum(count for layer, count in file.counts.items() if layer not in file.ends),
    )


def component_bits(checkpoint: Checkpoint) -> dict[str, float]:
    """Bits a weight, scales counted, of each component that `eval --ab` tells apart; of those that the file has (a tied
    head is none)."""
    from onegraph.engine.ab import component_of

    file = _Weights.of(checkpoint)
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    components = {layer: component_of(layer, file.deepseek) for layer in file.counts}
    for layer in {name.rpartition(".")[0] for name in file.stored}:
        if (component := components.get(layer)) is not None:
            weights[component] = weights.get(component, 0) + file.counts[layer]
    for name, stored in file.stored.items():
        layer, _, suffix = name.rpartition(".")
        if (component := components.get(layer)) is not None and suffix not in NO_WEIGHTS:
            sizes[component] = sizes.get(component, 0) + checkpoint.info(stored).nbytes
    return {name: round(8 * sizes[name] / weights[name], 3) for name in weights}


NO_WEIGHTS = ("inv_freq", "bias", "tid2eid")


@dataclass(frozen=True)
class _Weights:
    """A checkpoint's tensors under the names of its family: stored names by name, weights of each layer that is a
    matrix, embedding and head among them (`ends`); `spare` is a tied head."""

    deepseek: bool
    stored: dict[str, str]
    counts: dict[str, int]
    ends: frozenset[str]
    spare: frozenset[str] = frozenset()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Weights:
        import torch

        from onegraph.models.config import LlamaConfig
        from onegraph.models.deepseek_v4_weights import DeepseekWeights
        from onegraph.models.load import parse_config
        from onegraph.models.weights import EMBED, HEAD, Weights

        config = parse_config(checkpoint.config)
        if isinstance(config, LlamaConfig):
            shapes = Weights(checkpoint, config, torch.device("cpu"), torch.float32, decode=False).shapes
            table = config.vocab_size * config.hidden_size
            counts = {name: n * k for name, (n, k, _) in shapes.items()} | {EMBED: table, HEAD: table}
            stored = {name: name for name in checkpoint.names}
            return cls(False, stored, counts, frozenset((EMBED, HEAD)), frozenset((HEAD,) if config.tied else ()))
        weights = DeepseekWeights(checkpoint, config, torch.float32)
        counts = {}
        for name, (shape, dtypes) in weights.expected().items():
            layer, _, kind = name.rpartition(".")
            if kind in ("weight", "weight_packed") and len(shape) == 2:
                counts[layer] = math.prod(shape) * (2 if dtypes == (torch.uint8,) else 1)
        return cls(True, weights.stored, counts, frozenset(("embed", "head")))
