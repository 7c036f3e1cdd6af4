"""Where a result and unfinished work lie, and whether there is room for them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onegraph.api.cost import available_memory
from onegraph.api.size import human_bytes
from onegraph.formats.checkpoint import unfinished
from onegraph.quant.resumable import SPILLED

if TYPE_CHECKING:
    from onegraph.api.plan import Plan


def refuse_existing(out: Path) -> None:
    """Raises ValueError where `out` is there already."""
    if out.exists() or out.is_symlink():
        left = unfinished(out) if out.name else None  # of a process that was killed when the result had its name
        also = f"; {left}, in which it was made, can be removed" if left and left.exists() else ""
        raise ValueError(f"{out}: exists already; choose another output directory or remove it{also}")


def existing(out: Path) -> Path:
    """The nearest directory above `out` that is there."""
    return next(folder for folder in out.absolute().parents if folder.exists())


def check_output(out: Path) -> Path:
    """The nearest directory above `out` that is there. Raises ValueError where `out` exists or cannot be written: now,
    not after hours of work."""
    refuse_existing(out)
    parent = existing(out)
    if not parent.is_dir():
        raise ValueError(f"{out}: {parent} is no directory; choose another output directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{out}: {parent} cannot be written to; choose another output directory")
    return parent


def _bytes_in(folder: Path, pattern: str = "*") -> int:
    total = 0
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):  # a job that still runs drops its files meanwhile
            total += file.stat().st_size
    return total


def check_resources(found: Plan, out: Path) -> None:
    """Raises ValueError where `out` cannot be written, or memory or disk would not do: now, not after hours of work."""
    parent = check_output(out)
    stale = unfinished(out) / SPILLED  # of a job that was killed; it is removed where this one begins
    pieces = min(_bytes_in(unfinished(out), "*.safetensors"), found.disk - found.after.total_bytes)
    free = shutil.disk_usage(parent).free + _bytes_in(stale) + pieces  # which are gone on with, or thrown away
    less = ", or recipe 'quick'" if found.format != "nvfp4" and found.recipe != "quick" else ""
    if found.disk > free:
        raise ValueError(
            f"{out}: needs {human_bytes(found.disk)} of this disk and {human_bytes(free)} are free; make room, or "
            f"choose another output directory{less}"
        )
    memory = available_memory(torch.device(found.device))
    if memory is not None and found.memory > memory:
        whole = None
        if found.rounding <= memory:  # the rest is for the model that writes text
            whole = "the model that goes on with the text takes so much; self_generate=False does without"
            if found.calibration == "self":
                whole = "calibration 'self' holds the whole model; give a text"
        elif found.recipe == "best":
            whole = "recipe 'best' holds the whole model; choose 'good'"
        raise ValueError(
            f"{found.source}: takes at least {human_bytes(found.memory)} of memory on {found.device} and "
            f"{human_bytes(memory)} are free; {whole or 'ask for fewer tokens' + less}"
        )
