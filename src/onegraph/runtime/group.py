"""One step on several devices: ranks run it in parallel on their shares of the weights, each rank in stages.

A step is one graph per device (docs/how-it-works/communication.md compares one graph over all). A stage passes its
result to the next by a `copy_` between the two devices' streams: torch orders it after the source's queued work, and
after and before the target's, by events on those streams. The host does not wait and may run ahead.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onegraph.nn.peers import PeerError
from onegraph.runtime.graph import GraphPool, Runner


class DeviceError(RuntimeError):
    """A GPU of a group failed; the message says which."""


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


# Of a rank and bucket: each stage and the buffer for its result, and the copies at the end.
_Links = tuple[list[tuple[Runner, Tensor | None]], list[tuple[Tensor, Tensor]]]


class RankGroup:
    """Runs the stages of each rank in order; all ranks take the same values and come to the same result.

    Captured on GPUs, the graphs of all ranks are launched one after the other: launches return at once, and the GPU
    that starts first waits for the others' parts. Eagerly, and on a CPU, each of several ranks runs in its own thread.

    Args:
        ranks: of each rank the stages, one or more Runners with the same buckets.
        carried: the input of each stage but the first that takes what the stage before it returns, a tensor.
        shared: inputs of all stages that the last one writes in place; the others get copies when it is done, which is
            how a step's result enters the next step.
        state: of each rank and stage, tensors that its step reads beside its inputs, shared in the same way.
        failed: called where a replay ends in an error or an interrupt: perhaps not all ranks were launched.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Runner]],
        *,
        carried: str = "stream",
        shared: Sequence[str] = (),
        state: Sequence[Sequence[Sequence[Tensor]]] = (),
        failed: Callable[[], object] | None = None,
    ) -> None:
        if not ranks or not all(ranks):
            raise ValueError("stages: got none; a rank has one or more")
        self.ranks = [list(stages) for stages in ranks]
        for stages in self.ranks:
            for i, stage in enumerate(stages):
                if missing := sorted({*shared, *([carried] if i else [])} - stage.inputs.keys()):
                    raise ValueError(f"stage {i} takes {sorted(stage.inputs)}; {missing} must be among them")
        self._carried, self._shared, self._state, self._failed = carried, tuple(shared), state, failed
        self._links: dict[tuple[int, int | None], _Links] = {}
        launched = self.mode == "captured" and self.stages[0].device.type == "cuda"
        self._threads = None
        if len(self.ranks) > 1 and not launched:
            self._threads = ThreadPoolExecutor(len(self.ranks), thread_name_prefix="rank")

    @property
    def stages(self) -> list[Runner]:
        """The first rank's."""
        return self.ranks[0]

    @property
    def mode(self) -> str:
        return self.stages[0].mode

    def running(self) -> AbstractContextManager[None]:
        """The streams of all devices; wrap a loop over `replay` in it once."""
        return running([stage.pool for stages in self.ranks for stage in stages if stage.pool is not None])

    def load(self, **values: Tensor) -> tuple[int, int | None]:
        """Copy `values` into every stage that takes them; what a stage hands to the next is not the caller's.

        Returns (rows, bucket).
        """
        own = {name for stage in self.stages for name in stage.inputs}
        if unknown := sorted(set(values) - own):
            raise ValueError(f"inputs: got {unknown}; the stages take {sorted(own)}")
        rows = len(next(iter(values.values())))
        fits = []
        for stage in (stage for stages in self.ranks for stage in stages):
            kept = {name: tensor[:rows] if stage.buckets else tensor for name, tensor in stage.inputs.items()}
            fits.append(stage.load(**{name: values.get(name, tensor) for name, tensor in kept.items()}))
        return fits[0]

    def replay(self, bucket: int | None = None) -> Any:
        """Run all ranks on what their buffers hold; the first one's result, valid until the next replay."""
        try:
            if self._threads is None:
                results = [self.replay_rank(rank, bucket) for rank in range(len(self.ranks))]
            else:
                results = self._in_threads(self._threads, bucket)
        except BaseException:
            if self._failed is not None:
                self._failed()
            raise
        return results[0]

    def replay_rank(self, rank: int, bucket: int | None = None) -> Any:
        """Run the stages of one rank alone."""
        stages, copies = self._links.get((rank, bucket)) or self._link(rank, bucket)
        result = None
        for stage, target in stages:
            result = stage.replay(bucket)
            if target is not None:
                target.copy_(result, non_blocking=True)
        for source, copy in copies:
            copy.copy_(source, non_blocking=True)
        return result

    def _link(self, rank: int, bucket: int | None) -> _Links:
        """Kept, because making views costs the host more than the copies do."""
        stages = self.ranks[rank]
        *before, last = [stage.views(bucket) for stage in stages]
        targets = [*(views[self._carried] for views in (*before, last)[1:]), None]
        copies = [(last[name], views[name]) for name in self._shared for views in before]
        if self._state:
            *others, source = self._state[rank]
            copies += [pair for own in others for pair in zip(source, own, strict=True)]
        return self._links.setdefault((rank, bucket), (list(zip(stages, targets, strict=True)), copies))

    def _in_threads(self, threads: ThreadPoolExecutor, bucket: int | None) -> list[Any]:
        """On the caller's streams, which a thread does not inherit; all threads have ended when this returns."""
        inference = torch.is_inference_mode_enabled()
        devices = {stage.device for stages in self.ranks for stage in stages if stage.device.type == "cuda"}
        streams = [torch.cuda.current_stream(device) for device in devices]

        def run(rank: int) -> Any:
            with torch.inference_mode(inference), ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                return self.replay_rank(rank, bucket)

        work = [threads.submit(copy_context().run, run, rank) for rank in range(len(self.ranks))]
        try:
            return [each.result() for each in work]
        finally:
            wait(work)


def check_links(devices: Sequence[torch.device]) -> None:
    """Raises ValueError where two devices that hand tensors to each other cannot reach each other's memory."""
    cuda = [device.index for device in devices if device.type == "cuda"]
    for a, b in sorted({*pairwise(cuda), *((cuda[-1], b) for b in cuda[:-1])}):
        if a != b and not torch.cuda.can_device_access_peer(a, b):
            raise ValueError(
                f"cuda:{a} has no peer link to cuda:{b} (nvidia-smi topo -p2p r shows them); place the layers on GPUs "
                "that have one, or on one GPU"
            )
