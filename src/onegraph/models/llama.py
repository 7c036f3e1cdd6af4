"""The decoder of the Llama kind, in any weight format: every family of `models/families.py`.

A model is put together from what its config says, not from a class of its own. One forward serves prefill, decode,
evaluation and calibration: what differs is the `cache` that attends. A decode step of it reads nothing back from the
device and takes no Python number that changes from step to step, so it may be captured. What runs inside a linear's
launch follows from its format (`nn/block.py`): in E8P a layer is five ops, qkv behind its norm, attend, out onto the
residual, gate-up behind its norm, down behind SwiGLU onto the residual.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.models.adapters import read_adapters
from onegraph.models.blocks import Block, HalfBlock, build_block, build_per_layer, norm_weight, rotary_tables
from onegraph.models.config import LlamaConfig
from onegraph.models.expert_memory import ExpertMemory
from onegraph.models.loader import Held, Loader
from onegraph.models.memory import check_cache, check_weights, decode_unread, kernels_as_expected
from onegraph.models.shares import TPShard, check_ranks, head_part, share_of
from onegraph.nn.attention import Attend, Attention, CausalAttention, PagedCache
from onegraph.nn.block import Stream
from onegraph.nn.embedding import Embedding
from onegraph.nn.hybrid_cache import HybridCache
from onegraph.nn.latent import LatentAttention, LatentCache, link_indexers
from onegraph.nn.linear import Linear
from onegraph.nn.lora import Adapters
from onegraph.nn.peers import Peer
from onegraph.nn.per_layer import PerLayer
from onegraph.nn.recurrent import Recurrent
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.ahead import Ahead
from onegraph.ops.attention import capped

AttentionCache = PagedCache | TurboQuantCache | LatentCache
BIAS = 3  # a bit of a key's codes takes three quarters off the power of their error
SAMPLES = 64
MAX_TABLE = 131072  # positions; the rotary tables of more (64 MB at head_dim 128) are made only when asked for


class Llama(nn.Module):
    """The whole model. Build it with `Llama.load`.

    Attributes:
        config: what config.json says, validated.
        fused: False where norms, SwiGLU, sums and attention's parts run as ops of their own, for A/B comparison.
        device, dtype: where the weights lie, and the dtype of activations and KV cache.
        fp8_kv: whether caches of latents made from now on hold them in FP8.
        max_context: positions that the rotary tables cover; an engine must not go beyond.
        page_size: tokens of a page of the KV cache, unless the caller asks otherwise.
        dense_attention: attends over whole sequences without a cache.
        peer: what this rank exchanges through where it has a share of every layer (`models/ranks.py`); None of a whole
            model. head_unit: rows of the head that stay together where ranks share it, None where each has all.
        adapters: LoRA additions to its linears, None for none.
        lent: the cached layers whose keys and values an assistant reads, which stay exact.
    """

    norm: Tensor
    page_size = 16
    fp8_kv = False
    lent: frozenset[int] = frozenset()
    peers = None  # see `engine.decoder.Decoder`
    dense_attention = CausalAttention()

    def __init__(
        self,
        *,
        config: LlamaConfig,
        embed: Embedding,
        blocks: list[Block | HalfBlock],
        norm: Tensor,
        lm_head: Linear,
        dtype: torch.dtype,
        max_context: int,
        fused: bool = True,
        peer: Peer | None = None,
        head_unit: int | None = None,
        per_layer: PerLayer | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        self.per_layer, self.adapters = per_layer, adapters
        self.peer, self.head_unit = peer, head_unit
        self.config, self.dtype, self.max_context, self.fused = config, dtype, max_context, fused
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("norm", norm)
        self.lm_head = lm_head
        link_indexers(block.attention for block in blocks if block.attention is not None)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_context: int | None = None,
        decode: bool | None = None,
        held: Held | None = None,
        fused: bool = True,
        peer: Peer | None = None,
        adapters: Mapping[str, Path] | None = None,
        expert_memory: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Llama":
        """Reads a checkpoint onto `device`; presence, shape and dtype of each tensor is checked first.

        On the way to a GPU the host holds a ring of pinned blocks (`models/prefetch.py`).

        Args:
            dtype: float32, bfloat16 or float16.
            max_context: positions to make rotary tables for; None: what the config allows, at most 131072.
            decode: turn layers in codes into dense ones of `dtype` at load. None: on a CPU, whose time would go into
                reading codes, and on a GPU those linears that none of its kernels reads (`decode_unread`).
            held: what a CPU holds linears in instead, with activations in float32: see `Loader`.
            fused: False runs every op of a layer alone: the other side of an A/B comparison.
            peer: load this rank's share of every layer.
            adapters: directories of LoRA adapters by name (`models/adapters.py`).
            expert_memory: bytes on the device for routed experts; the others stay in host memory
                (`models/expert_memory.py`). None: all are on the device.
            progress: called as progress(bytes read, bytes in all).

        Raises ValueError (CheckpointError among them) that names the field or tensor that is wrong.
        """
        device = torch.device(device)
        config = config_of(checkpoint)
        positions = table_positions(config, max_context)
        everything = device.type == "cpu" if decode is None else decode
        loader = Loader(checkpoint, config, dtype, decode=everything, held=held, ahead=peer is None)
        loader.check()
        if adapters:
            loader.adapters = read_adapters(adapters, config.family_name)
        if expert_memory is not None:
            memory = ExpertMemory(loader, config, expert_memory, device)
            loader.expert_memory = None if memory.fits else memory
        if peer is not None:
            check_ranks(loader, config, peer.count)
        ranks = 1 if peer is None else peer.count
        ahead, unread = Ahead(), list[str]()
        if decode is None:
            unread = decode_unread(loader, device, ranks, ahead)
        check_weights(loader, device, ranks)
        unit, part = head_part(loader, config.vocab_size, config.hidden_size, peer)
        tables = rotary_tables(config, positions, device)
        with loader.reading(progress):
            embed = loader.embedding(device, embed_scale(config, dtype))
            lm_head = loader.head(embed, device, part)  # the largest: what it needs while it is read is free for blocks
            loader.forget()
            blocks: list[Block | HalfBlock] = []
            for i in range(config.layers):
                blocks.append(build_block(loader, config, i, tables, device, fused=fused, peer=peer))
                loader.forget()
            if loader.adapters is not None:
                loader.adapters.check()
            model = cls(
                adapters=loader.adapters,
                config=config,
                embed=embed,
                blocks=blocks,
                norm=norm_weight(loader, config, config.norm, device),
                lm_head=lm_head,
                dtype=dtype,
                max_context=positions,
                fused=fused,
                peer=peer,
                head_unit=unit,
                per_layer=build_per_layer(loader, config, device),
            )
        if decode is not None or kernels_as_expected(loader, device, ahead, unread):
            return model
        # A kernel could not be built: what it would read is loaded without it.
        del model, embed, lm_head, blocks, loader, tables, unit
        return cls.load(
            checkpoint, device, dtype, max_context=max_context, decode=decode, held=held, fused=fused, peer=peer,
            adapters=adapters, expert_memory=expert_memory, progress=progress,
        )  # fmt: skip

    def settled(self, kv: TurboQuantConfig | None) -> TurboQuantConfig | None:
        """The setting of a cache for which `kv` is asked: with the layers that stay exact."""
        if kv is None or kv.mode == "shadow":
            return kv
        biased = () if kv.biased == "coded" else self.biased
        unread = unread_layers(self.config, self.device.type)
        return replace(kv, exact=tuple(sorted({*kv.exact, *biased, *unread, *self.lent})))

    @cached_property
    def biased(self) -> list[int]:
        """See `biased_layers`; of ranks, those of all."""
        return biased_layers(self)

    @property
    def ranks(self) -> list["Llama"]:
        """Itself: see `engine.decoder.Decoder`."""
        return [self]

    @property
    def devices(self) -> list[torch.device]:
        """Of each stage; this model has one."""
        return [self.device]

    def forward(self, tokens: Tensor, cache: Attend) -> Tensor:
        """tokens int [B, Q] -> hidden states after the final norm [B, Q, D], in the model's dtype."""
        return self.leave(self.run(0, self.enter(tokens), tokens, cache))

    def enter(self, tokens: Tensor) -> Stream:
        """tokens int [B, Q] -> the residual stream before the first block."""
        return Stream(self.embed(tokens))

    def run(
        self, stage: int, stream: Stream, tokens: Tensor, cache: Attend, taps: dict[int, Tensor | None] | None = None
    ) -> Stream:
        """All blocks, which are the only stage. taps: those blocks that are keys get the residual stream behind them
        [B, Q, D]; what is computed besides is the same."""
        own = [None] * len(self.blocks) if self.per_layer is None else self.per_layer(tokens, stream.value).unbind(2)
        for i, block in enumerate(self.blocks):
            stream = block(stream, cache, own[i])
            if taps is not None and i in taps:
                taps[i] = stream.total()
        return stream

    def leave(self, stream: Stream) -> Tensor:
        """The residual stream after the last block -> hidden states after the final norm [B, Q, D]."""
        return stream.normed(self.norm, self.config.eps)[0]

    def stream_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Of the residual stream."""
        return rows, length, self.config.hidden_size

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned [..., D], or rows of it -> float32 [..., V]."""
        logits = self.lm_head(hidden, float32=True)
        if self.peer is not None and self.head_unit is not None:
            logits = self.peer.all_gather(logits, self.config.vocab_size, self.head_unit)
        return bounded(self.config, logits)

    def new_cache(
        self,
        *,
        rows: int,
        pages: int,
        page_size: int,
        pages_per_row: int,
        kv: TurboQuantConfig | None = None,
        spare: int = 0,
    ) -> PagedCache | TurboQuantCache | HybridCache | LatentCache:
        """A paged KV cache of this model's sizes, on its device: in its dtype, or in codes as `kv` says. `spare` tokens
        need no room: pages keep what stands before them, and the ring beside codes has it always.

        Layers whose keys are mostly a bias stay in the dtype (`biased_layers`), unless `kv` needs codes there too.

        Raises ValueError for codes where attention has what nothing that reads codes knows: `LlamaConfig.exact_cache`.
        """
        if kv is not None and (what := self.config.exact_cache) is not None:
            raise ValueError(
                f"turboquant: {self.config.model_type} has {what}, which a cache in codes does not know; leave the "
                "cache in the model's dtype"
            )
        sizes: dict[str, Any] = {"rows": rows, "pages": pages, "page_size": page_size, "pages_per_row": pages_per_row}
        needed, kv = self.cache_bytes(kv, **sizes), self.settled(kv)
        check_cache(needed, self.device, rows=rows, tokens=(pages - 1) * page_size, exact=kv is None)
        if kv is not None:
            for block in self.blocks:
                if isinstance(block.attention, LatentAttention):
                    block.attention.turn_products(kv.seed)
        return self._new_cache(kv, self.device, **sizes)

    def cache_bytes(self, kv: TurboQuantConfig | None, **sizes: int) -> int:
        """Of what `new_cache` makes, whose arguments these are, and of what latents in codes need beside it."""
        kv = self.settled(kv)
        turned = turned_bytes(self.config, kv, self.dtype) // share_of(self.peer).ranks
        return self._new_cache(kv, "meta", **sizes).nbytes + turned

    def _new_cache(
        self, kv: TurboQuantConfig | None, device: torch.device | str, **sizes: int
    ) -> AttentionCache | HybridCache:
        about: dict[str, Any] = {"dtype": self.dtype, "device": device}
        made = attention_cache(
            self.config, share_of(self.peer), kv, fused=self.fused, fp8=self.fp8_kv, **sizes, **about
        )
        return HybridCache(made, self.recurrent, **about) if self.recurrent else made

    @property
    def recurrent(self) -> list[Recurrent]:
        """The layers that do not attend, in order."""
        layers = (getattr(block, "attention", None) for block in self.blocks)
        return [layer for layer in layers if isinstance(layer, Recurrent)]


def attention_cache(
    config: LlamaConfig, share: TPShard, kv: TurboQuantConfig | None, *, fused: bool = True, fp8: bool = False,
    **sizes: Any,
) -> AttentionCache:  # fmt: skip
    """What a rank keeps of the layers that attend: its share of the heads of keys and values, or latents, which each
    rank has whole. kv: settled (`Llama.settled`); fp8: of latents. sizes: rows, pages, page_size, pages_per_row,
    device, dtype."""
    if config.latent is not None:
        latent, index = config.latent, config.latent.index
        sizes |= {"rank": latent.rank, "rope": latent.rope, "kv": kv, "fp8": fp8}
        if index is not None:
            own = {i: index.dim for i, full in enumerate(index.full) if full}
            sizes |= {"indexers": own, "top_k": index.top_k}
        return LatentCache(layers=config.attention_layers, **sizes)
    spans = ((share.span(kv_heads), dim) for kv_heads, dim in config.cached)
    shapes = [(last - first, dim) for (first, last), dim in spans]
    sizes |= {"layers": len(shapes), "kv_heads": shapes[0][0], "head_dim": shapes[0][1], "shapes": shapes}
    return PagedCache(fused=fused, **sizes) if kv is None else TurboQuantCache(kv, **sizes)


def turned_bytes(config: LlamaConfig, kv: TurboQuantConfig | None, dtype: torch.dtype) -> int:
    """Of the up-projections in the coordinates of codes, which latent attention has beside its own."""
    if config.latent is None or kv is None:
        return 0
    return config.attention_layers * config.latent.products * dtype.itemsize


def unread_layers(config: LlamaConfig, device: str) -> list[int]:
    """Of the layers that are cached, those whose heads no kernel of a device of this type reads codes of: attention
    from codes in torch's ops takes milliseconds per layer on a GPU."""
    from onegraph.ops.cuda.turboquant_attention import MAX_DIM

    if config.latent is not None:
        return []
    return [i for i, (_, dim) in enumerate(config.cached) if device == "cuda" and dim > MAX_DIM]


@torch.no_grad()
def biased_layers(model: Llama) -> list[int]:
    """Layers with a head whose keys are mostly a bias, which codes would be spent on.

    The error of a code is a share of the whole key's power, and a quarter of it with one bit more: where the bias has
    `BIAS` times the power of what depends on the token, a code of n bits does what one of n - 1 does elsewhere. Both
    are estimated from inputs of random directions. Layers of Qwen2 and Qwen2.5 have biases of hundreds.
    """
    config = model.config
    if not config.qkv_bias:
        return []
    source = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, config.hidden_size, generator=source).to(model.device, model.dtype)
    found = []
    attending = (block for block in model.blocks if isinstance(getattr(block, "attention", None), Attention))
    for i, block in enumerate(attending):
        qkv: Tensor = block.get_submodule("qkv")(Stream(x))[0]
        attention = block.attention
        assert isinstance(attention, Attention)
        heads, d = attention.kv_heads, attention.head_dim
        first = attention.heads * d * (1 + attention.gated)  # of the key
        keys = qkv.float()[:, 0, first : first + heads * d].unflatten(1, (heads, d))
        bias = keys.mean(0)
        if (bias.square().sum(1) > BIAS * (keys - bias).square().sum(2).mean(0)).any():
            found.append(i)
    return found


def config_of(checkpoint: Checkpoint) -> LlamaConfig:
    """Its config.json, and how its files hold what that leaves open. Raises ValueError as `LlamaConfig.from_dict`."""
    config = LlamaConfig.from_dict(checkpoint.config)
    return config.held_as({config.family_name(name): checkpoint.shape(name) for name in checkpoint.names})


def embed_scale(config: LlamaConfig, dtype: torch.dtype) -> float:
    """The factor of the embedding's rows: Gemma's is rounded to the dtype first (sqrt(3072) is 55.5 in bfloat16), as
    it was when the models were trained."""
    rounded = config.traits.scaled_embedding
    return float(torch.tensor(config.embed_scale, dtype=dtype)) if rounded else config.embed_scale


def bounded(config: LlamaConfig, logits: Tensor) -> Tensor:
    """What the head gave -> the model's logits."""
    logits = logits if config.logits_divisor == 1 else logits / config.logits_divisor
    return capped(logits, config.logits_softcap)


def table_positions(config: LlamaConfig, max_context: int | None) -> int:
    if max_context is None:
        return min(config.max_positions, MAX_TABLE)
    if not 1 <= max_context <= config.max_positions:
        raise ValueError(f"max_context is {max_context}; the model allows 1 to {config.max_positions}")
    return max_context
