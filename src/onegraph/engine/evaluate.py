"""How good a model is on a text: perplexity, and how far its predictions are from a reference model's.

Over whole windows with dense causal attention, which is exact and computes every position at once; the paged path gives
the same logits (tests/models/test_llama.py) a token at a time. A quantized KV cache is read as decoding reads it.
Logits exist for a few positions at once only.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onegraph.engine.choice import row_slices
from onegraph.engine.decoder import Decoder
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.nn.turboquant import relative_errors

Cached = TurboQuantConfig | Literal["fp8"] | None  # how a model is read: through a cache of this setting, or densely


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures over `tokens` predicted tokens; nats are natural-log units.

    perplexity: exp of the mean negative log-likelihood. kl: mean KL(reference ‖ model), nats per token, and its
    standard error over tokens. top1: share of positions at which both models' likeliest token is the same. The fields
    of a comparison are None where no reference was given. shadow_errors: of each layer what `TurboQuantCache.errors`
    says, None unless the cache is in mode `shadow`.
    """

    tokens: int
    windows: int
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    top1: float | None = None
    shadow_errors: list[float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def evaluate(
    model: Decoder,
    tokens: Tensor,
    *,
    reference: Decoder | None = None,
    window: int = 512,
    batch: int = 1,
    kv: Cached = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate `model` on tokens int [N], cut into windows that share nothing.

    Each window predicts its tokens from the second on; what is left at the end makes a shorter window. Windows are the
    unit of context, so figures compare only at the same `window`.

    Args:
        reference: another model of the same vocabulary, e.g. the one that `model` was quantized from.
        batch: windows computed at once.
        kv: read the model through a KV cache of this setting, as decoding does: every query sees of each earlier token
            what a decode step would. Compared with `reference`, or with the same model and exact attention. "fp8" is
            of a model loaded with `fp8_kv`.
        progress: called as progress(windows done, windows in all).

    Raises ValueError for arguments that make no sense, FloatingPointError where a model gives NaN or an infinite loss.
    """
    if reference is None and kv is not None:
        reference = model
    models = [("model", model)] if reference is None else [("model", model), ("reference model", reference)]
    _check(models, tokens, window, batch)
    whole = tokens.numel() // window
    tail = tokens[whole * window :]
    full = tokens[: whole * window].view(whole, window).split(batch) if whole else ()
    parts = [*full, *([tail[None]] if tail.numel() > 1 else [])]
    total = sum(len(part) for part in parts)

    count, losses = 0, [0.0] * len(models)
    kl = kl_squares = same = 0.0
    done = 0
    squares: list[Tensor] = []
    for part in parts:
        settings: tuple[Cached, ...] = (kv, None)[: len(models)]
        hidden = [
            read(m, part, how, squares)[:, :-1].flatten(0, 1) for (_, m), how in zip(models, settings, strict=True)
        ]
        targets = part[:, 1:].flatten().to(model.devices[-1], torch.int64)
        for rows in row_slices(len(targets), model.config.vocab_size):
            at = f"windows {done} to {done + len(part) - 1}"
            logs = [
                _log_probabilities(name, m, h[rows], at).to(model.devices[-1])
                for (name, m), h in zip(models, hidden, strict=True)
            ]
            for i, log in enumerate(logs):
                loss = -log.gather(1, targets[rows, None]).double().sum().item()
                if not math.isfinite(loss):
                    raise FloatingPointError(f"{models[i][0]}: gives a token of {at} no probability at all")
                losses[i] += loss
            count += len(targets[rows])
            if reference is not None:
                each = _kl(logs[1], logs[0])
                kl += each.sum().item()
                kl_squares += each.square().sum().item()
                same += (logs[0].argmax(1) == logs[1].argmax(1)).sum().item()
        done += len(part)
        if progress is not None:
            progress(done, total)
    perplexities = [math.exp(loss / count) if loss / count < 700 else math.inf for loss in losses]
    if reference is None:
        return Evaluation(tokens=count, windows=total, perplexity=perplexities[0])
    variance = max(kl_squares / count - (kl / count) ** 2, 0.0)
    return Evaluation(
        tokens=count,
        windows=total,
        perplexity=perplexities[0],
        reference_perplexity=perplexities[1],
        kl=kl / count,
        kl_error=math.sqrt(variance / count),
        top1=same / count,
        shadow_errors=relative_errors(torch.stack(squares).sum(0)) if squares else None,
    )


def read(model: Decoder, tokens: Tensor, kv: Cached, squares: list[Tensor]) -> Tensor:
    """tokens int [B, T] -> hidden states [B, T, D]: densely, or as decoding through a cache of `kv` from the first
    token on would give them, whose sums of errors go to `squares` in mode `shadow`."""
    tokens = tokens.to(model.devices[0], torch.int64)
    if kv is None and model.dense_attention is not None:
        return model(tokens, model.dense_attention)
    rows, length = tokens.shape
    page = model.page_size
    codes = None if kv == "fp8" else kv
    per_row = -(-max(length, 0 if codes is None else codes.window) // page)
    cache: Any = model.new_cache(rows=rows, pages=1 + rows * per_row, page_size=page, pages_per_row=per_row, kv=codes)
    for part in cache.parts:
        part.block_table.copy_(torch.arange(1, 1 + rows * per_row).view(rows, per_row))
        part.counts.fill_(length)
    hidden = model(tokens, cache if kv is None else cache.as_decoded())
    if codes is not None and codes.mode == "shadow":
        squares.append(cache.squares)
    return hidden


def _log_probabilities(name: str, model: Decoder, hidden: Tensor, at: str) -> Tensor:
    """Hidden states [R, D] -> log-probabilities float32 [R, V], none of them NaN."""
    logs = model.logits(hidden).float().log_softmax(dim=-1)
    if logs.isnan().any():
        raise FloatingPointError(
            f"{name}: gives NaN in {at}: its weights hold NaN or infinities, or activations overflow its dtype"
        )
    return logs


def _kl(truth: Tensor, other: Tensor) -> Tensor:
    """KL(truth ‖ other) of each row, float64 [R], from log-probabilities [R, V]."""
    p = truth.exp()
    return (p * (truth - other)).masked_fill_(p == 0, 0.0).sum(dim=1, dtype=torch.float64)


def _check(models: list[tuple[str, Any]], tokens: Tensor, window: int, batch: int) -> None:
    if tokens.dim() != 1 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens: got {tokens.dtype} {list(tokens.shape)}; allowed is int64 or int32 [N], one text")
    if tokens.numel() < 2:
        raise ValueError(
            f"tokens: got {tokens.numel()}; at least 2 are needed, as each is predicted from those before it"
        )
    if batch < 1:
        raise ValueError(f"batch: got {batch}; allowed is 1 and more")
    vocabularies = {name: model.config.vocab_size for name, model in models}
    if len(set(vocabularies.values())) > 1:
        raise ValueError(
            f"reference: got vocabularies of different sizes {vocabularies}; compare models of one tokenizer"
        )
    for name, model in models:
        if not 2 <= window <= model.max_context:
            raise ValueError(f"window: got {window}; the {name} was loaded for 2 to {model.max_context} tokens")
        if (bad := int(tokens.min())) < 0 or (bad := int(tokens.max())) >= vocabularies[name]:
            raise ValueError(
                f"tokens: got token {bad}; the {name}'s vocabulary is 0 to {vocabularies[name] - 1}: use its own "
                "tokenizer"
            )
