"""The device and dtype that a caller names, or the best that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onegraph.models.loader import Held
from onegraph.ops.cpu.packed import packs

DTYPES = ("float32", "bfloat16", "float16")


def pick_device(name: str | torch.device, option: str = "device") -> torch.device:
    """`auto` (the GPU where there is one), `cpu`, `cuda` or `cuda:N`; `option` is what an error calls it.

    Raises ValueError where this machine does not have it.
    """
    name = str(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (index.isascii() and index.isdigit() and len(index) < 4)):
        shown = "".join(c if c.isprintable() else "?" for c in name[:60])
        raise ValueError(f"{option} {shown!r}: allowed are auto, cpu, cuda and cuda:N")
    if kind == "cuda" and not count:
        raise ValueError(f"{option} cuda: torch finds no GPU here; 'onegraph env' says more, {option} cpu works")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"{option} {name}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}")
    return torch.device(kind, int(index)) if index and kind == "cuda" else torch.device(kind)


def device_name(device: torch.device) -> str:
    """What a reader knows it by: of a GPU its name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def pick_precision(
    name: str | torch.dtype, device: torch.device, *, holds: bool, packable: Callable[[bool], bool]
) -> tuple[torch.dtype, Held | None]:
    """(dtype of activations, what a CPU holds linears in where that is another) for `name`, which may be "int8" too,
    on a CPU. Where torch has packed products of float16, `auto` holds in them what a file has in 16 bits or in codes.

    holds: whether the model's family knows `Held`. packable: whether it may be packed, told whether float32 may be
    rounded (`models.load.packable`). Raises ValueError for another name.
    """
    short = str(name).removeprefix("torch.")
    if short not in ("auto", "int8", *DTYPES):
        also = ", and int8 on a CPU" if holds else ""
        raise ValueError(f"dtype: got {name!r}; allowed are auto, {', '.join(DTYPES)}{also}")
    if short == "int8" and device.type != "cpu":
        raise ValueError(f"dtype: got int8, in which a CPU holds weights; on {device} {', '.join(DTYPES)} are allowed")
    if short == "int8" and not holds:
        raise ValueError(f"dtype: got int8, which this family does not have; allowed are auto, {', '.join(DTYPES)}")
    if short == "int8":
        return torch.float32, "int8"
    if device.type == "cpu" and holds and packs() and short in ("auto", "float16") and packable(short == "float16"):
        return torch.float32, "float16"
    return pick_dtype(name, device), None


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """By name or as it is; `auto` is bfloat16 on a GPU, float32 on a CPU.

    Raises ValueError for another one.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise ValueError(f"dtype: got {name!r}; allowed are auto, {', '.join(DTYPES)}")
    dtype = getattr(torch, short)
    assert isinstance(dtype, torch.dtype)
    return dtype
