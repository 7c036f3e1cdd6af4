"""Finished pieces of a long job on disk, so that a killed or corrected one goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onegraph.formats.files import sync, writing

_VERSION = 3  # of what the pieces mean; with another one they are other pieces


def key_of(*parts: Any) -> str:
    """Names a piece by all that it depends on: JSON values and tensors."""
    digest = hashlib.sha256(str(_VERSION).encode())
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(repr((tuple(part.shape), str(part.dtype))).encode())
            digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _check_regular(folder: Path) -> None:
    """Raises ValueError for a link, a pipe or a folder among the files: what is written there would go elsewhere."""
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process's
            if not stat.S_ISREG(file.lstat().st_mode):
                raise ValueError(f"{file} is not a regular file, as those of unfinished work are; move it away")


def _own(name: str) -> bool:
    return name == "lock" or (name.startswith(".") and name.endswith(".tmp"))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and bytes: what a piece says of itself, so that a damaged one is never gone on with."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Partial:
    """A directory of pieces `<name>.safetensors`, each there whole or not at all, all of one source checkpoint. Each
    names what it depends on (`key_of`), and is found only with exactly that key.

    One process holds the directory, until `close`; a lock of a process that has died is none.

    Args:
        source: identifies the checkpoint.
        remark: told in a line what of earlier work is gone on with, and what is thrown away.
        keep_inputs: whether the Hessians are kept as well, which a corrected command may still use.

    Raises ValueError where another process holds the directory (and says which), and where it holds something else or
    the work on another checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        source: str,
        *,
        remark: Callable[[str], None] | None = None,
        keep_inputs: bool = True,
    ) -> None:
        self.path, self.keep_inputs = Path(path), keep_inputs
        self._remark = remark or (lambda line: None)
        self._asked: dict[str, str] = {}  # piece -> key, of this job
        self._made: set[str] = set()  # pieces that this job has written
        label = self.path / "job"
        if self.path.exists():
            _check_regular(self.path)
        if self.path.exists() and not label.is_file() and any(not _own(file.name) for file in self.path.iterdir()):
            raise ValueError(f"{self.path} exists and is no unfinished quantization; move it away")
        self._lock: TextIO | None = _locked(self.path)
        try:
            found = label.read_text(errors="replace").strip() if label.is_file() else None
            if found not in (None, source):
                raise ValueError(
                    f"{self.path} is the unfinished work on another model; repeat that command to finish it, or remove "
                    "the directory"
                )
            if found is None:
                self._place(label, lambda file: file.write_text(source + "\n"))
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another process go on; nothing is left of a job that has no piece yet."""
        if self._lock is not None:
            if not any(self.path.glob("*.safetensors")):
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def keep(self, keys: Mapping[str, str]) -> None:
        """Throw away every piece but the valid ones of `keys` (name -> key) and of what was asked for before, and say
        which of earlier jobs are gone on with and which are not."""
        keys = self._asked | dict(keys)
        kept: list[str] = []
        dropped: list[str] = []
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as piece:
                    valid = (piece.metadata() or {}).get("key") == keys.get(file.stem, "")
            except (SafetensorError, OSError):
                continue  # `load` says what is the matter with it
            if file.stem not in self._made:
                (kept if valid else dropped).append(file.stem)
            if not valid:
                file.unlink()
        if kept or dropped:
            fate = [f"{what} {_counted(names)}" for what, names in (("keeps", kept), ("drops", dropped)) if names]
            why = ", which this command asks for otherwise" if dropped else ""
            self._remark(f"{self.path}: {' and '.join(fate)}{why}")

    def load(self, name: str, key: str) -> dict[str, Tensor] | None:
        """The piece, None if it was not finished or depends on something else. Raises ValueError for one that is
        damaged."""
        self._asked[name] = key
        file = self._file(name)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as piece:
                label = piece.metadata() or {}
                if label.get("key", key) != key:
                    return None
                tensors = {key: piece.get_tensor(key) for key in piece.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it, and it is made again") from None
        if label.get("digest") != _digest(tensors):
            raise ValueError(f"{file} is damaged (its digest is another); remove it, and it is made again")
        return tensors

    def has(self, name: str, key: str) -> bool:
        """Whether `load` would look at the piece, by its label alone."""
        self._asked[name] = key
        try:
            with safe_open(self._file(name), framework="pt") as piece:
                return (piece.metadata() or {}).get("key") == key
        except (SafetensorError, OSError):
            return False

    def save(self, name: str, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a piece: to another name, to the disk, then renamed."""
        self._asked[name] = key
        self._made.add(name)
        kept = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        label = {"digest": _digest(kept), "key": key}
        self._place(self._file(name), lambda file: save_file(kept, file, metadata=label))

    def discard(self, name: str) -> None:
        """Remove a piece that another one has made useless."""
        self._file(name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget the work: what it led to is written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    @staticmethod
    def _place(file: Path, write: Any) -> None:
        temporary = file.with_name(f".{file.name}.tmp")
        with writing(temporary):
            write(temporary)
            sync(temporary)
        os.replace(temporary, file)
        sync(file.parent)


class Piece:
    """One piece of a `Partial`, for who works on no other."""

    def __init__(self, partial: Partial, name: str, key: str) -> None:
        self._partial, self._name, self._key = partial, name, key

    def load(self) -> dict[str, Tensor] | None:
        return self._partial.load(self._name, self._key)

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        self._partial.save(self._name, self._key, tensors)


def _counted(names: list[str]) -> str:
    """Pieces by kind: "the sampled text, the Hessians of 3 blocks, 3 blocks"."""
    kinds = {"text": "the sampled text", "costs": "what layers cost", "tuned": "the tuned scales"}
    kinds |= {"tuning": "half of the tuning", "embed": "the embedding", "head": "the head"}
    counts = {kind: sum(name.startswith(f"{kind}-") for name in names) for kind in ("inputs", "fisher", "block")}
    some = {kind: f"{count} block{'s' if count > 1 else ''}" for kind, count in counts.items() if count}
    found = [text for kind, text in kinds.items() if kind in names]
    found += [f"the Hessians of {some['inputs']}"] if "inputs" in some else []
    found += [f"the gradients of {some['fisher']}"] if "fisher" in some else []
    return ", ".join([*found, some["block"]] if "block" in some else found)


def _locked(path: Path) -> TextIO:
    """The lock file of a directory, which is made where there is none; the lock ends with the process at the latest."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        stream = (path / "lock").open("a+", errors="replace")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = re.fullmatch(r"process \d+ on [\w.-]+", stream.read(200).strip())
            stream.close()
            raise ValueError(
                f"{path}: {holder[0] if holder else 'another process'} works there; wait until it has ended, or choose "
                "another output directory"
            ) from None
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(FileNotFoundError):  # who held it may have removed the directory meanwhile
            if os.path.samestat(os.fstat(stream.fileno()), (path / "lock").stat()):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                stream.flush()
                return stream
        stream.close()
