"""What a checkpoint's plain tensors were before transformers took them in the model's dtype, for saving them again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.table import TensorInfo, read_header

logger = logging.getLogger(__name__)


class Originals:
    """Tensors of a model's files, by the model's names of them: (name in the file, what the header says)."""

    def __init__(self, tensors: Mapping[str, tuple[str, TensorInfo]]) -> None:
        self._tensors = dict(tensors)

    def restored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`state`, each tensor in the dtype of its file: with the file's own bits where the model's value is what
        transformers made of them, else as it is. What is tied stays tied.

        Read whole before it returns, since the caller may write over those files. Where a file is gone, one warning
        says so; what the model holds is written then, in the file's dtype if that holds it.
        """
        found: dict[tuple[int, torch.Size], Tensor] = {}
        lost: dict[str, Path] = {}
        for name, held in state.items():
            if name not in self._tensors or self._tensors[name][1].dtype == held.dtype:
                continue
            info = self._tensors[name][1]
            original = _read(*self._tensors[name])
            if original is None and torch.promote_types(info.dtype, held.dtype) != held.dtype:
                lost[name] = info.file  # the model's dtype holds less
            if original is not None and _same(original.to(held.dtype), held):
                found[_place(held)] = original
            elif _same((narrowed := held.to(info.dtype)).to(held.dtype), held):
                found[_place(held)] = narrowed
        if lost:
            name, file = next(iter(lost.items()))
            logger.warning(
                f"{len(lost)} tensors that are not in codes, {quote(name)} among them, are saved as the model rounded "
                f"them: {file}, which it was loaded from, is not there any more, or another one"
            )
        return {name: found.get(_place(held), held) for name, held in state.items()}


def _read(name: str, info: TensorInfo) -> Tensor | None:
    """A file's tensor in memory of its own; None where the file is gone or holds something else by now."""
    try:
        if read_header(info.file).get(name) != info:
            return None
        with safe_open(info.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name).clone()
    except (CheckpointError, SafetensorError, OSError):
        return None
    return tensor


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """The same for tensors that are tied."""
    return tensor.data_ptr(), tensor.shape


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    flat = [each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and torch.equal(*flat)
