"""Where a factory gets its weights from: files of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.check import compat


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
