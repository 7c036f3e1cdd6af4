"""The steps of all ranks of a model as one: built, run and emptied together. Of most models there is one rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from onegraph.engine.choice import Choice, ChoiceState
from onegraph.engine.steps import Steps
from onegraph.nn.peers import PeerError, Peers
from onegraph.runtime.beside import Beside
from onegraph.runtime.graph import GraphPool
from onegraph.runtime.pipeline import Pipeline, running

Runners = dict[int, Pipeline | Beside]  # of a step, by count of drafts


class Together:
    """Args:
    steps: of each rank. pools: of each rank's stages; none where steps run eagerly.
    peers: what several ranks exchange through. failed: called where perhaps not all of them ran a step.
    """

    def __init__(
        self,
        steps: Sequence[Steps],
        pools: Sequence[Sequence[GraphPool]],
        peers: Peers | None,
        failed: Callable[[], object],
    ) -> None:
        self.steps, self._pools, self._peers, self._failed = list(steps), pools, peers, failed
        self._devices = [device for each in steps for device in each.model.devices]

    @property
    def first(self) -> Steps:
        """The rank whose results the host reads; all have the same."""
        return self.steps[0]

    def running(self) -> AbstractContextManager[None]:
        """The streams of all devices."""
        return running([pool for pools in self._pools for pool in pools])

    def build(self, decoding: bool, choice: Choice, exact: bool) -> Runners:
        """Ranks are warmed up and captured one by one, each alone: nothing else may be under way."""
        pools = self._pools or [[]] * len(self.steps)
        if self._peers is None:
            return dict(self.first.build(decoding, choice, exact, pools[0]))
        self.wait()
        self._peers.arm(False)
        try:
            built = [steps.build(decoding, choice, exact, own) for steps, own in zip(self.steps, pools, strict=True)]
            if self._devices[0].type == "cuda":
                self._run_once([pipeline for rank in built for pipeline in rank.values()])
            self.wait()
        finally:
            self._peers.arm(True)
        return {count: Beside([rank[count] for rank in built], self._failed) for count in built[0]}

    def _run_once(self, built: Sequence[Pipeline]) -> None:
        """On padding, whose rows stand still: a first launch may wait for the whole GPU, which it must not do while a
        peer spins."""
        with self.running():
            for pipeline in built:
                for bucket in pipeline.stages[0].buckets or (None,):
                    pipeline.replay(bucket)

    def choices(self, make: Callable[[torch.device], ChoiceState]) -> list[ChoiceState]:
        """Of each rank, made when first asked for."""
        for steps in self.steps:
            if steps.choices is None:
                steps.choices = make(steps.model.devices[-1])
        return [steps.choices for steps in self.steps if steps.choices is not None]

    def trim(self, length: int, width: int) -> None:
        """What the next step looks at: tokens of a chunk, pages of a row."""
        for steps in self.steps:
            steps.length, steps.width = length, width

    def encode(self, pages: torch.Tensor, slots: list[int], tokens: list[int]) -> None:
        """Between steps: rows that all caches hold exactly turn into codes, see `TurboQuantCache.encode`."""
        for steps in self.steps:
            for device, part in zip(steps.model.devices, steps.cache.parts, strict=True):
                numbers = (torch.tensor(each, dtype=torch.int32, device=device) for each in (slots, tokens))
                part.encode(pages.to(device), *numbers)

    def reset(self) -> None:
        """Forget all texts, and whatever ranks have sent."""
        if self._peers is not None:
            self._peers.reset()
        for steps in self.steps:
            steps.cache.reset()

    def wait(self) -> None:
        """For all that is under way."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def check(self) -> None:
        """Raises PeerError where a rank waited for another in vain since the last `reset`. It asks no device."""
        if self._peers is not None:
            try:
                self._peers.check()
            except PeerError:
                self._failed()
                raise
