"""What a caller of a graph does beside replaying it: static inputs, copies into them, garbage wherever it may be."""

import torch
from torch import Tensor

from onegraph.check import containers

_JUNK = (16, 128, 1024, 16384, 262144)
"""Elements of the NaN tensors that take up freed memory before a replay, so that a read of it shows."""


def static(value: Tensor) -> Tensor:
    return value.clone().pin_memory() if value.device.type == "cpu" and value.is_pinned() else value.clone()


def refill(static: dict[str, Tensor], fresh: dict[str, Tensor]) -> None:
    """Copy the tensors of a step's arguments into those that were captured. Raises ValueError where they do not fit."""
    if other := containers.same_places(static, fresh):
        raise ValueError(f"the inputs are others: {other}")
    for path, target in static.items():
        if target.shape != fresh[path].shape:
            raise ValueError(f"an input of shape {tuple(fresh[path].shape)} does not fit {tuple(target.shape)}")
        target.copy_(fresh[path])


def junk() -> list[Tensor]:
    return [torch.full((n,), float("nan"), device="cuda") for n in _JUNK for _ in range(32 if n < 1024 else 4)]


def poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # the one mode that may write tensors which were made in it
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool and not tensor.is_complex():
            tensor.fill_(torch.iinfo(tensor.dtype).max)
