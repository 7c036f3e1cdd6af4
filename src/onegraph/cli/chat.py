"""`onegraph chat`: a conversation with a model, in a terminal or line by line through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from onegraph.api.chat import Thinking
from onegraph.cli.common import CONTEXT, MODEL, UsageError, import_engine, number, one_line, open_model, options
from onegraph.cli.generate import add_engine, add_thinking, engine, load, report, show, thinking_of
from onegraph.cli.sampling import add_sampling, check_constraint, sampling_of

if TYPE_CHECKING:
    from onegraph.api.conversation import Conversation
    from onegraph.api.defaults import SamplingDefaults
    from onegraph.api.llm import LLM
    from onegraph.api.tokenizer import Tokenizer

EPILOG = """\
examples:
  onegraph chat out/smollm2-4bit
  onegraph chat out/smollm2-4bit --system "Answer in one sentence." --temperature 0.7
  onegraph chat Qwen/Qwen3-8B --thinking off
  printf 'My name is Ada.\\nWhat is my name?\\n' | onegraph chat out/smollm2-4bit

Ctrl-C stops an answer after the current decode step; its text stays in the conversation. At the prompt, Ctrl-C twice
or Ctrl-D ends the program. /help lists the commands. If question and answer do not fit the context, the oldest turns
are dropped with a message; the system prompt stays. Thoughts (<think> ... </think>) are shown and then removed.
Temperature, top-p and top-k come from the options, then from the model's generation_config.json, then from onegraph's
default (0.7, 0.95, off). If stdin is no terminal, each line is a turn, and the first error ends the program.
"""
COMMANDS = """\
/reset       start a new conversation; the system prompt stays
/save FILE   write the conversation to FILE, as a JSON list of messages for LLM.chat
/help        list the commands
/exit        end the program, as Ctrl-D or Ctrl-C twice
Ctrl-C stops an answer. Put a space before a line that starts with / and is no command."""
PROMPT = "> "
MAX_LINE = 64 << 20  # bytes


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model",
        description="Chats with a model that has a chat template, quantized or not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_thinking(parser)
    parser.add_argument(
        "--max-tokens",
        type=number(int, 1, 1 << 24),
        metavar="N",
        help="maximum number of tokens of an answer [what the context leaves]",
    )
    parser.add_argument(
        "--max-model-len",
        type=CONTEXT,
        metavar="N",
        help="maximum number of tokens of the conversation [the model's, at most 4096]",
    )
    add_sampling(parser, stream=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import_engine(args, "tokenizers", "templates")
    from onegraph.api.constraint import Constraints
    from onegraph.api.conversation import Conversation
    from onegraph.api.defaults import FIELDS
    from onegraph.engine.params import SamplingParams

    chosen = engine(args)
    thinking = thinking_of(args)
    sampling = sampling_of(args)
    lines = typed() if interactive() else piped()
    tokenizer, vocabulary, context, defaults = prepare(args, thinking)
    with options(*FIELDS):
        params = defaults.fill(SamplingParams(**sampling))
    check_constraint(args, params, Constraints(tokenizer, vocabulary))
    with load(args, max_num_seqs=1, max_model_len=context, tokenizer=tokenizer, **chosen) as llm:
        conversation = Conversation(
            llm, system=args.system, params=params, max_tokens=args.max_tokens, thinking=thinking
        )
        sources = (defaults.model, "from the model's generation_config.json"), (defaults.added, "onegraph's default")
        for fields, source in sources if params.sampling else ():
            left = {name: value for name, value in fields.items() if name not in sampling}
            if left:
                named = ", ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in left.items())
                say(f"[{named}: {source}; these options override it]")
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


def prepare(args: argparse.Namespace, thinking: Thinking) -> tuple[Tokenizer, int, int, SamplingDefaults]:
    """The model's tokenizer, the size of its vocabulary, the length of the context, and how the model samples by
    default. Raises ValueError, before any weight is read, for what no turn could do."""
    from onegraph.api.conversation import reserved_tokens
    from onegraph.api.defaults import SamplingDefaults
    from onegraph.api.memory import MAX_MODEL_LEN
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.models.load import parse_config

    with open_model(args.model) as checkpoint:
        config = parse_config(checkpoint.config)
        largest = config.max_positions
        tokenizer = Tokenizer(checkpoint)
        defaults = SamplingDefaults.of(checkpoint)
    if args.max_model_len is not None and args.max_model_len > largest:
        raise UsageError(f"--max-model-len {args.max_model_len}: the model allows at most {largest}")
    if tokenizer.template is None:
        raise UsageError(f"{args.model}: the model has no chat template; use 'onegraph generate'")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    with options("thinking:"):
        shortest = len(tokenizer.chat([*system, {"role": "user", "content": "Hi"}], thinking))
    context = args.max_model_len or min(largest, MAX_MODEL_LEN)
    if shortest + (room := reserved_tokens(args.max_tokens, context)) > context:
        raise UsageError(
            f"the context of {context} tokens leaves {context - room} for the question, and 'Hi' in the chat template "
            f"takes {shortest}; give a larger --max-model-len (at most {largest}), or a shorter "
            "--system"
        )
    return tokenizer, config.vocab_size, context, defaults


def respond(llm: LLM, conversation: Conversation, line: str) -> bool:
    """Runs a line; False if the program is to end. Raises ValueError."""
    if not line.strip():
        return True
    if not line.startswith("/"):
        answer(llm, conversation, line)
        return True
    command, _, argument = line.strip().partition(" ")
    if command == "/save":
        save(conversation, argument.strip())
    elif command not in ("/reset", "/help", "/exit") or argument:
        raise UsageError(
            f"{one_line(line, 60)}: unknown command; /help lists the commands, a leading space sends it as text"
        )
    elif command == "/reset":
        conversation.reset()
        say("[a new conversation]")
    elif command == "/help":
        say(COMMANDS)
    return command != "/exit"


def answer(llm: LLM, conversation: Conversation, text: str) -> None:
    """Prints the answer until Ctrl-C."""
    with options("max_model_len"), stoppable() as stopped, closing(conversation.ask(text, stopped)) as pieces:
        if dropped := conversation.dropped:
            turns = f"{len(dropped)} turn{'s' if dropped[1:] else ''}"
            first = one_line(dropped[0], 60)
            say(f"[the context of {llm.max_model_len} tokens is full: dropped {turns}, from {first!r} on]")
        written = show(pieces)
    report(llm.stats, 1 if written or not stopped() else 0, llm.device, llm.engine.executor.speculation is not None)
    if stopped():
        if not written:
            say("[stopped before the answer began; the question was removed]")
    elif 1 + llm.stats.decode_tokens >= conversation.budget:
        say(f"[stopped after {conversation.budget} tokens: --max-tokens or the context allows no more]")


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
    say("[/help lists the commands; Ctrl-D ends the program]")
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
            say("\n[Ctrl-C again, or Ctrl-D, ends the program]")
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
    """Prints a message on stderr."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
