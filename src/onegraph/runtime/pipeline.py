"""Stages of one step on several devices: each a Runner with its own graphs, tensors handed on by peer copies.

One graph cannot span devices (torch 2.11: a capture that touches a second GPU fails), so a step is one graph a device.
A hand-over is a `copy_` between the two devices' streams: torch orders it behind what the source has queued, and behind
and before what the target has queued, by events on those streams. The host waits for nothing and may run ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onegraph.runtime.graph import GraphPool, Runner


class DeviceError(RuntimeError):
    """A GPU of a pipeline failed; the message says which."""


class Pools:
    """One GraphPool a device, entered together."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.each = [GraphPool(device) for device in devices]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work inside goes to the devices' own streams. A device's error comes out as a DeviceError that names it."""
        try:
            with ExitStack() as stack:
                for pool in self.each:
                    stack.enter_context(pool.running())
                yield
        except RuntimeError as error:
            if broken := [pool.device for pool in self.each if not _answers(pool)]:
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


class Pipeline:
    """Runs stages in order; looks like one Runner to a caller.

    Args:
        stages: Runners whose steps return a dict. An output whose name is an input of the next stage is copied there;
            the last stage's go to every stage that has such an input, itself included, which is how a step's result
            enters the next step. What no stage takes is the pipeline's result.
    """

    def __init__(self, stages: Sequence[Runner]) -> None:
        if not stages:
            raise ValueError("stages: got none; a pipeline has one or more")
        self.stages = list(stages)
        last = len(stages) - 1
        self._routes = [stages[i + 1 : i + 2] if i < last else stages for i in range(len(stages))]

    @property
    def mode(self) -> str:
        return self.stages[0].mode

    def load(self, **values: Tensor) -> tuple[int, int | None]:
        """Copy `values` into every stage that takes them; what a stage hands to the next is not the caller's."""
        own = [name for stage in self.stages for name in stage.inputs]
        if unknown := sorted(set(values) - set(own)):
            raise ValueError(f"inputs: got {unknown}; the stages take {sorted(set(own))}")
        fits = []
        rows = len(next(iter(values.values())))
        for stage in self.stages:
            kept = {name: tensor[:rows] if stage.buckets else tensor for name, tensor in stage.inputs.items()}
            given = {name: values.get(name, tensor) for name, tensor in kept.items()}
            fits.append(stage.load(**given))
        return fits[0]

    def replay(self, bucket: int | None = None) -> Any:
        """Run all stages on what their buffers hold; returns what no stage takes, valid until the next replay."""
        outputs: Mapping[str, Tensor] = {}
        taken: set[str] = set()
        for stage, targets in zip(self.stages, self._routes, strict=True):
            outputs = stage.replay(bucket)
            for target in targets:
                views = target.views(bucket)
                for name in outputs.keys() & views.keys():
                    views[name].copy_(outputs[name], non_blocking=True)
                    taken.add(name)
        rest = {name: value for name, value in outputs.items() if name not in taken}
        return next(iter(rest.values())) if len(rest) == 1 else rest


def check_links(devices: Sequence[torch.device]) -> None:
    """Raises ValueError where two devices that hand tensors to each other cannot reach each other's memory."""
    cuda = [device.index for device in devices if device.type == "cuda"]
    for a, b in sorted({*pairwise(cuda), *((cuda[-1], b) for b in cuda)}):
        if a != b and not torch.cuda.can_device_access_peer(a, b):
            raise ValueError(
                f"cuda:{a} has no peer link to cuda:{b} (nvidia-smi topo -p2p r shows them); place the layers on GPUs "
                "that have one, or on one GPU"
            )
