"""A model whose results for a token do not depend on the tokens and rows beside it: what `batch_invariant` means.

On a GPU the kernels see to that (`ops/invariant.py`). On a CPU, where torch's own products and even its exponentials
round by the shape and place of a tensor, each token is a pass of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from onegraph.engine.decoder import AuxHiddenStates, Cache, Decoder, Model, SplitAttention
from onegraph.engine.draft import view
from onegraph.nn.attention import PagedCache
from onegraph.nn.experts import Experts
from onegraph.ops import family


def check_invariant(model: Model, cache: Cache) -> None:
    """Raises ValueError for what is run by how many tokens there are, and cannot be otherwise."""
    why = None
    if len(model.ranks) > 1 or len(model.devices) > 1:
        why = f"the model is on {sum(len(rank.devices) for rank in model.ranks)} devices; allowed is one"
    elif not isinstance(cache, PagedCache):
        why = f"the KV cache is {cache.setting!r}; allowed is an exact one of a model of the Llama kind"
    elif getattr(model, "adapters", None) is not None:
        why = "the model has adapters, whose products are of a whole batch; load it without"
    elif not cache.fused:
        why = "the model was loaded with fused=False, for comparisons; load it without"
    elif isinstance(model, nn.Module) and any(isinstance(module, Experts) for module in model.modules()):
        why = "the model has routed experts, which are run by how many tokens chose them; allowed are dense models"
    elif family.FORCED == "reference" and model.devices[0].type == "cuda":
        why = f"{family.VARIABLE} is reference, whose products round by shape; allowed are the others"
    if why is not None:
        raise ValueError(f"batch_invariant: {why}")


class PerTokenDecoder:
    """A decoder of one stage whose passes are made token by token from embedding to logits, a row's in their order.
    What stands between `run` and `leave` is what the model's own `leave` gave."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def enter(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, Q], as they are."""
        return tokens

    def run(
        self, stage: int, stream: Tensor, tokens: Tensor, cache: SplitAttention, taps: AuxHiddenStates | None = None
    ) -> Tensor:
        """As `Decoder.run` and `leave` -> [B, Q, D]."""
        model, whole = self._model, cache.cache
        found, tapped = [], []
        for row, i in ((row, i) for row in range(tokens.shape[0]) for i in range(tokens.shape[1])):
            one = slice(row, row + 1)
            counts = (whole.counts[one] > i).to(whole.counts.dtype)
            own = view(whole, whole.positions[one] + i, counts, whole.block_table[one], whole.slots[one])
            token, kept = tokens[one, i : i + 1], None if taps is None else dict.fromkeys(taps)
            given = () if kept is None else (kept,)
            found.append(model.leave(model.run(stage, model.enter(token), token, SplitAttention(own), *given)))
            tapped.append(kept or {})
        if taps is not None:
            taps.update({layer: _joined([each[layer] for each in tapped], tokens) for layer in taps})
        return _joined(found, tokens)

    def leave(self, stream: Tensor) -> Tensor:
        """What `run` gave."""
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        found = [self._model.logits(each.view(1, -1)) for each in hidden.flatten(0, -2)]
        return torch.cat(found).view(*hidden.shape[:-1], -1)


def _joined(found: list[Any], tokens: Tensor) -> Tensor:
    """[1, 1, D] of each token -> [B, Q, D]."""
    return torch.cat(found).view(*tokens.shape, -1)
