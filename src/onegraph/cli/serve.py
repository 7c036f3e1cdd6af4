"""`onegraph serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import BATCH, CONTEXT, MODEL, UsageError, import_engine, number, one_line, open_model, remark
from onegraph.cli.generate import add_engine, engine, engine_options, load
from onegraph.formats.extras import install

if TYPE_CHECKING:
    from onegraph.api.memory import Memory
    from onegraph.serve.models import Model
    from onegraph.serve.worker import Worker

EPILOG = f"""\
examples:
  onegraph serve out/smollm2-4bit
  onegraph serve out/smollm2-4bit --host 0.0.0.0 --port 8080 --max-num-seqs 32 --kv-cache-dtype turboquant:4
  onegraph serve small=out/smollm2-4bit out/qwen3-8b-3bit --keep-alive 600
  ONEGRAPH_API_KEY=secret onegraph serve out/smollm2-4bit

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "smollm2-4bit", "messages": [{{"role": "user", "content": "What is the capital of Japan?"}}]}}'

Any client of OpenAI's API works with base_url http://HOST:PORT/v1 (docs/guides/serve.md). Requests are batched
continuously. Install the server's packages, and those for JSON schemas,
{install("serve", "constraints")}
"""


LOG = logging.getLogger(__name__)
LEVELS = "error", "warning", "info", "debug"
# Seconds after which a thread gives the interpreter up: the engine's asks for it once a step, every 1 to 3 ms, and by
# default would wait up to 5 for the thread that writes the streams.
SWITCH = 0.0002
# Of a page: scheme, host (in brackets where it is an IPv6 address) and port
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?/?")
DEFAULT_PORTS = {"http": 80, "https": 443}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="OpenAI-compatible server",
        description="Serves one or several models over HTTP with OpenAI's API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="[NAME=]MODEL",
        help=f"{MODEL}; NAME: in the API [the last part of MODEL]",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    server.add_argument(
        "--port", type=number(int, 0, 65535), default=8000, metavar="N", help="port; 0 for any free one [8000]"
    )
    server.add_argument(
        "--api-key", metavar="KEY", help="key that clients must send [$ONEGRAPH_API_KEY, which `ps` does not show]"
    )
    server.add_argument(
        "--allow-origin",
        type=origin,
        action="append",
        default=[],
        metavar="URL",
        help="origin of web pages that may send requests (CORS); repeatable; '*' for all [none]",
    )
    server.add_argument(
        "--allow-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="additional name in the Host header, for a proxy on this machine; repeatable [IP addresses and localhost; "
        "checked on loopback addresses without an API key]",
    )
    server.add_argument(
        "--queue",
        type=number(int, 0, 1 << 16),
        default=256,
        metavar="N",
        help="maximum number of waiting requests [256]",
    )
    server.add_argument(
        "--max-body",
        type=number(int, 1, 1 << 30),
        default=4 << 20,
        metavar="N",
        help="maximum bytes of a request body [4 MiB]",
    )
    server.add_argument(
        "--grace",
        type=number(int, 0, 3600),
        default=5,
        metavar="S",
        help="seconds for running requests at shutdown [5]",
    )
    server.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="least severe messages on stderr; debug also has a line per request [info]",
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--served-model-name", type=model_name, metavar="NAME", help="same as NAME=MODEL, for one model"
    )
    models.add_argument(
        "--max-loaded-models",
        type=number(int, 1, 1 << 10),
        default=1,
        metavar="N",
        help="maximum number of models in memory; for another one the least recently used is unloaded [1]",
    )
    models.add_argument(
        "--keep-alive",
        type=number(float, 0, 1e9, open_low=True),
        metavar="S",
        help="seconds without a request after which a model is unloaded [never]",
    )
    models.add_argument(
        "--lora-modules",
        type=adapter,
        action="append",
        default=[],
        metavar="NAME=DIRECTORY",
        help="LoRA adapter as peft saves it, which requests choose by NAME as their model; repeatable",
    )
    running = add_engine(parser)
    running.add_argument(
        "--max-num-seqs", type=BATCH, default=16, metavar="N", help="maximum number of sequences in a batch [16]"
    )
    running.add_argument(
        "--max-model-len",
        type=CONTEXT,
        metavar="N",
        help="maximum number of tokens of prompt and answer [the model's, at most 4096]",
    )
    running.add_argument(
        "--kv-cache-tokens",
        type=number(int, 1, 1 << 30),
        metavar="N",
        help="number of tokens in the KV cache [max-num-seqs x max-model-len, or what fits the machine]",
    )
    running.add_argument(
        "--kv-offloading-size",
        type=number(float, 0, 1e6, open_low=True),
        metavar="GIB",
        help="GiB of host memory for pages that the prefix cache evicts, which later prompts copy back [none]",
    )
    running.add_argument(
        "--prepare",
        choices=("background", "all", "plain"),
        default="background",
        help="step variants to capture at startup: all, or plain ones, without penalties, constraints, min-p and "
        "log-probabilities; plain captures the others on first use, which delays all requests, background also while "
        "no request runs [background]",
    )
    parser.set_defaults(run=run)


def origin(text: str) -> str:
    """An argparse type: an origin as browsers write it, with which it is compared: lower case, no default port."""
    if text in ("*", "null"):
        return text
    found = ORIGIN.fullmatch(text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"got {one_line(repr(text), 60)}; allowed is scheme://host or scheme://host:port without a path, as in "
            "https://chat.example.org, or '*'"
        )
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{int(port)}" if port and int(port) != DEFAULT_PORTS.get(scheme) else "")


def host_name(text: str) -> str:
    """An argparse type: a DNS name, in lower case."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        raise argparse.ArgumentTypeError(f"got {one_line(repr(text), 60)}; allowed is a name without port or path")
    return text.lower().rstrip(".")


def model_name(text: str) -> str:
    """An argparse type."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; leave it out for the last part of MODEL")
    return text


def adapter(text: str) -> tuple[str, str]:
    """An argparse type: NAME=DIRECTORY."""
    name, _, folder = text.partition("=")
    if not (name.strip() and folder):
        raise argparse.ArgumentTypeError(f"got {one_line(repr(text), 60)}; allowed is NAME=DIRECTORY of an adapter")
    return name, folder


def names_of(args: argparse.Namespace) -> dict[str, str]:
    """The paths of the models by their names. Raises UsageError."""
    found: dict[str, str] = {}
    several = len(args.models) > 1
    for option, given in (("--served-model-name", args.served_model_name), ("--lora-modules", args.lora_modules)):
        if several and given:
            cure = "write NAME=MODEL" if option == "--served-model-name" else "serve the model of the adapters alone"
            raise UsageError(f"{option}: it is for one model, {len(args.models)} are given; {cure}")
    for word in args.models:
        name, equals, path = word.partition("=")
        if not equals or os.path.exists(word):
            name, path = Path(os.path.abspath(word)).name, word  # of '.', too
        if not (name.strip() and path):
            raise UsageError(f"MODEL: got {one_line(repr(word), 60)}; allowed is MODEL or NAME=MODEL")
        if name in found:
            raise UsageError(f"two models have the name {name!r}; give one of them another: NAME={path}")
        found[name] = path
    if args.served_model_name:
        found = dict(zip([args.served_model_name], found.values(), strict=True))
    adapters = {name for name, _ in args.lora_modules}
    if adapters & found.keys() or len(adapters) < len(args.lora_modules):
        raise UsageError("--lora-modules: two models have the same name; give each adapter a name of its own")
    return found


def served(args: argparse.Namespace, place: dict[str, Any], name: str, path: str) -> Model:
    """A model that the command names, which is not loaded yet; the memory that it takes is printed where there are
    several. Raises ValueError for what shows without loading it."""
    from onegraph.api.memory import plan_load
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.serve.models import Model
    from onegraph.serve.worker import Worker

    sizes = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.max_model_len,
        "kv_cache_tokens": args.kv_cache_tokens,
        "kv_offloading_size": args.kv_offloading_size,
    }
    adapters = dict(args.lora_modules)

    def load_worker(check: Callable[[], None], announce: Callable[[Memory], None]) -> Worker:
        def on_memory(memory: Memory) -> None:
            LOG.info("%s", memory)
            announce(memory)

        LOG.info("loading %s", path)
        with open_model(path) as checkpoint:
            writer = Tokenizer(checkpoint)
        quiet = not LOG.isEnabledFor(logging.INFO)
        llm = load(args, path, check, quiet, adapters=adapters, **sizes, **place, on_memory=on_memory)
        return Worker(llm, writer, queue=args.queue, prepare=args.prepare)

    with engine_options(args), open_model(path) as checkpoint:
        gpus = max(place.get(each) or 1 for each in ("tensor_parallel_size", "pipeline_parallel_size", "gpus"))
        plan = plan_load(
            checkpoint, place["device"], dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype, gpus=gpus,
            adapters={each: Path(folder) for each, folder in adapters.items()}, expert_memory=args.expert_memory,
            gpu_memory_utilization=args.gpu_memory_utilization, speculative=args.speculative,
            batch_invariant=args.batch_invariant, **sizes,
        )  # fmt: skip
    if len(args.models) > 1:
        LOG.info("%s: %s", name, "memory: measured when it is loaded" if plan.memory is None else plan.memory)
    return Model(
        name, load_worker, max_model_len=plan.max_model_len, limit=args.max_num_seqs + args.queue, adapters=[*adapters]
    )


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        remark(record.getMessage())


@contextlib.contextmanager
def logged(level: str) -> Iterator[None]:
    """Messages of this package from `level` on are lines on stderr."""
    ours, handler = logging.getLogger("onegraph"), _Stderr()
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)


def run(args: argparse.Namespace) -> int:
    with logged(args.log_level):
        return serve(args)


def serve(args: argparse.Namespace) -> int:
    import_engine(args, "tokenizers", "templates")
    try:
        from onegraph.serve.http import bind, listen
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs {error.name}, which is not installed; {install('serve')}") from None
    from onegraph.serve.app import Settings
    from onegraph.serve.models import Models

    place, paths = engine(args), names_of(args)
    key = os.environ.get("ONEGRAPH_API_KEY") if args.api_key is None else args.api_key
    if key is not None and not (key and key.isascii()):
        told, cure = ("ONEGRAPH_API_KEY", "unset it") if args.api_key is None else ("--api-key", "leave it out")
        raise UsageError(f"{told}: it is empty or not ASCII; {cure} to serve without a key")
    with bind(args.host, args.port) as socket:
        found = Models(
            [served(args, place, name, path) for name, path in paths.items()],
            most=args.max_loaded_models,
            keep_alive=args.keep_alive,
        )
        host, port = socket.getsockname()[:2]

        def ready() -> None:
            LOG.info("serving %s at http://%s:%d/v1", ", ".join(paths), f"[{host}]" if ":" in host else host, port)

        def ending() -> None:
            LOG.info("stopping: running requests have %d s", args.grace)

        sys.setswitchinterval(SWITCH)
        guarded = args.allow_host or (key is None and ip_address(host).is_loopback)
        hosts = (*args.allow_host, args.host.lower()) if guarded else None
        settings = Settings(api_key=key, max_body=args.max_body, origins=tuple(args.allow_origin), hosts=hosts)
        verbose = args.log_level == "debug"
        ended_by = listen(socket, found, settings, grace=args.grace, ready=ready, ending=ending, verbose=verbose)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would be raised in what Python does at its end
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0
