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

    @property
    def bits(self) -> float:
        """Bits a parameter over the whole model."""
        return 8 * self.total_bytes / self.parameters

    @property
    def linear_bits(self) -> float:
        """Bits a weight of the linears inside the blocks, scales counted."""
        return 8 * self.linear_bytes / self.linear_parameters


def size_of(checkpoint: Checkpoint) -> Size:
    """Counts a checkpoint of the Llama family.

    Parameters are the model's own: a tied head counts once, also where quantizing has made it a matrix of its own, so
    that its bits show as the cost that they are.
    """
    import torch

    from onegraph.models.config import LlamaConfig
    from onegraph.models.weights import EMBED, HEAD, Weights

    config = LlamaConfig.from_dict(checkpoint.config)
    weights = Weights(checkpoint, config, torch.device("cpu"), torch.float32, decode=False)
    linears = {name: n * k for name, (n, k, _) in weights.shapes.items() if name != HEAD}
    table = config.vocab_size * config.hidden_size
    parameters = sum(linears.values()) + table * (1 if config.tied else 2)
    linear_bytes = 0
    for name in checkpoint.names:
        owner, _, suffix = name.rpartition(".")
        if owner in linears:
            linear_bytes += checkpoint.info(name).nbytes
        elif owner not in (EMBED, HEAD) and suffix != "inv_freq":
            parameters += checkpoint.info(name).nbytes // checkpoint.dtype(name).itemsize
    return Size(
        total_bytes=checkpoint.nbytes,
        linear_bytes=linear_bytes,
        parameters=parameters,
        linear_parameters=sum(linears.values()),
    )


def component_bits(checkpoint: Checkpoint) -> dict[str, float]:
    """Bits a weight, scales counted, of each component that `eval --ab` tells apart; of those that the file has (a tied
    head is none)."""
    import torch

    from onegraph.engine.ab import DEEPSEEK_V4, LLAMA, component_of
    from onegraph.models.config import LlamaConfig
    from onegraph.models.deepseek_v4_config import DeepseekV4Config
    from onegraph.models.deepseek_v4_weights import DeepseekWeights, official
    from onegraph.models.load import parse_config
    from onegraph.models.weights import EMBED, Weights

    config = parse_config(checkpoint.config)
    counts: dict[str, int] = {}  # weights of a layer
    if isinstance(config, DeepseekV4Config):
        for name, (shape, dtypes) in DeepseekWeights(checkpoint, config, torch.float32).expected().items():
            layer, _, kind = name.rpartition(".")
            if kind in ("weight", "weight_packed"):
                counts[layer] = math.prod(shape) * (2 if dtypes == (torch.uint8,) else 1)
    else:
        assert isinstance(config, LlamaConfig)
        shapes = Weights(checkpoint, config, torch.device("cpu"), torch.float32, decode=False).shapes
        counts = {name: n * k for name, (n, k, _) in shapes.items()}
        counts[EMBED] = config.vocab_size * config.hidden_size
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    stored = {official(name) if isinstance(config, DeepseekV4Config) else name: name for name in checkpoint.names}
    held = {name.rpartition(".")[0] for name in stored}
    for layer in counts.keys() & held:
        component = component_of(layer, DEEPSEEK_V4 if isinstance(config, DeepseekV4Config) else LLAMA)
        if component is not None:
            weights[component] = weights.get(component, 0) + counts[layer]
    for name, own in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("bias", "tid2eid"):
            continue
        component = component_of(layer, DEEPSEEK_V4 if isinstance(config, DeepseekV4Config) else LLAMA)
        if component is not None and layer in counts:
            sizes[component] = sizes.get(component, 0) + checkpoint.info(own).nbytes
    return {name: round(8 * sizes[name] / weights[name], 3) for name in weights}
