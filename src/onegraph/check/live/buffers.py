"""What a caller of a graph does beside replaying it: static inputs, copies into them, garbage wherever it may be."""

from typing import Any

import torch
from torch import Tensor

_JUNK = (16, 128, 1024, 16384, 262144)
"""Elements of the NaN tensors that take up freed memory before a replay, so that a read of it shows."""


def static(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone().pin_memory() if value.device.type == "cpu" and value.is_pinned() else value.clone()


def copy(static: Any, fresh: Any) -> Any:
    if isinstance(static, Tensor) and isinstance(fresh, Tensor):
        if static.shape != fresh.shape:
            raise ValueError(f"an input of shape {tuple(fresh.shape)} does not fit {tuple(static.shape)}")
        static.copy_(fresh)
    return static


def junk() -> list[Tensor]:
    return [torch.full((n,), float("nan"), device="cuda") for n in _JUNK for _ in range(32 if n < 1024 else 4)]


def poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # the one mode that may write tensors which were made in it
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool and not tensor.is_complex():
            tensor.fill_(torch.iinfo(tensor.dtype).max)
