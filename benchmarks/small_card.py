"""A model of 8 billion weights in 6 GB: loaded, filled and run under a bound, with what it took.

    PYTHONPATH=src python3 benchmarks/small_card.py --gb 6

Writes a checkpoint of random weights (2 bits, head and embedding at 4: 2.3 GB for the 8B shape) unless --model names
one. A process of its own, alone on its GPU, may then take --gb of it: torch is bounded to that less what the driver and
the context hold at the beginning. It loads the model with a cache for --context tokens in TurboQuant codes, reads a
prompt that nearly fills it, and writes the rest. `gpu_gb` is all that the GPU has lent at the end, of torch
or not; host memory is the most that the process held while it loaded, and what it held before (Python, torch, CUDA).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from serve import write_random
from step import SHAPES

from onegraph import LLM, SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.ops import family

GB = 10**9
WRITTEN = 128  # tokens


def host_gb(what: str) -> float:
    """Of this process: VmHWM, the most so far; VmRSS, now."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return round((int(found[1]) << 10) / GB, 2)


def gpu_gb() -> float:
    """What the GPU has lent, to whomever."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GB


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """In the bounded process."""
    gpu, row = args.device == "cuda", {"bench": "small-card", "gb": args.gb, "context": args.context}
    if gpu:
        bound = args.gb - gpu_gb()
        torch.cuda.set_per_process_memory_fraction(bound * GB / torch.cuda.mem_get_info()[1])
        row["torch_may_gb"] = round(bound, 3)
    before, begun = host_gb("VmRSS"), time.perf_counter()
    with LLM(
        args.model, kv_cache_dtype="turboquant:4", max_num_seqs=1, max_model_len=args.context, device=args.device
    ) as llm:
        row |= {"load_seconds": round(time.perf_counter() - begun, 1)}
        row |= {"host_before_gb": before, "host_loading_gb": host_gb("VmHWM")}
        if gpu:
            row["weights_and_cache_gb"] = round(torch.cuda.memory_allocated() / GB, 3)
        prompt = [i % 1000 for i in range(args.context - WRITTEN)]
        llm.engine.generate([prompt], SamplingParams(max_tokens=WRITTEN))
        stats = llm.engine.stats
        row |= {"prompt": len(prompt), "tokens_per_second": round(stats.decode_tokens / stats.decode_seconds, 1)}
        if gpu:
            row["most_allocated_gb"] = round(torch.cuda.max_memory_allocated() / GB, 3)
            row["most_reserved_gb"] = round(torch.cuda.max_memory_reserved() / GB, 3)
            row["gpu_gb"] = round(gpu_gb(), 3)
        return row | {"kernels": family.FORCED or "own"} | machine(llm.device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a checkpoint, or where to write one")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--gb", type=float, default=6.0, help="of the GPU that the process may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("write", "measure"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "write":
        write_random(args.model, SHAPES[args.shape], args.bits, 4, args.device, 4)
        return 0
    if args.part == "measure":
        emit(measured(args) | {"shape": args.shape, "bits": args.bits}, args.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = [] if args.model is not None else ["--model", str(Path(folder) / "model")]
        for part in ("write", "measure"):  # each with a context of its own
            if part == "measure" or args.model is None or not args.model.exists():
                subprocess.run([sys.executable, __file__, *sys.argv[1:], *words, "--part", part], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
