"""Stages of one step: a Runner for each device, with its own graphs; one stage is a pipeline that hands nothing on.

A step is one graph a device (docs/gpus.md says what one graph over all of them would save). A hand-over is a `copy_`
between the two devices' streams: torch orders it behind what the source has queued, and behind and before what the
target has queued, by events on those streams. The host waits for nothing and may run ahead.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onegraph.nn.peers import PeerError
from onegraph.runtime.graph import GraphPool, Runner


class DeviceError(RuntimeError):
    """A GPU of a pipeline failed; the message says which."""


@contextmanager
def running(pools: Sequence[GraphPool]) -> Iterator[None]:
    """Work inside goes to the pools' own streams; without pools it stays where it is.

    A device's error comes out as a DeviceError that names it.
    """
    try:
        with ExitStack() as stack:
            for pool in pools:
                stack.enter_context(pool.running())
            yield
    except PeerError:  # the rank that is missing may never answer
        raise
    except RuntimeError as error:
        if broken := [pool.device for pool in pools if not _answers(pool)]:
            names = ", ".join(map(str, broken))
            what = str(error).strip().split("\n")[0]
            raise DeviceError(
                f"{names} failed ({what}); what the sequences had computed is lost: restart the process, with "
                "CUDA_VISIBLE_DEVICES leaving it out if it fails again"
            ) from error
        raise


def _answers(pool: GraphPool) -> bool:
    try:
        pool.synchronize()
    except RuntimeError:
        return False
    return True


# Of a bucket: each stage and where its result goes, and the copies at the end.
_Links = tuple[list[tuple[Runner, Tensor | None]], list[tuple[Tensor, Tensor]]]


class Pipeline:
    """Runs stages in order and returns what the last one returns.

    Args:
        stages: one or more Runners with the same buckets.
        carried: the input of each stage but the first that takes what the stage before it returns, a tensor.
        shared: inputs of all stages that the last one writes in place; the others get copies when it is done, which is
            how a step's result enters the next step.
        state: of each stage, tensors that its step reads beside its inputs, shared in the same way.
    """

    def __init__(
        self,
        stages: Sequence[Runner],
        *,
        carried: str = "stream",
        shared: Sequence[str] = (),
        state: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        if not stages:
            raise ValueError("stages: got none; a pipeline has one or more")
        self.stages = list(stages)
        for i, stage in enumerate(self.stages):
            if missing := sorted({*shared, *([carried] if i else [])} - stage.inputs.keys()):
                raise ValueError(f"stage {i} takes {sorted(stage.inputs)}; {missing} must be among them")
        self._carried, self._shared = carried, tuple(shared)
        last = state[-1] if state else ()
        self._state = [pair for own in state[:-1] for pair in zip(last, own, strict=True)]
        self._links: dict[int | None, _Links] = {}

    @property
    def ranks(self) -> "list[Pipeline]":
        """Itself, alone: see `runtime.beside.Beside`."""
        return [self]

    @property
    def mode(self) -> str:
        return self.stages[0].mode

    def running(self) -> AbstractContextManager[None]:
        """The streams of the stages; wrap a loop over `replay` in it once."""
        return running([stage.pool for stage in self.stages if stage.pool is not None])

    def load(self, **values: Tensor) -> tuple[int, int | None]:
        """Copy `values` into every stage that takes them; what a stage hands to the next is not the caller's.

        Returns (rows, bucket).
        """
        own = {name for stage in self.stages for name in stage.inputs}
        if unknown := sorted(set(values) - own):
            raise ValueError(f"inputs: got {unknown}; the stages take {sorted(own)}")
        rows = len(next(iter(values.values())))
        fits = []
        for stage in self.stages:
            kept = {name: tensor[:rows] if stage.buckets else tensor for name, tensor in stage.inputs.items()}
            fits.append(stage.load(**{name: values.get(name, tensor) for name, tensor in kept.items()}))
        return fits[0]

    def replay(self, bucket: int | None = None) -> Any:
        """Run all stages on what their buffers hold; the result is valid until the next replay."""
        stages, copies = self._links.get(bucket) or self._link(bucket)
        result = None
        for stage, target in stages:
            result = stage.replay(bucket)
            if target is not None:
                target.copy_(result, non_blocking=True)
        for source, copy in copies:
            copy.copy_(source, non_blocking=True)
        return result

    def _link(self, bucket: int | None) -> _Links:
        """Kept, because making views costs the host more than the copies do."""
        *before, last = [stage.views(bucket) for stage in self.stages]
        targets = [*(views[self._carried] for views in (*before, last)[1:]), None]
        copies = [(last[name], views[name]) for name in self._shared for views in before]
        copies += self._state
        return self._links.setdefault(bucket, (list(zip(self.stages, targets, strict=True)), copies))


def check_links(devices: Sequence[torch.device]) -> None:
    """Raises ValueError where two devices that hand tensors to each other cannot reach each other's memory."""
    cuda = [device.index for device in devices if device.type == "cuda"]
    for a, b in sorted({*pairwise(cuda), *((cuda[-1], b) for b in cuda[:-1])}):
        if a != b and not torch.cuda.can_device_access_peer(a, b):
            raise ValueError(
                f"cuda:{a} has no peer link to cuda:{b} (nvidia-smi topo -p2p r shows them); place the layers on GPUs "
                "that have one, or on one GPU"
            )
