"""`onegraph eval`: perplexity of a model on a text, and how far it is from a reference model."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onegraph.cli.common import (
    MODEL,
    TEXT_TOKENS,
    Progress,
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
    read_text,
    remark,
    tell_exact_layers,
)

EPILOG = """\
examples:
  onegraph eval out/4bit --text wiki.txt
  onegraph eval out/4bit --reference models/SmolLM2-135M-Instruct --text wiki.txt --tokens 8192 --json
  onegraph eval out/4bit --reference models/SmolLM2-135M-Instruct --text wiki.txt --card
  onegraph eval out/4bit --reference models/SmolLM2-135M-Instruct --ab --text wiki.txt
  onegraph eval models/SmolLM2-135M-Instruct --ab --text wiki.txt
  onegraph eval out/4bit --reference models/SmolLM2-135M-Instruct --generation --text wiki.txt
  onegraph eval out/4bit --kv turboquant:k3v4 --text wiki.txt --window 2048 --needle 2048

Use text that calibration never saw. Perplexity is exp of the mean loss over windows that share nothing, so figures
compare only at the same --window. KL is KL(reference || model) in nats a token, with its standard error; top-1 is how
often both models' likeliest token is the same. bits a weight counts all scales.

--card also writes the figures into README.md of MODEL, a directory: a table for each text, reference, --tokens,
--window, --kv and --needle, which the next run with the same replaces. It takes 1000 tokens at the least; figures of
fewer than some 4000 say little, and a warning says so.

--kv reads the model through a quantized KV cache as decoding does, and compares it with the same model and exact
attention (or with --reference). --needle hides sentences at five depths of so many tokens and asks for them.

--generation measures what the model writes, greedily: how long its continuations of pieces of the text are those of
the reference (or of the exact cache), how much of them repeats itself, and how many of some short instructions it
follows, judged by rule.

--ab flips one component at a time (attention's projections, lm_head, a router's gate, ...), then all, and prints what
each costs: MODEL's put into REF, or without --reference those of the unquantized MODEL as NVFP4 would have them.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="perplexity on a text, KL and top-1 agreement with a reference model",
        description="Measures a model on a text, and against the model that it was quantized from.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text, '-' for stdin")
    parser.add_argument("--reference", metavar="REF", help="what to compare with, as MODEL; usually the unquantized")
    parser.add_argument(
        "--tokens", type=TEXT_TOKENS, default=16384, metavar="N", help="of the text to use (default: 16384)"
    )
    parser.add_argument(
        "--window", type=number(int, 2, 1 << 17), default=512, metavar="W", help="tokens of context (default: 512)"
    )
    parser.add_argument("--generation", action="store_true", help="what it writes, in place of how likely the text is")
    parser.add_argument("--ab", action="store_true", help="what each component costs by itself, quantized")
    parser.add_argument(
        "--kv",
        default="exact",
        metavar="SETTING",
        help="the KV cache: exact (default), turboquant:4, turboquant:k3v4, ...",
    )
    parser.add_argument(
        "--card",
        action="store_true",
        help="write the figures into the model's card too (README.md), replacing older ones",
    )
    parser.add_argument(
        "--needle",
        type=number(int, 64, 1 << 17),
        metavar="N",
        help="also retrieval of needles from N tokens of the text",
    )
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.device import device_name
    from onegraph.api.evaluate import evaluate_checkpoint
    from onegraph.api.hub import locate
    from onegraph.api.quality import Measure, card_of, record

    device = pick_device(args.device)
    if args.card and (args.ab or args.generation):
        raise UsageError("--card takes the figures of the text itself; leave out --ab and --generation")
    if args.ab:
        return run_ab(args, device)
    if args.generation:
        return run_generation(args, device)
    card = None
    if args.card:  # refused now, not after the minutes that measuring takes
        with open_model(args.model) as checkpoint:
            card = card_of(checkpoint.path)
    text, dtype = read_text(args.text), pick_dtype(args.dtype, device)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with Progress(evaluating="window") as shown, options("needle"):
        result = evaluate_checkpoint(
            args.model,
            text,
            reference=args.reference,
            tokens=args.tokens,
            window=args.window,
            kv=args.kv,
            needle=args.needle,
            device=device,
            dtype=dtype,
            progress=shown,
            for_card=args.card,
            remark=remark,
        )
    if args.json:
        told = {"model": args.model, "reference": args.reference, "text_sha256": digest}
        print_json({**told, "device": str(device), **result})
    else:
        tell(result, args.kv)
    if card is not None:
        measure = Measure(
            figures=result,
            text="standard input" if args.text == "-" else Path(args.text).name,
            sha256=digest,
            reference=None if args.reference is None else locate(args.reference).path,
            needle=args.needle,
            computed=f"in {str(dtype).removeprefix('torch.')} on {device_name(device)}",
            day=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        record(card, measure)
        print(f"{card}: has these figures now", file=sys.stderr)
    return 0


def tell(result: Mapping[str, Any], kv: str) -> None:
    """Prints the figures."""
    print(f"tokens          {result['tokens']} in {result['windows']} windows of {result['window']}")
    print(f"bits a weight   {result['linear_bits']:.2f} in the linears, {result['bits']:.2f} over the whole model")
    print(f"perplexity      {result['perplexity']:.4f}")
    if result["kl"] is not None:
        print(f"  of reference  {result['reference_perplexity']:.4f}")
        print(f"KL              {result['kl']:.5f} +- {result['kl_error']:.5f} nats a token")
        print(f"top-1           {100 * result['top1']:.2f} %")
    if result["kv_bytes"] is not None:
        times = result["exact_kv_bytes"] / result["kv_bytes"]
        beside = f"{times:.2f} times less than" if times >= 1 else f"{1 / times:.2f} times as much as"
        print(f"KV cache        {result['kv_bytes']} bytes a token of a window in all layers, {beside} exact ones")
        tell_exact_layers(kv, result["kv"])
    if result["shadow_errors"] is not None:
        worst = max(result["shadow_errors"])
        print(f"shadow          codes would move the output of attention by up to {100 * worst:.2f} % in a layer")
    if result["needle"] is not None:
        rows = [sum(row) for row in result["needle"]]
        print(
            f"needles         {sum(rows)} of {sum(map(len, result['needle']))}, from the first depth to the last {rows}"
        )


def run_generation(args: argparse.Namespace, device: Any) -> int:
    from onegraph.api.generation import ANSWER, evaluate_generation

    if args.needle is not None:
        raise UsageError("--generation measures what is written; --needle is a measurement of its own")
    with Progress(writing="text") as shown, options("kv"):
        result = evaluate_generation(
            args.model,
            read_text(args.text),
            reference=args.reference,
            kv=args.kv,
            device=device,
            dtype=pick_dtype(args.dtype, device),
            progress=shown,
        )
    if args.json:
        print_json({"model": args.model, "reference": args.reference, "device": str(device), **result})
        return 0
    for name in ("model", "reference"):
        if name not in result:
            continue
        row = result[name]
        done = (
            "no chat template" if row["done"] is None else f"{row['done']} of {result['tasks']} instructions followed"
        )
        repeated, loops = (f"{100 * row[key]:.1f} %" for key in ("repetition", "loops"))
        print(f"{name:16s}{repeated} repeated, {loops} of texts end in a loop, {done}")
    if "same" in result:
        print(f"same text       {100 * result['same']:.1f} % of {result['pieces']} continuations of {ANSWER} tokens")
        print(f"  agreeing      {result['agreeing']:.1f} tokens until the first other one")
    return 0


def run_ab(args: argparse.Namespace, device: Any) -> int:
    from onegraph.api.evaluate import compare_components

    if args.kv != "exact" or args.needle is not None or args.generation:
        raise UsageError("--ab compares components of weights; it takes no --kv, --needle or --generation")
    with Progress(comparing="component") as shown:
        rows = compare_components(
            args.model,
            args.reference,
            read_text(args.text),
            tokens=args.tokens,
            window=args.window,
            device=device,
            dtype=pick_dtype(args.dtype, device),
            progress=shown,
            remark=remark,
        )
    if args.json:
        print_json({"model": args.model, "reference": args.reference, "device": str(device), "ab": rows})
        return 0
    print(f"{'component':22s}{'bits a weight':>14s}{'KL, nats a token':>24s}{'top-1':>10s}")
    for row in rows:
        kl = f"{row['kl']:.5f} +- {row['kl_error']:.5f}"
        bits = "" if row["bits"] is None else f"{row['bits']:.2f}"
        print(f"{row['component']:22s}{bits:>14s}{kl:>24s}{100 * row['top1']:>8.2f} %")
    return 0
