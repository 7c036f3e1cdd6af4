"""What each launch of a captured decode step costs: kernel by kernel from the CUDA profiler, with gaps and the floor.

    PYTHONPATH=src python3 benchmarks/profile_step.py --shape smollm2-135m --bits 4

Launches overlap where they are programmatic (PDL), so durations of one kernel contain waiting for the one before; with
--plain they follow each other, and the durations are the kernels' own.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch
from step import SHAPES, command_line, random_checkpoint
from torch.profiler import ProfilerActivity, profile

from onegraph.engine.bench import machine
from onegraph.engine.generate import Engine
from onegraph.engine.params import SamplingParams
from onegraph.models.llama import Llama
from onegraph.ops.triton.launch import plain_launches

REPLAYS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--lm-head", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--plain", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "model", SHAPES[args.shape], args.bits, args.lm_head)
        model = Llama.load(checkpoint, "cuda", torch.bfloat16, max_context=2048)
    with plain_launches() if args.plain else nullcontext():
        engine = Engine(model, max_batch=args.batch, max_context=args.context + 64)
        engine.generate([list(range(args.context))] * args.batch, SamplingParams(max_tokens=4))
    runner = engine.runner("decode")
    with profile(activities=[ProfilerActivity.CUDA]) as trace, runner.running():
        for _ in range(REPLAYS):
            runner.replay(args.batch)
        torch.cuda.synchronize()
    events = sorted((e for e in trace.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    span = (events[-1].time_range.end - events[0].time_range.start) / REPLAYS
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name[:60]].append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "launches": len(t) // REPLAYS, "us": round(sum(t) / len(t), 2), "total": sum(t) / REPLAYS}
        for name, t in times.items()
    ]
    for row in sorted(rows, key=lambda row: -row["total"]):
        print(f"{row['kernel']:<60} {row['launches']:>5} x {row['us']:>7.2f} us = {row['total']:>8.1f} us")
    print(f"{'launches':<60} {len(events) // REPLAYS:>5}     step from first to last: {span:.1f} us")
    if args.out:
        about = {k: v for k, v in vars(args).items() if k != "out"} | machine("cuda")
        args.out.write_text(json.dumps({"profile": rows, "step_us": span, **about, "command": command_line()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
