"""Outputs of functions that torch compiles with graphs of its own: each run of a function overwrites the last one's."""

import weakref
from collections.abc import Callable
from typing import Any

from onegraph.check import containers
from onegraph.check.report import Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor, StorageRecord
from onegraph.check.simulate.records import RawFinding

OVERWRITTEN = "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"


class CompiledOutputs:
    """runs: how often each function was called; storages: those that one returned, with the function and in which run;
    late: reads of them after a later run."""

    def __init__(self) -> None:
        self.runs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.storages: weakref.WeakKeyDictionary[StorageRecord, tuple[Any, int]] = weakref.WeakKeyDictionary()
        self.late: list[RawFinding] = []

    def called(self, function: Any) -> int:
        """The function is called: how often that makes."""
        self.runs[function] = self.runs.get(function, 0) + 1
        return self.runs[function]

    def returned(self, function: Any, run: int, out: Any) -> None:
        """What that run gave."""
        for tensor in containers.tensors(out).values():
            if isinstance(tensor, DeviceTensor) and not tensor.requires_grad:  # a pending backward keeps them
                self.storages[tensor.record] = weakref.ref(function), run

    def read(self, tensor: DeviceTensor, calls: Callable[[], frames.Chain], step: int) -> None:
        """A tensor is read: late where it is such an output and the function has run again since."""
        known, run = self.storages.get(tensor.record, (None, 0))
        function = known() if known is not None else None
        if function is None or self.runs[function] <= run:
            return
        chain = calls()
        if (seen := next((s for s in self.late if s.chain == chain), None)) is not None:
            seen.count += 1
            return
        text = "an output of a compiled function is read after the function ran again, which overwrites it"
        self.late.append(RawFinding(step, "CG209", Severity.ERROR, chain, text, OVERWRITTEN))
