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
  onegraph eval out/4bit --kv-cache-dtype turboquant:k3v4 --text wiki.txt --window 2048 --needle 2048

Use text that calibration never saw. Perplexity is exp of the mean loss over disjoint windows, so figures compare only
at equal --window. KL is KL(reference || model) in nats per token, with its standard error; top-1 is the agreement of
the most likely token. Bits per weight include all scales.

--card also writes the figures into README.md of MODEL, a directory: one table per text, reference, --tokens, --window,
--kv-cache-dtype and --needle, which the next run with the same options replaces. It needs 1000 tokens; below 4000 a
warning says that the figures mean little.

--kv-cache-dtype reads the model through a quantized KV cache as decoding does, and compares it with exact attention
(or with --reference). --needle hides sentences at five depths of N tokens and asks for them.

--generation measures greedy continuations: how long they agree with the reference (or the exact cache), how much they
repeat, and how many of 24 short instructions are followed, judged by rule.

--ab quantizes one component at a time, then all, and prints the cost of each: MODEL's components in REF, or without
--reference the components of the unquantized MODEL in NVFP4.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure perplexity, KL and top-1 agreement with a reference model",
        description="Measures a model on a text, and compares it with a reference model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text, '-' for stdin")
    parser.add_argument("--reference", metavar="REF", help="reference model, usually the unquantized one")
    parser.add_argument(
        "--tokens", type=TEXT_TOKENS, default=16384, metavar="N", help="maximum number of tokens of the text [16384]"
    )
    parser.add_argument(
        "--window",
        type=number(int, 2, 1 << 17),
        default=512,
        metavar="W",
        help="tokens per window, at most the model's context [512]",
    )
    parser.add_argument("--generation", action="store_true", help="measure generated text instead of likelihood")
    parser.add_argument("--ab", action="store_true", help="measure the cost of each component")
    parser.add_argument(
        "--kv-cache-dtype",
        default="exact",
        metavar="DTYPE",
        help="KV cache: exact, turboquant:4, turboquant:k3v4, ...; with latent attention (DeepSeek) also fp8 [exact]",
    )
    parser.add_argument(
        "--card",
        action="store_true",
        help="also write the figures into the model card (README.md), replacing older ones",
    )
    parser.add_argument(
        "--needle",
        type=number(int, 64, 1 << 17),
        metavar="N",
        help="also measure retrieval of needles from N tokens",
    )
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.deprecated import public_names
    from onegraph.api.device import device_name
    from onegraph.api.evaluate import evaluate_checkpoint
    from onegraph.api.hub import locate
    from onegraph.api.llm import PUBLIC
    from onegraph.api.quality import Measure, card_of, record

    device = pick_device(args.device)
    if args.card and (args.ab or args.generation):
        raise UsageError("--card: got --ab or --generation; the card takes figures of the text only; leave them out")
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
    with Progress(evaluating="window") as shown, options("needle", "kv_cache_dtype"), public_names(PUBLIC):
        result = evaluate_checkpoint(
            args.model,
            text,
            reference=args.reference,
            tokens=args.tokens,
            window=args.window,
            kv=args.kv_cache_dtype,
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
        tell(result, args.kv_cache_dtype)
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
        print(f"{card}: updated with these figures", file=sys.stderr)
    return 0


def tell(result: Mapping[str, Any], kv: str) -> None:
    """Prints the figures."""
    print(f"tokens          {result['tokens']} in {result['windows']} windows of {result['window']}")
    print(f"bits per weight {result['linear_bits']:.2f} in the linears, {result['bits']:.2f} over the whole model")
    print(f"perplexity      {result['perplexity']:.4f}")
    if result["kl"] is not None:
        print(f"  of reference  {result['reference_perplexity']:.4f}")
        print(f"KL              {result['kl']:.5f} +- {result['kl_error']:.5f} nats per token")
        print(f"top-1           {100 * result['top1']:.2f} %")
    if result["kv_bytes"] is not None:
        times = result["exact_kv_bytes"] / result["kv_bytes"]
        beside = f"{times:.2f}x smaller than" if times >= 1 else f"{1 / times:.2f}x larger than"
        print(f"KV cache        {result['kv_bytes']} bytes per token in all layers, {beside} the exact cache")
        tell_exact_layers(kv, result["kv"])
    if result["shadow_errors"] is not None:
        worst = max(result["shadow_errors"])
        print(f"shadow          quantization changes the output of attention by up to {100 * worst:.2f} % in a layer")
    if result["needle"] is not None:
        rows = [sum(row) for row in result["needle"]]
        print(f"needles         {sum(rows)} of {sum(map(len, result['needle']))}, by depth {rows}")


def run_generation(args: argparse.Namespace, device: Any) -> int:
    from onegraph.api.generation import ANSWER, evaluate_generation

    if args.needle is not None:
        raise UsageError("--generation and --needle are separate measurements; give one of them")
    with Progress(writing="text") as shown, options("kv_cache_dtype"):
        result = evaluate_generation(
            args.model,
            read_text(args.text),
            reference=args.reference,
            kv=args.kv_cache_dtype,
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
        print(f"  agreeing      {result['agreeing']:.1f} tokens before the first difference")
    return 0


def run_ab(args: argparse.Namespace, device: Any) -> int:
    from onegraph.api.evaluate import compare_components

    if args.kv_cache_dtype != "exact" or args.needle is not None or args.generation:
        raise UsageError("--ab compares components of weights; it takes no --kv-cache-dtype, --needle or --generation")
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
    print(f"{'component':22s}{'bits per weight':>16s}{'KL, nats per token':>22s}{'top-1':>10s}")
    for row in rows:
        kl = f"{row['kl']:.5f} +- {row['kl_error']:.5f}"
        bits = "" if row["bits"] is None else f"{row['bits']:.2f}"
        print(f"{row['component']:22s}{bits:>16s}{kl:>22s}{100 * row['top1']:>8.2f} %")
    return 0
