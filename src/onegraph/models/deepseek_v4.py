"""DeepSeek-V4 (Flash and Pro): hyper-connected streams, compressed attention with an indexer, routed experts.

One forward serves prefill by chunks and decode; what changes between steps lies on the device, so a step may be
captured. Layers may be placed over several devices: a stage is what one device runs, and the streams travel between
them. The weights may be anything that the layers accept as a linear (`nn/deepseek_attention.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_weights import DeepseekWeights
from onegraph.nn.deepseek_attention import Attend, DeepseekAttention
from onegraph.nn.deepseek_cache import DeepseekCache
from onegraph.nn.deepseek_moe import DeepseekMoE
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear
from onegraph.ops.deepseek_hyper import hyper_head, hyper_mix, hyper_update

MAX_TABLE = 131072  # positions of the rotary tables unless more are asked for


class Hyper(nn.Module):
    """A sublayer's hyper-connection: fn float32 [M, H D], base [M], scale, and the RMSNorm weight behind it [D]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor) -> None:
        super().__init__()
        for name, tensor in (("fn", fn), ("base", base), ("scale", scale), ("norm", norm)):
            self.register_buffer(name, tensor)


class DeepseekBlock(nn.Module):
    """One layer: attention and experts, each between `hyper_mix` and `hyper_update` of the streams."""

    def __init__(
        self, *, attention: DeepseekAttention, moe: DeepseekMoE, hypers: tuple[Hyper, Hyper], config: DeepseekV4Config
    ) -> None:
        super().__init__()
        self.attention, self.moe = attention, moe
        self.attention_hyper, self.moe_hyper = hypers
        self.eps, self.floor, self.iterations = config.eps, config.hyper_eps, config.sinkhorn

    def forward(self, streams: Tensor, tokens: Tensor, cache: Attend) -> None:
        """Updates streams [B, Q, H, D] in place; tokens int64 [B, Q]."""
        x, post, comb = self._mix(streams, self.attention_hyper)
        hyper_update(streams, self.attention(x, cache), post, comb)
        x, post, comb = self._mix(streams, self.moe_hyper)
        hyper_update(streams, self.moe(x, tokens), post, comb)

    def _mix(self, streams: Tensor, h: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        return hyper_mix(streams, h.fn, h.base, h.scale, h.norm, self.eps, self.floor, self.iterations)


class DeepseekV4(nn.Module):
    """The whole decoder. Build it with `DeepseekV4.load`, or from blocks.

    Attributes:
        config, dtype: what config.json says; the dtype of activations and state.
        max_context: positions that the rotary tables cover.
        page_size: tokens that a page of the cache stands for, unless the caller asks otherwise.
    """

    def __init__(
        self,
        *,
        config: DeepseekV4Config,
        embed: Embedding,
        blocks: Sequence[DeepseekBlock],
        head: Hyper,
        lm_head: nn.Module,
        dtype: torch.dtype,
        max_context: int,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.max_context = config, dtype, max_context
        self.page_size = max((128, *config.ratios))
        self.embed, self.head, self.lm_head = embed, head, lm_head
        self.blocks = nn.ModuleList(blocks)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_context: int | None = None,
    ) -> "DeepseekV4":
        """Reads a checkpoint tensor by tensor onto `device`; presence, shape and dtype of each is checked first.

        Raises ValueError (CheckpointError among them) that names the field or tensor that is wrong.
        """
        device = torch.device(device)
        config = DeepseekV4Config.from_dict(checkpoint.config)
        positions = min(config.max_positions, MAX_TABLE) if max_context is None else max_context
        if not 1 <= positions <= config.max_positions:
            raise ValueError(f"max_context is {max_context}; the model allows 1 to {config.max_positions}")
        weights = DeepseekWeights(checkpoint, config, dtype)
        weights.check()
        tables = {
            compressed: rope.tables(config.rope_dim, positions, device)
            for compressed, rope in ((False, config.main), (True, config.compress))
        }
        return cls(
            config=config,
            embed=Embedding(weights.tensor("embed.weight", device)),
            blocks=[build_block(weights, i, tables[config.ratios[i] > 0], device) for i in range(config.layers)],
            head=build_hyper(weights, "hc_head_", "norm.weight", device),
            lm_head=Linear(weights.tensor("head.weight", device)),
            dtype=dtype,
            max_context=positions,
        )

    def forward(self, tokens: Tensor, cache: Attend) -> Tensor:
        """tokens int64 [B, Q] -> hidden states after the final norm [B, Q, D]."""
        streams = self.embed(tokens).unsqueeze(2).repeat(1, 1, self.config.streams, 1)
        for block in self.blocks:
            block(streams, tokens, cache)
        h, c = self.head, self.config
        return hyper_head(streams, h.fn, h.base, h.scale, h.norm, c.eps, c.hyper_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned [..., D], or rows of it -> float32 [..., V]."""
        return self.lm_head.wide(hidden)  # type: ignore[operator]

    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int) -> DeepseekCache:
        """The state of this model's sequences, on its device and in its dtype."""
        return DeepseekCache(
            [block.attention for block in self.blocks],  # type: ignore[misc]
            rows=rows,
            pages=pages,
            page_size=page_size,
            pages_per_row=pages_per_row,
            device=self.device,
            dtype=self.dtype,
        )


def build_block(weights: DeepseekWeights, i: int, tables: tuple[Tensor, Tensor], device: torch.device) -> DeepseekBlock:
    prefix = f"layers.{i}."
    attention, moe = (
        build_hyper(weights, f"{prefix}hc_{p}_", f"{prefix}{p}_norm.weight", device) for p in ("attn", "ffn")
    )
    return DeepseekBlock(
        attention=weights.attention(i, tables, device),
        moe=weights.moe(i, device),
        hypers=(attention, moe),
        config=weights.config,
    )


def build_hyper(weights: DeepseekWeights, prefix: str, norm: str, device: torch.device) -> Hyper:
    return Hyper(*(weights.wide(name, device) for name in (f"{prefix}fn", f"{prefix}base", f"{prefix}scale", norm)))
