"""What the commands share: the parser, argument types, the choice of device and dtype, progress and JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onegraph.formats.files import CheckpointError, read_bytes

if TYPE_CHECKING:
    import torch

    from onegraph.formats.checkpoint import Checkpoint

MAX_TEXT = 1 << 30  # bytes of a text or prompt file


class UsageError(ValueError):
    """The command line is wrong."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises one line in place of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False  # what a script abbreviates today is ambiguous tomorrow
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def one_line(error: object, limit: int = 500) -> str:
    """A message on one line, at most `limit` characters long, without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def number(
    kind: type[int] | type[float], low: float, high: float, open_low: bool = False
) -> Callable[[str], int | float]:
    """An argparse type: a number in [low, high], or (low, high] with `open_low`."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text) if len(text) < 40 else None
        except ValueError:
            value = None
        if value is None or not (low < value if open_low else low <= value) or not value <= high:
            bounds = f"{'more than ' if open_low else ''}{low:g} to {high:g}"
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{one_line(repr(text), 60)} is not {what} from {bounds}")
        return value

    return parse


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", metavar="DEV", help="cpu, cuda or cuda:N (default: the GPU where there is one)"
    )


def add_gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", type=number(int, 1, 8), metavar="N", help="place the layers over so many GPUs (DeepSeek-V4)"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="what activations are computed in (default: bfloat16 on a GPU, float32 on a CPU)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, for scripts")


def pick_device(name: str) -> torch.device:
    """The device that `--device` asks for. Raises ValueError where this machine does not have it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (index.isascii() and index.isdigit() and len(index) < 4)):
        raise UsageError(f"--device {one_line(repr(name), 60)}: allowed are auto, cpu, cuda and cuda:N")
    if kind == "cuda" and not count:
        raise UsageError("--device cuda: torch finds no GPU here; 'onegraph env' says more, --device cpu works")
    if kind == "cuda" and int(index or 0) >= count:
        raise UsageError(f"--device {name}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}")
    return torch.device(kind, int(index)) if index and kind == "cuda" else torch.device(kind)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `--dtype` asks for; auto is bfloat16 on a GPU, float32 on a CPU (faster there, and exact)."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def open_model(path: str) -> Checkpoint:
    """The checkpoint at `path`, every header checked. Raises CheckpointError."""
    from onegraph.formats.checkpoint import Checkpoint

    return Checkpoint.open(path)


def read_text(path: str) -> str:
    """A UTF-8 text file of at most 1 GB, '-' for stdin. Raises CheckpointError."""
    data = sys.stdin.buffer.read(MAX_TEXT) if path == "-" else read_bytes(Path(path), MAX_TEXT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from None


def progress(*, total: int | None = None, what: str, unit: str) -> Any:
    """A progress bar on stderr, with `total`, `n`, `update` and a context; where stderr is no terminal, `PlainBar`."""
    if not sys.stderr.isatty():
        return PlainBar(what, unit, total)
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr, dynamic_ncols=True)


class PlainBar:
    """Progress for logs: a whole line every ten seconds, and one at the end."""

    EVERY = 10.0  # seconds

    def __init__(self, what: str, unit: str, total: int | None) -> None:
        self.what, self.unit, self.total, self.n = what, unit, total, 0
        self.started = self.printed = time.monotonic()
        self.shown = -1

    def __enter__(self) -> PlainBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.n != self.shown:
            self._print()

    def update(self, count: int = 1) -> None:
        self.n += count
        if time.monotonic() - self.printed >= self.EVERY:
            self._print()

    def _print(self) -> None:
        self.printed, self.shown = time.monotonic(), self.n
        of = f" of {self.total}" if self.total else ""
        print(f"{self.what}: {self.n}{of} {self.unit}s, {self.printed - self.started:.0f} s", file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """One line on stdout. A figure that is not finite (a perplexity may overflow) is null: JSON has no infinity."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    print(json.dumps(plain, ensure_ascii=False, allow_nan=False), flush=True)


def human_bytes(count: float) -> str:
    """98.4 MB: decimal units, as files are sold."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
