"""`onegraph bench`: tokens per second of a model's decode step, and what of it fits into a GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from onegraph.cli.common import (
    BATCH,
    CONTEXT,
    MODEL,
    STEPS,
    UsageError,
    add_device,
    add_dtype,
    add_gpu_share,
    human_bytes,
    number,
    open_model,
    options,
    pick_device,
    print_json,
)

FP8 = "fp8"  # a cache of latents
EPILOG = """\
examples:
  onegraph bench step out/4bit
  onegraph bench step out/4bit --batch 1 --batch 8 --json
  onegraph bench fit out/4bit --context 8192

Times include the host. `fit` reads no weights and needs no GPU. --json prints one JSON line per row; those of `step`
have id, command, commit, GPU, driver and versions.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure tokens per second of the decode step; show what fits into a GPU",
        description="Measures speed on this machine, and shows what fits into a GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", dest="what", metavar="WHAT", required=True)
    step = kinds.add_parser(
        "step",
        help="decode step of a model, eager and captured",
        description="Measures the decode step of a model, eager and, on a GPU, captured.",
    )
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
    fit = kinds.add_parser(
        "fit",
        help="sequences and tokens that fit into a GPU beside a model, without one",
        description="Computes how many sequences and tokens fit into a GPU beside a model. It needs no GPU.",
    )
    fit.add_argument("model", metavar="MODEL", help=MODEL)
    fit.add_argument("--context", type=CONTEXT, metavar="N", help="tokens of a sequence [the model's, at most 4096]")
    fit.add_argument(
        "--gpu-memory",
        action="append",
        type=number(float, 0, 1e6, open_low=True),
        metavar="GB",
        help="memory of the GPU in GB; repeatable [24, 48, 80]",
    )
    fit.add_argument(
        "--kv-cache-dtype",
        action="append",
        metavar="DTYPE",
        help="KV cache: exact, turboquant:4, ...; repeatable [exact, and fp8 and turboquant:4 where the model can have "
        "them]",
    )
    add_gpu_share(
        fit, "share of the GPU's memory for CUDA, weights and KV cache [CUDA, weights and 0.9 of what they leave]"
    )
    add_dtype(fit)
    fit.add_argument("--json", action="store_true", help="print one JSON object per row")
    fit.set_defaults(run=run_fit)


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


def run_fit(args: argparse.Namespace) -> int:
    import torch

    from onegraph.api.deprecated import public_names
    from onegraph.api.device import pick_dtype
    from onegraph.api.memory import MAX_MODEL_LEN, fit
    from onegraph.formats.turboquant import parse_kv
    from onegraph.models.load import parse_config

    dtype, wanted = pick_dtype(args.dtype, torch.device("cuda")), args.kv_cache_dtype or ("exact", FP8, "turboquant:4")
    rows, share = list[dict[str, Any]](), args.gpu_memory_utilization
    with (
        open_model(args.model) as checkpoint,
        options("context:", "kv_cache_dtype"),
        public_names({"kv": "kv_cache_dtype"}),
    ):
        config = parse_config(checkpoint.config)
        context = args.context or min(config.max_positions, MAX_MODEL_LEN)
        for size, kind in product(args.gpu_memory or (24, 48, 80), wanted):
            try:
                kv, fp8 = (None, True) if kind == FP8 else (parse_kv(kind), False)
                found = fit(checkpoint, int(size * 1e9), dtype=dtype, kv=kv, context=context, fp8=fp8, share=share)
            except ValueError:
                if args.kv_cache_dtype or kind == "exact":
                    raise
                continue  # a cache that nobody named and that the model cannot have
            rows.append({"bench": "fit", "gpu_gb": size, "kv": kind, **asdict(found)})
    if args.json:
        for row in rows:
            print_json(row)
        return 0
    print(f"weights {human_bytes(rows[0]['weights'])}; a cached token, by type of the KV cache:")
    for kind, size in {row["kv"]: row["token_bytes"] for row in rows}.items():
        print(f"  {kind}: {human_bytes(size)}")
    head = ("GPU memory", "KV cache", f"sequences of {context}", "longest sequence")
    print("  ".join(f"{column:>{max(14, len(column))}}" for column in head))
    for row in rows:
        fits = (str(row["sequences"]), f"{row['longest']} tokens") if row["longest"] else ("none", "weights do not fit")
        cells = (f"{row['gpu_gb']:g} GB", str(row["kv"]), *fits)
        print("  ".join(f"{cell:>{max(14, len(column))}}" for cell, column in zip(cells, head, strict=True)))
    return 0
