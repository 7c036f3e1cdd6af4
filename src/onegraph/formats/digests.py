"""Digests of a checkpoint's files: `SHA256SUMS`, which `sha256sum -c` reads too.

A flipped bit in a code is a code: no check of shapes or values finds it. A digest does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from onegraph.formats.files import CheckpointError, member, quote, read_bytes, reason

SUMS = "SHA256SUMS"
MAX_SUMS = 16 << 20  # bytes; a line is some 110, and the largest models have some hundred files
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")
_BLOB = re.compile(r"[0-9a-f]{64}")


def sha256(file: Path) -> str:
    """The digest of a regular file, in hexadecimal. Raises CheckpointError where it cannot be read."""
    if not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file}: not a regular file")
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {reason(error)}") from None


def format_sums(sums: Mapping[str, str]) -> bytes:
    """The content of SHA256SUMS: file name -> digest, a line each."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def read_sums(directory: Path) -> dict[str, str] | None:
    """File name -> digest of a model directory's SHA256SUMS, None where there is none.

    Raises CheckpointError for a line that is none of `sha256sum`, and for files of another directory.
    """
    file = member(directory, SUMS)
    if file is None:
        return None
    found = {}
    for number, line in enumerate(read_bytes(file, MAX_SUMS).decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in (".", ".."):
            raise CheckpointError(
                f"{file}: line {number} is {quote(line)}; a line is a SHA-256 digest, two spaces and the name of a "
                "file of the same directory"
            )
        found[match[2]] = match[1]
    return found


def known_digest(file: Path) -> str | None:
    """The digest that the cache of huggingface_hub names a large file by, which the hub gave; None elsewhere."""
    real = file.resolve()
    return real.name if real.parent.name == "blobs" and _BLOB.fullmatch(real.name) else None
