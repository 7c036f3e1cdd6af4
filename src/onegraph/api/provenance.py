"""What a checkpoint was made from and by: the content of its onegraph.json."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import torch

from onegraph import __version__
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.digests import known_digest, read_sums, sha256
from onegraph.formats.files import CheckpointError


def versions() -> dict[str, str]:
    return {"onegraph": __version__, "torch": torch.__version__, "safetensors": version("safetensors")}


def source_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Names a checkpoint for good: {"name", "revision" where the hub gave one, "sha256": {file: digest}}.

    A path would tell more of somebody's machine than of the model, so that a local directory is known by its last name.
    Digests of weights come from the hub's cache or the directory's own SHA256SUMS where one of the two has them;
    others are computed, which reads the files once.
    """
    path = checkpoint.path.resolve()
    cache = next((p for p in path.parents if p.name.startswith("models--")), None)
    named: dict[str, Any] = {"name": path.name}
    if cache is not None and path.is_relative_to(cache / "snapshots"):
        named = {"name": cache.name.removeprefix("models--").replace("--", "/")}
        named["revision"] = path.relative_to(cache / "snapshots").parts[0]
    try:
        sums = (read_sums(checkpoint.path) if checkpoint.path.is_dir() else None) or {}
    except CheckpointError:
        sums = {}  # another tool's: what cannot be read is computed
    files = sorted({checkpoint.info(name).file for name in checkpoint.names})
    return named | {"sha256": {file.name: known_digest(file) or sums.get(file.name) or sha256(file) for file in files}}


def digest_of(tokens: torch.Tensor) -> str:
    """SHA-256 of calibration tokens int64 [rows, length]: tells whether two runs saw the same text."""
    return hashlib.sha256(tokens.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()
