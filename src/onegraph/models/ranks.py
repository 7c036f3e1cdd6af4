"""A tensor-parallel model on several devices: each runs every layer on its share of the weights.

Heads, hidden units and the vocabulary are cut (`models/shares.py`); the residual stream, norms, routers and the
embedding are on every rank, and so is what a rank draws, from the same bits. Of DeepSeek-V4, so are the latent keys,
what compresses them, and the indexer. Each layer has two all-reduces, one more where a norm spans all heads, and the
step one all-gather of logits, inside the ranks' steps (`nn/peers.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.llama import Llama
from onegraph.models.shares import UNITS
from onegraph.nn.peers import Peers

CONFIGS: dict[Any, Any] = {Llama: LlamaConfig, DeepseekV4: DeepseekV4Config}
TOKENS, ROWS = 64, 16  # that an inbox takes at once: of a layer's sum, and of logits; more go in parts


class Ranks:
    """Build it with `Ranks.load`. It generates through an engine alone, which runs all ranks at once.

    Attributes:
        ranks: each a model of one stage on a device of its own.
    """

    def __init__(self, ranks: Sequence[Any], peers: Peers) -> None:
        self.ranks, self.peers = list(ranks), peers
        first = self.ranks[0]  # what is the same on all ranks
        self.config, self.dtype, self.embed = first.config, first.dtype, first.embed
        self.max_context, self.page_size = first.max_context, first.page_size
        if isinstance(first, Llama):  # each has looked at its own heads
            biased = sorted({i for rank in self.ranks for i in rank.biased})
            for rank in self.ranks:
                rank.biased = biased

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        devices: Sequence[torch.device | str],
        dtype: torch.dtype = torch.float32,
        *,
        kind: type[Llama] | type[DeepseekV4] = Llama,
        peers: Peers | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> "Ranks":
        """Reads a checkpoint of this kind onto `devices`, one rank each; `options` as its `load` takes them. peers: of
        another model on these devices, within whose steps this one runs.

        Raises ValueError where so many ranks cannot share it, with the counts that can.
        """
        places = [torch.device(device) for device in devices]
        config = CONFIGS[kind].from_dict(checkpoint.config)
        peers = peers_for(config, places, dtype) if peers is None else peers
        built = [
            kind.load(
                checkpoint, place, dtype, peer=peers.rank(i), progress=one_progress(progress, i, len(places)), **options
            )
            for i, place in enumerate(places)
        ]
        return cls(built, peers)

    @property
    def devices(self) -> list[torch.device]:
        """Of each rank."""
        return [device for rank in self.ranks for device in rank.devices]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All ranks' weights."""
        for i, rank in enumerate(self.ranks):
            for name, tensor in rank.named_buffers():
                yield f"rank {i}: {name}", tensor


def peers_for(config: LlamaConfig | DeepseekV4Config, devices: Sequence[torch.device], dtype: torch.dtype) -> Peers:
    """What ranks of such a model exchange through."""
    stream, logits = TOKENS * config.hidden_size * dtype.itemsize // 4, ROWS * -(-config.vocab_size // len(devices))
    return Peers(devices, max(stream, logits + ROWS * UNITS[0]))


def one_progress(
    progress: Callable[[int, int], None] | None, rank: int, ranks: int
) -> Callable[[int, int], None] | None:
    """One progress over ranks that are read one after the other."""
    if progress is None:
        return None
    return lambda done, total: progress(rank * total + done, ranks * total)
