"""EAGLE-3 heads: one decoder layer that goes on from what a model made of its text (Li et al., arXiv 2503.01840).

    x = norm(embedding of the next token) | norm(features)
    features = fc(the model's hidden states behind three layers), or what the head itself returned
    logits = head(norm(layer(x)))

The residual stream of the layer is the features. Entry t of the head's cache stands for features of token t and the
token at t + 1, so head and model share positions and pages. Files come in two layouts, which differ in config.json and
in two letters of a name (`EagleConfig`); what a file does not hold, embedding or output head, is the model's own.

Of several ranks each has its share of the layer and of the head's own output head, and all of `fc` and embedding, where
that saves time (`models.shares.shares_draft`); else each has the whole head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import FLOATS, Dtypes, Part, Quantization, Shape
from onegraph.models.blocks import build_attention, rotary_tables
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import LlamaConfig
from onegraph.models.fields import Fields, short
from onegraph.models.llama import Llama, attention_cache
from onegraph.models.loader import Loader
from onegraph.models.parts import Parts
from onegraph.models.shares import columns, gate_up_parts, head_part, qkv_parts, share_of, shares_draft
from onegraph.nn.attention import Attend, Attention, PagedCache
from onegraph.nn.block import MLP, Normed, ResidualLinear
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import ConcatLinear, Linear
from onegraph.nn.peers import Peer
from onegraph.ops.activation import SwiGLU
from onegraph.ops.norm import rms_norm

EMBED, HEAD, LAYER = "embed_tokens", "lm_head", "layers.0."
NORMS = "hidden_norm", "input_layernorm", "post_attention_layernorm"
TAPS = "eagle_aux_hidden_state_layer_ids"
# What a config says of the head itself, where it stands beside what it says of the layer.
_OWN = "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "eagle_config", TAPS
_KIND = "an EAGLE-3 head"


class EagleLayer(LlamaConfig):
    """The head's layer as a decoder of one layer."""

    def prefix(self, layer: int) -> str:
        """What the names of its parts begin with."""
        return LAYER


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """What a head's config.json says, validated. Build it with `from_dict`.

    layer: its one decoder layer. layers: of the target, behind which hidden states are taken, 0 the first; None where
    the config leaves it to who serves. draft_vocab: tokens that it may name. norm_first: the residual stream of its
    layer is the normed features.
    """

    layer: LlamaConfig
    layers: tuple[int, ...] | None
    target_hidden: int
    draft_vocab: int
    norm_first: bool
    quantization: Quantization | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "EagleConfig":
        """From either layout: speculators' (`speculators_model_type`, the layer under `transformer_layer_config`), or
        that of EAGLE and SpecForge, which has both in one object with a `draft_vocab_size`.

        Raises one ValueError that names what is unsupported or makes no sense.
        """
        try:
            return cls._parse(config)
        except ValueError as error:
            raise ValueError(f"config.json: {str(error).removeprefix('config.json: ')}") from None

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> "EagleConfig":
        kind = config.get("speculators_model_type")
        if kind is None and "draft_vocab_size" not in config:
            raise ValueError("has neither speculators_model_type nor draft_vocab_size; it is of no EAGLE-3 head")
        if kind not in (None, "eagle3"):
            raise ValueError(f"speculators_model_type is {short(kind)}; supported is 'eagle3'")
        inside: Any
        if kind is None:
            inside = {key: value for key, value in config.items() if key not in _OWN}
            own = {key: value for key, value in config.items() if key in _OWN}
        else:
            inside, own = config.get("transformer_layer_config"), dict(config)
            if not isinstance(inside, Mapping):
                raise ValueError(f"transformer_layer_config is {short(inside)}; it must be an object")
        if inside.get("model_type") != "llama":
            raise ValueError(f"the head's layer is a {short(inside.get('model_type'))}; supported is 'llama'")
        layer = EagleLayer.from_dict({key: value for key, value in inside.items() if key != "quantization_config"})
        if layer.layers != 1:
            raise ValueError(f"num_hidden_layers is {layer.layers}; supported are heads of 1 layer")
        fields = Fields(own, {})
        # Bookkeeping: how many tokens to draft, for which model, with which of their versions.
        fields.read("speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config")
        fields.read("embed_requires_grad", "has_no_defaults_at_init", "base_model_ep_plan", "tie_word_embeddings")
        quantization = parse_quantization(config.get("quantization_config", inside.get("quantization_config")))
        fields.read("quantization_config")
        target, drafts = fields.get("target_hidden_size"), layer.vocab_size
        if fields.get("draft_vocab_size") is not None:
            drafts = fields.integer("draft_vocab_size", high=layer.vocab_size)
        parsed = cls(
            layer=layer,
            layers=_layers(fields),
            target_hidden=layer.hidden_size if target is None else fields.integer("target_hidden_size", high=2**18),
            draft_vocab=drafts,
            norm_first=fields.flag("norm_before_residual"),
            quantization=quantization,
        )
        fields.check_unread(_KIND)
        return parsed

    def behind(self, depth: int) -> tuple[int, ...]:
        """The layers of a target of so many, behind which hidden states are taken.

        Raises ValueError where the target has no such layer.
        """
        found = (1, depth // 2 - 1, depth - 4) if self.layers is None else self.layers
        if not all(0 <= i < depth for i in found):
            raise ValueError(
                f"hidden states are asked for behind the layers {list(found)}; the model has 0 to {depth - 1}"
            )
        return found


def _layers(fields: Fields) -> tuple[int, ...] | None:
    """Behind which layers: beside the head's sizes they count as vLLM does, which takes what goes into a layer; within
    `eagle_config` (SpecForge) as SGLang does, what comes out of it."""
    nested, shift = fields.get("eagle_config"), 1
    given = fields.get(TAPS)
    if isinstance(nested, Mapping) and given is None:
        if nested.get("use_aux_hidden_state") not in (None, True):
            raise ValueError("eagle_config.use_aux_hidden_state is false: that is no EAGLE-3 head")
        given, shift = nested.get(TAPS), 0
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(type(i) is int and i >= shift for i in given):
        raise ValueError(f"{TAPS} is {short(given)}; it must list layers from {shift} on")
    return tuple(i - shift for i in given)


class _Files:
    """A head's file as a loader needs it."""

    def __init__(self, config: EagleConfig, layers: int, names: list[str]) -> None:
        self.config, self.layers = config, layers
        self.names = {self.family_name(name) for name in names}

    @property
    def quantization(self) -> Quantization | None:
        return self.config.quantization

    @staticmethod
    def family_name(name: str) -> str:
        """midlayer.* (EAGLE, SpecForge) is layers.0.* (speculators)."""
        return name.removeprefix("model.").replace("midlayer.", LAYER, 1)

    @property
    def parts(self) -> Parts:
        c, d = self.config.layer, self.config.layer.hidden_size
        q, kv, wide = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate_size
        linears = {
            "fc": (d, self.layers * self.config.target_hidden, False),
            **{f"{LAYER}self_attn.{name}_proj": (n, 2 * d, c.qkv_bias) for name, n in (("q", q), ("k", kv), ("v", kv))},
            f"{LAYER}self_attn.o_proj": (d, q, c.out_bias),
            **{f"{LAYER}mlp.{name}_proj": (wide, d, c.mlp_bias) for name in ("gate", "up")},
            f"{LAYER}mlp.down_proj": (d, wide, c.mlp_bias),
            HEAD: (self.config.draft_vocab, d, False),
        }
        tensors: dict[str, tuple[Shape, Dtypes]] = {f"{LAYER}{name}.weight": ((d,), FLOATS) for name in NORMS}
        tensors["norm.weight"] = (d,), FLOATS
        if self.reduced or "d2t" in self.names:
            tensors["d2t"] = (self.config.draft_vocab,), (torch.int64, torch.int32)
        return Parts(
            linears=linears,
            embedding=(EMBED, (c.vocab_size, d)),
            head=HEAD,
            tensors=tensors,
            shared=tuple(name for name in (EMBED, HEAD) if self.may_share(name)),
            ignored=lambda name: name == "t2d",  # what d2t says, the other way round
        )

    @property
    def reduced(self) -> bool:
        return self.config.draft_vocab < self.config.layer.vocab_size

    def may_share(self, name: str) -> bool:
        """Whether the file lacks this end and the target's can stand for it."""
        same = self.config.layer.hidden_size == self.config.target_hidden
        return same and not (name == HEAD and self.reduced) and not any(n.startswith(f"{name}.") for n in self.names)


class EagleHead(nn.Module):
    """The head of a loaded model. Build it with `load`.

    Attributes:
        config, dtype: what config.json says; the target's. layers: of the target, behind which hidden states are taken.
        vocab_size: of the target. vocabulary: int64 [V'], the target's token of each that the head names, None for all.
        peer, head_unit: of a rank that has a share of the head, see `Llama`; None where it has all of it.
    """

    vocabulary: Tensor | None
    hidden_norm: Tensor
    input_norm: Tensor
    norm: Tensor

    def __init__(
        self,
        *,
        config: EagleConfig,
        target: Llama | ChainedLlama,
        layers: tuple[int, ...],
        embed: Embedding | None,
        lm_head: Linear | None,
        head_unit: int | None,
        peer: Peer | None,
        fc: Linear,
        qkv: Linear | ConcatLinear,
        attention: Attention,
        out: ResidualLinear,
        mlp: MLP,
        norms: tuple[Tensor, Tensor, Tensor],
        vocabulary: Tensor | None,
    ) -> None:
        super().__init__()
        self.config, self.layers, self.dtype = config, layers, target.dtype
        self.vocab_size = config.layer.vocab_size
        # The target keeps what is its own: a module may be part of two, but must not be counted as this one's weight.
        self._embed = [target.embed if embed is None else embed]
        self._logits = target.logits if lm_head is None else partial(lm_head, float32=True)
        self.own_embed, self.lm_head = embed, lm_head
        self.peer, self.head_unit = peer, None if lm_head is None else head_unit
        self.fc, self.qkv, self.attention, self.out, self.mlp = fc, qkv, attention, out, mlp
        for name, norm in zip(("hidden_norm", "input_norm", "norm"), norms, strict=True):
            self.register_buffer(name, norm)
        self.register_buffer("vocabulary", vocabulary)
        self.eval()

    @staticmethod
    def loader(
        checkpoint: Checkpoint, model: LlamaConfig, device: torch.device, dtype: torch.dtype, *, ahead: bool = True
    ) -> Loader:
        """What reads the head of a model with this config. Raises ValueError for what `EagleConfig` does not take."""
        config = EagleConfig.from_dict(checkpoint.config)
        files = _Files(config, len(config.behind(model.layers)), checkpoint.names)
        return Loader(checkpoint, files, dtype, decode=device.type == "cpu", ahead=ahead)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Llama | ChainedLlama) -> "EagleHead":
        """Reads the head that belongs to `target`, or its rank's share of it, onto its device, in its dtype.

        Raises ValueError (CheckpointError among them) that names what is unsupported, missing or wrong, or in what the
        two do not go together.
        """
        config = EagleConfig.from_dict(checkpoint.config)
        layer, model = config.layer, target.config
        for name, found, wanted in (
            ("vocab_size", layer.vocab_size, model.vocab_size),
            ("target_hidden_size", config.target_hidden, model.hidden_size),
        ):
            if found != wanted:
                raise ValueError(
                    f"{checkpoint.path}: {name} is {found}, the model's is {wanted}: it is another model's head"
                )
        layers, device, eps = config.behind(model.layers), target.device, layer.eps
        loader = cls.loader(checkpoint, model, device, target.dtype, ahead=target.peer is None)
        loader.check()
        peer = target.peer
        if peer is not None and not shares_draft(loader, layer, peer.count):
            peer = None
        share, parts = share_of(peer), loader.parts
        unit, rows = head_part(loader, config.draft_vocab, layer.hidden_size, peer)
        # Heads are trained on texts shorter than they serve (2,048 is common): tables reach as far as the target's.
        tables = rotary_tables(layer, target.max_context, device)

        def joined(cut: list[tuple[str, Part]]) -> Linear | ConcatLinear:
            return loader.siblings([LAYER + name for name, _ in cut], device, parts=[part for _, part in cut])

        with loader.reading():
            hidden_norm, input_norm, behind = (loader.tensor(f"{LAYER}{name}.weight", device) for name in NORMS)
            side = Normed(behind, joined(gate_up_parts(layer, share, 0)), eps)
            out = loader.linear(f"{LAYER}self_attn.o_proj", device, columns(share, layer.heads, layer.head_dim))
            down = loader.linear(f"{LAYER}mlp.down_proj", device, columns(share, layer.intermediate_size))
            return cls(
                config=config,
                target=target,
                layers=layers,
                embed=None if EMBED in parts.shared else loader.embedding(device),
                lm_head=None if HEAD in parts.shared else loader.linear(HEAD, device, rows),
                head_unit=unit,
                peer=peer,
                fc=loader.linear("fc", device),
                qkv=joined(qkv_parts(layer, share, 0)),
                attention=build_attention(loader, layer, 0, tables, device, peer)[0],
                out=ResidualLinear(out, peer=peer),
                mlp=MLP(side, ResidualLinear(down, gate=SwiGLU(), peer=peer)),
                norms=(hidden_norm, input_norm, loader.tensor("norm.weight", device)),
                vocabulary=_vocabulary(loader, config, device) if "d2t" in parts.tensors else None,
            )

    def features(self, stream: object, hidden: Mapping[int, Tensor | None]) -> Tensor:
        """The target's hidden states [B, Q, D] behind each of `layers` -> features [B, Q, d]."""
        found = [tap for layer in self.layers if (tap := hidden[layer]) is not None]
        result: Tensor = self.fc(torch.cat(found, dim=-1))
        return result

    def forward(self, tokens: Tensor, features: Tensor, cache: Attend) -> Tensor:
        """One call over tokens that follow each other, at the cache's positions.

        Args:
            tokens: int64 [B, Q]; i is the token behind the one that features i stand for.
            features: [B, Q, d], of `features`, or what this returned.

        Returns features [B, Q, d].
        """
        eps = self.config.layer.eps
        normed = rms_norm(features, self.hidden_norm, eps)
        x = torch.cat((rms_norm(self._embed[0](tokens), self.input_norm, eps), normed), dim=-1)
        attended = cache.attend(self.attention, self.qkv(x))
        result: Tensor = self.mlp(self.out(attended, normed if self.config.norm_first else features)).total()
        return result

    def leave(self, features: Tensor) -> Tensor:
        """What `forward` returned [..., d] -> what the output head reads."""
        result: Tensor = rms_norm(features, self.norm, self.config.layer.eps)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """What `leave` returned [..., d] -> float32 [..., V'] of the token behind."""
        logits = self._logits(hidden)
        if self.peer is None or self.head_unit is None:
            return logits
        return self.peer.all_gather(logits, self.config.draft_vocab, self.head_unit)

    def new_cache(self, *, spare: int, **sizes: Any) -> PagedCache:
        """For one layer, in the target's dtype and with its pages (rows, pages, page_size, pages_per_row): one block
        table serves both."""
        layer, share = self.config.layer, share_of(self.peer)
        found = attention_cache(layer, share, None, **sizes, device=self.norm.device, dtype=self.dtype)
        assert isinstance(found, PagedCache)
        return found


def _vocabulary(loader: Loader, config: EagleConfig, device: torch.device) -> Tensor:
    """The target's tokens, int64 [V']: d2t holds how far each lies behind its number in the head's own order."""
    steps = loader.tensor("d2t", device, torch.int64)
    tokens = torch.arange(config.draft_vocab, device=device) + steps
    if bool(((tokens < 0) | (tokens >= config.layer.vocab_size)).any()):
        raise CheckpointError(f"d2t names tokens outside of 0 to {config.layer.vocab_size - 1}; the file is damaged")
    return tokens
