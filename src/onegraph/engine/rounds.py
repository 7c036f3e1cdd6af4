"""What rounds that check drafts keep on the devices, and what of a round is neither the model's nor the drafter's.

Which drafts wait for a row lies in its slot's state, so a round of any size may follow any other. Of a model in stages
all read the same tokens: the last stage alone knows which were kept and what waits for the next round, and the others
get copies when a round is done (`runtime/group.py`). Tensor-parallel ranks have each its own: all come to the
same, from the same bits.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onegraph.engine.choice import draw
from onegraph.engine.decoder import Cache
from onegraph.engine.draft import UNKNOWN, Drafter, DraftState, MakeDrafter
from onegraph.engine.exact_window import Sizes
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.runtime.transfer import Upload


class RoundState:
    """Of one rank.

    Args:
        make: the drafter, which works on the last stage's device. cache: the target's. devices: of the rank's stages.
        count: drafts of a round at most.

    Attributes:
        state: what the drafter works on. waiting: of each stage `drafts` and `found` as `DraftState` has them; the last
            stage's are the state's own.
    """

    def __init__(
        self,
        make: MakeDrafter,
        cache: Cache,
        devices: Sequence[torch.device],
        sizes: Sizes,
        *,
        count: int,
        kv: TurboQuantConfig | None,
    ) -> None:
        slots, last = sizes.rows + 1, devices[-1]
        self.waiting: list[tuple[Tensor, Tensor]] = [
            (
                torch.zeros(slots, count, dtype=torch.int64, device=device),
                torch.zeros(slots, dtype=torch.int32, device=device),
            )
            for device in devices
        ]
        drafts, found = self.waiting[-1]
        history = torch.zeros(slots, sizes.context, dtype=torch.int64, device=last)
        self.state = DraftState(
            sizes=sizes, kv=kv, cache=cache.parts[-1], device=last, history=history, drafts=drafts, found=found
        )
        self.drafter: Drafter = make(self.state)
        self._text = Upload(torch.zeros(sizes.context, dtype=torch.int64, device=last))

    # Within a step: the capture contract holds here.

    def following(self, slots: Tensor, positions: Tensor, length: int, new: Tensor) -> Tensor:
        """The tokens int64 [B, length] behind those of a prompt that rows read from positions int32 [B] on: as the text
        knows them, and where it ends the one drawn, new int64 [B]."""
        history = self.state.history
        step = torch.arange(1, length + 1, device=positions.device)
        at = (positions.unsqueeze(1) + step).clamp(max=history.shape[1] - 1)
        known = history[slots.long().unsqueeze(1), at]
        return torch.where(known == UNKNOWN, new.unsqueeze(1), known)

    # The host's part, between steps.

    def begin(self, slot: int, text: Tensor) -> None:
        """The tokens int64 [context] that are known of a slot's text, UNKNOWN behind them; nothing waits."""
        self._text(text)
        self.state.history[slot].copy_(self._text.target)
        for _, found in self.waiting:
            found[slot].zero_()

    def load(self, inputs: Mapping[str, Tensor], rows: int) -> None:
        """The rows' newest tokens, which the host has just loaded into a step's inputs, are part of their texts."""
        slots, positions = inputs["slots"][:rows].long(), inputs["positions"][:rows].long()
        self.state.history.index_put_((slots, positions), inputs["drawn"][:rows])


def draw_each(logits: Tensor, places: Tensor, inputs: Mapping[str, Tensor], *, sampling: bool) -> Tensor:
    """The target's own token at each of places int32 [B, W], from logits [B * W, V] -> int64 [B, W]."""
    wide = {}
    if sampling:
        names = "temperature", "top_k", "top_p", "min_p", "seed"
        wide = {name: inputs[name].repeat_interleave(places.shape[1]) for name in names if name in inputs}
    return draw(logits, places.view(-1), wide, sampling=sampling).view(places.shape)
