"""`onegraph quantize`: a causal language model to E8P-RVQ at 2, 3 or 4 bits, or to NVFP4."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import (
    QUANTIZING,
    Progress,
    add_device,
    add_json,
    human_bytes,
    number,
    one_line,
    pick_device,
    print_json,
    read_text,
    remark,
)
from onegraph.formats.files import CheckpointError, read_json

if TYPE_CHECKING:
    from onegraph.api.plan import Plan

EPILOG = """\
examples:
  onegraph quantize HuggingFaceTB/SmolLM2-135M-Instruct out/4bit
  onegraph quantize models/Llama-3-8B out/4bit --dry-run --layer '*.down_proj=3'
  onegraph quantize models/SmolLM2-135M-Instruct out/4bit --bits 4 --calibration text.txt
  onegraph quantize models/SmolLM2-135M-Instruct out/mixed --bits 2 --layer '*.down_proj=4' --layer '*.v_proj=3'
  onegraph quantize models/Llama-3-8B out/mixed --bits 2.5 --recipe good
  onegraph quantize models/Llama-3-8B out/fits --size 3.2GB
  onegraph quantize SmolLM2.gguf out/3bit --bits 3 --calibration self --recipe good --device cuda
  onegraph quantize models/gpt-oss-20b out/gpt-oss-3bit --bits 3 --experts 3
  onegraph quantize models/SmolLM2-135M-Instruct out/nvfp4 --format nvfp4

A linear stores codes of 2, 3 or 4 bits a weight and a float16 scale for each row and column: 4.01 bits in all for
4096 x 4096. --map reads the same patterns as --layer from a JSON object, {"*.down_proj": 4}; 16 keeps a layer
unquantized; the last pattern that matches wins.

--bits may be any number from 2 to 4, or --size says what all tensors may take. Then what rounding each layer alone
costs is measured, as KL of the whole model, and the rates 2, 3 and 4 are given out so that these add up to the least
(--format trellis: numbers from 2 to 8 and the rates 2 to 8);
linears that share an input get one rate. A plot says what other averages would cost. --size gives the head and the
embedding rates too, as 'auto' does beside --bits; 16 leaves them. What --layer names keeps the rate it is given.

Models that onegraph's own decoder runs (docs/models.md) need nothing else; any other causal language model is taken
through transformers' modules, where that is installed, and OUT then runs in transformers. Routed experts are rounded
too, each under the tokens that chose it; how many those were is said, by name where they are few. What is left as it is
(routers, convolutions) is said with the reason.

Works block by block, so memory holds one block, the calibration text's activations (--activation-memory bounds them),
and at the end one file of OUT (at most 4 GB). Finished blocks lie in OUT.partial: the same command resumes after a
crash or Ctrl-C and ends with the same bytes; a corrected one goes on with what it leaves as it was (sampled text,
Hessians, blocks), and says what it drops. OUT appears whole, at the end.

Without --calibration, a text of some 8,600 tokens that comes with onegraph is read, and on a GPU the model goes on with
it. That is for a quick result: for 2 and 3 bits, and wherever quality counts, give a text of the kind that the model
will see, and 32,000 tokens of it or more. --dry-run says how many linears each pattern matches, what OUT takes, and
what time and memory here, of any model whose config.json is there, and does nothing.

--format trellis rounds each tile of 16 x 16 weights as one path through 65,536 states: about 2 ms of a CPU core a tile,
so a model of 135M parameters takes some ten minutes on two cores. --recipe quick looks for the ends of a path among 32
weights rather than 128 (1 to 2 percent more error, a quarter less time).

--format nvfp4 reads no text: weights are rounded under the scale of each 16 that errs least (--recipe quick: the plain
one), linears whose inputs are no multiple of 16 are kept. It also takes DeepSeek-V4: attention and experts.
"""
RECIPES = ("quick", "good", "best")
RATES = (*map(str, range(1, 9)), "16")  # of any format; which ones it has, the API says


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="make a checkpoint smaller: E8P-RVQ (2 to 4 bits), trellis-coded weights (1 to 8 bits), or NVFP4",
        description="Quantizes a causal language model to E8P-RVQ weights of 2, 3 or 4 bits, to trellis-coded weights "
        "of 1 to 8 bits, or to NVFP4.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="unquantized model: a directory, a .gguf file, or ORG/NAME[@REVISION] of the Hugging Face hub",
    )
    parser.add_argument("output", metavar="OUT", help="directory to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=("e8p", "trellis", "nvfp4"),
        default="e8p",
        help="e8p (default); trellis: 1 to 8 bits, 30 to 50 percent less error at the same size, slower to quantize; "
        "nvfp4: 4.5 bits a weight, no calibration, in NVIDIA ModelOpt's form",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--bits",
        type=average,
        help="of every linear inside the blocks: 2, 3 or 4 (default), with --format trellis 1 to 8; or a number "
        "between for rates that are chosen",
    )
    amount.add_argument(
        "--size", type=byte_count, metavar="SIZE", help="choose rates so that all tensors take so much, e.g. 3.2GB"
    )
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        type=layer_rate,
        metavar="PATTERN=BITS",
        help="another rate for the linears that match, e.g. '*.down_proj=4'; may be given again",
    )
    parser.add_argument("--map", metavar="FILE", help="JSON object of pattern to bits, read before any --layer")
    end = {"type": end_rate, "metavar": "{BITS,16,auto}"}
    parser.add_argument("--lm-head", help="quantize the output head as well; auto: its rate is chosen", **end)
    parser.add_argument("--embed-tokens", help="quantize the embedding as well, likewise", **end)
    parser.add_argument(
        "--experts",
        type=int,
        choices=(*range(1, 9), 16),
        help="of routed experts, 16 to keep them (default: as --bits; experts published in MXFP4 are kept)",
    )
    parser.add_argument(
        "--calibration",
        default="bundled",
        metavar="FILE",
        help="text to calibrate on, '-' for stdin, 'bundled' for a short one that comes with onegraph (default), or "
        "'self' for text that the model samples, which takes long on a CPU",
    )
    parser.add_argument(
        "--tokens",
        type=number(int, 64, 1 << 24),
        metavar="N",
        help="of it to use, at most (default: 8192 on a CPU, 32768 on a GPU)",
    )
    parser.add_argument(
        "--extend",
        action=argparse.BooleanOptionalAction,
        help="where the text has fewer tokens than that, let the model sample the rest behind pieces of it (holds the "
        "whole model; default: of the bundled text, on a GPU that has room for the model)",
    )
    parser.add_argument(
        "--sequence", type=number(int, 16, 1 << 17), default=512, metavar="T", help="tokens a row (default: 512)"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="how hard to try: quick (one pass; default on a CPU), good (under Hessians of the model's KL, by backward "
        "passes; default on a GPU), best (tunes scales as well; holds the whole model)",
    )
    parser.add_argument(
        "--activation-memory",
        type=number(int, 0, 1 << 20),
        metavar="MB",
        help="activations to hold in memory; the rest goes to disk beside OUT (default: an eighth of what is free)",
    )
    parser.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, metavar="N", help="same seed, same bytes")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what it would do and take, from the headers alone; write nothing"
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def average(text: str) -> float:
    """--bits: a rate as an int, what lies between rates as it is."""
    bits = number(float, 1, 8)(text)
    return int(bits) if bits == int(bits) else bits


def byte_count(text: str) -> int:
    """--size: 3.2GB, 800 MB, 98000000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B?\s*", text, re.ASCII)
    if found is None or not (size := round(float(found[1]) * 1000.0 ** " kMGT".index(found[2] or " "))):
        raise argparse.ArgumentTypeError(f"{one_line(repr(text), 40)} is no size; give e.g. 3.2GB, 800MB or 98000000")
    return size


def end_rate(text: str) -> int | str:
    """--lm-head and --embed-tokens."""
    if text != "auto" and text not in RATES:
        raise argparse.ArgumentTypeError(
            f"{one_line(repr(text), 40)} is no rate of an end; allowed are 1 to 8, 16 to keep it, and auto"
        )
    return text if text == "auto" else int(text)


def layer_rate(text: str) -> tuple[str, int]:
    """PATTERN=BITS of the command line."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or bits not in RATES:
        raise argparse.ArgumentTypeError(
            f"{one_line(repr(text), 80)} is not PATTERN=BITS with 1 to 8, or 16 to keep a layer, e.g. '*.down_proj=4'"
        )
    return pattern, int(bits)


def rates_of(map_file: str | None, layers: list[tuple[str, int]]) -> dict[str, int]:
    """Pattern -> bits, of --map and then --layer. Raises CheckpointError for a map that is not one."""
    rates: dict[str, int] = {}
    for pattern, bits in (read_json(Path(map_file)) if map_file is not None else {}).items():
        if type(bits) is not int or str(bits) not in RATES:
            raise CheckpointError(
                f"{map_file}: {one_line(repr(pattern), 80)} has the rate {one_line(repr(bits), 40)}; "
                "allowed are 1 to 8, and 16 to keep a layer"
            )
        rates[pattern] = bits
    for pattern, bits in layers:
        rates.pop(pattern, None)  # given again, it comes last
        rates[pattern] = bits
    return rates


def run(args: argparse.Namespace) -> int:
    from onegraph.api.plan import plan
    from onegraph.api.quantize import quantize

    options = {
        "bits": args.bits,
        "size": args.size,
        "format": args.format,
        "recipe": args.recipe,
        "calibration": args.calibration,
        "tokens": args.tokens,
        "extend": args.extend,
        "sequence": args.sequence,
        "layers": rates_of(args.map, args.layer),
        "lm_head": args.lm_head,
        "embed_tokens": args.embed_tokens,
        "experts": args.experts,
        "activations": None if args.activation_memory is None else args.activation_memory * 10**6,
        "seed": args.seed,
        "device": pick_device(args.device),
    }
    if args.calibration not in ("self", "bundled"):
        options["calibration"] = read_text(args.calibration)
    if args.dry_run:
        return tell(plan(args.source, args.output, **options), args.json)
    with Progress(**QUANTIZING) as shown:
        made = quantize(args.source, args.output, progress=shown, remark=remark, **options)
    if args.json:
        told: dict[str, Any] = {"source": made.source, "output": args.output}
        if args.format == "nvfp4":
            told |= {"format": "nvfp4"}
        else:
            told |= {"bits": made.bits, "recipe": made.recipe, "seed": made.seed}
            told |= {"calibration_tokens": made.calibration_tokens, "left": dict(made.left)}
            told |= {"experts": dict(made.experts)} if made.experts else {}
            told |= {"curve": [{"bits": round(b, 3), "kl": kl} for b, kl in made.curve]} if made.curve else {}
        print_json(told | {"seconds": made.seconds, "before": made.before.as_dict(), "after": made.after.as_dict()})
    else:
        print(
            f"{args.output}: {made.before.stored} -> {human_bytes(made.after.total_bytes)}, "
            f"{made.after}, in {made.seconds:.0f} s"
        )
    return 0


def tell(found: Plan, json: bool) -> int:
    """What --dry-run prints."""
    from onegraph.api.budget import AVERAGE

    if json:
        print_json(found.as_dict())
        return 0
    for pattern, names in found.matched.items():
        print(f"{one_line(pattern, 80)}: {len(names)} linears, {names[0]}{' to ' + names[-1] if names[1:] else ''}")
    for line in (*found.left_lines, *found.notes):
        print(one_line(line, 400))
    print(f"{found.source}: {found}")
    if found.chosen:
        print(AVERAGE)
    print(f"{found.after}; nothing written")
    return 0
