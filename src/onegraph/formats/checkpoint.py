"""A checkpoint on disk: a directory that transformers users know, or a GGUF file, read lazily and never trusted.

Nothing here executes or unpickles what it reads; what lies where is settled first (`table.py`), so that a damaged file
is one `CheckpointError`, not a crash in a reader.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from onegraph.formats.digests import SUMS, format_sums, sha256
from onegraph.formats.files import (
    CheckpointError,
    member,
    quote,
    read_bytes,
    read_json,
    reason,
    sync,
    tagged,
    write_bytes,
    writing,
)
from onegraph.formats.table import TensorInfo, read_table
from onegraph.formats.weight import check_conversion

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "read_config", "write_checkpoint"]

SIDECARS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "processor_config.json",  # of images and video beside the text, which transformers and vLLM read
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "LICENSE",  # of the base model: it holds for what is made of it, and many ask to be passed on
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
CARD = "README.md"  # the model card; one is written for each checkpoint, the base model's is not copied
LICENSE = ("license", "license_name", "license_link")  # of the front matter of a card
ABOUT = "onegraph.json"  # what a checkpoint was made from, how, and by which versions
MAX_SIDECAR = 256 << 20  # bytes; the longest published tokenizer.json is some 35 MB
SHARD_BYTES = 4 << 30
_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # where a NaN or an infinity can hide

Expected = Mapping[str, tuple[tuple[int, ...], "torch.dtype | Collection[torch.dtype]"]]


# ------------------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """A model on disk. `open` takes a directory of safetensors or a GGUF file; tensors are read when asked for.

    `config` is the Hugging Face config.json as a dict; `names` are Hugging Face tensor names, sorted.
    """

    format = "safetensors"

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path, self.config, self._tensors = path, config, tensors
        self.names: list[str] = sorted(tensors)
        self._handles: dict[Path, Any] = {}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Checkpoint:
        """Opens `path` and validates every header in it. Raises CheckpointError."""
        path = Path(path)
        try:
            if path.is_file():
                from onegraph.formats.gguf import GGUFCheckpoint

                return GGUFCheckpoint.read(path)
            if not path.is_dir():
                raise absent(path)
            return Checkpoint(path, read_config(path), read_table(path))
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{quote(str(path))}: cannot be read: {reason(error)}") from None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drops the memory maps. Tensors already handed out stay valid."""
        self._handles.clear()

    def forget(self) -> None:
        """Gives back the memory of what was read so far, whose pages count as this process's; reading goes on."""
        self._handles.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors occupy on disk, headers not counted."""
        return sum(info.nbytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype, stored bytes and file of one tensor. Raises CheckpointError for an unknown name."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: has no tensor {quote(name)}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.info(name).dtype

    def tensor(self, name: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, on `device`, as `dtype` (None: as stored). Raises CheckpointError where it holds a NaN or an
        infinity: a weight that does is damaged, and would surface as a token repeated for ever."""
        value = self._read(name, dtype)
        check_conversion(name, value.dtype, dtype or value.dtype)
        if (ok := finite(value)) is not None and not ok:
            raise CheckpointError(self.not_finite(name, value.dtype))
        return value.to(device=device, dtype=dtype or value.dtype)

    def not_finite(self, name: str, dtype: torch.dtype) -> str:
        """What to say of a tensor that `finite` finds wrong."""
        return (
            f"{self.info(name).file}: tensor {quote(name)} holds NaN or infinite values as {dtype}; the file is "
            "damaged, fetch it again"
        )

    def unrounded(self, name: str) -> torch.Tensor:
        """The tensor on the CPU as it is stored; where it is stored in blocks that `tensor` decodes, in float32."""
        return self.tensor(name)

    def _read(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        info = self.info(name)
        try:
            if info.file not in self._handles:
                self._handles[info.file] = safe_open(info.file, framework="pt")
            result: torch.Tensor = self._handles[info.file].get_tensor(name)
            return result
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: tensor {quote(name)} cannot be read: {reason(error)}") from None

    def sidecar(self, name: str) -> bytes | None:
        """The content of a tokenizer or generation file beside the weights, None where the checkpoint has none.
        Raises CheckpointError for a symbolic link that leads out of the directory or to nothing (`files.member`)."""
        path = member(self.path, name)
        return None if path is None else read_bytes(path, MAX_SIDECAR)

    def check(self, expected: Expected, optional: Collection[str] = ()) -> None:
        """Compares what is there with `expected`: name -> (shape, dtype or dtypes allowed).

        `optional` names may be there or not (lm_head.weight of a tied model) and are not looked at. Raises one
        CheckpointError that names every missing, wrong and unexpected tensor (the first five of each kind).
        """
        missing = [quote(name) for name in expected if name not in self._tensors]
        unexpected = [
            quote(name)
            for name in self.names
            if name not in expected and name not in optional and not name.endswith(".rotary_emb.inv_freq")
        ]
        wrong = []
        for name, (shape, dtypes) in expected.items():
            if name not in self._tensors:
                continue
            allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
            found = self._tensors[name]
            if found.shape != tuple(shape):
                wrong.append(f"{quote(name)} has shape {list(found.shape)}, the config needs {list(shape)}")
            elif found.dtype not in allowed:
                kinds = " or ".join(str(kind).removeprefix("torch.") for kind in allowed)
                wrong.append(f"{quote(name)} is {str(found.dtype).removeprefix('torch.')}, allowed is {kinds}")
        parts = [
            f"{len(found)} {kind}: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"
            for kind, found in (("missing", missing), ("wrong", wrong), ("unexpected", unexpected))
            if found
        ]
        if parts:
            raise CheckpointError(f"{self.path}: tensors do not fit config.json: " + "; ".join(parts))


def finite(value: torch.Tensor) -> torch.Tensor | None:
    """Whether all values are finite, bool [] on their device; None where the dtype cannot hold others, or on meta.

    A meta tensor has no values, and torch's `aminmax` of one imports its compiler, which makes a cache directory.
    """
    if value.dtype not in _CHECKED or not value.numel() or value.is_meta:
        return None
    low, high = torch.aminmax(value)  # one pass, no temporary; a NaN anywhere makes both NaN
    return low * 0 == high * 0


def unfinished(out: Path) -> Path:
    """The directory beside `out` in which `quantize` keeps finished blocks until `out` is whole."""
    return out.with_name(out.name + ".partial")


def absent(path: Path) -> CheckpointError:
    """What to say of a path that is neither a directory nor a regular file."""
    if not os.path.lexists(path) and path.name and unfinished(path).is_dir():
        return CheckpointError(
            f"{path}: quantizing it has not been finished; the same quantize command goes on with what lies in "
            f"{unfinished(path)}"
        )
    if path.suffix == ".gguf" and not path.exists():
        return CheckpointError(f"{path}: no such file")
    return CheckpointError(
        f"{path}: no such model; give a directory that holds config.json and model.safetensors, or a .gguf file"
    )


def read_config(path: Path) -> dict[str, Any]:
    """config.json; where it says nothing of quantization, hf_quant_config.json does, as NVIDIA publishes many.
    compression_config is what compressed-tensors called it once."""
    if (file := member(path, "config.json")) is None:
        if (adapter := member(path, "adapter_config.json")) is not None:
            base = quote(read_json(adapter).get("base_model_name_or_path"))
            raise CheckpointError(
                f"{path}: is an adapter for {base}, not a model; merge it into that (peft: merge_and_unload, then "
                "save_pretrained) and give the directory of the merged model"
            )
        raise CheckpointError(
            f"{path}: has no config.json; give a directory that holds it and model.safetensors, or a .gguf file"
        )
    config = read_json(file, infinite=True)
    told = config.get("quantization_config")
    told = config.get("compression_config") if told is None else told
    inside = config.get("text_config")
    if told is None and isinstance(inside, dict) and inside.get("quantization_config") is not None:
        return config
    if told is None and (apart := member(path, "hf_quant_config.json")) is not None:
        told = read_json(apart)
    return config if told is None else config | {"quantization_config": told}


# ------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    copy_from: Checkpoint | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[str], None] | None = None,
    about: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Writes a checkpoint directory that appears whole or not at all.

    Everything goes into a hidden directory beside `path`, is flushed to disk, and is renamed at the end. config.json
    comes last: what a killed run leaves is no checkpoint to any reader. At most one shard is held in memory. Tokenizer,
    generation and license files come through from `copy_from`; `about` goes to onegraph.json, `card` to README.md;
    SHA256SUMS holds the digest of each file but README.md, which people edit.
    Raises CheckpointError where `path` exists already; OSError (disk full) leaves nothing behind.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path}: exists already; choose another output directory or remove it")
    temporary = path.parent / f".{path.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        sums = _write_tensors(temporary, tensors, shard_bytes, on_tensor)
        small: dict[str, bytes] = {}
        if copy_from is not None:
            small |= {name: content for name in SIDECARS if (content := copy_from.sidecar(name)) is not None}
        if about is not None:
            small[ABOUT] = _dump(dict(about))
        sums |= {name: write_bytes(temporary / name, content) for name, content in small.items()}
        last = _dump(tagged(dict(config)))
        sums["config.json"] = hashlib.sha256(last).hexdigest()
        write_bytes(temporary / SUMS, format_sums(sums))
        if card is not None:
            write_bytes(temporary / CARD, card.encode())
        write_bytes(temporary / "config.json", last)
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], limit: int, on_tensor: Callable[[str], None] | None
) -> dict[str, str]:
    """Writes shards and their index; file name -> digest of each."""
    shards: list[list[str]] = []
    digests: list[str] = []
    seen: set[str] = set()
    pending: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        file = directory / f"shard-{len(shards)}"
        with writing(file):
            save_file(pending, file, metadata={"format": "pt"})
            file.chmod(0o644)
            digests.append(sha256(file))  # while it is still in memory
            sync(file)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {quote(name)} is written twice")
        seen.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > limit:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu").contiguous().clone()  # two names never share one storage
        size, total = size + nbytes, total + nbytes
        if on_tensor is not None:
            on_tensor(name)
    flush()
    if len(shards) == 1:
        os.rename(directory / "shard-0", directory / "model.safetensors")
        return {"model.safetensors": digests[0]}
    weight_map: dict[str, str] = {}
    sums: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / f"shard-{i}", directory / file)
        weight_map.update(dict.fromkeys(names, file))
        sums[file] = digests[i]
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    name = "model.safetensors.index.json"
    return sums | {name: write_bytes(directory / name, _dump(index))}


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
