"""`onegraph generate`: text from a model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from onegraph.cli.batch import Request, read_batch, rows
from onegraph.cli.common import (
    MODEL,
    Progress,
    UsageError,
    add_device,
    add_dtype,
    add_gpus,
    add_json,
    number,
    open_model,
    options,
    pick_device,
    print_json,
    read_text,
    shown,
    tell_exact_layers,
    tell_skipped,
)
from onegraph.cli.sampling import add_sampling, sampling_of

if TYPE_CHECKING:
    import torch

    from onegraph.api.llm import LLM
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.engine.params import SamplingParams, Stats

EPILOG = """\
examples:
  onegraph generate out/smollm2-4bit --prompt "What is the capital of Japan?"
  onegraph generate out/smollm2-4bit --raw --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  onegraph generate out/smollm2-4bit --kv turboquant:k3v4 --prompt "Tell me a long story."
  onegraph generate out/smollm2-4bit --batch questions.txt --json > answers.json
  onegraph generate out/smollm2-4bit --batch requests.jsonl > answers.jsonl
  onegraph generate out/smollm2-4bit --prompt "Three colours:" --json-schema colours.json --stop $'\\n\\n'
  git diff | onegraph generate out/smollm2-4bit --prompt -

--chat (the default where the model has a chat template) asks a question, --raw continues the text as it stands.
A line of a .jsonl file is {"prompt": TEXT} or {"messages": [...]}, with an "id", "thinking" (true or false) and fields
of SamplingParams (docs/python.md) that go over the options; answers come as a JSON object a line, in the same order.
The same seed gives the same text. On a GPU the decode step is one CUDA graph; --capture off runs the same code
eagerly, --capture split breaks the graph around attention. --kv stores keys and values as TurboQuant codes
(docs/turboquant.md).
"""
CAPTURE: dict[str, bool | Literal["split"] | None] = {"auto": None, "on": True, "off": False, "split": "split"}
DEFAULT_TOKENS = 256


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="text from a model, with the decode step as one CUDA graph where there is a GPU",
        description="Generates text from a model (a directory or a .gguf file), quantized or not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt; '-' reads it from stdin")
    source.add_argument(
        "--batch", metavar="FILE", help="a file with a prompt a line, or a .jsonl file; all run together"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    style.add_argument("--raw", action="store_true", help="continue the prompt as it stands")
    add_thinking(parser)
    parser.add_argument(
        "--max-tokens",
        type=number(int, 1, 1 << 24),
        metavar="N",
        help=f"generate at most N tokens (default: {DEFAULT_TOKENS}, or what the context leaves)",
    )
    add_sampling(parser)
    add_engine(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Where and how the model runs: what `engine` reads."""
    parser.add_argument(
        "--capture",
        choices=tuple(CAPTURE),
        default="auto",
        help="one CUDA graph for the step, none, or one split around attention (default: auto)",
    )
    parser.add_argument(
        "--kv",
        default="exact",
        metavar="KV",
        help="the KV cache: exact (default), turboquant:4, turboquant:k3v4, ...; of DeepSeek-V4: exact or fp8",
    )
    add_draft(parser)
    add_gpus(parser)
    add_device(parser)
    add_dtype(parser, int8=True)


def add_thinking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thinking",
        choices=("on", "off"),
        help="whether the model thinks before it answers, where its template has a switch (default: the template's)",
    )


def thinking_of(args: argparse.Namespace) -> bool | None:
    """What `add_thinking`'s option says, as `LLM.chat` takes it."""
    return None if args.thinking is None else args.thinking == "on"


def add_draft(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        metavar="WHO",
        help="who drafts tokens that the model checks several at once: 'ngram' (the text itself), 'eagle:PATH' (an "
        "EAGLE-3 head), 'mtp' (the draft layers of DeepSeek-V4 or Qwen3.5), or a smaller model directory of the same "
        "tokens; the text stays the same but for near-ties",
    )
    parser.add_argument(
        "--draft-tokens",
        type=draft_tokens,
        metavar="K",
        help="drafts to check at once, 1 to 7, or 'auto' (default) for as many as pay",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="a text is the same, bit by bit, whatever is drafted and whatever is computed beside it; steps take "
        "longer",
    )


def draft_tokens(text: str) -> int | str:
    """An argparse type."""
    if text == "auto":
        return text
    if text not in {str(count) for count in range(1, 8)}:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor an integer from 1 to 7")
    return int(text)


def drafted(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM that `add_draft`'s options name."""
    if args.draft is None and args.draft_tokens is not None:
        raise UsageError("--draft-tokens counts what --draft drafts; say who drafts, e.g. --draft ngram")
    drafts = {} if args.draft is None else {"draft": args.draft, "draft_tokens": args.draft_tokens or "auto"}
    return {"batch_invariant": args.batch_invariant, **drafts}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM that `add_engine`'s options name. Raises ValueError for what this machine cannot do."""
    from onegraph.formats.turboquant import parse_kv

    device = pick_device(args.device)
    if args.capture in ("on", "split") and device.type != "cuda":
        raise UsageError(f"--capture {args.capture} needs a GPU, the device is {device}; use --capture off or auto")
    if args.kv != "fp8":
        with options("kv"):
            parse_kv(args.kv)
    chosen = {"device": device, "dtype": args.dtype, "kv": args.kv}
    return chosen | {
        "gpus": args.gpus or 1,
        "split": args.split_mode,
        "capture": CAPTURE[args.capture],
        **drafted(args),
    }


def load(args: argparse.Namespace, **chosen: Any) -> LLM:
    """The model of a command, with a bar for who waits, and none in logs: what was asked for is text."""
    from onegraph.api.llm import LLM

    bar = Progress(loading="byte") if sys.stderr.isatty() else contextlib.nullcontext()
    names = "gpus", "split", "kv", "draft:", "batch_invariant:", "max_context", "cache_tokens:"
    with options(*names), bar as loading:
        llm = LLM(args.model, progress=loading, **chosen)
    tell_exact_layers(args.kv, llm.engine.kv)
    tell_skipped(llm.skipped)
    return llm


def run(args: argparse.Namespace) -> int:
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.engine.params import SamplingParams
    from onegraph.formats.turboquant import parse_kv
    from onegraph.models.load import parse_config

    lines = args.batch is not None and args.batch.endswith(".jsonl") and not args.json
    if args.logprobs is not None and not (args.json or lines):
        raise UsageError(f"--logprobs {args.logprobs}: only JSON has room for them; add --json")
    place = engine(args)
    kv = None if args.kv == "fp8" else parse_kv(args.kv)
    requests, chosen = requests_of(args), sampling_of(args)
    with open_model(args.model) as checkpoint:
        config = parse_config(checkpoint.config)
        tokenizer = Tokenizer(checkpoint)
    context = config.max_positions
    chat = args.chat or (tokenizer.template is not None and not args.raw)
    prompts = [encoded(tokenizer, request, chat, thinking_of(args)) for request in requests]
    asked = [{"max_tokens": args.max_tokens} | chosen | request.fields for request in requests]
    check_stops(requests, config.vocab_size)
    budgets = [
        budget(request, len(prompt), fields["max_tokens"], context)
        for request, prompt, fields in zip(requests, prompts, asked, strict=True)
    ]
    params = [SamplingParams(**fields | {"max_tokens": tokens}) for fields, tokens in zip(asked, budgets, strict=True)]
    check_constraints(requests, params, tokenizer, config.vocab_size)
    needed = max(len(prompt) + tokens for prompt, tokens in zip(prompts, budgets, strict=True))
    if kv is not None:  # a short answer shall not make the window of exact tokens an error
        needed = max(needed, min(kv.window, context))
    live = len(prompts) == 1 and params[0].n == 1 and params[0].logprobs is None and not args.json and not lines
    rows_at_once = min(sum(each.n for each in params), 64)
    llm = load(args, max_batch=rows_at_once, max_context=needed, tokenizer=tokenizer, **place)
    with llm:
        if live:
            show(llm.stream(prompts[0], params[0]))
        else:
            tell = None if args.json else Answers(requests, lines).take
            completions = llm.generate(prompts, params, on_done=tell)
        stats, stored = llm.stats, llm.engine.kv
    if args.json:
        print_json(
            {
                "model": args.model,
                "device": str(place["device"]),
                "dtype": llm.weights,
                "kv": stored,
                "mode": stats.mode,
                "prefill_tokens_per_second": round(stats.prefill_tokens_per_second, 1),
                "decode_tokens_per_second": round(stats.decode_tokens_per_second, 1),
                "decode_steps": stats.decode_steps,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "outputs": [
                    row for request, made in zip(requests, completions, strict=True) for row in rows(request, made)
                ],
            }
        )
        return 0
    report(stats, sum(each.n for each in params), place["device"], args.draft is not None)
    return 0


def report(stats: Stats, prompts: int, device: torch.device, drafts: bool) -> None:
    """The line behind what was generated: tokens of prompts, written, and written per second; where somebody drafts,
    how many drafts were right."""
    sys.stdout.flush()
    read = f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts right, " if stats.drafted_tokens else None
    kept = (read or "no drafts read, ") if drafts else ""
    print(
        f"[{stats.prefill_tokens + stats.shared_tokens} prompt tokens, {prompts + stats.decode_tokens} new, "
        f"{stats.decode_tokens_per_second:.1f} tokens/s, {kept}{stats.mode} on {device}]",
        file=sys.stderr,
        flush=True,
    )


class Answers:
    """Prints each answer as soon as it and all before it are done: prompts with their answers, or `lines` of JSON."""

    def __init__(self, requests: list[Request], lines: bool) -> None:
        self._requests, self._lines = requests, lines
        self._waiting: dict[int, Any] = {}
        self._next = 0

    def take(self, number: int, completion: Any) -> None:
        self._waiting[number] = completion
        while self._next in self._waiting:
            self._print(self._requests[self._next], self._waiting.pop(self._next))
            self._next += 1

    def _print(self, request: Request, completion: Any) -> None:
        for row in rows(request, completion):
            if self._lines:
                print_json(row)
            else:
                print(shown(f"> {request.prompt}\n{row['text'].strip()}\n"), flush=True)


def encoded(tokenizer: Tokenizer, request: Request, chat: bool, thinking: bool | None) -> list[int]:
    """Token ids of a prompt, as it stands or as a question in the chat template; what the request says of `thinking`
    goes over what the command line does. Raises ValueError."""
    from onegraph.api.chat import TemplateError

    prompt, thinking = request.prompt, thinking if request.thinking is None else request.thinking
    try:
        if isinstance(prompt, str) and chat:
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            return tokenizer.chat(prompt, thinking)
        if thinking is not None:
            raise UsageError("thinking is a switch of the chat template, and the prompt is continued as it stands")
        return tokenizer.encode(prompt)
    except TemplateError as error:
        cure = "try --raw" if tokenizer.template else "use --raw to continue the prompt as it stands"
        raise UsageError(f"{request.where}: {error}" + (f"; {cure}" if thinking is None else "")) from None
    except ValueError as error:
        raise UsageError(f"{request.where}: {error}") from None


def check_stops(requests: list[Request], vocabulary: int) -> None:
    """Raises UsageError for a stop token that the model cannot write."""
    for request in requests:
        stops = request.fields.get("stop", ())
        if (token := next((s for s in stops if isinstance(s, int) and s >= vocabulary), None)) is not None:
            raise UsageError(f"{request.where}: stop: got token {token}; allowed are 0 to {vocabulary - 1}, and texts")


def check_constraints(
    requests: list[Request], params: list[SamplingParams], tokenizer: Tokenizer, vocabulary: int
) -> None:
    """Raises UsageError for a schema or regex of a line that cannot be read, before the model is."""
    from onegraph.api.constraint import Constraints

    constraints = Constraints(tokenizer, vocabulary)
    for request, each in zip(requests, params, strict=True):
        if each.constrained and request.fields.keys() & {"json_schema", "regex"}:
            try:
                constraints(each)
            except ValueError as error:
                raise UsageError(f"{request.where}: {error}") from None


def requests_of(args: argparse.Namespace) -> list[Request]:
    """What the command line asks for. Raises ValueError where there is no prompt."""
    if args.batch is not None:
        return read_batch(args.batch)
    text = read_text("-") if args.prompt == "-" else args.prompt
    if not text:
        raise UsageError("--prompt: the prompt is empty")
    return [Request("--prompt", text, {"prompt": text})]


def budget(request: Request, length: int, asked: int | None, context: int) -> int:
    """How many tokens to generate behind a prompt of `length` tokens. Raises ValueError where they do not fit."""
    if length >= context:
        raise UsageError(
            f"{request.where}: it has {length} tokens, the model's context is {context}; shorten the prompt"
        )
    if length == 0:
        raise UsageError(f"{request.where}: it gives no tokens")
    if asked is None:
        return min(DEFAULT_TOKENS, context - length)
    if length + asked > context:
        option = "max_tokens" if "max_tokens" in request.fields else "--max-tokens"
        raise UsageError(
            f"{request.where}: it has {length} tokens, and {option} {asked} does not fit the model's context of "
            f"{context}; at most {context - length} are possible"
        )
    return asked


def show(pieces: Iterable[str]) -> str:
    """Prints text while it comes, without the blanks that it begins with; returns all of it as it came."""
    text = ""
    for piece in pieces:
        piece = piece if text else piece.lstrip()
        text += piece
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    if text:
        print(flush=True)
    return text
