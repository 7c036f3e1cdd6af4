"""What a checkpoint really stores: bytes, and bits a weight with all scales counted."""

from __future__ import annotations

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
