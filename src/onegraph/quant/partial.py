"""Finished pieces of a long job on disk, so that a killed one goes on where it was."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onegraph.formats.files import sync, writing

_VERSION = 1  # of what the pieces mean; another one is another job


def fingerprint(source: str, recipe: Mapping[str, Any], tokens: Tensor) -> str:
    """Names a job: `source` identifies the checkpoint (its digest), the recipe and the calibration tokens the rest."""
    digest = hashlib.sha256(json.dumps([_VERSION, source, recipe], sort_keys=True, default=str).encode())
    digest.update(repr(tuple(tokens.shape)).encode())
    digest.update(tokens.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and bytes: what a piece says of itself, so that a damaged one is never gone on with."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Partial:
    """A directory of pieces `<name>.safetensors`, each there whole or not at all, all of one job.

    Raises ValueError where the directory holds another job: going on would mix two models.
    """

    def __init__(self, path: str | os.PathLike[str], job: str) -> None:
        self.path = Path(path)
        label = self.path / "job"
        if self.path.exists():
            found = label.read_text().strip() if label.is_file() else None
            if found is None and any(self.path.iterdir()):
                raise ValueError(f"{self.path} exists and is no unfinished quantization; move it away")
            if found not in (None, job):
                raise ValueError(
                    f"{self.path} is the unfinished work of another job (other model, recipe or calibration text); "
                    "repeat that command to finish it, or remove the directory"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        if not label.exists():
            self._place(label, lambda file: file.write_text(job + "\n"))

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The piece, None if it was not finished. Raises ValueError for one that is damaged."""
        file = self.path / f"{name}.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as piece:
                tensors = {key: piece.get_tensor(key) for key in piece.keys()}  # noqa: SIM118 (not a mapping)
                label = (piece.metadata() or {}).get("digest")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it, and it is made again") from None
        if label != _digest(tensors):
            raise ValueError(f"{file} is damaged (its digest is another); remove it, and it is made again")
        return tensors

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a piece: to another name, to the disk, then renamed."""
        kept = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        label = {"digest": _digest(kept)}
        self._place(self.path / f"{name}.safetensors", lambda file: save_file(kept, file, metadata=label))

    def remove(self) -> None:
        """Forget the work: what it led to is written."""
        shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def _place(file: Path, write: Any) -> None:
        temporary = file.with_name(f".{file.name}.tmp")
        with writing(temporary):
            write(temporary)
            sync(temporary)
        os.replace(temporary, file)
        sync(file.parent)
