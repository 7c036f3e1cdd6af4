"""DeepSeek-V4 (Flash and Pro): hyper-connected streams, compressed attention with an indexer, routed experts.

One forward serves prefill by chunks and decode; what changes between steps lies on the device, so a step may be
captured. Layers may be placed over several devices: a stage is what one device runs, and the streams travel between
them. The weights may be anything that the layers accept as a linear (`nn/deepseek_attention.py`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4_config import DeepseekV4Config, Layer
from onegraph.models.deepseek_v4_place import RESERVE, place
from onegraph.models.deepseek_v4_weights import build_attention, build_moe, check_ranks
from onegraph.models.loader import Loader
from onegraph.models.memory import free_cache_memory, free_memory
from onegraph.models.shares import head_part
from onegraph.nn.deepseek_attention import Attend, DeepseekAttention
from onegraph.nn.deepseek_cache import DeepseekCache, PlacedCache
from onegraph.nn.deepseek_moe import DeepseekMoE
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear
from onegraph.nn.peers import Peer
from onegraph.ops.deepseek_hyper import hyper_head, hyper_mix, hyper_update, hyper_update_mix
from onegraph.ops.deepseek_hyper_ranks import MAX_TOKENS, hyper_all_reduce

MAX_TABLE = 131072  # positions of the rotary tables unless more are asked for


Update = tuple[Tensor, Tensor, Tensor]
"""What is still to be written to the streams: a sublayer's result [B, Q, D], or a rank's part of it; post; and comb, of
few tokens on ranks as logits (`ops/deepseek_hyper_ranks.py`)."""


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
    """One layer: attention and experts, each behind a mixture of the streams. `peer`: where both are one rank's, whose
    results add up."""

    def __init__(
        self,
        *,
        attention: DeepseekAttention,
        moe: DeepseekMoE,
        hypers: tuple[Hyper, Hyper],
        config: DeepseekV4Config,
        peer: Peer | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.moe, self.peer = attention, moe, peer
        self.attention_hyper, self.moe_hyper = hypers
        self.eps, self.floor, self.iterations = config.eps, config.hyper_eps, config.sinkhorn

    def forward(self, streams: Tensor, tokens: Tensor, cache: Attend, before: Update | None) -> Update:
        """Reads streams [B, Q, H, D] when the sublayer before is written to them; tokens int64 [B, Q]. What this layer
        is still to write is returned."""
        x, post, comb = self._mix(streams, self.attention_hyper, before)
        x, post, comb = self._mix(streams, self.moe_hyper, (self.attention(x, cache), post, comb))
        return self.moe(x, tokens), post, comb

    def _mix(self, streams: Tensor, h: Hyper, before: Update | None) -> Update:
        weights = h.fn, h.base, h.scale, h.norm, self.eps, self.floor
        crosses = self._crosses(streams)
        mixed: Update
        if before is None:
            mixed = hyper_mix(streams, *weights, 0 if crosses is not None else self.iterations)
        elif crosses is not None:
            mixed = hyper_all_reduce(streams, *before, *weights, self.iterations, *crosses.group)
        else:
            mixed = hyper_update_mix(streams, *self._summed(before), *weights, self.iterations)
        return mixed

    def _crosses(self, streams: Tensor) -> Peer | None:
        """The rank whose sublayers' results cross inside of the hyper-connection: those of few tokens do."""
        few = self.peer is not None and streams.shape[:2].numel() <= MAX_TOKENS
        return self.peer if few else None

    def _summed(self, update: Update) -> Update:
        x, post, comb = update
        return x if self.peer is None else self.peer.all_reduce(x), post, comb

    def write(self, streams: Tensor, update: Update) -> None:
        """What a call with these streams returned is written to them."""
        iterations = 0 if self._crosses(streams) is None else self.iterations
        hyper_update(streams, *self._summed(update), self.floor, iterations)


class DeepseekV4(nn.Module):
    """The whole decoder. Build it with `DeepseekV4.load`, or from blocks.

    Attributes:
        config, dtype: what config.json says; the dtype of activations and state.
        stages: the layers of each device, in order; one range where the model is on one device.
        max_context: positions that the rotary tables cover.
        page_size: tokens that a page of the cache stands for, unless the caller asks otherwise.
        fp8_kv: whether caches made from now on keep keys in FP8 with a bfloat16 rotary part.
        dense_attention: None: it attends through its own state only.
        peer, head_unit: of a rank that has a share of every layer, see `Llama`.
    """

    dense_attention = None
    peers = None  # see `engine.decoder.Decoder`

    def __init__(
        self,
        *,
        config: DeepseekV4Config,
        embed: Embedding,
        blocks: Sequence[DeepseekBlock],
        head: Hyper,
        lm_head: Linear,
        dtype: torch.dtype,
        max_context: int,
        counts: Sequence[int] | None = None,
        peer: Peer | None = None,
        head_unit: int | None = None,
    ) -> None:
        super().__init__()
        self.peer, self.head_unit = peer, head_unit
        self.config, self.dtype, self.max_context = config, dtype, max_context
        ends = list(accumulate(counts or [len(blocks)]))
        if ends[-1] != len(blocks) or min(counts or [1]) < 1:
            raise ValueError(f"counts is {counts}; it must share out {len(blocks)} layers, at least one to each device")
        self.stages = [range(end - count, end) for end, count in zip(ends, counts or ends, strict=True)]
        self.page_size = max((128, *config.ratios))
        self.fp8_kv = False
        self.embed, self.head, self.lm_head = embed, head, lm_head
        self.blocks = nn.ModuleList(blocks)
        self.eval()

    @property
    def ranks(self) -> list["DeepseekV4"]:
        """Itself: its stages stand one behind the other."""
        return [self]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return [self.blocks[stage[0]].get_buffer("attention_hyper.fn").device for stage in self.stages]

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str | Sequence[torch.device | str] = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_context: int | None = None,
        peer: Peer | None = None,
        drafts: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> "DeepseekV4":
        """Reads a checkpoint, each tensor straight onto its device; presence, shape and dtype of each is checked first.

        Args:
            device: one, or several to place the layers over in this order, by the bytes that they have free.
            dtype: of activations and dense weights. max_context: positions to make rotary tables for.
            peer: load this rank's share of every layer; keys, what compresses them and the indexer are on all ranks.
            drafts: bytes of draft layers, for which the last device keeps room.
            progress: called as progress(bytes read, bytes in all).

        Raises ValueError (CheckpointError among them) that names the field or tensor that is wrong, or says by how much
        the devices are too small.
        """
        config = DeepseekV4Config.from_dict(checkpoint.config)
        positions = min(config.max_positions, MAX_TABLE) if max_context is None else max_context
        if not 1 <= positions <= config.max_positions:
            raise ValueError(f"max_context is {max_context}; the model allows 1 to {config.max_positions}")
        loader = Loader(checkpoint, config, dtype, ahead=peer is None)
        loader.check()
        if peer is not None:
            check_ranks(loader, config, peer.count, range(config.layers))
        devices = [torch.device(d) for d in ([device] if isinstance(device, str | torch.device) else device)]
        with loader.reading(progress):
            return cls.assemble(loader, config, devices, positions, peer, drafts)

    @classmethod
    def assemble(
        cls,
        loader: Loader,
        config: DeepseekV4Config,
        devices: Sequence[torch.device],
        positions: int,
        peer: Peer | None = None,
        drafts: int = 0,
    ) -> "DeepseekV4":
        """The model, or a rank's share of it, from whatever `loader` gives for each part, with rotary tables for so
        many positions and room for draft layers."""
        layers, (first, last) = _bytes(loader, config)
        if drafts and len(devices) > 1:  # which read an embedding there, too
            drafts += first
        if peer is not None:  # at least; what every rank has whole comes besides
            layers, drafts = [size // peer.count for size in layers], drafts // peer.count
        ends = first, last + drafts
        unit, part = head_part(loader, config.vocab_size, config.hidden_size, peer)
        counts = place(layers, ends, [free_memory(d, RESERVE + loader.landing_bytes) for d in devices])
        blocks: list[DeepseekBlock] = []
        embed = loader.embedding(devices[0])
        lm_head = loader.head(embed, devices[-1], part)
        loader.forget()
        for each, count in zip(devices, counts, strict=True):
            plain = config.main.tables(config.rope_dim, positions, each)
            compressed = config.compress.tables(config.rope_dim, positions, each)
            for i in range(len(blocks), len(blocks) + count):
                tables = compressed if config.ratios[i] else plain
                blocks.append(build_block(loader, config, config.layer(i), tables, each, peer))
                loader.forget()
        return cls(
            config=config,
            embed=embed,
            blocks=blocks,
            head=build_hyper(loader, "hc_head_", "norm.weight", devices[-1]),
            lm_head=lm_head,
            dtype=loader.dtype,
            max_context=positions,
            counts=counts,
            peer=peer,
            head_unit=unit,
        )

    def forward(self, tokens: Tensor, cache: DeepseekCache | PlacedCache) -> Tensor:
        """tokens int64 [B, Q] -> hidden states after the final norm [B, Q, D] on the last device."""
        streams = self.enter(tokens)
        for stage, (device, part) in enumerate(zip(self.devices, cache.parts, strict=True)):
            streams = self.run(stage, streams.to(device), tokens.to(device), part)
        return self.leave(streams)

    def enter(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, Q] -> streams [B, Q, H, D] on the first device: the embedding, repeated."""
        result: Tensor = self.embed(tokens).unsqueeze(2).repeat(1, 1, self.config.streams, 1)
        return result

    def run(
        self, stage: int, streams: Tensor, tokens: Tensor, cache: Attend, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """The layers of one stage on streams, in place, which are returned; everything on that stage's device.

        taps: of this stage's layers, those that are keys get the mean of the streams behind them [B, Q, D].
        """
        update: Update | None = None
        for i in self.stages[stage]:
            block = cast(DeepseekBlock, self.blocks[i])
            update = block(streams, tokens, cache, update)
            if taps is not None and i in taps:
                block.write(streams, update)
                taps[i], update = streams.float().mean(2).to(streams.dtype), None
        if update is not None:
            block.write(streams, update)
        return streams

    def leave(self, streams: Tensor) -> Tensor:
        """Streams on the last device -> hidden states after the final norm [B, Q, D]."""
        h, c = self.head, self.config
        result: Tensor = hyper_head(streams, h.fn, h.base, h.scale, h.norm, c.eps, c.hyper_eps)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned [..., D], or rows of it -> float32 [..., V]."""
        logits: Tensor = self.lm_head(hidden, float32=True)
        if self.peer is not None and self.head_unit is not None:
            logits = self.peer.all_gather(logits, self.config.vocab_size, self.head_unit)
        return logits

    def stream_shape(self, rows: int, length: int) -> tuple[int, ...]:
        return rows, length, self.config.streams, self.config.hidden_size

    def new_cache(
        self,
        *,
        rows: int,
        pages: int,
        page_size: int,
        pages_per_row: int,
        kv: object = None,
        spare: int = 0,
        drafts: Sequence[DeepseekAttention] = (),
    ) -> DeepseekCache | PlacedCache:
        """The state of this model's sequences, in its dtype, each layer's on its device. `kv` must be None.

        Args:
            spare: latest tokens of a sequence that may be taken back.
            drafts: attention layers of draft stages, whose state lies with the last device's and is taken back with it.
        """
        if kv is not None:
            raise ValueError(f"kv: got {kv}; this model has a cache of its own kind, leave kv out")
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "spare": spare}
        parts = []
        for stage, device in zip(self.stages, self.devices, strict=True):
            layers = [cast(DeepseekBlock, self.blocks[i]).attention for i in stage]
            layers += drafts if stage is self.stages[-1] else ()
            needed = sum(
                DeepseekCache.bytes_of(a, itemsize=self.dtype.itemsize, fp8=self.fp8_kv, **sizes) for a in layers
            )
            if needed > (free := free_cache_memory(device, reserve=1 << 30)):
                raise ValueError(
                    f"{device} has {free / 1e9:.1f} GB free for state; {rows} sequences in {pages} pages of "
                    f"{page_size} tokens need {needed / 1e9:.1f} GB there: take fewer or shorter ones, or more devices"
                )
            parts.append(
                DeepseekCache(
                    layers, **sizes, pages_per_row=pages_per_row, device=device, dtype=self.dtype, fp8=self.fp8_kv
                )
            )
        return parts[0] if len(parts) == 1 else PlacedCache(parts)


def build_block(
    loader: Loader,
    config: DeepseekV4Config,
    layer: Layer,
    tables: tuple[Tensor, Tensor],
    device: torch.device,
    peer: Peer | None = None,
) -> DeepseekBlock:
    attention, moe = (
        build_hyper(loader, f"{layer.prefix}hc_{p}_", f"{layer.prefix}{p}_norm.weight", device) for p in ("attn", "ffn")
    )
    return DeepseekBlock(
        attention=build_attention(loader, config, layer, tables, device, peer),
        moe=build_moe(loader, config, layer, device, peer),
        hypers=(attention, moe),
        config=config,
        peer=peer,
    )


def build_hyper(loader: Loader, prefix: str, norm: str, device: torch.device) -> Hyper:
    return Hyper(*(loader.float32(name, device) for name in (f"{prefix}fn", f"{prefix}base", f"{prefix}scale", norm)))


def _bytes(loader: Loader, config: DeepseekV4Config) -> tuple[list[int], tuple[int, int]]:
    """Bytes on the device of each layer, and of the embedding and the head."""
    layers, ends = [0] * config.layers, [0, 0]
    for name, nbytes in loader.device_bytes().items():
        where = name.split(".")
        if where[0] == "layers":
            layers[int(where[1])] += nbytes
        else:
            ends[0 if where[0] == "embed" else 1] += nbytes
    return layers, (ends[0], ends[1])
