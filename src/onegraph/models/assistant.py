"""Gemma 4's assistants: a few layers that draft from the target's own keys and values (`gemma4_assistant`).

    x = pre_projection(embedding of the newest token | h);  logits = head(norm(layers(x)))
    h' = post_projection(norm(layers(x)))

The layers have queries alone. Each attends to what the target's last layer of its kind, with a window or without, has
in its cache, and nothing is added to that: all drafts of an iteration are queries at the position of the newest token,
which the target has not read. h is what the target gives behind its final norm for the token before; h' stands for it
when another token is drafted behind. Embedding of the newest token: the target's. As in transformers 5.17.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.weight import FLOATS, Dtypes, Shape
from onegraph.models.blocks import Block, HalfBlock, build_block, norm_weight, rotary_tables
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import LlamaConfig
from onegraph.models.fields import short
from onegraph.models.llama import Llama, embed_scale
from onegraph.models.loader import Loader
from onegraph.models.parts import Parts
from onegraph.models.shares import check_ranks
from onegraph.nn.attention import Attend
from onegraph.nn.block import Stream
from onegraph.nn.linear import Linear

KINDS = "gemma4_assistant", "gemma4_unified_assistant"  # model_type of a checkpoint
PRE, POST = "pre_projection", "post_projection"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of an assistant."""
    return config.get("model_type") in KINDS


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(LlamaConfig):
    """An assistant of one target.

    Args:
        sources: for each layer the number, among the target's cached layers, of the one whose keys it reads.
        target_size: hidden size of the target. centroids, top: groups of tokens, of which the head looks into the `top`
            best; 0 centroids: it names any token.
    """

    sources: tuple[int, ...]
    target_size: int
    centroids: int
    top: int

    @classmethod
    def of(cls, config: Mapping[str, Any], target: LlamaConfig) -> "AssistantConfig":
        """From config.json. Raises ValueError for what does not fit the target, and names it."""
        text = config.get("text_config")
        if target.model_type != "gemma4_text":
            raise ValueError(f"a {config['model_type']} drafts for Gemma 4; the model is {target.model_type!r}")
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config is {short(text)}; an assistant has its layers' config there")
        own = {"model_type": "gemma4_text", **text, "num_kv_shared_layers": 0}
        own["quantization_config"] = config.get("quantization_config", text.get("quantization_config"))
        parsed = LlamaConfig.from_dict(own)
        size, many = config.get("backbone_hidden_size"), config.get("num_centroids", 2048)
        ordered, top = config.get("use_ordered_embeddings", False), config.get("centroid_intermediate_top_k", 32)
        if size != target.hidden_size or parsed.vocab_size != target.vocab_size:
            raise ValueError(
                f"backbone_hidden_size is {short(size)} and vocab_size {parsed.vocab_size}; the model has "
                f"{target.hidden_size} and {target.vocab_size}: give the assistant of this model"
            )
        if ordered and (type(many) is not int or type(top) is not int or not 0 < top <= many):
            raise ValueError(
                f"num_centroids is {short(many)}, of which centroid_intermediate_top_k is {short(top)}; both are counts"
            )
        if ordered and parsed.vocab_size % many:
            raise ValueError(f"vocab_size {parsed.vocab_size} is no multiple of num_centroids {many}")
        sources = tuple(_source(target, window > 0) for window in parsed.windows)
        kept = target.cached
        for i, (heads, source) in enumerate(zip(parsed.attention, sources, strict=True)):
            if heads[:2] != kept[source]:
                raise ValueError(
                    f"layer {i} reads {heads.kv_heads} heads of {heads.dim}; the model keeps {kept[source][0]} of "
                    f"{kept[source][1]}: give the assistant of this model"
                )
        told = {field.name: getattr(parsed, field.name) for field in fields(parsed)}
        pairs = zip(parsed.attention, sources, strict=True)
        told["attention"] = tuple(heads._replace(source=source) for heads, source in pairs)
        # A query sees so many keys before the newest token's, which has none yet (transformers' mask is inclusive).
        told["windows"] = tuple(window + 1 if window else 0 for window in parsed.windows)
        return cls(**told, sources=sources, target_size=target.hidden_size, centroids=many if ordered else 0, top=top)

    def attention_index(self, layer: int) -> int:
        """Of the target's cache."""
        return self.sources[layer]

    @property
    def parts(self) -> Parts:
        whole, d = super().parts, self.hidden_size
        linears = {PRE: (d, 2 * self.target_size, False), POST: (self.target_size, d, False)}
        tensors: dict[str, tuple[Shape, Dtypes]] = {}
        if self.centroids:
            tensors[CENTROIDS] = (self.centroids, d), FLOATS
            tensors[ORDER] = (self.vocab_size,), (torch.int64, torch.int32)
        return replace(whole, linears=whole.linears | linears, tensors={**whole.tensors, **tensors}, components={})


def _source(target: LlamaConfig, windowed: bool) -> int:
    """The last of the target's layers of a kind that keeps keys of its own, by number in the cache."""
    layers = zip(target.windows, target.attention, target.mixers, strict=True)
    own = [i for i, (window, heads, mixer) in enumerate(layers) if mixer is None and heads.source is None
           and (window > 0) == windowed]  # fmt: skip
    if not own:
        what = "with a window" if windowed else "without a window"
        raise ValueError(f"the assistant has a layer {what} and the model has none: give the assistant of this model")
    return target.attention_index(own[-1])


class Assistant(nn.Module):
    """An assistant of a loaded target, on its device and in its dtype. Build it with `load`. Of several ranks each has
    its share of the layers, as of the target's, and all of what is around them."""

    norm: Tensor
    centroids: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        *,
        config: AssistantConfig,
        target: Llama | ChainedLlama,
        blocks: list[Block | HalfBlock],
        projections: tuple[Linear, Linear],
        norm: Tensor,
        head: Linear,
        centroids: Tensor | None,
        order: Tensor | None,
    ) -> None:
        super().__init__()
        self.config, self.blocks, self.head = config, nn.ModuleList(blocks), head
        self.pre, self.post = projections
        self._target = [target]  # whose weights are not this module's
        self.register_buffer("norm", norm)
        self.register_buffer("centroids", centroids)
        self.register_buffer("order", order)
        self.eval()

    @property
    def sources(self) -> frozenset[int]:
        """The cached layers of the target that this reads."""
        return frozenset(self.config.sources)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Llama | ChainedLlama) -> "Assistant":
        """Reads the assistant of `target`, whose layers that it reads stay exact in any cache made from then on.

        Raises ValueError (CheckpointError among them) that names what is missing, wrong or another model's.
        """
        config, device = AssistantConfig.of(checkpoint.config, target.config), target.device
        peer = target.peer
        loader = Loader(checkpoint, config, target.dtype, decode=device.type == "cpu", ahead=peer is None)
        loader.check()
        if peer is not None:
            check_ranks(loader, config, peer.count)
        # Queries are at the newest token's position; the last one that has a key is the one before.
        tables = {
            key: (None if cos is None else cos[1:], None if sin is None else sin[1:], factors)
            for key, (cos, sin, factors) in rotary_tables(config, target.max_context + 1, device).items()
        }
        with loader.reading():
            embedding = loader.embedding(device, embed_scale(config, target.dtype))
            made = cls(
                config=config,
                target=target,
                blocks=[build_block(loader, config, i, tables, device, peer=peer) for i in range(config.layers)],
                projections=(loader.linear(PRE, device), loader.linear(POST, device)),
                norm=norm_weight(loader, config, config.norm, device),
                head=loader.head(embedding, device),
                centroids=loader.tensor(CENTROIDS, device) if config.centroids else None,
                order=loader.tensor(ORDER, device, loader.info(ORDER).dtype).long() if config.centroids else None,
            )
        (target.model if isinstance(target, ChainedLlama) else target).lent = made.sources
        return made

    def features(self, stream: Any) -> Tensor:
        """What this goes on from: the target's hidden states behind its final norm [B, Q, D]."""
        return self._target[0].leave(stream)

    def forward(self, tokens: Tensor, features: Tensor, cache: Attend) -> tuple[Tensor, Tensor]:
        """One draft of each row.

        Args:
            tokens: int64 [B], the newest of each row. features: [B, 1, D], those of the token before, or what this
                returned.
            cache: the target's, whose positions are those before the newest tokens'.

        Returns features [B, 1, D] and logits float32 [B, V] of the token behind.
        """
        embedded = self._target[0].embed(tokens.unsqueeze(1))
        stream = Stream(self.pre(torch.cat((embedded, features), dim=-1)))
        for block in self.blocks:
            stream = block(stream, cache)
        hidden = stream.normed(self.norm, self.config.eps)[0]
        return self.post(hidden), self.logits(hidden[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, D] -> float32 [B, V]; where tokens lie in groups, those of others than the best groups are at -inf."""
        if self.centroids is None or self.order is None:
            found: Tensor = self.head(hidden, float32=True)
            return found
        best = (hidden @ self.centroids.T).topk(self.config.top, dim=-1).indices
        tokens = self.order.view(self.config.centroids, -1)[best].flatten(1)  # [B, top V / centroids]
        rows = self.head.tensors["weight"][tokens]
        chosen = (rows @ hidden.unsqueeze(-1)).squeeze(-1).float()
        return chosen.new_full((len(hidden), self.config.vocab_size), -torch.inf).scatter(1, tokens, chosen)
