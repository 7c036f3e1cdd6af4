"""The draft layer that a checkpoint of the Llama kind carries: one block more, which guesses the token after the next.

    x = projection(norm(embedding of the next token) | norm(h))
    h' = norm(block(x));  logits = head(h')

h is what the decoder gives behind its final norm; embedding and head are the decoder's. h' stands for it when another
token is drafted behind. Qwen3-Next and Qwen3.5 hold it under `mtp.`; Nemotron 3 too, as an attention block and a MoE
block; GLM-4.5, GLM-5 and DeepSeek-V3 as a layer behind the last (`models.families.DraftNames`). What drives it, and
says which drafts are kept, is `engine/draft_heads.py`.

Its keys and values, or latents, lie in pages of its own, in the decoder's dtype, under the decoder's block table and
positions. Of several ranks each has its share of the block, as of the decoder's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.rotated import KEEP, RotatedConfig
from onegraph.formats.weight import FLOATS, Dtypes, Quantization, Shape
from onegraph.models.blocks import Block, HalfBlock, build_block, norm_weight, rotary_tables
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import EMBED, HEAD, LlamaConfig
from onegraph.models.families import DraftNames
from onegraph.models.llama import Llama, attention_cache
from onegraph.models.loader import Loader
from onegraph.models.memory import decode_unread
from onegraph.models.mixers import NoMixer
from onegraph.models.parts import Parts
from onegraph.models.shares import check_ranks, share_of
from onegraph.models.windows import FULL
from onegraph.models.wrapper import text_config
from onegraph.nn.attention import Attend, PagedCache
from onegraph.nn.block import Stream
from onegraph.nn.latent import LatentCache
from onegraph.nn.linear import Linear
from onegraph.nn.peers import Peer
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LlamaConfig):
    """The draft layer as a decoder of one block, whose files call it otherwise: as `names`, whose root is `root`."""

    names: DraftNames
    root: str

    @classmethod
    def of(
        cls, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]], quantization: Quantization | None = None
    ) -> "DraftConfig":
        """Of a decoder, as a file with tensors of these names, by the family's, and shapes holds it.

        quantization: of the file. What onegraph wrote has of this layer in codes what has a tensor of codes; the rest
        is dense.
        """
        names, latent = config.traits.draft, config.latent
        assert names is not None
        like = config.mixers.index(None)  # a layer that attends
        if latent is not None and latent.index is not None:
            latent = replace(latent, index=replace(latent.index, full=(True,)))
        kinds = config.draft_kinds or ("",)  # "": attention and what feeds behind it
        alone: dict[str, Any] = {
            name: (getattr(config, name)[like],) * len(kinds) for name in ("windows", "ropes", "attention")
        } | {
            "layers": len(kinds), "mixers": tuple(None if kind in ("", FULL) else NoMixer() for kind in kinds),
            "latent": latent, "wide_from": len(kinds), "quantization": quantization,
            "routed": config.routed and replace(config.routed, layers=tuple(kind in ("", "moe") for kind in kinds)),
        }  # fmt: skip
        told = {field.name: getattr(config, field.name) for field in fields(config)} | alone
        made = cls(**told, names=names, root=names.root.format(config.layers))
        if isinstance(quantization, RotatedConfig):
            made = replace(made, quantization=made._rates(quantization, shapes))
        found = made.held_as(shapes)
        assert isinstance(found, DraftConfig)
        return found

    @classmethod
    def read(cls, config: LlamaConfig, checkpoint: Checkpoint) -> "DraftConfig":
        """Of a decoder's checkpoint."""
        shapes = {config.family_name(name): checkpoint.shape(name) for name in checkpoint.names}
        quantization = config.quantization
        if isinstance(quantization, RotatedConfig):  # of which the decoder has its own layers' rates alone
            quantization = parse_quantization(text_config(checkpoint.config).get("quantization_config"))
        return cls.of(config, shapes, quantization)

    def _rates(self, given: RotatedConfig, names: Collection[str]) -> RotatedConfig | None:
        """The rates of what of this layer is in codes; None where nothing is."""
        whole = replace(self, quantization=replace(given, layers={})).parts
        layers = [name for name in (*whole.linears, *whole.stacks) if name != HEAD]
        rates = {name: given.bits_of(name) if f"{name}.codes" in names else KEEP for name in layers}
        if all(rate == KEEP for rate in rates.values()):
            return None
        return replace(given, layers={name: rate for name, rate in rates.items() if rate != given.bits})

    def prefix(self, layer: int) -> str:
        """What the names of a block's parts begin with."""
        return self.root + self.names.block.format(layer)

    @property
    def projection(self) -> str:
        """The linear of both norms' results."""
        return self.root + self.names.projection

    @property
    def norms(self) -> tuple[str, ...]:
        """Weights of the norms of embeddings, of hidden states, and of the block's result."""
        return tuple(f"{self.root}{name.format(self.layers - 1)}.weight" for name in self.names.norms)

    @property
    def parts(self) -> Parts:
        whole, d = super().parts, self.hidden_size
        linears = {name: size for name, size in whole.linears.items() if name != HEAD}
        linears |= {self.projection: (d, 2 * d, False), HEAD: (self.vocab_size, d, False)}
        tensors: dict[str, tuple[Shape, Dtypes]] = dict.fromkeys(self.norms, ((d,), FLOATS))
        tensors |= {name: what for name, what in whole.tensors.items() if name != self.norm}
        return replace(
            whole,
            linears=linears,
            tensors=tensors,
            shared=(EMBED, HEAD),
            tied=False,
            components={},
            ignored=self._of_others,
        )

    def _of_others(self, name: str) -> bool:
        """Whether a tensor is the decoder's, or a copy of one."""
        copies = tuple(f"{self.root}{copy}." for copy in self.names.copies)
        return not name.startswith(self.root) or name.startswith(copies)


class DraftBlock(nn.Module):
    """What a draft layer has of its own: two norms, the projection, the block or its halves, the norm behind it."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor

    def __init__(
        self, *, config: DraftConfig, projection: Linear, blocks: list[Block | HalfBlock], norms: list[Tensor]
    ) -> None:
        super().__init__()
        self.config, self.projection, self.blocks = config, projection, nn.ModuleList(blocks)
        for name, norm in zip(("embedding_norm", "hidden_norm", "norm"), norms, strict=True):
            self.register_buffer(name, norm)
        self.eval()

    @staticmethod
    def parts(
        loader: Loader, config: DraftConfig, positions: int, device: torch.device, *, joined: bool = True,
        peer: Peer | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What this is made of, from a checkpoint; positions: of the rotary tables; else as for `build_block`."""
        tables = rotary_tables(config, positions, device)
        return {
            "config": config,
            "projection": loader.linear(config.projection, device),
            "blocks": [
                build_block(loader, config, i, tables, device, joined=joined, peer=peer) for i in range(config.layers)
            ],
            "norms": [norm_weight(loader, config, name, device) for name in config.norms],
        }

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Embeddings of tokens and features of those before them, [B, Q, D] -> [B, Q, 2 D] for the projection."""
        eps = self.config.eps
        both = rms_norm(embedded, self.embedding_norm, eps), rms_norm(features, self.hidden_norm, eps)
        return torch.cat(both, dim=-1)

    def run(self, x: Tensor, cache: Attend) -> Stream:
        """`inputs` -> the residual stream behind the block."""
        found = Stream(self.projection(x))
        for block in self.blocks:
            found = block(found, cache)
        return found


class DraftLayer(DraftBlock):
    """The draft layer of a loaded decoder, or a rank's share of it. Build it with `load`.

    Attributes:
        dtype, vocab_size: the decoder's. layers, vocabulary: no hidden states are needed but the last, and every token
            may be named (`engine.draft_heads.Head`).
    """

    layers: tuple[int, ...] = ()
    vocabulary = None

    def __init__(self, *, target: Llama | ChainedLlama, **parts: Any) -> None:
        super().__init__(**parts)
        self.dtype, self.vocab_size = target.dtype, target.config.vocab_size
        self._target = [target]  # whose weights are not this module's

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Llama | ChainedLlama) -> "DraftLayer":
        """Reads the draft layer that belongs to `target`, whose checkpoint this is, onto its device, in its dtype.

        Raises ValueError (CheckpointError among them) that names what is missing or wrong, and for ranks that cannot
        share the layer.
        """
        config = DraftConfig.read(target.config, checkpoint)
        if not has_layer(checkpoint, target.config):
            raise CheckpointError(
                f"{checkpoint.path} has no tensor {config.projection + '.weight'!r}, so it comes without its draft "
                "layer: draft with 'ngram'"
            )
        device, peer = target.device, target.peer
        loader = Loader(checkpoint, config, target.dtype, decode=device.type == "cpu", ahead=peer is None)
        loader.check()
        if peer is not None:
            check_ranks(loader, config, peer.count)
        decode_unread(loader, device, 1 if peer is None else peer.count)
        with loader.reading():
            return cls(target=target, **cls.parts(loader, config, target.max_context, device, peer=peer))

    def features(self, stream: Any, hidden: Mapping[int, Tensor | None]) -> Tensor:
        """What this goes on from: the decoder's hidden states behind its final norm [B, Q, D]."""
        return self._target[0].leave(stream)

    def forward(self, tokens: Tensor, features: Tensor, cache: Attend) -> Tensor:
        """One call over tokens that follow each other, at the cache's positions.

        Args:
            tokens: int64 [B, Q]; i is the token behind the one that features i stand for.
            features: [B, Q, D], of `features`, or what this returned.

        Returns features [B, Q, D].
        """
        x = self.inputs(self._target[0].embed(tokens), features)
        return self.run(x, cache).normed(self.norm, self.config.eps)[0]

    def leave(self, features: Tensor) -> Tensor:
        """What `forward` returned is what the output head reads."""
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> float32 [..., V] of the token behind."""
        return self._target[0].logits(hidden)

    def new_cache(self, *, spare: int, **sizes: Any) -> PagedCache | LatentCache:
        """For one layer, in the decoder's dtype and with its pages (rows, pages, page_size, pages_per_row): one block
        table serves both."""
        share = share_of(self._target[0].peer)
        found = attention_cache(self.config, share, None, **sizes, device=self.norm.device, dtype=self.dtype)
        assert not isinstance(found, TurboQuantCache)
        return found


def has_layer(checkpoint: Checkpoint, config: LlamaConfig) -> bool:
    """Whether a checkpoint of this config comes with its draft layer."""
    names = config.traits.draft
    root = "" if names is None else names.root.format(config.layers) + names.projection
    return names is not None and any(config.family_name(name).startswith(f"{root}.") for name in checkpoint.names)


def has_draft(config: object) -> bool:
    """Whether decoders of this config may come with such a draft layer."""
    return isinstance(config, LlamaConfig) and config.traits.draft is not None
