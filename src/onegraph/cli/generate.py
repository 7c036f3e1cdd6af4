"""`onegraph generate`: text from a model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from onegraph.api.chat import EFFORTS, Thinking
from onegraph.cli.batch import Request, read_batch, rows
from onegraph.cli.common import (
    CONTEXT,
    MODEL,
    Options,
    Progress,
    UsageError,
    add_device,
    add_dtype,
    add_gpu_share,
    add_gpus,
    add_json,
    gpus_of,
    import_engine,
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
from onegraph.cli.sampling import FIELDS, add_sampling, check_constraint, sampling_of

if TYPE_CHECKING:
    import torch

    from onegraph.api.llm import LLM
    from onegraph.api.token_text import TokenTexts
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.engine.params import SamplingParams, Stats

EPILOG = """\
examples:
  onegraph generate out/smollm2-4bit --prompt "What is the capital of Japan?"
  onegraph generate out/smollm2-4bit --raw --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  onegraph generate out/smollm2-4bit --kv-cache-dtype turboquant:k3v4 --prompt "Tell me a long story."
  onegraph generate out/smollm2-4bit --batch questions.txt --json > answers.json
  onegraph generate out/smollm2-4bit --batch requests.jsonl > answers.jsonl
  onegraph generate out/smollm2-4bit --prompt "Three colours:" --json-schema colours.json --stop $'\\n\\n'
  git diff | onegraph generate out/smollm2-4bit --prompt -

--chat (default if the model has a chat template) asks a question; --raw continues the text. A line of a .jsonl file is
{"prompt": TEXT} or {"messages": [...]}, with an "id", "thinking" (true, false, an effort) and fields of SamplingParams
(docs/reference/python.md), which override the options. Answers are JSON lines in the same order. The same seed gives
the same text. On a GPU the decode step is one CUDA graph; --capture off runs the same code eagerly, --capture split
breaks the graph around attention. --kv-cache-dtype quantizes keys and values (docs/guides/long-context.md).
"""
CAPTURE: dict[str, bool | Literal["split"] | None] = {"auto": None, "on": True, "off": False, "split": "split"}
DEFAULT_TOKENS = 256  # as of LLM.generate


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text",
        description="Generates text with a model, quantized or not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="prompt; '-' reads it from stdin")
    source.add_argument(
        "--batch",
        metavar="FILE",
        help="file with one prompt per line, or a .jsonl file; '-': either, from stdin; all prompts run as one batch",
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="apply the model's chat template [if it has one]")
    style.add_argument("--raw", action="store_true", help="continue the prompt without a chat template")
    add_thinking(parser)
    parser.add_argument(
        "--max-tokens",
        type=number(int, 1, 1 << 24),
        metavar="N",
        help=f"maximum number of tokens of an answer [{DEFAULT_TOKENS}, or what the context leaves]",
    )
    parser.add_argument(
        "--max-model-len",
        type=CONTEXT,
        metavar="N",
        help="maximum number of tokens of prompt and answer, for which memory is taken [what the prompts need]",
    )
    add_sampling(parser)
    add_engine(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_engine(parser: argparse.ArgumentParser) -> Options:
    """Where and how the model runs: what `engine` reads. Returns the group of these options."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--capture",
        choices=tuple(CAPTURE),
        default="auto",
        help="CUDA graph of the decode step: on, off, split around attention, or on if there is a GPU [auto]",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="exact",
        metavar="DTYPE",
        help="KV cache: exact, turboquant:4, turboquant:k3v4, ...; with latent attention (DeepSeek) also fp8 [exact]",
    )
    add_gpu_share(
        group,
        "share of the GPU's memory that weights and KV cache fill, above 0 to 1 [the cache has a full context for each "
        "sequence, or what fits]",
    )
    group.add_argument(
        "--expert-memory",
        type=number(float, 0, 1e6, open_low=True),
        metavar="GB",
        help="GPU memory for routed experts in GB; the others stay in host memory, from where each step copies those "
        "that it needs [all on the GPU]",
    )
    add_draft(group)
    add_gpus(group)
    add_device(group)
    add_dtype(group, int8=True)
    return group


def add_thinking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thinking",
        choices=("on", "off", *EFFORTS),
        metavar="HOW",
        help=f"turn thoughts on or off, or an effort ({', '.join(EFFORTS)}), if the chat template has a switch "
        "[the template's default]",
    )


def thinking_of(args: argparse.Namespace) -> Thinking:
    """What `add_thinking`'s option says, as `LLM.chat` takes it."""
    given: Thinking = {"on": True, "off": False}.get(args.thinking, args.thinking)
    return given


def add_draft(parser: Options) -> None:
    parser.add_argument(
        "--speculative",
        metavar="METHOD",
        help="draft method for speculative decoding: 'ngram', 'eagle:PATH' (an EAGLE-3 head), 'mtp' (draft layers "
        "of DeepSeek, GLM, Nemotron 3, Qwen3-Next or Qwen3.5), or a draft model, named like MODEL; the text stays the "
        "same up to near-ties [no drafts]",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=draft_tokens,
        metavar="K",
        help="number of drafts per verify pass, 1 to 7, or 'auto' [auto]",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="identical results bit by bit in any batch and with any drafts; steps take longer",
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
    method, count = args.speculative, args.num_speculative_tokens
    if method is None and count is not None:
        raise UsageError("--num-speculative-tokens needs --speculative; give a method, e.g. --speculative ngram")
    drafts = {} if method is None else {"speculative": method, "num_speculative_tokens": count or "auto"}
    return {"batch_invariant": args.batch_invariant, **drafts}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM that `add_engine`'s options name. Raises ValueError for what this machine cannot do."""
    from onegraph.api.deprecated import public_names
    from onegraph.api.llm import PUBLIC
    from onegraph.formats.turboquant import parse_kv

    device = pick_device(args.device)
    if args.capture in ("on", "split") and device.type != "cuda":
        raise UsageError(f"--capture {args.capture} needs a GPU, the device is {device}; use --capture off or auto")
    if args.kv_cache_dtype != "fp8":
        with options("kv_cache_dtype"), public_names(PUBLIC):
            parse_kv(args.kv_cache_dtype)
    chosen = {"device": device, "dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype}
    return chosen | {
        **gpus_of(args),
        "capture": CAPTURE[args.capture],
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "expert_memory": args.expert_memory,
        **drafted(args),
    }


def engine_options(args: argparse.Namespace) -> AbstractContextManager[None]:
    """`options` of the arguments of LLM that options of the command name."""
    names = "tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype", "max_model_len", "max_num_seqs"
    more = "batch_invariant", "kv_cache_tokens", "kv_offloading_size", "expert_memory", "gpu_memory_utilization"
    return options("speculative:", *(name for name in (*names, *more) if hasattr(args, name)))


def load(
    args: argparse.Namespace,
    model: str | None = None,
    check: Callable[[], None] = lambda: None,
    quiet: bool = False,
    **chosen: Any,
) -> LLM:
    """The model of a command (`args.model`), with a progress bar on a terminal. check: called while it is read; what it
    raises ends that. quiet: without the bar and the lines about the model."""
    from onegraph.api.llm import LLM

    bar = Progress(loading="byte") if sys.stderr.isatty() and not quiet else contextlib.nullcontext()
    with engine_options(args), bar as loading:

        def progress(what: str, done: int, total: int) -> None:
            check()
            if loading is not None:
                loading(what, done, total)

        llm = LLM(args.model if model is None else model, progress=progress, **chosen)
    if not quiet:
        tell_exact_layers(args.kv_cache_dtype, llm.engine.kv)
        tell_skipped(llm.skipped)
    return llm


def run(args: argparse.Namespace) -> int:
    import_engine(args, "tokenizers", *(() if args.raw else ("templates",)))
    from onegraph.api.token_text import TokenTexts
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.engine.params import SamplingParams
    from onegraph.formats.turboquant import parse_kv
    from onegraph.models.load import parse_config

    place = engine(args)
    kv = None if args.kv_cache_dtype == "fp8" else parse_kv(args.kv_cache_dtype)
    (requests, lines), chosen = requests_of(args), sampling_of(args)
    lines = lines and not args.json
    if args.logprobs is not None and not (args.json or lines):
        raise UsageError(f"--logprobs {args.logprobs}: needs JSON output; add --json")
    with open_model(args.model) as checkpoint:
        config = parse_config(checkpoint.config)
        tokenizer = Tokenizer(checkpoint)
    texts, context = TokenTexts(tokenizer), config.max_positions
    if args.max_model_len is not None:
        if args.max_model_len > context:
            raise UsageError(f"--max-model-len: got {args.max_model_len}; the model's context is {context}")
        context = args.max_model_len
    chat = args.chat or (tokenizer.template is not None and not args.raw)
    prompts = [encoded(tokenizer, request, chat, thinking_of(args)) for request in requests]
    asked = [{"max_tokens": args.max_tokens} | chosen | request.fields for request in requests]
    check_stops(requests, config.vocab_size)
    budgets = [
        budget(request, len(prompt), fields["max_tokens"], context)
        for request, prompt, fields in zip(requests, prompts, asked, strict=True)
    ]
    with options(*(f"{name}:" for name in FIELDS)):
        params = [SamplingParams(**f | {"max_tokens": tokens}) for f, tokens in zip(asked, budgets, strict=True)]
    check_constraints(args, requests, params, tokenizer, config.vocab_size)
    needed = args.max_model_len or max(len(prompt) + tokens for prompt, tokens in zip(prompts, budgets, strict=True))
    if kv is not None:  # a short answer shall not make the window of exact tokens an error
        needed = max(needed, min(kv.window, context))
    live = len(prompts) == 1 and params[0].n == 1 and params[0].logprobs is None and not args.json and not lines
    rows_at_once = min(sum(each.n for each in params), 64)
    llm = load(args, max_num_seqs=rows_at_once, max_model_len=needed, tokenizer=tokenizer, **place)
    with llm:
        if live:
            show(llm.stream(prompts[0], params[0]))
        else:
            tell = None if args.json else Answers(requests, lines, texts).take
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
                    row
                    for request, made in zip(requests, completions, strict=True)
                    for row in rows(request, made, texts)
                ],
            }
        )
        return 0
    report(stats, sum(each.n for each in params), place["device"], args.speculative is not None)
    return 0


def report(stats: Stats, prompts: int, device: torch.device, drafts: bool) -> None:
    """Prints the summary: prompt tokens, new tokens, tokens per second; with speculative decoding, accepted drafts."""
    sys.stdout.flush()
    read = f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts accepted, " if stats.drafted_tokens else None
    kept = (read or "no drafts, ") if drafts else ""
    print(
        f"[{stats.prefill_tokens + stats.shared_tokens} prompt tokens, {prompts + stats.decode_tokens} new, "
        f"{stats.decode_tokens_per_second:.1f} tokens/s, {kept}{stats.mode} on {device}]",
        file=sys.stderr,
        flush=True,
    )


class Answers:
    """Prints each answer as soon as it and all before it are done: prompts with their answers, or `lines` of JSON."""

    def __init__(self, requests: list[Request], lines: bool, texts: TokenTexts) -> None:
        self._requests, self._lines, self._texts = requests, lines, texts
        self._waiting: dict[int, Any] = {}
        self._next = 0

    def take(self, number: int, completion: Any) -> None:
        self._waiting[number] = completion
        while self._next in self._waiting:
            self._print(self._requests[self._next], self._waiting.pop(self._next))
            self._next += 1

    def _print(self, request: Request, completion: Any) -> None:
        for row in rows(request, completion, self._texts):
            if self._lines:
                print_json(row)
            else:
                print(shown(f"> {request.prompt}\n{row['text'].strip()}\n"), flush=True)


def encoded(tokenizer: Tokenizer, request: Request, chat: bool, thinking: Thinking) -> list[int]:
    """Token ids of a prompt, unchanged or as a question in the chat template; what the request says of `thinking`
    goes over what the command line does. Raises ValueError."""
    from onegraph.api.chat import TemplateError, ThinkingError

    prompt, thinking = request.prompt, thinking if request.thinking is None else request.thinking
    try:
        if isinstance(prompt, str) and chat:
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            return tokenizer.chat(prompt, thinking)
        if thinking is not None:
            raise UsageError(
                "thinking needs a chat template, and --raw continues the prompt without one; leave one of them out"
            )
        return tokenizer.encode(prompt)
    except TemplateError as error:
        if isinstance(error, ThinkingError) and request.thinking is None:
            raise UsageError(f"--{error}") from None
        cure = "try --raw" if tokenizer.template else "use --raw to continue the prompt without a template"
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
    args: argparse.Namespace,
    requests: list[Request],
    params: list[SamplingParams],
    tokenizer: Tokenizer,
    vocabulary: int,
) -> None:
    """Raises UsageError for a schema or regex of a line or option that cannot be read, before the model is."""
    from onegraph.api.constraint import Constraints

    constraints, own = Constraints(tokenizer, vocabulary), {"json_schema", "regex", "grammar"}
    if general := next((p for r, p in zip(requests, params, strict=True) if not r.fields.keys() & own), None):
        check_constraint(args, general, constraints)
    for request, each in zip(requests, params, strict=True):
        if each.constrained and request.fields.keys() & own:
            try:
                constraints(each)
            except ValueError as error:
                raise UsageError(f"{request.where}: {error}") from None


def requests_of(args: argparse.Namespace) -> tuple[list[Request], bool]:
    """What the command line asks for, and whether that is JSON Lines. Raises ValueError where there is no prompt."""
    if args.batch is not None:
        return read_batch(args.batch)
    text = read_text("-") if args.prompt == "-" else args.prompt
    if not text:
        raise UsageError("--prompt: the prompt is empty")
    return [Request("--prompt", text, {"prompt": text})], False


def budget(request: Request, length: int, asked: int | None, context: int) -> int:
    """How many tokens to generate behind a prompt of `length` tokens. Raises ValueError where they do not fit."""
    if length >= context:
        raise UsageError(
            f"{request.where}: it has {length} tokens, the model's context is {context}; shorten the prompt"
        )
    if length == 0:
        raise UsageError(f"{request.where}: the prompt has no tokens; give some text")
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
