"""Ranks beside one another: the same step on each device, on its share of the weights, exchanging inside.

Captured on GPUs, each rank's step is one graph, and all are launched one after the other: launches return at once, and
who comes first waits on its GPU for the others' parts. Eagerly, and on a CPU, each rank runs in a thread of its own.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from onegraph.runtime.graph import Runner
from onegraph.runtime.pipeline import Pipeline, running


class Beside:
    """As a Pipeline, of the pipelines of all ranks, which take the same values and come to the same result.

    failed: called where a replay ends in an error or an interrupt: perhaps not all ranks were launched.
    """

    def __init__(self, ranks: Sequence[Pipeline], failed: Callable[[], object]) -> None:
        self.ranks, self._failed = list(ranks), failed
        first = self.ranks[0].stages[0]
        alone = first.mode == "captured" and first.device.type == "cuda"
        self._threads = None if alone else ThreadPoolExecutor(len(self.ranks), thread_name_prefix="rank")

    @property
    def stages(self) -> list[Runner]:
        """The first rank's."""
        return self.ranks[0].stages

    @property
    def mode(self) -> str:
        return self.ranks[0].mode

    def running(self) -> AbstractContextManager[None]:
        """The streams of all ranks; wrap a loop over `replay` in it once."""
        return running([stage.pool for rank in self.ranks for stage in rank.stages if stage.pool is not None])

    def load(self, **values: Tensor) -> tuple[int, int | None]:
        """Copy `values` into every rank's buffers; returns (rows, bucket)."""
        loaded = [rank.load(**values) for rank in self.ranks]
        return loaded[0]

    def replay(self, bucket: int | None = None) -> Any:
        """Run all ranks on what their buffers hold; the first one's result, valid until the next replay."""
        try:
            if self._threads is None:
                results = [rank.replay(bucket) for rank in self.ranks]
            else:
                results = self._in_threads(self._threads, bucket)
        except BaseException:
            self._failed()
            raise
        return results[0]

    def _in_threads(self, threads: ThreadPoolExecutor, bucket: int | None) -> list[Any]:
        """On the caller's streams, which a thread does not have by itself, and nobody is left running."""
        inference = torch.is_inference_mode_enabled()
        devices = {stage.device for rank in self.ranks for stage in rank.stages if stage.device.type == "cuda"}
        streams = [torch.cuda.current_stream(device) for device in devices]

        def run(rank: Pipeline) -> Any:
            with torch.inference_mode(inference), ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                return rank.replay(bucket)

        work = [threads.submit(copy_context().run, run, rank) for rank in self.ranks]
        try:
            return [each.result() for each in work]
        finally:
            wait(work)
