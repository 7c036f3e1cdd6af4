"""`python -m tools soak`: thousands of decode steps, watched."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import (
    BATCH,
    CONTEXT,
    MODEL,
    SEED,
    STEPS,
    UsageError,
    add_device,
    add_dtype,
    add_json,
    number,
    open_model,
    options,
    pick_device,
    pick_dtype,
    print_json,
)

if TYPE_CHECKING:
    from tools.rounds import Round

EPILOG = """\
examples:
  python -m tools soak out/smollm2-4bit --steps 5000 --out out/soak
  python -m tools soak out/smollm2-4bit --traffic --kv exact --kv turboquant:4 --round 10000 --out out/soak
  python -m tools soak models/DeepSeek-V4-Flash-NVFP4 --gpus 2 --steps 1000 --context 2048 --out out/soak

Each round draws a text until the context is full, and then asks whether the state that all these steps left gives the
logits that eager passes over the same text give from nothing; one of them may have a few roundings added, so that it
falls where the state fell in a tie of a router or an indexer. Memory and the addresses of all storages are watched,
and texts that go round in circles. --out receives rounds.jsonl, a line a round, and plot.svg; a soak that was stopped,
by whatever, goes on from there with the same command. Exit status 1: a problem was found.

With --traffic requests of all lengths join, leave, are cancelled and make room for each other, --batch of them at once
in a cache that holds half of that; a round has --round decode steps, and its longest rows are compared at its end.
Several --kv take turns. --minutes ends it after the round that is running then, well where nothing was found so far.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "soak",
        help="thousands of decode steps with memory, addresses, drift and loops watched",
        description="Runs a model's decode step for long and watches that nothing grows, moves or drifts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--out", required=True, metavar="DIR", help="where rounds.jsonl and plot.svg go")
    parser.add_argument("--steps", type=STEPS, default=5000, metavar="N", help="(default: 5000)")
    parser.add_argument("--batch", type=BATCH, default=2, metavar="B", help="rows (default: 2)")
    parser.add_argument("--context", type=CONTEXT, default=1024, metavar="N", help="tokens of a round (default: 1024)")
    parser.add_argument("--seed", type=SEED, default=0, metavar="N", help="of the texts")
    parser.add_argument("--traffic", action="store_true", help="requests join, leave and are preempted all the time")
    parser.add_argument(
        "--kv", action="append", metavar="KV", help="with --traffic, may be repeated: exact, turboquant:4"
    )
    parser.add_argument(
        "--round", type=STEPS, metavar="N", help="with --traffic: decode steps of a round (default: --context)"
    )
    parser.add_argument(
        "--minutes", type=number(float, 0, 10000, True), metavar="M", help="with --traffic: no longer than this"
    )
    parser.add_argument("--gpus", type=number(int, 1, 8), metavar="N", help="number of GPUs that share the layers")
    parser.add_argument("--eager", action="store_true", help="watch the eager step instead of the captured one")
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.engine.engine import Engine
    from onegraph.models.load import CONFIGS, load_decoder, parse_config
    from tools.rounds import read_rounds, soak
    from tools.traffic import crowded, soak_traffic

    alone = [f"--{name}" for name in ("kv", "round", "minutes") if getattr(args, name)]
    if alone and not args.traffic:
        raise UsageError(f"{alone[0]} is for --traffic alone")
    if args.context < 32:
        raise UsageError(f"--context: got {args.context}, a round takes 32 tokens and more")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    out = Path(args.out)
    with open_model(args.model) as checkpoint:
        context = min(args.context, parse_config(checkpoint.config).max_positions)
        with options("gpus"):
            if (args.gpus or 1) > 1 and checkpoint.config.get("model_type") not in CONFIGS:
                raise ValueError(
                    f"gpus is {args.gpus}; soak takes several for DeepSeek-V4 alone, whose layers it places"
                )
            model = load_decoder(checkpoint, device, dtype, max_context=context, gpus=args.gpus)

    def make(tested: bool, kv: str | None = None) -> Engine:
        captured = None if tested and not args.eager else False
        batch = args.batch if tested else 1
        how = {} if kv is None else crowded(model, batch, context, kv, tested)
        return Engine(model, max_batch=batch, max_context=context, capture=captured, **how)

    def say(this: Round, done: int) -> None:
        print(
            f"round {this.number}: {done} of {args.steps} steps, {max(this.memory) / 1e6:.0f} MB, drift "
            f"{this.drift:.1e} (noise {this.noise:.1e})"
            + (f", {this.plain:.1e} from the first pass, {this.shaken} shaken ones" if this.shaken else "")
            + (f"; {this.kv}: {this.joined} joined, {this.preempted} preempted" if this.kv else ""),
            file=sys.stderr,
        )

    path = out / "rounds.jsonl"
    if args.traffic:
        with options("kv", "kv:"):
            verdict = soak_traffic(
                make, kvs=args.kv or ["exact"], steps=args.steps, path=path, per_round=args.round or context,
                seed=args.seed, seconds=60 * args.minutes if args.minutes else None, on_round=say,
            )  # fmt: skip
    else:
        verdict = soak(make, steps=args.steps, path=path, batch=args.batch, seed=args.seed, on_round=say)
    write_whole(out / "plot.svg", plot(read_rounds(path)))
    if args.json:
        print_json(
            {
                "steps": verdict.steps,
                "rounds": verdict.rounds,
                "memory_growth": verdict.growth,
                "drift": verdict.drift,
                "noise": verdict.noise,
                "looped": verdict.looped,
                "passed": verdict.passed,
                "problems": list(verdict.problems),
            }
        )
    else:
        for problem in verdict.problems:
            print(f"problem: {problem}")
        print(
            f"{'passed' if verdict.passed else 'FAILED'}: {verdict.steps} steps in {verdict.rounds} rounds, memory "
            f"+{verdict.growth / 1e6:.1f} MB, drift {verdict.drift:.1e} where another order of summation makes "
            f"{verdict.noise:.1e}, {verdict.looped:.0%} of a round in loops; {out / 'plot.svg'}"
        )
    return 0 if verdict.passed else 1


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def plot(rounds: list[Round]) -> str:
    """Memory, drift with its yardstick, and loops over the steps: three panels of an SVG."""
    at, steps = 0, []
    for r in rounds:
        at += r.steps
        steps.append(at)
    memory = [[r.memory[i] / 1e6 for r in rounds] for i in range(len(rounds[0].memory))]
    panels = (
        ("memory, MB", [(f"device {i}", line) for i, line in enumerate(memory)]),
        ("relative error of logits", [("drift", [r.drift for r in rounds]), ("noise", [r.noise for r in rounds])]),
        ("tokens in loops, %", [("looped", [100 * r.looped for r in rounds])]),
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="510" font-family="sans-serif" font-size="11">'
    ]
    for i, (title, lines) in enumerate(panels):
        parts += _panel(40 + 160 * i, title, steps, lines)
    return "\n".join([*parts, "</svg>", ""])


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def _panel(top: int, title: str, steps: list[int], lines: list[tuple[str, list[float]]]) -> list[str]:
    left, width, height = 80, 520, 100
    values = [v for _, line in lines for v in line if v == v and abs(v) != float("inf")] or [0.0]
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1
    parts = [
        f'<text x="{left}" y="{top - 6}">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{left - 6}" y="{top + height}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{left + width}" y="{top + height + 14}" text-anchor="end">{steps[-1]} steps</text>',
    ]
    for i, (name, line) in enumerate(lines):
        points = []
        for step, value in zip(steps, line, strict=True):
            share = min(1.0, max(0.0, (value - low) / (high - low))) if value == value else 1.0
            points.append(f"{left + width * step / steps[-1]:.1f},{top + height * (1 - share):.1f}")
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2" fill="{colour}"/>' for p in points]
        x = left + width - 70 * (len(lines) - i)
        parts.append(f'<text x="{x}" y="{top - 6}" fill="{colour}">{name}</text>')
    return parts
