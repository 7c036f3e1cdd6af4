"""What the server's host path costs a token: `onegraph serve` around an engine whose steps only take time.

    PYTHONPATH=src python3 benchmarks/serve_host.py .demo/SmolLM2-135M-Instruct-4bit --batch 16 --step-ms 2.6

Scheduler, text, JSON and HTTP are the server's own, with MODEL's tokenizer; the model is not run: a decode step is over
`--step-ms` after the one before it, as on a device, and its tokens are drawn from a table. Streams begin together.
`share` is the rate that clients see of the rate that steps of that length would give; `host_us` the CPU time of the
server's process for a token, `text_us` that of its tokenizer's process, each the least of the repeats. Prints a JSON
line for each batch; --out appends them.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from onegraph.engine.record import emit, machine

TICK = os.sysconf("SC_CLK_TCK")


def pretend(engine: Any, step: float) -> None:
    """Takes the model out of an engine: steps launched one behind the other end `step` seconds apart."""
    source = random.Random(0)
    table = torch.tensor([source.randrange(1000, 40000) for _ in range(1 << 16)])
    free, rows, turn = [0.0], [0], [0]

    def report(count: int, width: int, seconds: float) -> tuple[Any, None]:
        turn[0] = (turn[0] + count) % (len(table) - 64)
        tokens = table[turn[0] : turn[0] + count].clone()
        over = free[0] = max(free[0], time.perf_counter()) + seconds

        def fetched() -> torch.Tensor:
            time.sleep(max(0.0, over - time.perf_counter()))
            return tokens.view(count, width) if width else tokens

        return fetched, None

    executor = engine.executor
    executor.ahead = 1
    executor.step = lambda *args, **kwargs: None
    executor.begin = lambda sequence: None
    executor.prefill = lambda sequence, end: report(1, 0, 0.0)
    executor.load = lambda loaded: rows.__setitem__(0, len(loaded))
    executor.load_tables = lambda loaded: None
    executor.decode = lambda reach: report(rows[0], 1, step)


def serve(model: str, batch: int, step: float, context: int) -> None:
    from onegraph.api.llm import LLM
    from onegraph.api.tokenizer import Tokenizer
    from onegraph.cli.serve import SWITCH
    from onegraph.formats.checkpoint import Checkpoint
    from onegraph.serve.app import Settings
    from onegraph.serve.http import bind, listen
    from onegraph.serve.models import Models
    from onegraph.serve.worker import Worker

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH)
    with (
        LLM(model, max_num_seqs=batch, max_model_len=context, device="cpu") as llm,
        Checkpoint.open(model) as checkpoint,
    ):
        pretend(llm.engine, step)
        socket = bind("127.0.0.1", 0)
        worker = Worker(llm, Tokenizer(checkpoint), queue=64)
        child = worker._writer.tokenizer._cage._child
        assert child is not None
        said = json.dumps({"port": socket.getsockname()[1], "text": child.pid})
        listen(socket, Models.of("m", worker), Settings(), grace=0, ready=lambda: print(said, flush=True))


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICK


async def stream(port: int, tokens: int) -> list[tuple[float, int]]:
    """When what came, in bytes of text events: a reader that costs little."""
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True, "seed": 0}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    found = []
    while part := await reader.read(1 << 16):
        found.append((time.perf_counter(), len(part)))
    writer.close()
    return found


async def load(port: int, batch: int, tokens: int) -> tuple[float, float]:
    """(tokens a second while all write, seconds of all): bytes stand for tokens, of which each stream has as many."""
    began = time.perf_counter()
    done = await asyncio.gather(*(stream(port, tokens) for _ in range(batch)))
    begin, end = max(parts[0][0] for parts in done), min(parts[-1][0] for parts in done)
    shares = [sum(size for at, size in parts if begin < at <= end) / sum(size for _, size in parts) for parts in done]
    return tokens * sum(shares) / (end - begin), time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint with its tokenizer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--step-ms", type=float, default=2.6, help="that a decode step takes; 0: as fast as the host is"
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    step = args.step_ms / 1e3
    if args.serve:
        serve(args.model, max(args.batch), step, args.tokens + 64)
        return 0
    command = [sys.executable, __file__, args.model, "--serve", "--batch", str(max(args.batch))]
    command += ["--step-ms", str(args.step_ms), "--tokens", str(args.tokens)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        place = json.loads(server.stdout.readline())
        for batch in args.batch:
            rates, host, text = [], [], []
            for _ in range(args.repeats + 1):  # the first one warms
                before = [cpu_seconds(pid) for pid in (server.pid, place["text"])]
                rates.append(asyncio.run(load(place["port"], batch, args.tokens))[0])
                spent = [cpu_seconds(pid) - b for pid, b in zip((server.pid, place["text"]), before, strict=True)]
                host.append(1e6 * spent[0] / (batch * args.tokens))
                text.append(1e6 * spent[1] / (batch * args.tokens))
            rate = statistics.median(rates[1:])
            row: dict[str, Any] = {
                "bench": "serve-host",
                "batch": batch,
                "step_ms": args.step_ms,
                "tokens": args.tokens,
            }
            row |= {"tokens_per_second": round(rate), "host_us": round(min(host[1:]), 1)}
            row |= {"text_us": round(min(text[1:]), 1)}
            row |= {"share": round(rate * step / batch, 3)} if step else {}
            emit(row | machine("cpu"), args.out)
    finally:
        server.kill()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
