"""`onegraph chat`: a conversation with a model, in a terminal or line by line through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import CONTEXT, MODEL, UsageError, number, one_line, open_model, options
from onegraph.cli.generate import add_engine, add_thinking, engine, load, report, show, thinking_of
from onegraph.cli.sampling import add_sampling, sampling_of, suggested

if TYPE_CHECKING:
    from onegraph.api.conversation import Conversation
    from onegraph.api.llm import LLM
    from onegraph.api.tokenizer import Tokenizer

EPILOG = """\
examples:
  onegraph chat out/smollm2-4bit
  onegraph chat out/smollm2-4bit --system "Answer in one sentence." --temperature 0.7
  onegraph chat Qwen/Qwen3-8B --thinking off
  printf 'My name is Ada.\\nWhat is my name?\\n' | onegraph chat out/smollm2-4bit

Ctrl-C ends an answer after the model's next step, also while it reads the question, and what was written of it stays
in the conversation; at the prompt, Ctrl-C twice or Ctrl-D leaves. /help lists the commands. Where question and answer
do not fit the context any more, the oldest turns are forgotten, and said to be; the system prompt stays. Thoughts
(<think> ... </think>) are shown and then forgotten. Temperature, top-p and top-k are those that the model's
generation_config.json suggests, or else 0.7 and 0.95, and options go over them; --temperature 0 takes the likeliest
token. Where stdin is no terminal, each line of it is
a turn, and the first error ends the program.
"""
COMMANDS = """\
/reset       forget what was said; the system prompt stays
/save FILE   write all that was said to FILE, as JSON: a list of messages, which LLM.chat takes
/help        this list
/exit        leave, as Ctrl-D or Ctrl-C twice
Ctrl-C ends an answer. A line that begins with / and is no command: put a blank in front."""
PROMPT = "> "
MAX_LINE = 64 << 20  # bytes


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="a conversation with a model",
        description="Talks with a model (a directory or a .gguf file), quantized or not, that has a chat template.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before everything")
    add_thinking(parser)
    parser.add_argument(
        "--max-tokens",
        type=number(int, 1, 1 << 24),
        metavar="N",
        help="of an answer, at most (default: what the context leaves)",
    )
    parser.add_argument(
        "--max-context",
        type=CONTEXT,
        metavar="N",
        help="tokens of the conversation that the model sees (default: the model's context, at most 4096)",
    )
    add_sampling(parser, stream=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.conversation import Conversation
    from onegraph.engine.params import SamplingParams

    chosen = engine(args)
    thinking = thinking_of(args)
    sampling = sampling_of(args)
    lines = typed() if interactive() else piped()
    tokenizer, context, said, drawn = prepare(args, thinking, sampling)
    params = SamplingParams(**said | drawn | sampling)
    with load(args, max_batch=1, max_context=context, tokenizer=tokenizer, **chosen) as llm:
        conversation = Conversation(
            llm, system=args.system, params=params, max_tokens=args.max_tokens, thinking=thinking
        )
        for fields, why in (
            (said, "the model's generation_config.json suggests it"),
            (drawn, "the model suggests none"),
        ):
            if fields:
                named = ", ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in fields.items())
                say(f"[{named}: {why}; say otherwise by these options]")
        with handled(lambda: None) if interactive() else contextlib.nullcontext():
            for line in lines:
                try:
                    if not respond(llm, conversation, line):
                        break
                except ValueError as error:
                    if not interactive():
                        raise
                    say(f"onegraph: error: {one_line(error)}")
    return 0


def prepare(
    args: argparse.Namespace, thinking: bool | None, sampling: Mapping[str, Any]
) -> tuple[Tokenizer, int, dict[str, Any], dict[str, Any]]:
    """The model's tokenizer, the context to keep, how to draw beside `sampling` as the model says and
    by default; refused before any weight is read is what no turn could do."""
    from onegraph.api.conversation import room_for
    from onegraph.api.llm import MAX_CONTEXT
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.models.load import parse_config

    with open_model(args.model) as checkpoint:
        largest = parse_config(checkpoint.config).max_positions
        tokenizer = Tokenizer(checkpoint)
        said, drawn = suggested(checkpoint, sampling)
    if args.max_context is not None and args.max_context > largest:
        raise UsageError(f"--max-context {args.max_context}: the model's context is {largest}, which is the most")
    if tokenizer.template is None:
        raise UsageError(f"{args.model}: has no chat template; 'onegraph generate' continues a text as it stands")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    with options("thinking:"):
        shortest = len(tokenizer.chat([*system, {"role": "user", "content": "Hi"}], thinking))
    context = args.max_context or min(largest, MAX_CONTEXT)
    if shortest + (room := room_for(args.max_tokens, context)) > context:
        raise UsageError(
            f"the context of {context} tokens takes {context - room} beside an answer, and the question 'Hi' makes "
            f"{shortest} with all that stands around it; give --max-context more (at most {largest}), or a shorter "
            "--system"
        )
    return tokenizer, context, said, drawn


def respond(llm: LLM, conversation: Conversation, line: str) -> bool:
    """Does what a line says; False where it says to leave. Raises ValueError."""
    if not line.strip():
        return True
    if not line.startswith("/"):
        answer(llm, conversation, line)
        return True
    command, _, argument = line.strip().partition(" ")
    if command == "/save":
        save(conversation, argument.strip())
    elif command not in ("/reset", "/help", "/exit") or argument:
        raise UsageError(f"{one_line(line, 60)}: no such command; /help lists them, a blank in front sends it as text")
    elif command == "/reset":
        conversation.reset()
        say("[a new conversation]")
    elif command == "/help":
        say(COMMANDS)
    return command != "/exit"


def answer(llm: LLM, conversation: Conversation, text: str) -> None:
    """Asks, and shows what comes until Ctrl-C."""
    with stoppable() as stopped, closing(conversation.ask(text, stopped)) as pieces:
        if dropped := conversation.dropped:
            turns = f"{len(dropped)} turn{'s' if dropped[1:] else ''}"
            first = one_line(dropped[0], 60)
            say(f"[the context of {llm.max_context} tokens is full: forgot {turns}, from {first!r} on]")
        written = show(pieces)
    report(llm.stats, 1 if written or not stopped() else 0, llm.device, llm.engine.executor.speculation is not None)
    if stopped():
        if not written:
            say("[stopped before the answer began: the question is forgotten]")
    elif 1 + llm.stats.decode_tokens >= conversation.budget:
        say(f"[{conversation.budget} tokens are all that --max-tokens allows or the context leaves]")


def save(conversation: Conversation, name: str) -> None:
    if not name:
        raise UsageError("/save: give a file to write")
    content = json.dumps(conversation.messages, ensure_ascii=False, indent=2)
    try:
        with Path(name).open("x", encoding="utf-8") as file:
            file.write(content + "\n")
    except FileExistsError:
        raise UsageError(f"{name}: exists already; give another name") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    say(f"[{len(conversation.messages)} messages in {name}]")


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """At a terminal, Ctrl-C makes what this gives true, and says so. A pipe's many turns end with the first."""
    asked = False

    def ask() -> None:
        nonlocal asked
        if not interactive():
            raise KeyboardInterrupt
        if not asked:
            with contextlib.suppress(OSError, ValueError):  # not `say`: the streams may be in the middle of a write
                os.write(sys.stderr.fileno(), b"\n[stopping ...]\n")
        asked = True

    with handled(ask):
        yield lambda: asked


@contextlib.contextmanager
def handled(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `act`."""

    def handle(signum: int, frame: FrameType | None) -> None:
        act()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interactive() -> bool:
    if sys.stdin is None:
        raise UsageError("standard input is closed, and questions come from it; use a terminal or a pipe")
    return sys.stdin.isatty()


def typed() -> Iterator[str]:
    """Lines of the terminal, until Ctrl-D, or Ctrl-C twice."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (the line can be edited, and earlier ones are there)
    say("[/help lists the commands; Ctrl-D leaves]")
    pressed = False
    while True:
        try:
            with handled(interrupt):  # elsewhere one that comes late, for an answer that is over, costs nothing
                if sys.stdout.isatty():
                    line = input(PROMPT)
                else:
                    print(PROMPT, end="", file=sys.stderr, flush=True)
                    line = input()
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            if pressed:
                say("")
                return
            pressed = True
            say("\n[Ctrl-C again, or Ctrl-D, leaves]")
            continue
        pressed = False
        yield line


def interrupt() -> None:
    raise KeyboardInterrupt


def piped() -> Iterator[str]:
    """Lines of stdin. Raises ValueError for one that is no text."""
    from onegraph.api.text import decode

    while data := sys.stdin.buffer.readline(MAX_LINE + 1):
        if len(data) > MAX_LINE:
            raise UsageError(f"standard input: a line of more than {MAX_LINE} bytes; each line is a question")
        yield decode(data, "standard input").rstrip("\r\n")


def say(text: str) -> None:
    """A remark, beside what the model says."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
