"""What an EAGLE head learns from: texts of a model, and the hidden states that it makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onegraph.models.chain import ChainedLlama
from onegraph.models.llama import Llama

AT_ONCE = 8192  # tokens of texts, padding included, in one pass of the model


class Written(NamedTuple):
    """A text: tokens, of which the model was given the first `prompt` and wrote the others."""

    tokens: list[int]
    prompt: int = 0


@dataclass
class Shelf:
    """Room for hidden states: bytes that are left on a device."""

    device: torch.device
    left: int

    def keep(self, states: Tensor) -> Tensor | None:
        """A copy of `states`, or None where they do not fit. Copies of a GPU's on the host are pinned, so that neither
        way waits."""
        if states.nbytes > self.left:
            return None
        self.left -= states.nbytes
        pinned = self.device.type == "cpu" and states.is_cuda
        return torch.empty_like(states, device=self.device, pin_memory=pinned).copy_(states, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts side by side, padded behind: tokens int64 [B, T], the hidden states behind the tapped layers [B, T, L D],
    those that the output head reads [B, T, D]; and the texts themselves."""

    tokens: Tensor
    hidden: Tensor
    final: Tensor
    texts: Sequence[Written]

    def told(self, steps: int) -> Tensor:
        """Places int64 [N] in the flattened [B T] behind which a head of so many steps learns to name the token: those
        where the model wrote it (but the first, which no draft ever names), and each step has a place to begin
        from."""
        width = self.tokens.shape[1]
        places = [
            torch.arange(i * width + max(text.prompt, steps), i * width + len(text.tokens) - 1)
            for i, text in enumerate(self.texts)
        ]
        return sent(torch.cat(places), self.tokens.device)


class Texts:
    """Texts with what the model makes of them, which is kept on the first of `shelves` that has room for it, and
    computed anew each time where none has."""

    def __init__(
        self,
        model: Llama | ChainedLlama,
        texts: Sequence[Written],
        layers: tuple[int, ...],
        shelves: Sequence[Shelf] = (),
    ) -> None:
        self.model, self.texts, self.layers, self._shelves = model, texts, layers, shelves
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Some of the texts."""
        texts, model = [self.texts[i] for i in rows], self.model
        tokens, taps = sent(_padded(texts), model.device), len(self.layers) * model.config.hidden_size
        # Zeros: an entry that nobody sees has weight 0, which does away with everything but NaN.
        states = torch.zeros(*tokens.shape, taps + model.config.hidden_size, dtype=model.dtype, device=model.device)
        for place, i in enumerate(rows):
            if (kept := self._kept.get(i)) is not None:
                states[place, : len(kept)].copy_(kept, non_blocking=True)
        for place, made in self._made([place for place, i in enumerate(rows) if i not in self._kept], texts):
            states[place, : len(made)] = made
            self._keep(rows[place], made)
        return Batch(tokens=tokens, hidden=states[..., :taps], final=states[..., taps:], texts=texts)

    def _keep(self, i: int, states: Tensor) -> None:
        for shelf in self._shelves:
            if (kept := shelf.keep(states)) is not None:
                self._kept[i] = kept
                return

    @torch.no_grad()
    def _made(self, places: Sequence[int], texts: Sequence[Written]) -> Iterator[tuple[int, Tensor]]:
        """(place, states [T, (L + 1) D]) of the texts at `places`: texts of like length in one pass."""
        order = sorted(places, key=lambda place: len(texts[place].tokens))
        while order:
            count = max(1, AT_ONCE // len(texts[order[-1]].tokens))
            some, order = order[-count:], order[:-count]
            states = self._states(sent(_padded([texts[place] for place in some]), self.model.device))
            for place, made in zip(some, states, strict=True):
                yield place, made[: len(texts[place].tokens)]

    def _states(self, tokens: Tensor) -> Tensor:
        """Of tokens [B, T]. A token's states depend on those before it alone, so padding behind changes none."""
        model = self.model
        taps: dict[int, Tensor | None] = dict.fromkeys(self.layers)
        final = model.leave(model.run(0, model.enter(tokens), tokens, model.dense_attention, taps))
        found = [tap for layer in self.layers if (tap := taps[layer]) is not None]
        return torch.cat((*found, final), dim=-1)


def _padded(texts: Sequence[Written]) -> Tensor:
    """int64 [B, T] on the host."""
    rows = [torch.tensor(text.tokens) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, without waiting for what runs there."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
