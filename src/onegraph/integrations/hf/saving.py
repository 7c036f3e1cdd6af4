"""Saving a checkpoint again: what its plain tensors were before transformers took them in the model's dtype, and the
digests of a directory that is saved over."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from onegraph.formats.checkpoint import CARD
from onegraph.formats.digests import SUMS, format_sums, read_sums, sha256
from onegraph.formats.files import CheckpointError, quote, replace_bytes
from onegraph.formats.table import TensorInfo, read_header

logger = logging.getLogger(__name__)
LOADED = "_onegraph_loaded"  # attribute of a model that came from one of our checkpoints


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


def register() -> None:
    """Makes `save_pretrained` of models that were loaded from our checkpoints renew SHA256SUMS of a directory that has
    one. transformers tells a quantizer neither where it saves nor when it is done."""
    save = PreTrainedModel.save_pretrained

    @wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, LOADED, False):
            return save(self, save_directory, *args, **kwargs)
        before = _states(Path(save_directory))
        made = save(self, save_directory, *args, **kwargs)
        _renew_sums(Path(save_directory), before)
        return made

    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]  # there is no hook for it


def _states(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of each regular file of a directory, what changes when it is written; of a directory that is not there, none."""
    if not directory.is_dir():
        return {}
    found = ((each.name, each.stat()) for each in directory.iterdir() if each.is_file())
    return {name: (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in found}


def _renew_sums(directory: Path, before: Mapping[str, tuple[int, ...]]) -> None:
    """Gives SHA256SUMS the digests of files that were written since, and takes those of files that are gone. Digests of
    the others stay, right or not."""
    try:
        sums = read_sums(directory)
    except CheckpointError:
        return  # `verify` says what is wrong with it
    if sums is None:
        return
    after = _states(directory)
    gone = before.keys() - after.keys()
    written = {name for name, state in after.items() if before.get(name) != state} - {SUMS, CARD}
    kept = {name: digest for name, digest in sums.items() if name not in gone}
    renewed = kept | {name: sha256(directory / name) for name in written}
    if renewed != sums:
        replace_bytes(directory / SUMS, format_sums(renewed))
