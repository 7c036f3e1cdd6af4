"""Tokens per second and time to the first token over HTTP, beside the engine's own rate, on one model shape.

    PYTHONPATH=src python3 benchmarks/serve.py --shape llama-3-8b --bits 2 --lm-head 4

Writes a checkpoint of random weights (4 GB for 8B at 2 bits) unless --model names one, starts `onegraph serve` on it
(or, with --server vllm, `vllm serve`), and asks as clients do: streams of token ids over connections of their own.
Streams of a row begin together; `tokens_per_second` is of the time in which all of them write, none waits and none has
ended, `all_tokens_per_second` is over everything, prompts too. `first_token_ms` is from the request to the first piece,
of prompts that no page holds. Then the server ends and the same model generates in this process: `engine` rows, the
rate that the server is held to. Prints JSON lines; --out appends them.

With --client vllm the load is that of `vllm bench serve` instead, with its random prompts: as many streams at once,
each followed by the next until there were --repeats of them; `first_token_ms` is its median, `token_ms` its mean time
of a token behind the first, `all_tokens_per_second` over everything.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step import SHAPES, RandomCheckpoint

from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import write_checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.loader import Loader

PORT = 8123
OWN = "onegraph"


def write_random(
    path: Path, shape: dict[str, Any], bits: int, lm_head: int | None, device: str, embed_tokens: int | None = None
) -> None:
    """A checkpoint of random weights with a tokenizer of so many words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config = shape | {"dtype": "bfloat16", "eos_token_id": None}
    checkpoint = RandomCheckpoint(config, bits, lm_head, device, embed_tokens)
    Loader(checkpoint, LlamaConfig.from_dict(checkpoint.config), torch.bfloat16).check()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (_, kinds) in checkpoint._expected.items():
            kind = (
                torch.bfloat16 if "embed" in name and torch.bfloat16 in kinds else kinds[0]
            )  # as models are published
            yield name, checkpoint.tensor(name, dtype=kind).cpu()

    write_checkpoint(path, checkpoint.config, tensors())
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def started(args: argparse.Namespace, path: Path, context: int) -> subprocess.Popen[bytes]:
    """The server, once it answers."""
    command = [sys.executable, "-m", "onegraph", "serve", str(path), "--served-model-name", "m", "--port", str(PORT)]
    command += ["--max-num-seqs", str(max(args.batch)), "--max-model-len", str(context)]
    if args.draft:
        command += ["--speculative", args.draft]
    if args.server == "vllm":
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(path), "--served-model-name", "m"]
        command += ["--port", str(PORT), "--max-num-seqs", str(max(args.batch)), "--max-model-len", str(context)]
        command += ["--gpu-memory-utilization", "0.5"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=None if args.verbose else subprocess.DEVNULL)
    begun = time.perf_counter()
    while time.perf_counter() - begun < 300 and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1)
            return server
        except OSError:
            time.sleep(0.2)
    server.kill()
    raise SystemExit("the server does not answer; --verbose shows why")


async def stream(
    client: Any, prompt: list[int], tokens: int, warm: dict[str, Any]
) -> tuple[float, list[tuple[float, int]]]:
    """When it was asked for, and when each piece came with how many tokens: a word is one."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, **warm}
    body |= {"stream_options": {"include_usage": True}}
    asked = time.perf_counter()
    pieces, count = [], 0
    async with client.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit((await response.text())[:500])
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line[6:])
            if piece.get("usage"):
                count = piece["usage"]["completion_tokens"]
            if piece.get("choices"):
                pieces.append((time.perf_counter(), len(piece["choices"][0]["text"].split())))
    assert sum(words for _, words in pieces) == count, "the tokenizer's words are tokens"
    return asked, pieces


async def load(batch: int, context: int, tokens: int, warm: dict[str, Any], vocabulary: int) -> dict[str, float]:
    """`batch` streams at once."""
    import aiohttp

    prompts = [[random.randrange(vocabulary) for _ in range(context)] for _ in range(batch)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as client:
        done = await asyncio.gather(*(stream(client, prompt, tokens, warm) for prompt in prompts))
    begin, end = max(pieces[0][0] for _, pieces in done), min(pieces[-1][0] for _, pieces in done)
    together = sum(words for _, pieces in done for at, words in pieces if begin < at <= end)
    seconds = max(pieces[-1][0] for _, pieces in done) - min(asked for asked, _ in done)
    return {
        "tokens_per_second": together / (end - begin) if end > begin else 0.0,
        "first_token_ms": 1e3 * statistics.median(pieces[0][0] - asked for asked, pieces in done),
        "all_tokens_per_second": len(done) * tokens / seconds,
    }


def served(args: argparse.Namespace, path: Path, vocabulary: int, warm: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for batch in args.batch:
        given = batch, args.context, args.tokens, warm, vocabulary
        runs = [asyncio.run(load(*given)) for _ in range(args.repeats + 1)]  # the first one warms
        found = {name: round(statistics.median(run[name] for run in runs[1:]), 1) for name in runs[0]}
        yield {"bench": "serve", "name": args.server, "batch": batch, "context": args.context, **found}


def served_to_vllm(args: argparse.Namespace, path: Path, warm: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for batch in args.batch:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
            command += ["--base-url", f"http://127.0.0.1:{PORT}", "--model", "m", "--tokenizer", str(path)]
            command += ["--dataset-name", "random", "--random-input-len", str(args.context)]
            command += ["--random-output-len", str(args.tokens), "--max-concurrency", str(batch)]
            command += ["--num-prompts", str(batch * args.repeats), "--num-warmups", str(batch)]
            command += [word for name, value in warm.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            command += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
            out = None if args.verbose else subprocess.DEVNULL
            subprocess.run(command, check=True, stdout=out, stderr=out)
            found = json.loads(result.read_text())
        if found["failed"]:
            raise SystemExit(f"{found['failed']} of {batch * args.repeats} requests failed; --verbose shows why")
        yield {
            "bench": "serve", "name": args.server, "client": "vllm", "batch": batch, "context": args.context,
            "token_ms": round(found["mean_tpot_ms"], 4), "first_token_ms": round(found["median_ttft_ms"], 1),
            "all_tokens_per_second": round(found["output_throughput"], 1),
        }  # fmt: skip


def engine(args: argparse.Namespace, path: Path, vocabulary: int, warm: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from onegraph.api.llm import LLM
    from onegraph.engine.params import SamplingParams

    context = args.context + args.tokens
    with LLM(path, max_num_seqs=max(args.batch), max_model_len=context) as llm:
        for batch in args.batch:
            params = SamplingParams(max_tokens=args.tokens, seed=0, **warm)
            rates = []
            for _ in range(args.repeats + 1):
                prompts = [[random.randrange(vocabulary) for _ in range(args.context)] for _ in range(batch)]
                llm.generate(prompts, params)
                rates.append(llm.stats.decode_tokens_per_second)
            rate = round(statistics.median(rates[1:]), 1)
            yield {"bench": "serve", "name": "engine", "batch": batch, "context": args.context,
                   "tokens_per_second": rate}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--lm-head", type=int, default=None)
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape, or where to write one")
    parser.add_argument("--server", choices=(OWN, "vllm"), default=OWN)
    parser.add_argument("--client", choices=(OWN, "vllm"), default=OWN, help="whose load")
    parser.add_argument("--draft", help="as of `onegraph serve`")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--greedy", action="store_true", help="else temperature .8, top-p .95")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    warm = {"temperature": 0.0} if args.greedy else {"temperature": 0.8, "top_p": 0.95}
    vocabulary = SHAPES[args.shape]["vocab_size"]
    about = {"shape": args.shape, "bits": args.bits, "lm_head": args.lm_head, "tokens": args.tokens, **warm}
    about |= {"draft": args.draft} if args.draft else {}
    about |= machine(torch.device(args.device))
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "m"
        if not (path / "config.json").exists():
            write_random(path, SHAPES[args.shape], args.bits, args.lm_head, args.device)
        server = started(args, path, args.context + args.tokens)
        try:
            rows = served(args, path, vocabulary, warm) if args.client == OWN else served_to_vllm(args, path, warm)
            for row in rows:
                emit(row | about, args.out)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
        if args.server == args.client == OWN and not args.draft:
            for row in engine(args, path, vocabulary, warm):
                emit(row | about, args.out)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
