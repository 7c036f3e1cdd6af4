"""The header of a GGUF file: metadata and tensor table, with every length checked against the file before it is used.

The `gguf` package's own reader follows lengths blindly (a damaged count makes it loop for hours) and takes two seconds
for a vocabulary that takes 0.1 s here. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onegraph.formats.files import CheckpointError, quote

MAX_ENTRIES = 1 << 16  # metadata keys, and tensors; the largest published files have some thousand
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFTensor(NamedTuple):
    """A tensor of the file: dims innermost first, as GGUF has them; offset from the file's start."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


class GGUFHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: list[GGUFTensor]


class _Cursor:
    """Reads the header front to back and refuses to step beyond the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why} at byte {self.at}; the file is damaged, fetch it again")

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        if self.at + size > len(self.data):
            raise self.refuse("the header ends early (truncated?)")
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value

    def count(self, what: str, limit: int) -> int:
        value: int = self.number("<Q")
        if value > limit:
            raise self.refuse(f"{value} {what}, at most {limit} are possible,")
        return value

    def text(self) -> str:
        size = self.count("bytes of text", len(self.data) - self.at)
        if self.at + size > len(self.data):
            raise self.refuse("a text runs past the end (truncated?)")
        raw = self.data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse("text that is not UTF-8 ends") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.refuse(f"unknown value type {kind}")
        inner = self.number("<I")
        if inner == _STRING:  # each takes at least its length
            return [self.text() for _ in range(self.count("texts", (len(self.data) - self.at) // 8))]
        if inner not in _SCALARS:
            raise self.refuse(f"unknown array type {inner}")
        width = struct.calcsize(_SCALARS[inner])
        count = self.count("numbers", (len(self.data) - self.at) // width)
        if self.at + count * width > len(self.data):
            raise self.refuse("an array runs past the end (truncated?)")
        values = np.frombuffer(self.data, np.dtype(_SCALARS[inner]), count, self.at).tolist()
        self.at += count * width
        return values


def read_header(data: mmap.mmap, path: Path) -> GGUFHeader:
    """Metadata and tensor table of a GGUF file, tensor offsets relative to the file's start. Raises CheckpointError."""
    cursor = _Cursor(data, path)
    if data[:4] != b"GGUF":
        raise CheckpointError(
            f"{path}: not a GGUF file (it starts with {bytes(data[:4])!r}); for safetensors give the directory that "
            "holds config.json"
        )
    cursor.at = 4
    version = cursor.number("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}, 2 and 3 (little-endian) are supported")
    n_tensors = cursor.count("tensors", MAX_ENTRIES)
    n_keys = cursor.count("metadata keys", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.text()
        if key in metadata:
            raise cursor.refuse(f"metadata key {quote(key)} occurs twice,")
        metadata[key] = cursor.value(cursor.number("<I"))
    tensors = []
    for _ in range(n_tensors):
        name = cursor.text()
        rank = cursor.number("<I")
        if not 1 <= rank <= 4:
            raise cursor.refuse(f"tensor {quote(name)} has {rank} dimensions")
        dims = tuple(cursor.number("<Q") for _ in range(rank))
        tensors.append(GGUFTensor(name, dims, cursor.number("<I"), cursor.number("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {quote(alignment)}, a power of two is expected")
    start = -(-cursor.at // alignment) * alignment
    return GGUFHeader(metadata, [tensor._replace(offset=start + tensor.offset) for tensor in tensors])
