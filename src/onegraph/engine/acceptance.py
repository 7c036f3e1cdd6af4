"""How often a sequence's drafts were right, and what that promises."""

from dataclasses import dataclass

PRIOR, WEIGHT = 0.6, 2.0  # how often a draft is right before any was read, and for how many of them that stands
FADE = 0.95  # what is left of a round's weight after the next: a text changes its kind


@dataclass
class Acceptance:
    """What the host knows of one sequence's drafts: how many wait, and how many of those read so far were right.

    right, read: fading counts, in which a run of drafts ends with its first wrong one.
    """

    waiting: int = 0
    right: float = PRIOR * WEIGHT
    read: float = WEIGHT

    def learn(self, drafted: int, accepted: int) -> None:
        """A round read so many drafts, of which the first `accepted` were right; of none, doubt fades."""
        self.right = FADE * self.right + (1 - FADE) * PRIOR * WEIGHT + accepted
        self.read = FADE * self.read + (1 - FADE) * WEIGHT + min(accepted + 1, drafted)

    def tokens(self, count: int) -> float:
        """Expected new tokens of a round that reads `count` drafts."""
        rate = self.right / self.read
        return sum(rate**i for i in range(count + 1))
