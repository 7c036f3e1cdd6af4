"""Time to the first token of a prompt that was evicted from the prefix cache, with and without one in host memory.

    PYTHONPATH=src python3 benchmarks/offload.py .demo/SmolLM2-135M-Instruct-4bit

A cache of two prompts; `others` prompts go between two requests for the same one. `first_s`: from the request to the
token, when it is new; `evicted_s`: when its pages are gone; `restored_s`: when they come from host memory; `cached_s`:
when they are on the device still. Medians of the repeats. Prints a JSON line; --out appends it.
"""

import argparse
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from onegraph import LLM, SamplingParams
from onegraph.engine.record import emit, machine

ONE = SamplingParams(max_tokens=1)


def seconds(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """From the request to the first token; the token."""
    engine = llm.engine
    with engine.executor.running():
        started = time.perf_counter()
        request = engine.request(prompt, ONE)
        engine.scheduler.add(request)
        while not engine.scheduler.idle:
            engine.scheduler.step()
        return time.perf_counter() - started, request.output[0]


def measure(args: argparse.Namespace, size: float | None) -> tuple[dict[str, float], list[int], int]:
    """Medians of each kind, the tokens, and how many of a prompt came from host memory."""
    one, *others = ([(7 * n + 31 * k) % 9973 for n in range(args.tokens)] for k in range(1 + args.others))
    requests = [("first_s", one), *(("", other) for other in others), ("again_s", one), ("cached_s", one)]
    found: dict[str, list[float]] = {name: [] for name, _ in requests}
    tokens = []
    options = {"max_num_seqs": 1, "max_model_len": args.tokens + 16, "kv_cache_tokens": 2 * args.tokens + 32}
    with LLM(args.model, device=args.device, kv_offloading_size=size, **options) as llm:
        with closing(llm.engine.scheduler.open()) as scheduler:
            seconds(llm, one)  # builds the steps
            for _ in range(args.repeats):
                scheduler.prefixes.forget()
                for name, prompt in requests:
                    took, token = seconds(llm, prompt)
                    found[name].append(took)
                    tokens.append(token)
        restored = llm.stats.restored_tokens // args.repeats
    return {name: median(each) for name, each in found.items()}, tokens, restored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--others", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=float, default=1.0, help="GiB")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without, wanted, _ = measure(args, None)
    having, tokens, restored = measure(args, args.size)
    if tokens != wanted:
        raise SystemExit("the tokens differ")
    row = {
        "bench": "offload",
        "run": f"{args.tokens}t",
        "name": Path(args.model).name,
        "prompt_tokens": args.tokens,
        "restored_tokens": restored,
        "repeats": args.repeats,
        "first_s": round(without["first_s"], 4),
        "evicted_s": round(without["again_s"], 4),
        "restored_s": round(having["again_s"], 4),
        "cached_s": round(having["cached_s"], 4),
    }
    emit(row | machine(args.device), args.out)


if __name__ == "__main__":
    main()
