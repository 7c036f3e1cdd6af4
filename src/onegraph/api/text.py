"""Text from outside: UTF-8, bounded, and named where it is not."""

from __future__ import annotations

from pathlib import Path

from onegraph.formats.files import CheckpointError, read_bytes

MAX_TEXT = 1 << 30  # bytes


def read_text(path: Path) -> str:
    """A UTF-8 text file of at most 1 GB. Raises CheckpointError."""
    return decode(read_bytes(path, MAX_TEXT), str(path))


def decode(data: bytes, where: str) -> str:
    """UTF-8, without the byte order mark that some editors put in front; `where` is what an error calls it. Raises
    CheckpointError."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text at byte {error.start}") from None
