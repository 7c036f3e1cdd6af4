"""`onegraph bench`: tokens per second of a model's decode step."""

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
    open_model,
    pick_device,
)

EPILOG = """\
examples:
  onegraph bench step out/4bit
  onegraph bench step out/4bit --batch 1 --batch 8 --json

Times include the host. --json prints one JSON line per row, with id, command, commit, GPU, driver and versions.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure tokens per second of the decode step",
        description="Measures speed on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", dest="what", metavar="WHAT", required=True)
    step = kinds.add_parser("step", help="decode step of a model, eager and captured")
    step.add_argument("model", metavar="MODEL", help=MODEL)
    step.add_argument("--batch", action="append", type=BATCH, metavar="B", help="batch size; repeatable [1]")
    step.add_argument("--context", type=CONTEXT, default=128, metavar="N", help="tokens of the prompt [128]")
    step.add_argument(
        "--steps", type=STEPS, default=256, metavar="N", help="steps to measure, at most 32 of them eager [256]"
    )
    add_device(step)
    add_dtype(step, int8=True)
    step.add_argument("--json", action="store_true", help="print one JSON object per row")
    step.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.device import pick_precision
    from onegraph.engine.bench import bench_step
    from onegraph.engine.record import emit
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
    columns = ("name", "mode", "weights", "batch", "context", "steps", "tokens_per_second", "ms_per_step", "replay_us")
    widths = [22, *(max(len(column), 9) for column in columns[1:])]
    for i, row in enumerate(row | {"weights": weights} for row in timed):
        if args.json:
            emit(row)
            continue
        if not i:
            print(f"{row['device']}, torch {row['torch']}")
            print("  ".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)))
        cells = (f"{row.get(column, '-')!s:>{width}}" for column, width in zip(columns, widths, strict=True))
        print("  ".join(cells), flush=True)
    return 0
