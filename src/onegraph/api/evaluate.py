"""A checkpoint measured on a text: perplexity, distance from a reference, needles, and what each component costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.hub import locate
from onegraph.api.needle import ROOM, retrieve
from onegraph.api.size import component_bits, size_of
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.ab import costs, exchanged, in_nvfp4
from onegraph.engine.evaluate import evaluate
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.latent_kv import code_bits, token_bytes
from onegraph.formats.nvfp4 import GROUP
from onegraph.formats.turboquant import parse_kv
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.load import load_decoder, parse_config

FEW = 4000  # tokens; figures of fewer say more of the text than of the model
CARD_TOKENS = 1000  # the fewest whose figures a model card may have


def compare_components(
    model: str,
    reference: str | None,
    text: str,
    *,
    tokens: int,
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    remark: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """`eval --ab`: a row for each component of `model` that differs from `reference`, or of a model that has none for
    each component as NVFP4; then one for all of them. `remark` is told where the text is short. Raises ValueError."""
    with Checkpoint.open(locate(model).path) as checkpoint:
        ids = _measured_on(Tokenizer(checkpoint), text, tokens, remark)
        window = min(window, parse_config(checkpoint.config).max_positions)
        base = load_decoder(checkpoint, device, dtype, max_context=window, fused=False)
        bits = component_bits(checkpoint)
    if reference is None:
        changes = in_nvfp4(base)
        bits = dict.fromkeys(changes, 4 + 8 / GROUP)
    else:
        with Checkpoint.open(locate(reference).path) as checkpoint:
            other = load_decoder(checkpoint, device, dtype, max_context=window, fused=False)
        changes, base = exchanged(base, other), other
    progress("comparing", 0, 0)
    found = costs(
        base, changes, torch.tensor(ids), window=window, progress=lambda done, total: progress("comparing", done, total)
    )
    return [cost.as_dict() | {"bits": bits.get(cost.component)} for cost in found]


def evaluate_checkpoint(
    model: str,
    text: str,
    *,
    reference: str | None,
    tokens: int,
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    kv: str = "exact",
    needle: int | None = None,
    for_card: bool = False,
    remark: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Figures of `model` on `text`, by name; against `reference` where there is one; `for_card`: of `CARD_TOKENS`
    tokens at least. `remark` is told where the text is short. Raises ValueError."""
    fp8 = kv == "fp8"
    setting = None if fp8 else parse_kv(kv)
    with Checkpoint.open(locate(model).path) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
        ids = _measured_on(tokenizer, text, tokens, remark, CARD_TOKENS if for_card else 2)
        config = LlamaConfig.from_dict(checkpoint.config)
        if fp8 and config.latent is None:
            raise ValueError(
                f"kv_cache_dtype fp8: it is for latent attention, which {config.model_type} does not have; take exact "
                "or turboquant:4"
            )
        window = min(window, config.max_positions)
        reach = (needle or 0) + ROOM
        if reach > config.max_positions:
            raise ValueError(
                f"needle {needle}: with {ROOM} tokens for the answer that is {reach}; the model has "
                f"{config.max_positions} positions"
            )
        loaded = Llama.load(checkpoint, device, dtype, max_context=max(window, reach))
        setting, loaded.fp8_kv = loaded.settled(setting), fp8
        size = size_of(checkpoint)
    other = None
    if reference is not None:
        with Checkpoint.open(locate(reference).path) as checkpoint:
            other = Llama.load(checkpoint, device, dtype, max_context=window)
    progress("evaluating", 0, 0)
    found = evaluate(
        loaded,
        torch.tensor(ids),
        reference=other,
        window=window,
        kv="fp8" if fp8 else setting,
        progress=lambda done, total: progress("evaluating", done, total),
    )
    hidden = None if needle is None else retrieve(loaded, tokenizer, text, needle, setting)
    size_of_token = None
    if config.latent is not None and (fp8 or setting is not None):
        bits = code_bits(setting, fp8, config.attention_layers)
        size_of_token = float(token_bytes(bits, config.latent.rank, config.latent.rope, 2))
    elif setting is not None:
        size_of_token = setting.token_bytes_of(config.cached) + setting.sequence_bytes_of(config.cached) / window
    exact = 2 * sum(kv_heads * dim for kv_heads, dim in config.cached)
    exact = exact if config.latent is None else config.attention_layers * config.latent.width
    return {
        **found.as_dict(),
        "window": window,
        "kv": kv if setting is None else str(setting),
        "kv_bytes": None if size_of_token is None else round(size_of_token, 1),
        "exact_kv_bytes": 2 * exact,
        "needle": hidden,
        "bits": round(size.bits, 3),
        "linear_bits": round(size.linear_bits, 3),
    }


def _measured_on(
    tokenizer: Tokenizer, text: str, tokens: int, remark: Callable[[str], None] | None, least: int = 2
) -> list[int]:
    """The first `tokens` tokens of a text. Raises ValueError for fewer than `least`."""
    ids = tokenizer.encode(text)[:tokens]
    if len(ids) < least:
        what = "for a model card" if least == CARD_TOKENS else "and some thousand to mean much"
        raise ValueError(f"{len(ids)} tokens of the text are measured; at least {least} are needed, {what}")
    if len(ids) < FEW and remark is not None:
        remark(f"warning: figures of {len(ids)} tokens mean little; give some thousand tokens of text")
    return ids
