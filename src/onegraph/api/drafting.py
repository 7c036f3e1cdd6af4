"""Who drafts, by the name that a user gives: "ngram", or a second checkpoint."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from onegraph.api.hub import locate
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.draft import MakeDrafter, ModelDrafter, NgramDrafter
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.load import load_decoder, parse_config

if TYPE_CHECKING:
    import torch

    from onegraph.api import Progress

NGRAM = "ngram"


def drafter(
    name: str,
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    int8: bool,
    max_context: int,
    progress: Progress | None = None,
) -> MakeDrafter:
    """The drafter of this name, for a target with this tokenizer and vocabulary; a model is loaded as the target is.

    Raises ValueError where a model's tokens are not the target's, CheckpointError where it cannot be read.
    """
    if name == NGRAM:
        return NgramDrafter
    with Checkpoint.open(locate(name).path) as checkpoint:
        config = parse_config(checkpoint.config)
        found = config.vocab_size
        if found != vocabulary:
            raise ValueError(
                f"draft: {name} has a vocabulary of {found} tokens, the model has {vocabulary}: draft with a model of "
                f"the same family, or with {NGRAM!r}"
            )
        if config.max_positions < max_context:
            raise ValueError(
                f"draft: {name} takes texts of {config.max_positions} tokens, the model is run with a max_context of "
                f"{max_context}: give a max_context of {config.max_positions} or less, or draft with {NGRAM!r}"
            )
        if Tokenizer(checkpoint).token_bytes() != tokenizer.token_bytes():
            raise ValueError(
                f"draft: the tokens of {name} are not the model's: draft with a model of the same family, or with "
                f"{NGRAM!r}"
            )
        report = None if progress is None else partial(progress, "loading")
        model = load_decoder(checkpoint, device, dtype, max_context=max_context, int8=int8, progress=report)
    return partial(ModelDrafter, model)
