"""What each launch of a captured decode step costs, beside the op that made it and the floor of its bytes.

    PYTHONPATH=src python3 benchmarks/profile_step.py --shape llama-3-8b --bits 2 --lm-head 4 --context 1024

Launches overlap where they are programmatic (PDL), so a launch is charged from the end of the one before it to its own
end: the charges add up to the step. The floor is the op's bytes (ops/registry.py) over the measured copy bandwidth.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kernels import copy_bandwidth
from step import SHAPES, random_model, shape_of
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import machine, with_id
from onegraph.formats.quantization import OWN
from onegraph.ops.registry import OPS
from onegraph.ops.triton.launch import plain_launches

REPLAYS = 20
BEFORE, AFTER = "bitwise_not", "cos_kernel"  # two torch kernels that no step launches mark where an op begins and ends


class Observer(TorchDispatchMode):
    """Writes down the op calls of an eager step: a label and the bytes each moves; optionally marks them on the GPU."""

    def __init__(self, device: torch.device, *, mark: bool) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.marks = (torch.ones(1, dtype=torch.int32, device=device), torch.ones(1, device=device)) if mark else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        op = OPS.get(func._schema.name.removeprefix("onegraph::"))
        if op is None:
            return func(*args, **(kwargs or {}))
        if self.marks is None:
            label = op.name
            if op.call is not None and hasattr(call := op.call(*args), "n"):
                label += f" {call.k} -> {call.n}"
            self.calls.append((label, op.bytes_moved(*args)))
            return func(*args)
        self.marks[0].bitwise_not_()
        result = func(*args)
        self.marks[1].cos_()
        return result


def kernels(step: Any, times: int) -> list[Any]:
    """CUDA events of `times` runs of `step`, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    return sorted((e for e in trace.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)


def owners(runner: Any, bucket: int) -> list[tuple[str, int]]:
    """For each launch of the step, what it belongs to: (number and label of the op call, its bytes)."""
    views = runner.views(bucket)
    with torch.no_grad(), Observer(runner.device, mark=False) as seen:
        runner.step(**views)
    with torch.no_grad(), Observer(runner.device, mark=True):
        events = kernels(lambda: runner.step(**views), 1)
    found, call, inside = [], -1, False
    for event in events:
        if BEFORE in event.name:
            call, inside = call + 1, True
        elif AFTER in event.name:
            inside = False
        else:
            found.append((f"{call} {seen.calls[call][0]}", seen.calls[call][1]) if inside else ("- torch", 0))
    return found


def table(runner: Any, bucket: int, bandwidth: float) -> tuple[list[dict[str, Any]], float]:
    """Rows by op and kernel: launches, microseconds charged to one, in all, and the floor; and the whole step's us."""
    with runner.running():
        owned = owners(runner, bucket)
        events = kernels(lambda: runner.replay(bucket), REPLAYS)
    count = len(owned)
    if len(events) != count * REPLAYS:
        raise RuntimeError(f"{len(events)} launches in {REPLAYS} replays; the eager step makes {count}")
    ends = [event.time_range.end for event in events]
    charges = [
        statistics.median(ends[r * count + i] - ends[r * count + i - 1] for r in range(1, REPLAYS))
        for i in range(count)
    ]
    rows: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    floors: dict[str, set[str]] = defaultdict(set)
    for (owner, size), event, charge in reversed(list(zip(owned, events, charges, strict=False))):
        call, _, label = owner.partition(" ")
        rows[label, event.name[:48]].append((charge, 0 if call in floors[label] else size))
        floors[label].add(call)  # an op of several launches has one floor, at its last
    made = [
        {
            "op": label,
            "kernel": name,
            "launches": len(parts),
            "us": round(sum(us for us, _ in parts) / len(parts), 2),
            "total_us": round(sum(us for us, _ in parts), 1),
            "floor_us": round(sum(size for _, size in parts) / bandwidth * 1e6, 1),
        }
        for (label, name), parts in rows.items()
    ]
    return sorted(made, key=lambda row: -row["total_us"]), sum(charges)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--format", choices=OWN, default="e8p")
    parser.add_argument("--lm-head", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--sampling", action="store_true", help="temperature 0.8, top-k 50, top-p 0.95; else greedy")
    parser.add_argument("--plain", action="store_true", help="Triton's kernels without programmatic dependent launch")
    parser.add_argument("--out", type=Path, help="append the result as a JSON line")
    args = parser.parse_args()
    model = random_model(shape_of(args.shape), args.bits, args.lm_head, args.context + 64, format=args.format)
    with plain_launches() if args.plain else nullcontext():
        engine = Engine(model, max_batch=args.batch, max_context=args.context + 64)
        drawing = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if args.sampling else {}
        engine.generate([list(range(args.context))] * args.batch, SamplingParams(max_tokens=4, **drawing))
        (runner,) = engine.executor.step("decode", sampling=args.sampling).stages
        rows, step = table(runner, args.batch, copy_bandwidth(model.device))
    print(f"{'op':<32} {'kernel':<48} {'':>5} {'us each':>8} {'us':>8} {'floor':>7}")
    for row in rows:
        print(
            f"{row['op']:<32} {row['kernel']:<48} {row['launches']:>5} {row['us']:>8.2f} {row['total_us']:>8.1f} "
            f"{row['floor_us']:>7.1f}"
        )
    launches, floor = sum(row["launches"] for row in rows), sum(row["floor_us"] for row in rows)
    print(f"{'the step':<32} {'':<48} {launches:>5} {'':>8} {step:>8.1f} {floor:>7.1f}", flush=True)
    if args.out:
        about = {k: v for k, v in vars(args).items() if k != "out"} | machine("cuda")
        line = {
            "bench": "profile",
            "profile": rows,
            "launches": launches,
            "step_us": round(step, 1),
            "floor_us": round(floor, 1),
            **about,
        }
        with args.out.open("a") as file:
            file.write(json.dumps(with_id(line)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
