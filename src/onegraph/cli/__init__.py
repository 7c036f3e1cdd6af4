"""The command line: one file per command, each imported when the parser is built, its heavy imports when it runs."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from onegraph import __version__
from onegraph.cli.common import Parser, UsageError, human_bytes, one_line
from onegraph.cli.streams import STDOUT, abandon_stdout, as_utf8, checked
from onegraph.formats.files import out_of_memory

COMMANDS = ("quantize", "verify", "generate", "chat", "serve", "eval", "draft-head", "bench", "env")
USER_ERROR, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 70, 130, 141

DESCRIPTION = "Run the whole decode step of a low-bit LLM as one CUDA graph, and check that this is safe."
EPILOG = """\
from a checkpoint to text:
  onegraph quantize models/SmolLM2-135M-Instruct out/smollm2-4bit --bits 4
  onegraph generate out/smollm2-4bit --prompt "What is the capital of Japan?"
  onegraph chat out/smollm2-4bit
  onegraph serve out/smollm2-4bit

what it cost, and what it runs on:
  onegraph eval out/smollm2-4bit --reference models/SmolLM2-135M-Instruct --text some.txt
  onegraph env

whether a step function of your own can be captured:
  onegraph check steps.py:decode

A model is a directory with config.json and model.safetensors, as transformers writes it, a .gguf file, or ORG/NAME of
the Hugging Face hub, from where it is fetched.
'onegraph COMMAND --help' explains each command; --debug, anywhere on the line, shows where an error came from. Exit
status: 0 done, 1 findings (check, verify), 2 an error that one line on stderr explains, 130 interrupted.
"""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The command line, without importing torch: of `command` alone if it is one of COMMANDS, otherwise whole."""
    parser = Parser(
        prog="onegraph",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onegraph {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error came from (anywhere on the line)")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    if command not in COMMANDS and importlib.util.find_spec("onegraph.check.cli") is not None:
        importlib.import_module("onegraph.check.cli").add_parsers(commands)
        importlib.import_module("onegraph.cli.check_vllm").add_option(commands.choices["check"])
    for name in [command] if command in COMMANDS else COMMANDS:
        importlib.import_module(f"onegraph.cli.{name.replace('-', '_')}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None, make_parser: Callable[[], argparse.ArgumentParser] | None = None) -> int:
    """Runs one command and returns its exit status; every error is one line on stderr.

    `--debug`, anywhere on the line, prints the traceback as well. Without `argv` it is the process's own command.
    `make_parser`: the parser with the commands, each of which sets `run` (`tools/__main__.py` has its own).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    make_parser = make_parser or functools.partial(build_parser, next(iter(words), None))
    ended: list[int] = []
    if argv is None and "--run" not in words and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)  # a program of the user's has Python's own
    if argv is None and words[:1] != ["check"]:  # which may run a program of the user's
        atexit.register(_end_process, ended)  # before others: they run before it
    status = _command(words, make_parser)
    if argv is None and "onegraph.check.deadline" in sys.modules:
        importlib.import_module("onegraph.check.deadline").leave(status)
    ended.append(status)
    return status


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C raises KeyboardInterrupt, but while numpy is imported only when that is done: torch imports it from C code
    that drops what is raised there, and the command would run on with half of numpy."""
    while frame is not None and not _imports_numpy(frame):
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    again = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    again.daemon = True
    again.start()


def _imports_numpy(frame: FrameType) -> bool:
    """Whether the frame is Python's own import of numpy or of a part of it."""
    return frame.f_code.co_name == "_find_and_load" and str(frame.f_locals.get("name")).partition(".")[0] == "numpy"


def _end_process(ended: list[int]) -> None:
    """Ends the process of a command that has ended, as all it had to do at its end is done: to take torch's modules
    apart takes Python half a second. `ended`: its status, nothing where it raised."""
    if ended and "torch" in sys.modules:
        with contextlib.suppress(OSError, ValueError):  # of a stream that is closed Python has its own to say
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(ended[0])


def _command(words: list[str], make_parser: Callable[[], argparse.ArgumentParser]) -> int:
    if "torch" not in sys.modules:
        # OpenMP's threads spin while they wait: on two cores that others use as well, a run takes ten times as long
        # (quantizing a block of SmolLM2 at load 4: 37 s spinning, 3.5 s passive). Read once, when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ours = words.index("--run") if words[:1] == ["check"] and "--run" in words else len(words)  # then a program's own
    debug = "--debug" in words[:ours]
    try:
        with checked():
            return _run([word for word in words[:ours] if word != "--debug"] + words[ours:], make_parser())
    except KeyboardInterrupt:
        _say("interrupted" + (_resume_hint(words) if words else ""))
        return INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()  # what reads us has gone (a pager, head)
        return BROKEN_PIPE
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            abandon_stdout()
        if debug:
            raise
        return _report(error)


def _run(words: list[str], parser: argparse.ArgumentParser) -> int:
    as_utf8(words)
    try:
        args = parser.parse_args(words)
        if args.command is None:
            parser.print_help()
            status = 0
        else:
            status = int(args.run(args) or 0)
    except SystemExit as stop:  # --help and --version
        status = int(stop.code or 0)
    sys.stdout.flush()
    return status


def _report(error: BaseException) -> int:
    kind = type(error).__name__
    if out_of_memory(error):
        _say(f"error: out of memory: {one_line(error)}; {_memory_advice(on_gpu=kind == 'OutOfMemoryError')}")
        return USER_ERROR
    if isinstance(error, UsageError | ValueError):
        _say("error: " + one_line(error))
        return USER_ERROR
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        _say(f"error: {where}{error.strerror or one_line(error)}")
        return USER_ERROR
    if kind in ("CaptureError", "StepError", "FloatingPointError", "ModuleNotFoundError"):
        _say("error: " + one_line(error))
        return USER_ERROR
    _say(f"internal error: {kind}: {one_line(error)}; please report it with the output of the same command and --debug")
    return INTERNAL_ERROR


def _memory_advice(on_gpu: bool) -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and not on_gpu:
        return f"this process may have {human_bytes(limit)} of addresses (ulimit -v); raise the limit"
    return "take a smaller model, batch or context, or a machine with more memory"


def _resume_hint(words: list[str]) -> str:
    return "; the same command resumes where it stopped" if words[0] == "quantize" else ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # where nobody can read it, the status tells
        print(f"onegraph: {text}", file=sys.stderr)
