"""`onegraph bench`: microseconds of the E8P linear and of decode attention, tokens per second of the decode step."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from onegraph.cli.common import (
    BATCH,
    CONTEXT,
    MODEL,
    STEPS,
    UsageError,
    add_device,
    add_dtype,
    number,
    one_line,
    open_model,
    pick_device,
    pick_dtype,
)

EPILOG = """\
examples:
  onegraph bench linear                              # E8P beside torch's dense linear, a table
  onegraph bench linear --shape 4096x14336 --tokens 1 --bits 4 --json
  onegraph bench attention --context 1024 --context 32768 --batch 16
  onegraph bench step out/4bit --batch 1 --batch 8   # eager and captured

Kernels are timed under CUDA-graph replay on weights that the L2 cannot hold, beside the time that the measured copy
bandwidth would take; a step is timed as a whole, host included. --json prints one JSON line a row, with an
id, the command, the commit, GPU, driver and versions.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time the E8P linear, decode attention or the decode step on this machine",
        description="Times what onegraph runs on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="what to time", dest="what", metavar="WHAT", required=True)
    linear = kinds.add_parser("linear", help="the E8P linear and torch's dense one (needs a GPU)")
    linear.add_argument("--shape", action="append", type=shape, metavar="KxN", help="inputs x outputs; may be repeated")
    linear.add_argument("--tokens", action="append", type=number(int, 1, 1 << 16), metavar="T", help="rows at once")
    linear.add_argument("--bits", action="append", type=int, choices=(2, 3, 4), help="rates; may be repeated")
    linear.set_defaults(run=run_linear)
    attention = kinds.add_parser("attention", help="a layer's decode attention beside torch's SDPA (needs a GPU)")
    count = number(int, 1, 1 << 10)
    attention.add_argument("--context", action="append", type=CONTEXT, metavar="N", help="keys a row")
    attention.add_argument("--batch", action="append", type=BATCH, metavar="B", help="may be repeated")
    attention.add_argument("--heads", type=count, default=32, metavar="N", help="query heads (default: 32)")
    attention.add_argument("--kv-heads", type=count, default=8, metavar="N", help="(default: 8)")
    attention.add_argument("--head-dim", type=number(int, 2, 256), default=128, metavar="N", help="(default: 128)")
    attention.set_defaults(run=run_attention)
    step = kinds.add_parser("step", help="the decode step of a model, eager and captured")
    step.add_argument("model", metavar="MODEL", help=MODEL)
    step.add_argument("--batch", action="append", type=BATCH, metavar="B", help="may be repeated")
    step.add_argument("--context", type=CONTEXT, default=128, metavar="N", help="prompt (default: 128)")
    step.add_argument(
        "--steps", type=STEPS, default=256, metavar="N", help="to time, eagerly 32 at most (default: 256)"
    )
    step.set_defaults(run=run_step)
    for each in (linear, attention, step):
        add_device(each)
        add_dtype(each, int8=each is step)
        each.add_argument("--json", action="store_true", help="print one JSON object a row")


def shape(text: str) -> tuple[int, int]:
    """KxN of the command line."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and 0 < len(p) < 7 for p in parts) or int(parts[0]) % 8:
        raise argparse.ArgumentTypeError(
            f"{one_line(repr(text), 60)} is not KxN, inputs (a multiple of 8) x outputs, e.g. 4096x14336"
        )
    if not int(parts[0]) or not int(parts[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be at least 1")
    return int(parts[0]), int(parts[1])


def run_linear(args: argparse.Namespace) -> int:
    from onegraph.engine.bench import LINEAR_SHAPES, bench_linear

    device = pick_device(args.device)
    if device.type != "cuda":
        raise UsageError("bench linear needs a GPU, and torch finds none here; 'onegraph env' says more")
    dtype = pick_dtype(args.dtype, device)
    rows = bench_linear(
        args.shape or LINEAR_SHAPES,
        tokens=args.tokens or (1, 16),
        bits=args.bits or (2, 3, 4),
        device=device,
        dtype=dtype,
    )
    columns = ("name", "k", "n", "tokens", "bits", "us", "roof_us", "percent_of_roof", "gb_per_s")
    return show(rows, columns, args.json)


def run_attention(args: argparse.Namespace) -> int:
    from onegraph.engine.bench import bench_attention

    device = pick_device(args.device)
    if device.type != "cuda":
        raise UsageError("bench attention needs a GPU, and torch finds none here; 'onegraph env' says more")
    if args.heads % args.kv_heads or args.head_dim % 2:
        raise UsageError(
            f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}, --head-dim {args.head_dim} even"
        )
    rows = bench_attention(
        args.context or (1024, 32768),
        batches=args.batch or (1,),
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        device=device,
        dtype=pick_dtype(args.dtype, device),
    )
    columns = ("name", "context", "batch", "heads", "kv_heads", "us", "roof_us", "percent_of_roof", "gb_per_s")
    return show(rows, columns, args.json)


def run_step(args: argparse.Namespace) -> int:
    from onegraph.api.device import pick_precision
    from onegraph.engine.bench import bench_step
    from onegraph.models.config import LlamaConfig
    from onegraph.models.load import load_decoder, packable, parse_config

    device = pick_device(args.device)
    reach = args.context + args.steps + 1
    with open_model(args.model) as checkpoint:
        config = parse_config(checkpoint.config)
        if reach > config.max_positions:
            raise UsageError(
                f"--context {args.context} and --steps {args.steps} need {reach} positions, the model has "
                f"{config.max_positions}"
            )
        dtype, held = pick_precision(  # as `generate` has it
            args.dtype, device, holds=isinstance(config, LlamaConfig), packable=partial(packable, checkpoint)
        )
        model = load_decoder(checkpoint, device, dtype, max_context=reach, held=held)
    weights = held or str(dtype).removeprefix("torch.")
    timed = bench_step(model, batches=args.batch or (1,), context=args.context, steps=args.steps)
    rows = (row | {"weights": weights} for row in timed)
    columns = ("name", "mode", "weights", "batch", "context", "steps", "tokens_per_second", "ms_per_step", "replay_us")
    return show(rows, columns, args.json)


def show(rows: Any, columns: tuple[str, ...], as_json: bool) -> int:
    """Prints rows as they are measured, as a table or as JSON lines."""
    from onegraph.engine.record import emit

    first = True
    for row in rows:
        if as_json:
            emit(row)
            continue
        if first:
            print(f"{row['device']}, torch {row['torch']}")
            print("  ".join(f"{column:>{width(column)}}" for column in columns))
            first = False
        print("  ".join(f"{row.get(column, '-')!s:>{width(column)}}" for column in columns), flush=True)
    return 0


def width(column: str) -> int:
    return max(len(column), 22 if column == "name" else 9)
