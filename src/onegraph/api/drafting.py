"""The drafter of a name that a user gives: "ngram", "mtp", "eagle:PATH", or a second checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from onegraph.api.hub import locate
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.draft import MakeDrafter, ModelDrafter, NgramDrafter
from onegraph.engine.draft_assistant import AssistantDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.suggestion import suggestion
from onegraph.models.assistant import Assistant, is_assistant
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import LlamaConfig
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_mtp import DeepseekDraft
from onegraph.models.eagle import EagleHead
from onegraph.models.llama import Llama
from onegraph.models.load import checkpoint_config, load_decoder
from onegraph.models.loader import Held, Loader
from onegraph.models.mtp import DraftLayer, has_draft
from onegraph.models.ranks import Ranks, one_progress
from onegraph.models.shares import shares_draft
from onegraph.nn.peers import Peers

if TYPE_CHECKING:
    from onegraph.api import Progress

NGRAM, MTP, EAGLE = "ngram", "mtp", "eagle:"
ALLOWED = f"allowed are {NGRAM!r}, {MTP!r}, '{EAGLE}PATH' of a head, and a smaller model's path"
Rank = Llama | ChainedLlama | DeepseekV4
Model = Rank | Ranks


def drafters(
    name: str,
    tokenizer: Tokenizer,
    model: Model,
    path: str | PathLike[str],
    *,
    held: Held | None,
    max_context: int,
    progress: Progress | None = None,
) -> list[MakeDrafter]:
    """The drafters of this name for the ranks of `model`, which was loaded from `path` and has this tokenizer. What
    they need is loaded as the model is, by each rank.

    Raises ValueError, whose message begins with "speculative", if there is no such drafter, it cannot be read, or the
    two do not match.
    """
    ranks: list[Rank] = list(model.ranks)
    check_name(name)
    if name == NGRAM:
        return [NgramDrafter for _ in ranks]
    if name == MTP:
        return [own_layers(rank, path) for rank in ranks]
    if name.startswith(EAGLE):
        return [eagle(name, rank) for rank in ranks]
    return second(name, tokenizer, ranks, held=held, max_context=max_context, progress=progress)


def check_name(name: str) -> None:
    """Raises ValueError for what names nothing that may draft: a method that is misspelt, and no model of that name."""
    if name in (NGRAM, MTP) or name.startswith(EAGLE):
        return
    method = name.lower().partition(":")[0]
    is_model = "/" in method or os.path.exists(name)
    hint = "" if is_model else suggestion(method, (NGRAM, MTP, f"{EAGLE}PATH"))
    if hint or not name:
        raise ValueError(f"speculative: got {name!r}; {ALLOWED}{hint}")


def own_layers(model: Rank, path: str | PathLike[str]) -> MakeDrafter:
    """The draft layer that a model's own checkpoint carries."""
    if not isinstance(model, DeepseekV4):
        if not has_draft(model.config):
            raise ValueError(
                f"speculative: {MTP!r} are the draft layers of DeepSeek, GLM, Nemotron 3, Qwen3-Next and Qwen3.5; a "
                f"{model.config.model_type!r} has none that run here: use {NGRAM!r}, '{EAGLE}PATH' or a smaller model"
            )
        with Checkpoint.open(locate(path).path) as checkpoint, told():
            return partial(HeadDrafter, DraftLayer.load(checkpoint, model))
    if not model.config.drafts:
        raise ValueError(f"speculative: {path} has no draft layers (num_nextn_predict_layers is 0): use {NGRAM!r}")
    with Checkpoint.open(path) as checkpoint, told():
        return partial(HeadDrafter, DeepseekDraft.load(checkpoint, model))


def eagle(name: str, model: Rank) -> MakeDrafter:
    """Loads the EAGLE-3 head of `name`, "eagle:PATH"."""
    if isinstance(model, DeepseekV4):
        raise ValueError(f"speculative: EAGLE heads are for Llama-like models; DeepSeek-V4 has its own layers, {MTP!r}")
    with head_checkpoint(name) as checkpoint:
        return partial(HeadDrafter, EagleHead.load(checkpoint, model))


@contextmanager
def head_checkpoint(name: str) -> Iterator[Checkpoint]:
    """Opens the EAGLE head of `name`, "eagle:PATH". Raises ValueError if there is no path."""
    where = name.removeprefix(EAGLE)
    if not where:
        raise ValueError(f"speculative: {name!r} names no head; give its directory, '{EAGLE}PATH'")
    with told(), Checkpoint.open(locate(where).path) as checkpoint:
        yield checkpoint


@contextmanager
def second_checkpoint(name: str) -> Iterator[Checkpoint]:
    """Opens the checkpoint of a draft model."""
    with told(), Checkpoint.open(locate(name).path) as checkpoint:
        if {"speculators_model_type", "draft_vocab_size"} & checkpoint.config.keys():
            raise ValueError(f"speculative: {name} is an EAGLE head; say '{EAGLE}{name}'")
        yield checkpoint


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with a drafter, as such: the model's own files are fine."""
    try:
        yield
    except ValueError as error:
        says = str(error)
        raise ValueError(says if says.startswith("speculative: ") else f"speculative: {says}") from None


def assistant(checkpoint: Checkpoint, model: Rank) -> Assistant:
    """Loads an assistant, which reads the model's own cache."""
    if isinstance(model, DeepseekV4):
        raise ValueError("speculative: assistants are for Gemma 4; DeepSeek-V4 has its own layers, 'mtp'")
    return Assistant.load(checkpoint, model)


def second(
    name: str,
    tokenizer: Tokenizer,
    ranks: Sequence[Rank],
    *,
    held: Held | None,
    max_context: int,
    progress: Progress | None,
) -> list[MakeDrafter]:
    """Another, smaller model of the same tokens, shared by the ranks or whole on each (`shares_draft`); or an assistant
    of this one."""
    vocabulary = ranks[0].config.vocab_size
    with second_checkpoint(name) as checkpoint:
        if is_assistant(checkpoint.config):
            return [partial(AssistantDrafter, assistant(checkpoint, rank)) for rank in ranks]
        config = checkpoint_config(checkpoint)
        found = config.vocab_size
        if found != vocabulary:
            raise ValueError(
                f"speculative: {name} has a vocabulary of {found} tokens, the model has {vocabulary}: use a model of "
                f"the same family, or with {NGRAM!r}"
            )
        if config.max_positions < max_context:
            raise ValueError(
                f"speculative: {name} takes texts of {config.max_positions} tokens; the model runs with max_model_len "
                f"{max_context}; give a max_model_len of {config.max_positions} or less, or use {NGRAM!r}"
            )
        if Tokenizer(checkpoint).token_bytes() != tokenizer.token_bytes():
            raise ValueError(
                f"speculative: the tokens of {name} are not the model's: use a model of the same family, or with "
                f"{NGRAM!r}"
            )
        loading = None if progress is None else partial(progress, "loading")
        count, dtype = len(ranks), ranks[0].dtype
        peer = None if count == 1 else ranks[0].peer
        if peer is not None and isinstance(config, LlamaConfig):
            peers: Peers = peer.peers
            how: dict[str, Any] = {"max_context": max_context, "held": held, "progress": loading}
            if shares_draft(Loader(checkpoint, config, dtype), config, count):
                shared = Ranks.load(checkpoint, peers.devices, dtype, peers=peers, **how)
                return [partial(ModelDrafter, model) for model in shared.ranks]
        drafting = [
            load_decoder(
                checkpoint,
                rank.devices[-1],
                rank.dtype,
                max_context=max_context,
                held=held,
                progress=one_progress(loading, i, count),
            )
            for i, rank in enumerate(ranks)
        ]
    return [partial(ModelDrafter, model.ranks[0]) for model in drafting]  # each itself
