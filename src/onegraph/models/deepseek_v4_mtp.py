"""The draft layer of DeepSeek-V4 Flash and Pro (`mtp.0.*`): one block more, which guesses the token after the next.

    x = e_proj(enorm(embedding of the next token)) for every stream + h_proj(hnorm(X)) of each stream
    logits = head(norm(hc_head(block(x))))

X are the decoder's streams behind its last layer, in front of its own head; embedding and head are the decoder's. The
block attends to its window only and routes by scores. Its streams stand for the decoder's when another token is drafted
behind. What drives it, and says which drafts are kept, is `engine/draft_heads.py`.

The state lies in a cache of its own (`new_cache`) or in the decoder's (`DeepseekV4.new_cache(drafts=draft.attentions,
spare=k)`): token t of the draft's window stands for X of position t and the token at t + 1, so draft and decoder share
positions, slots and `truncate`.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.weight import Quantization
from onegraph.models.deepseek_v4 import DeepseekBlock, DeepseekV4, Hyper, build_block, build_hyper
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_names import official
from onegraph.models.deepseek_v4_parts import draft_parts
from onegraph.models.deepseek_v4_weights import check_ranks
from onegraph.models.loader import Loader
from onegraph.models.parts import Parts
from onegraph.nn.deepseek_attention import Attend, DeepseekAttention
from onegraph.nn.deepseek_cache import DeepseekCache
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear
from onegraph.ops.deepseek_hyper import hyper_head
from onegraph.ops.norm import rms_norm


class DraftFamily:
    """The draft stages of a checkpoint, as a loader needs them."""

    def __init__(self, config: DeepseekV4Config) -> None:
        self.config = config

    @property
    def quantization(self) -> Quantization | None:
        return self.config.quantization

    @property
    def parts(self) -> Parts:
        return draft_parts(self.config)

    def family_name(self, name: str) -> str:
        return official(name)


def draft_config(checkpoint: Checkpoint) -> DeepseekV4Config:
    """Raises ValueError where the draft stages are DSpark's, which compute something else."""
    config = DeepseekV4Config.from_dict(checkpoint.config)
    if config.dspark is not None:
        raise ValueError(
            f"{checkpoint.path}: mtp.* are {config.drafts} stages of DSpark, which do not run here; draft with 'ngram'"
        )
    return config


def draft_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What the draft stages of a checkpoint take on a device besides what is the decoder's; 0 where it has none.

    Raises ValueError (CheckpointError among them) that names what is missing or wrong.
    """
    config = draft_config(checkpoint)
    if not config.drafts:
        return 0
    loader = Loader(checkpoint, DraftFamily(config), dtype)
    loader.check()
    return sum(size for name, size in loader.device_bytes().items() if name.startswith("mtp."))


def draft_loader(checkpoint: Checkpoint, config: DeepseekV4Config, model: DeepseekV4) -> Loader:
    """Of the draft stages that belong to `model`, checked; a rank has its share of them as of the decoder's layers."""
    loader = Loader(checkpoint, DraftFamily(config), model.dtype, ahead=model.peer is None)
    loader.check()
    if model.peer is not None:
        check_ranks(loader, config, model.peer.count, range(config.layers, config.layers + config.drafts))
    return loader


def shared_embedding(model: DeepseekV4) -> Embedding:
    """The decoder's embedding on its last device: a step's graph is one device's."""
    first, last = model.devices[0], model.devices[-1]
    return model.embed if first == last else copy.deepcopy(model.embed).to(last)


def window_cache(
    model: DeepseekV4,
    layers: list[DeepseekAttention],
    *,
    rows: int,
    pages: int,
    page_size: int,
    pages_per_row: int,
    spare: int,
) -> DeepseekCache:
    """State of draft layers alone, under the decoder's slots and positions, as the decoder keeps its own."""
    return DeepseekCache(
        layers, rows=rows, pages=pages, page_size=page_size, pages_per_row=pages_per_row, spare=spare,
        device=model.devices[-1], dtype=model.dtype, fp8=model.fp8_kv,
    )  # fmt: skip


MakeCache = Callable[..., DeepseekCache]  # as `window_cache`, of one decoder
Logits = Callable[[Tensor], Tensor]  # hidden states [..., D] -> float32 [..., V], of one decoder


class DeepseekDraft(nn.Module):
    """The draft layer of a loaded decoder, on the device of its last stage, or a rank's share of it. Build it with
    `load`.

    Attributes:
        config, dtype, logits: the decoder's; `logits` takes what `leave` gives. layers, vocabulary: no hidden states
            are needed but the last streams, and every token may be named (`engine.draft_heads.Head`).
    """

    layers: tuple[int, ...] = ()
    vocabulary = None
    embedding_norm: Tensor
    stream_norm: Tensor

    def __init__(
        self,
        *,
        config: DeepseekV4Config,
        embed: Embedding,
        logits: Logits,
        block: DeepseekBlock,
        norms: tuple[Tensor, Tensor],
        projections: tuple[Linear, Linear],
        head: Hyper,
        dtype: torch.dtype,
        make_cache: MakeCache,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.vocab_size, self._make_cache = config, dtype, config.vocab_size, make_cache
        self.embed, self.block, self.head, self.logits = embed, block, head, logits
        self.embedding_projection, self.stream_projection = projections
        for name, norm in zip(("embedding_norm", "stream_norm"), norms, strict=True):
            self.register_buffer(name, norm)
        self.eval()

    @classmethod
    def load(cls, checkpoint: Checkpoint, model: DeepseekV4) -> "DeepseekDraft":
        """Reads the draft layer that belongs to `model`, in the precision in which the checkpoint has it.

        Raises ValueError (CheckpointError among them) that names what is missing or wrong, and for a checkpoint without
        a draft layer.
        """
        config = draft_config(checkpoint)
        if config.drafts != 1:
            raise ValueError(f"{checkpoint.path}: config.json tells of {config.drafts} draft layers; supported is 1")
        loader = draft_loader(checkpoint, config, model)
        device, layer = model.devices[-1], config.layer(config.layers)
        tables = config.main.tables(config.rope_dim, model.max_context, device)
        prefix = layer.prefix
        with loader.reading():
            enorm, hnorm = (loader.float32(f"{prefix}{name}.weight", device) for name in ("enorm", "hnorm"))
            e_proj, h_proj = (loader.linear(f"{prefix}{name}", device) for name in ("e_proj", "h_proj"))
            return cls(
                config=config,
                embed=shared_embedding(model),
                logits=model.logits,
                block=build_block(loader, config, layer, tables, device, model.peer),
                norms=(enorm, hnorm),
                projections=(e_proj, h_proj),
                head=build_hyper(loader, f"{prefix}hc_head_", f"{prefix}norm.weight", device),
                dtype=model.dtype,
                make_cache=partial(window_cache, model),
            )

    @property
    def attentions(self) -> list[DeepseekAttention]:
        """The layers whose state a cache of the decoder must hold besides its own."""
        return [self.block.attention]

    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, spare: int) -> DeepseekCache:
        """Of this layer alone, of the decoder's slots, from which `spare` latest tokens may be taken back."""
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "pages_per_row": pages_per_row, "spare": spare}
        return self._make_cache(self.attentions, **sizes)

    def features(self, stream: Tensor, hidden: object) -> Tensor:
        """What this goes on from: the decoder's streams behind its last layer [B, Q, H, D]."""
        return stream

    def forward(self, tokens: Tensor, streams: Tensor, cache: Attend) -> Tensor:
        """One call over tokens that follow each other, at the cache's positions.

        Args:
            tokens: int64 [B, Q]; i is the token behind the one that streams i stand for.
            streams: [B, Q, H, D], the decoder's behind its last layer, or what this returned.

        Returns streams [B, Q, H, D], a fresh tensor.
        """
        e = self.embedding_projection(rms_norm(self.embed(tokens), self.embedding_norm, self.config.eps))
        x: Tensor = self.stream_projection(rms_norm(streams.contiguous(), self.stream_norm, self.config.eps))
        x = x + e.unsqueeze(2)
        self.block.write(x, self.block(x, tokens, cache, None))
        return x

    def leave(self, streams: Tensor) -> Tensor:
        """What `forward` returned -> hidden states after the draft's own norm [B, Q, D]."""
        h, c = self.head, self.config
        result: Tensor = hyper_head(streams, h.fn, h.base, h.scale, h.norm, c.eps, c.hyper_eps)
        return result
