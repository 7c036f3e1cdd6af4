"""What the commands share: the parser, argument types, the choice of device and dtype, progress and JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onegraph.api.deprecated import message
from onegraph.api.size import human_bytes as human_bytes  # for the commands
from onegraph.cli.vllm_options import cure
from onegraph.formats.suggestion import suggestion

if TYPE_CHECKING:
    import torch

    from onegraph.api.sandbox import Kind
    from onegraph.formats.checkpoint import Checkpoint


MODEL = "model directory, .gguf file, or ORG/NAME[@REVISION] of the Hugging Face hub"  # help, where `locate` finds it


class UsageError(ValueError):
    """The command line is wrong."""


# Options that another name has replaced: they work until `api.deprecated.REMOVED_IN`, with a warning
DEPRECATED = {
    "--kv": "--kv-cache-dtype",
    "--max-batch": "--max-num-seqs",
    "--max-context": "--max-model-len",
    "--cache-tokens": "--kv-cache-tokens",
    "--draft": "--speculative",
    "--draft-tokens": "--num-speculative-tokens",
    "--name": "--served-model-name",
    "--tokens": "--num-calibration-tokens",
    "--sequence": "--calibration-seq-len",
    "--extend": "--self-generate",
    "--no-extend": "--no-self-generate",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises one line in place of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False  # what a script abbreviates today is ambiguous tomorrow
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown options come first: a misspelt one makes others look missing."""
        if self._subparsers is None:
            args = self._current(args or ())
            for word in args:
                name = word.partition("=")[0]
                known = self._option_string_actions.get(name)
                if word == "--" or (known is not None and known.nargs == argparse.REMAINDER):
                    break  # what follows is somebody else's
                if word.startswith("--") and " " not in word and name not in self._option_string_actions:
                    names = self._option_string_actions
                    self.error(f"unrecognized arguments: {word}{cure(name, names) or suggestion(name, names)}")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:  # argparse says it as the parser of all commands
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _current(self, args: Iterable[str]) -> list[str]:
        """The words with today's names of options."""
        words = list(args)
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            known = self._option_string_actions.get(name)
            if word == "--" or (known is not None and known.nargs == argparse.REMAINDER):
                break
            new = DEPRECATED.get(name)
            if known is None and new is not None and new in self._option_string_actions:
                deprecated(name, new)
                words[at] = new + equals + value
        return words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = suggestion(str(value), choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {', '.join(choices)})")

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:  # argparse would pass over a stdout that cannot be written
            print(message, end="", file=file or sys.stderr)


def deprecated(old: str, new: str) -> None:
    print(f"onegraph: warning: {message(old, new)}", file=sys.stderr)


def one_line(error: object, limit: int = 500) -> str:
    """A message on one line, at most `limit` characters long, without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# What may steer a terminal: control characters but newline and tab, and those that turn the direction of writing
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _CONTROLS}


def shown(text: str) -> str:
    """Text of a model or a file as stdout may have it: on a terminal, control characters are escaped."""
    return text.translate(_ESCAPES) if sys.stdout.isatty() else text


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
            what, form = ("an integer", "d") if kind is int else ("a number", "g")
            bounds = f"{'more than ' if open_low else ''}{low:{form}} to {high:{form}}"
            raise argparse.ArgumentTypeError(f"got {one_line(repr(text), 60)}; allowed is {what} from {bounds}")
        return value

    return parse


# One range for one option, whichever command takes it.
SEED = number(int, 0, 2**31 - 1)
STEPS = number(int, 1, 1 << 30)
CONTEXT = number(int, 1, 1 << 20)
BATCH = number(int, 1, 1 << 12)
SPLITS = "tensor", "layer"
TEXT_TOKENS = number(int, 64, 1 << 24)


Options = argparse.ArgumentParser | argparse._ArgumentGroup


def add_device(parser: Options) -> None:
    parser.add_argument("--device", default="auto", metavar="DEV", help="cpu, cuda or cuda:N [the GPU if there is one]")


def add_gpus(parser: Options) -> None:
    count = number(int, 1, 8)
    parser.add_argument(
        "--tensor-parallel-size", type=count, default=1, metavar="N", help="number of GPUs that share every layer [1]"
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=count,
        default=1,
        metavar="N",
        help="number of GPUs that each hold some of the layers; DeepSeek-V4 only [1]",
    )
    parser.add_argument("--gpus", type=count, help=argparse.SUPPRESS)
    parser.add_argument("--split-mode", choices=SPLITS, help=argparse.SUPPRESS)


def add_gpu_share(parser: Options, about: str) -> None:
    parser.add_argument(
        "--gpu-memory-utilization", type=number(float, 0, 1, open_low=True), metavar="SHARE", help=about
    )


def gpus_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM that `add_gpus`'s options name."""
    if args.gpus is None and args.split_mode is None:
        return {
            "tensor_parallel_size": args.tensor_parallel_size,
            "pipeline_parallel_size": args.pipeline_parallel_size,
        }
    deprecated("--gpus (with --split-mode)", "--tensor-parallel-size or --pipeline-parallel-size")
    return {"gpus": args.gpus or 1, "split": args.split_mode}


def add_dtype(parser: Options, *, int8: bool = False) -> None:
    """int8: of a command that answers; others measure what is stored."""
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", *(("int8",) if int8 else ())),
        help="dtype of activations [bfloat16 on a GPU, float32 on a CPU]"
        + ("; on a CPU float16 and int8 are dtypes of the weights" if int8 else ""),
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, for scripts")


def pick_device(name: str) -> torch.device:
    """The device that `--device` asks for. Raises ValueError where this machine does not have it."""
    from onegraph.api.device import pick_device

    return pick_device(name, "--device")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `--dtype` asks for; auto is bfloat16 on a GPU, float32 on a CPU."""
    from onegraph.api.device import pick_dtype

    return pick_dtype(name, device)


def import_engine(args: argparse.Namespace, *kinds: Kind) -> None:
    """Imports what runs a model, while the children of the sandboxes that the command needs start and the driver makes
    the contexts of the GPUs that `add_device` and `add_gpus` name.

    Python's collector is off meanwhile, and passes over what came of it from then on: it would walk the half a million
    objects of torch's modules eight times, and once more when the model is closed.
    """
    from onegraph.api.gpu_context import start_context
    from onegraph.api.sandbox import start_early

    for kind in kinds:
        start_early(kind)
    if "onegraph.api.llm" not in sys.modules:
        start_context(args.device, max(args.tensor_parallel_size, args.pipeline_parallel_size, args.gpus or 1))
        gc.disable()
        try:
            importlib.import_module("onegraph.api.llm")
        finally:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def options(*names: str) -> Iterator[None]:
    """Where an error of the API names its arguments, the command line's options of these names: any of `names` at the
    head, those with an underscore, which no prose has, anywhere but as a key of a file (`config.json: top_p`), a layer
    or a part of a path."""
    try:
        yield
    except ValueError as error:
        told = str(error)
        head = told.partition(" ")[0]
        words = "|".join({name.rstrip(":") for name in names if "_" in name})
        text = re.sub(rf"(?<!\.json: )(?<![\w./'-])({words})(?![\w./=])", _option, told) if words else told
        if head in names and text.startswith(head):
            text = f"--{text}"
        if text == told:
            raise
        raise UsageError(text) from None


def _option(name: re.Match[str]) -> str:
    return f"--{name[0].replace('_', '-')}"


def open_model(path: str) -> Checkpoint:
    """The checkpoint at `path` or of that name on the hub, every header checked. Raises CheckpointError."""
    from onegraph.api.hub import locate
    from onegraph.formats.checkpoint import Checkpoint

    return Checkpoint.open(locate(path).path)


def read_text(path: str) -> str:
    """A UTF-8 text file of at most 1 GB, '-' for stdin. Raises CheckpointError."""
    from onegraph.api import text

    if path != "-":
        if (file := Path(path)).exists() and not file.is_file():  # a pipe, as of <(command)
            raise UsageError(f"{path}: not a regular file; give one, or '-' and the text on standard input")
        return text.read_text(file)
    if sys.stdin is None:
        raise UsageError("standard input is closed, and '-' reads it; give a file, or pipe the text in")
    try:
        data = sys.stdin.buffer.read(text.MAX_TEXT + 1)
    except OSError as error:  # a directory, a terminal that went away
        raise UsageError(f"standard input: cannot be read: {error.strerror}") from None
    if len(data) > text.MAX_TEXT:
        raise UsageError(f"standard input: more than {text.MAX_TEXT} bytes; give less text")
    return text.decode(data, "standard input")


def progress(*, total: int | None = None, what: str, unit: str) -> Any:
    """A progress bar on stderr, with `total`, `n`, `update` and a context; where stderr is no terminal, `PlainBar`."""
    if not sys.stderr.isatty():
        return PlainBar(what, unit, total)
    from tqdm import tqdm

    # Words as `PlainBar` has them; of bytes tqdm's own form, which scales them.
    plain = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{n_fmt}} of {{total_fmt}} {unit}s [{{elapsed}}<{{remaining}}]"
    form = {"unit": "B", "unit_scale": True} if unit == "byte" else {"bar_format": plain}
    return tqdm(total=total, desc=what, file=sys.stderr, dynamic_ncols=True, **form)


def remark(line: str) -> None:
    """A line of the API for people. A stderr that cannot be written (full, closed) stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(line, 1000), file=sys.stderr, flush=True)


# What quantizing reports, and in what each is counted: whichever command quantizes
QUANTIZING = {"sampling_text": "token", "measuring": "block", "quantizing": "linear"}


class Progress:
    """What the API calls with its progress: a bar for each thing that it does; `units` says in what each is counted."""

    def __init__(self, **units: str) -> None:
        self.units = {what.replace("_", " "): unit for what, unit in units.items()}
        self.what, self.bar = "", contextlib.ExitStack()
        self.shown: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self.what:
            self.bar.close()
            self.what, self.bar = what, contextlib.ExitStack()
            self.shown = self.bar.enter_context(progress(total=total or None, what=what, unit=self.units[what]))
        self.shown.total = total or None
        self.shown.update(done - self.shown.n)


class PlainBar:
    """Progress for logs: a line every ten seconds, with the time left at the rate since the last; one at the end."""

    EVERY = 10.0  # seconds

    def __init__(self, what: str, unit: str, total: int | None) -> None:
        self.what, self.unit, self.total, self.n = what, unit, total, 0
        self.started = self.printed = time.monotonic()
        self.shown = -1
        self.mark = self.started, 0  # when the last line was printed, and how much was done

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
        spent = self.printed - self.started
        missing, (begun, before) = (self.total or 0) - self.n, self.mark
        recent = (
            (self.printed - begun) / (self.n - before) if self.n > before else 0.0
        )  # a resumed run begins with a jump
        left = f", about {missing * recent:.0f} s left" if self.n > before and missing > 0 else ""
        self.mark = self.printed, self.n
        with contextlib.suppress(OSError, ValueError):  # a stderr that cannot be written stops nothing
            print(f"{self.what}: {self.n}{of} {self.unit}s, {spent:.0f} s{left}", file=sys.stderr)


def tell_skipped(skipped: Mapping[str, int]) -> None:
    """Say which tensors of the checkpoint are not read: those of images and audio, and layers that predict further."""
    if skipped:
        parts = ", ".join(f"{module} ({count})" for module, count in skipped.items())
        print(f"text only: {sum(skipped.values())} tensors are skipped: {parts}", file=sys.stderr)


def tell_exact_layers(asked: str, settled: str) -> None:
    """Prints the layers that a cache of the setting `settled` keeps exact although `asked` does not name them."""
    from onegraph.formats.turboquant import parse_kv

    wanted, found = (None if kv == "fp8" else parse_kv(kv) for kv in (asked, settled))
    if wanted is not None and found is not None and (kept := set(found.exact) - set(wanted.exact)):
        named = f"layer{'s' if len(kept) > 1 else ''} {', '.join(map(str, sorted(kept)))} kept exact"
        why = "their keys are mostly a bias, or their heads are larger than the kernels read"
        print(f"kv: {named}: {why} (docs/guides/long-context.md)", file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """One line on stdout. A figure that is not finite (a perplexity may overflow) is null: JSON has no infinity."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal of few characters: JSON has its own escapes
        line = json.dumps(plain, allow_nan=False)
    print(line, flush=True)
