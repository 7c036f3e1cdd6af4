"""Decoding on a CPU by how weights and keys are held: tokens per second, resident memory, and the KL to float32.

    OMP_NUM_THREADS=2 python benchmarks/cpu_decode.py .demo/SmolLM2-135M-Instruct-4bit
    OMP_NUM_THREADS=1 python benchmarks/cpu_decode.py MODEL --only float16:exact --context 1000

Each setting runs in a process of its own, for its memory: the peak until it is loaded. Tokens per second are those of
the best of five answers, since other work shares a machine's cores. KL is of the next token, in nats, over 512 tokens
from the end of the calibration corpus, computed without a cache: of settings with the exact one alone.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import torch

from onegraph.api.calibration import corpus_text
from onegraph.api.llm import LLM
from onegraph.engine.record import emit, machine
from onegraph.nn.attention import CausalAttention

SETTINGS = [(dtype, "exact") for dtype in ("float32", "float16", "int8", "bfloat16")]
SETTINGS += [(dtype, "turboquant:4") for dtype in ("float32", "float16", "int8")]


def measure(model: str, dtype: str, kv: str, tokens: int, context: int, answers: int, logits: Path) -> dict[str, float]:
    """The row's figures. context: tokens that stand before those that are timed, 0 for a chat. logits: a file of
    float32's, which the first setting writes; of a context there is no KL."""
    with LLM(model, device="cpu", dtype=dtype, kv_cache_dtype=kv, max_model_len=max(512, context + tokens)) as llm:
        loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        best, text = math.inf, llm.tokenizer.encode(corpus_text())[:context]
        for _ in range(answers):
            if context:
                llm.generate([text], max_tokens=tokens, temperature=0.0)
            else:
                llm.chat("Tell me about the history of Japan, at length.", max_tokens=tokens, temperature=0.0)
            best = min(best, llm.stats.decode_seconds / llm.stats.decode_steps)
        row = {"tokens_per_s": round(1 / best, 2), "gb": round(loaded, 2)}
        if kv != "exact" or context:
            return row
        ids = torch.tensor([llm.tokenizer.encode(corpus_text()[-4000:])[:512]])
        with torch.inference_mode():
            hidden = llm.engine.model.forward(ids, CausalAttention())
            found = llm.engine.model.logits(hidden)[0].float().log_softmax(-1)
    if not logits.exists():
        torch.save(found, logits)
    truth = torch.load(logits)
    kl = float((truth.exp() * (truth - found)).sum(-1).mean())
    return row | {"kl": round(kl, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--context", type=int, default=0, help="of a text so long, instead of a chat")
    parser.add_argument("--answers", type=int, default=5, help="the best of so many")
    parser.add_argument("--only", nargs="+", default=[], metavar="DTYPE:KV", help="these settings alone")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        dtype, kv, logits = args.one
        print(json.dumps(measure(args.model, dtype, kv, args.tokens, args.context, args.answers, Path(logits))))
        return
    logits = Path("build/cpu_decode.pt")
    logits.parent.mkdir(exist_ok=True)
    logits.unlink(missing_ok=True)
    for dtype, kv in SETTINGS:
        if args.only and f"{dtype}:{kv}" not in args.only:
            continue
        command = [sys.executable, __file__, args.model, "--tokens", str(args.tokens), "--context", str(args.context)]
        command += ["--answers", str(args.answers)]
        command += ["--one", dtype, kv, str(logits)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        what = {"bench": "cpu-decode", "model": Path(args.model).name, "dtype": dtype, "kv": kv}
        what |= {"context": args.context} if args.context else {}
        emit(what | row | machine("cpu"), args.out)


if __name__ == "__main__":
    main()
