"""Where a factory gets its weights from: files of tensors, and pools of threads that read them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onegraph.check import compat
from onegraph.check.deadline import Overdue
from onegraph.check.report import SILENT

if TYPE_CHECKING:
    from onegraph.check.simulate.world import World


def load(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that reads every storage on the host, and moves those that belong on a GPU to the simulated one."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        devices: dict[int, str] = {}

        def here(storage: Any, location: str) -> Any:
            wanted = _wanted(map_location, storage, location)
            if wanted.startswith("cuda"):
                devices[storage._cdata] = wanted
            return storage

        def moved(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return value.to(next(iter(devices.values()), "cpu"))
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                return value
            device = devices.get(value.untyped_storage()._cdata)
            if device is None:
                return value
            there = value.detach().to(device)
            return nn.Parameter(there, value.requires_grad) if isinstance(value, nn.Parameter) else there

        return compat.tree_map(moved, real(f, here, *args, **kwargs))

    return load


def _wanted(map_location: Any, storage: Any, location: str) -> str:
    """Where torch would put a storage that was saved on `location`."""
    if callable(map_location) and not isinstance(map_location, torch.device):
        return location if map_location(storage, location) is None else "cpu"
    if isinstance(map_location, dict):
        map_location = map_location.get(location)
    return location if map_location is None else str(map_location)


def submit(world: "World") -> Callable[..., Any]:
    """`ThreadPoolExecutor.submit` that does the work at once: the simulation's modes hold for one thread. In a step,
    what it launches is the work of another thread."""

    def submit(_: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        before = len(world.current.ops) if world.current is not None else 0
        try:
            done.set_result(function(*args, **kwargs))
        except (Overdue, KeyboardInterrupt):  # to whoever checks, not to whoever waits for the work
            raise
        except BaseException as error:
            done.set_exception(error)
        if world.current is not None and len(world.current.ops) > before:
            world.see("CG309", "work is launched by a thread of a pool, whose stream is not captured", SILENT)
        return done

    return submit


def start(world: "World", real: Callable[..., Any]) -> Callable[..., Any]:
    """`Thread.start` that leaves on the thread who started it in the step."""

    def start(thread: Any) -> Any:
        if chain := world.chain():
            world.started[thread] = chain
        return real(thread)

    return start
