"""The table of a checkpoint's tensors: from headers of safetensors files, which are validated before a byte of a tensor
is touched. A truncated or lying file is one `CheckpointError` that names the file and the tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from onegraph.formats.files import CheckpointError, member, parse_json, quote, read_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER = 100 << 20  # bytes; the safetensors library's own limit


UNWRITTEN = -1  # offset of a tensor that no file holds yet


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is; `nbytes` is what it occupies on disk, from byte `offset` of the file on.
    offset None: those bytes are not the tensor's own, as in blocks that reading decodes; `UNWRITTEN`: there are none
    yet, and `file` is where they will be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    file: Path
    offset: int | None = None


def read_table(path: Path) -> dict[str, TensorInfo]:
    """Of a directory: model.safetensors, or the shards that its index names. Raises CheckpointError for what is missing
    or damaged."""
    single, index = member(path, "model.safetensors"), member(path, "model.safetensors.index.json")
    if single is not None:
        return read_header(single)
    if index is not None:
        return _sharded(path, index)
    pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in path.glob(kind))
    if pickled:
        raise CheckpointError(
            f"{path}: holds {quote(pickled[0])} but no model.safetensors; pickled weights can run code when loaded and "
            "are never read: convert them with transformers' save_pretrained"
        )
    raise CheckpointError(f"{path}: holds neither model.safetensors nor model.safetensors.index.json")


def _sharded(path: Path, index: Path) -> dict[str, TensorInfo]:
    """What the shards that an index names hold, listed there or not: some indexes leave out scales."""
    weight_map = read_json(index, MAX_HEADER).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is not an object of tensor name to file name")
    headers: dict[str, dict[str, TensorInfo]] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{index}: tensor {quote(name)} points to {quote(file)}; only the name of a file in the same directory "
                "is allowed"
            )
        if file not in headers:
            shard = member(path, file)
            if shard is None:
                raise CheckpointError(f"{index}: shard {quote(file)} is missing from {path}; fetch it again")
            headers[file] = read_header(shard)
        if name not in headers[file]:
            raise CheckpointError(f"{index}: tensor {quote(name)} is not in shard {quote(file)}")
        tensors[name] = headers[file][name]
    for found in headers.values():
        for name, info in found.items():
            if tensors.setdefault(name, info) is not info:
                raise CheckpointError(
                    f"{index}: tensor {quote(name)} is in {quote(tensors[name].file.name)} and in "
                    f"{quote(info.file.name)}; one of the two is not of this model, fetch it again"
                )
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Validates a safetensors header against the file's length: the tensors must tile the data exactly.

    Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
    """

    def refuse(why: str) -> NoReturn:
        raise CheckpointError(f"{file}: {why}; the file is damaged, fetch it again")

    if not file.is_file():
        raise CheckpointError(f"{file}: not a regular file")
    total = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if total < 8 or length > min(total - 8, MAX_HEADER):
            refuse(f"header of {length} bytes does not fit a file of {total} bytes (truncated?)")
        header = parse_json(stream.read(length), f"{file} (header)")
    if not isinstance(header, dict):
        refuse("header is not a JSON object")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            refuse(f"tensor {quote(name)} is not described by dtype, shape and data_offsets")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in DTYPES:
            refuse(f"tensor {quote(name)} has dtype {quote(kind)}, allowed are {', '.join(DTYPES)}")
        if not _naturals(shape) or len(shape) > 8 or not _naturals(offsets) or len(offsets) != 2:
            refuse(f"tensor {quote(name)} has shape {quote(shape)} and data_offsets {quote(offsets)}")
        nbytes = math.prod(shape) * DTYPES[kind].itemsize
        if offsets[1] - offsets[0] != nbytes:
            refuse(
                f"tensor {quote(name)} of shape {shape} and dtype {kind} needs {nbytes} bytes, "
                f"data_offsets {offsets} give {offsets[1] - offsets[0]}"
            )
        tensors[name] = TensorInfo(tuple(shape), DTYPES[kind], nbytes, file, 8 + length + offsets[0])
        spans.append((offsets[0], offsets[1], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            refuse(f"tensor {quote(name)} starts at byte {start} of the data where {end} is expected (overlap or hole)")
        end = stop
    if end != total - 8 - length:
        refuse(f"the header describes {end} bytes of tensors, the file holds {total - 8 - length} (truncated?)")
    return tensors


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
