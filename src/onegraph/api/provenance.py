"""What a checkpoint was made from and by: the content of its onegraph.json."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onegraph import __version__
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.digests import known_digest, read_sums, sha256
from onegraph.formats.files import CheckpointError


def versions() -> dict[str, str]:
    return {"onegraph": __version__, "torch": torch.__version__, "safetensors": version("safetensors")}


def named(path: Path) -> dict[str, str]:
    """What a checkpoint is called: {"name", "revision" where the hub gave one}.

    A path would tell more of somebody's machine than of the model, so that a local directory is known by its last name.
    """
    path = path.resolve()
    cache = next((p for p in path.parents if p.name.startswith("models--")), None)
    if cache is None or not path.is_relative_to(cache / "snapshots"):
        return {"name": path.name}
    name = cache.name.removeprefix("models--").replace("--", "/")
    return {"name": name, "revision": path.relative_to(cache / "snapshots").parts[0]}


def source_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Names a checkpoint for good: what `named` says, and "sha256": {file: digest}.

    Digests of weights come from the hub's cache or the directory's own SHA256SUMS where one of the two has them;
    others are computed, which reads the files once.
    """
    try:
        sums = (read_sums(checkpoint.path) if checkpoint.path.is_dir() else None) or {}
    except CheckpointError:
        sums = {}  # another tool's: what cannot be read is computed
    files = sorted({checkpoint.info(name).file for name in checkpoint.names})
    digests = {file.name: known_digest(file) or sums.get(file.name) or sha256(file) for file in files}
    return {**named(checkpoint.path), "sha256": digests}


def digest_of(tokens: torch.Tensor) -> str:
    """SHA-256 of calibration tokens int64 [rows, length]: tells whether two runs saw the same text."""
    return hashlib.sha256(tokens.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()
