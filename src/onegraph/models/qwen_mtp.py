"""The draft layer of Qwen3-Next, Qwen3.5 and their successors (`mtp.*`): one block more, of attention, which guesses
the token after the next.

    x = fc(norm(embedding of the next token) | norm(h))
    h' = norm(block(x));  logits = head(h')

h is what the decoder gives behind its final norm; embedding and head are the decoder's. h' stands for it when another
token is drafted behind. The layout is vLLM's (models/qwen3_next_mtp.py, qwen3_5_mtp.py), since transformers has none.
What drives it, and says which drafts are kept, is `engine/draft_heads.py`.

Its keys and values lie in pages of its own, in the decoder's dtype, under the decoder's block table and positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.models.blocks import Block, HalfBlock, build_block, norm_weight, rotary_tables
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import EMBED, HEAD, LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.loader import Loader
from onegraph.models.parts import Parts
from onegraph.nn.attention import Attend, PagedCache
from onegraph.nn.block import Stream
from onegraph.nn.linear import Linear
from onegraph.ops.norm import rms_norm

FC = "mtp.fc"
NORMS = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LlamaConfig):
    """The draft layer as a decoder of one block, whose files call it otherwise."""

    @classmethod
    def of(cls, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> "DraftConfig":
        """Of a decoder, as a file with tensors of these names and shapes holds it. What onegraph quantizes keeps it
        dense."""
        like = config.mixers.index(None)  # a layer that attends
        routed = config.routed and replace(config.routed, layers=(True,))
        quantization = None if isinstance(config.quantization, RotatedConfig) else config.quantization
        alone = {
            "layers": 1, "windows": (0,), "ropes": (config.ropes[like],), "attention": (config.attention[like],),
            "mixers": (None,), "routed": routed, "quantization": quantization,
        }  # fmt: skip
        made = cls(**{field.name: getattr(config, field.name) for field in fields(config)} | alone)
        found = made.held_as(shapes)
        assert isinstance(found, DraftConfig)
        return found

    def prefix(self, layer: int) -> str:
        return f"mtp.layers.{layer}."

    def family_name(self, name: str) -> str:
        """Files have draft layers beside the text model, under the same names whatever is around it."""
        return name

    @property
    def parts(self) -> Parts:
        whole, d = super().parts, self.hidden_size
        linears = {name: size for name, size in whole.linears.items() if name != HEAD}
        linears |= {FC: (d, 2 * d, False), HEAD: (self.vocab_size, d, False)}
        tensors: dict[str, tuple[Shape, Dtypes]] = dict.fromkeys(NORMS, ((d,), FLOATS))
        tensors |= {name: what for name, what in whole.tensors.items() if name != self.norm}
        return replace(
            whole,
            linears=linears,
            tensors=tensors,
            shared=(EMBED, HEAD),
            tied=False,
            components={},
            ignored=lambda name: not name.startswith("mtp."),
        )


class QwenDraft(nn.Module):
    """The draft layer of a loaded decoder. Build it with `load`.

    Attributes:
        config, dtype: the decoder's. vocab_size: its. layers, vocabulary: no hidden states are needed but the last, and
            every token may be named (`engine.draft_heads.Head`).
    """

    layers: tuple[int, ...] = ()
    vocabulary = None
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor

    def __init__(
        self,
        *,
        target: Llama | ChainedLlama,
        config: DraftConfig,
        fc: Linear,
        block: Block | HalfBlock,
        norms: list[Tensor],
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.vocab_size = config, target.dtype, config.vocab_size
        self.fc, self.block = fc, block
        self._target = [target]  # whose weights are not this module's
        for name, norm in zip(("embedding_norm", "hidden_norm", "norm"), norms, strict=True):
            self.register_buffer(name, norm)
        self.eval()

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Llama | ChainedLlama) -> "QwenDraft":
        """Reads the draft layer that belongs to `target`, whose checkpoint this is, onto its device, in its dtype.

        Raises ValueError (CheckpointError among them) that names what is missing or wrong.
        """
        if not has_layer(checkpoint):
            raise CheckpointError(
                f"{checkpoint.path} has no tensor {FC + '.weight'!r}, so it comes without its draft layer: draft with "
                "'ngram'"
            )
        if target.peer is not None:
            raise ValueError("the draft layer runs on one GPU; run the model on one, or draft with 'ngram'")
        config = DraftConfig.of(target.config, {name: checkpoint.shape(name) for name in checkpoint.names})
        device = target.device
        loader = Loader(checkpoint, config, target.dtype, decode=device.type == "cpu")
        loader.check()
        tables = rotary_tables(config, target.max_context, device)
        with loader.reading():
            return cls(
                target=target,
                config=config,
                fc=loader.linear(FC, device),
                block=build_block(loader, config, 0, tables, device),
                norms=[norm_weight(loader, config, name, device) for name in NORMS],
            )

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
        eps = self.config.eps
        embedded = rms_norm(self._target[0].embed(tokens), self.embedding_norm, eps)
        x = self.fc(torch.cat((embedded, rms_norm(features, self.hidden_norm, eps)), dim=-1))
        out: Stream = self.block(Stream(x), cache)
        return out.normed(self.norm, eps)[0]

    def leave(self, features: Tensor) -> Tensor:
        """What `forward` returned is what the output head reads."""
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> float32 [..., V] of the token behind."""
        return self._target[0].logits(hidden)

    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, spare: int) -> PagedCache:
        """For one layer, in the decoder's dtype and with its pages: one block table serves both."""
        return PagedCache(
            layers=1, pages=pages, page_size=page_size, kv_heads=self.config.kv_heads, head_dim=self.config.head_dim,
            rows=rows, pages_per_row=pages_per_row, device=self.norm.device, dtype=self.dtype,
        )  # fmt: skip


def has_layer(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint comes with its draft layer."""
    return any(name.startswith(f"{FC}.") for name in checkpoint.names)


def has_draft(config: object) -> bool:
    """Whether decoders of this config may come with such a draft layer."""
    return isinstance(config, LlamaConfig) and config.traits.mtp is not None
