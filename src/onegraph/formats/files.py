"""Small files: those that nobody vouches for read whole, bounded, refused in one line; ours written to the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MAX_CONFIG = 4 << 20  # bytes; the longest published config.json is some 100 KB
MAX_DEPTH = 32  # of JSON; published configs stay below 6


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, in one line that names the file or tensor, what was got and what is allowed."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused: torch, the dynamic linker and threads each say it in their own way."""
    words = ("can't allocate memory", "annot allocate memory", "failed to map segment", "can't start new thread")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or getattr(error, "errno", None) == errno.ENOMEM
        or any(word in str(error) for word in (*words, "bad_alloc"))
    )


def quote(text: object, limit: int = 100) -> str:
    """Text from a file, fit for one line of a message: quoted, control characters escaped, long text cut."""
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[: limit - 4]}...{shown[-1]}"


INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}
TAG = "__float__"  # how transformers 5 writes an infinity: {"__float__": "Infinity"}
UNLIMITED = str(int(1e30))  # what transformers writes for a `model_max_length` without a limit


def parse_json(data: bytes, where: str, *, infinite: bool = False) -> Any:
    """JSON from an untrusted file. Duplicate keys, NaN, infinities, integers beyond 64 bits and nesting deeper than
    32 are errors: each means a damaged file or one made to hurt, and each would otherwise be silently repaired.

    infinite: infinities are allowed, bare (`Infinity`), as transformers 5 writes them or as its integer for one, and
    become floats: limits of some state-space models and of tokenizers are such.
    """

    def pairs(items: list[tuple[str, Any]]) -> Any:
        if infinite and len(items) == 1 and items[0][0] == TAG and items[0][1] in INFINITE:
            return INFINITE[items[0][1]]
        seen = set[str]()
        for name, _ in items:
            if name in seen:
                raise CheckpointError(f"{where}: key {quote(name)} occurs twice in one object")
            seen.add(name)
        return dict(items)

    def integer(text: str) -> int | float:
        if infinite and text == UNLIMITED:
            return math.inf
        if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
            raise CheckpointError(f"{where}: integer {quote(text, 40)} does not fit 64 bits")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if infinite and text in INFINITE:
            return value
        if not math.isfinite(value):
            raise CheckpointError(f"{where}: number {quote(text, 40)} is not finite")
        return value

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_int=integer, parse_float=real, parse_constant=real)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; the file is damaged") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply") from None
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return value
    raise CheckpointError(f"{where}: JSON nested deeper than {MAX_DEPTH}")


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole regular file of at most `limit` bytes. Raises CheckpointError (absent, directory, pipe, unreadable)."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, at most {limit} are allowed for such a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None


def member(directory: Path, name: str) -> Path | None:
    """The file `name` of a model directory, None where there is none.

    A symbolic link may lead to another file of the directory; in the cache of huggingface_hub, where
    models--x--y/snapshots/<revision>/file points to models--x--y/blobs/<digest>, to one of the same models--x--y.
    Raises CheckpointError for any other link: whoever made the directory would choose which file of this machine is
    read, and copied into what is made of it. Also for a link to nothing: a file that was meant to be there is lost.
    """
    path = directory / name
    if not os.path.lexists(path):
        return None
    try:
        real, home = path.resolve(strict=True), directory.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        what = f"points to {quote(os.readlink(path))}" if path.is_symlink() else "cannot be read"
        why = "which does not exist" if isinstance(error, FileNotFoundError) else reason(error)
        raise CheckpointError(f"{path}: {what}, {why}; fetch the file again") from None
    cache = [p for p in home.parents if p.name.startswith("models--") and home.is_relative_to(p / "snapshots")]
    if not any(real.is_relative_to(allowed) for allowed in (home, *cache)):
        raise CheckpointError(
            f"{path}: is a symbolic link to {quote(str(real))}, outside of the model directory; copy the file here if "
            "it belongs to the model"
        )
    return path


def tagged(value: Any) -> Any:
    """A value with infinities as transformers 5 writes them, since JSON has none."""
    if isinstance(value, dict):
        return {key: tagged(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(inner) for inner in value]
    return {TAG: f"{'-' * (value < 0)}Infinity"} if isinstance(value, float) and math.isinf(value) else value


def read_json(path: Path, limit: int = MAX_CONFIG, *, infinite: bool = False) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes, under the rules of `parse_json`."""
    value = parse_json(read_bytes(path, limit), str(path), infinite=infinite)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, an object is expected")
    return value


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """A disk that is full, or a limit on sizes, as an OSError that names the file, whichever library meets it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(file)) from None


def write_bytes(file: Path, content: bytes) -> str:
    """Writes a small file to the disk and returns its SHA-256: of what was meant, not of what came back."""
    with writing(file):
        file.write_bytes(content)
        sync(file)
    return hashlib.sha256(content).hexdigest()


def replace_bytes(file: Path, content: bytes) -> None:
    """Writes a small file in place of the one that is there, whole or not at all, with its permissions."""
    with writing(file):
        # A name that nobody can have put there before, as a link to somewhere else
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            write_bytes(temporary, content)
            shutil.copymode(file, temporary)
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(file.parent)


def sync(path: Path) -> None:
    """Returns when the file, or a directory's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """One line that says what an exception means."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
