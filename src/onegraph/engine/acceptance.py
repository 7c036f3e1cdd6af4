"""How often a sequence's drafts were right, and what that promises."""

from dataclasses import dataclass

# How often a draft is right before any was read, and for how many of them that stands. Hopeful: what is never tried is
# never learnt, and where drafts are dear a doubtful guess would read none for ever.
PRIOR, WEIGHT = 0.9, 2.0
# What is left of a round's weight after the next, since a text changes its kind, and after one that read no drafts: a
# drafter that fails is tried again some hundred rounds later.
FADE, IDLE = 0.95, 0.995


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
        fade = FADE if drafted else IDLE
        self.right = fade * self.right + (1 - fade) * PRIOR * WEIGHT + accepted
        self.read = fade * self.read + (1 - fade) * WEIGHT + min(accepted + 1, drafted)

    def tokens(self, count: int) -> float:
        """Expected new tokens of a round that reads `count` drafts."""
        rate = self.right / self.read
        return sum(rate**i for i in range(count + 1))
