"""`onegraph quantize`: a causal language model to E8P-RVQ at 2, 3 or 4 bits, or to NVFP4."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import (
    QUANTIZING,
    Progress,
    UsageError,
    add_device,
    add_json,
    human_bytes,
    number,
    one_line,
    options,
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
  onegraph quantize models/SmolLM2-135M-Instruct out/4bit --calibration chats.jsonl=0.5 docs/=0.3 bundled=0.2
  onegraph quantize models/SmolLM2-135M-Instruct out/mixed --bits 2 --layer '*.down_proj=4' --layer '*.v_proj=3'
  onegraph quantize models/Llama-3-8B out/mixed --bits 2.5 --recipe good
  onegraph quantize models/Llama-3-8B out/fits --size 3.2GB
  onegraph quantize SmolLM2.gguf out/3bit --bits 3 --calibration self --recipe good --device cuda
  onegraph quantize models/gpt-oss-20b out/gpt-oss-3bit --bits 3 --experts 3
  onegraph quantize models/SmolLM2-135M-Instruct out/nvfp4 --format nvfp4

A linear stores codes of 2, 3 or 4 bits per weight and a float16 scale per row and column: 4.01 bits in total for 4096 x
4096. --map reads the same patterns as --layer from a JSON object, {"*.down_proj": 4}; 16 keeps a layer unquantized; the
last match wins.

--bits takes any number from 2 to 4 (--format trellis: 2 to 8); --size limits the bytes of all tensors. Then the cost of
rounding each layer is measured as KL of the whole model, and each layer gets one of the format's rates at the least
total cost; linears that share an input get one rate unless --per-linear is given. A plot shows the cost of other
averages. --size also chooses the rates of head and embedding, as 'auto' does with --bits; 16 keeps them. --layer fixes
a rate.

Models of onegraph's own decoder (docs/reference/models.md) need nothing else. Other causal language models are
quantized through transformers, if it is installed, and run in transformers only. Routed experts are quantized with the
tokens that selected them. Layers that stay unquantized are listed with the reason.

Memory holds one block, its calibration activations (--activation-memory limits them), and at the end one file of OUT
(at most 4 GB). Finished blocks are in OUT.partial: the same command resumes after a crash or Ctrl-C and ends with the
same bytes; a corrected command reuses what is still valid. OUT appears at the end.

Without --calibration, a corpus that comes with onegraph is used: prose, chats through the model's chat template, code,
data, mathematics, a dozen languages. Text that resembles your use improves quality further; 'bundled' among your
sources keeps the corpus in the mix. Of a directory all UTF-8 files are read; a .jsonl file has a line of {"text": ...}
or {"messages": [...]} for each document. --dry-run prints the linears that each pattern matches, the size of OUT, the
tokens of each source, and estimates of time and memory; it needs only config.json.

--format trellis rounds each tile of 16 x 16 weights as one path through 65,536 states: about 2 ms of a CPU core per
tile, so a model of 135M parameters takes ten minutes on two cores. --recipe quick searches the ends of a path among
32 weights rather than 128 (1 to 2 percent more error, a quarter less time).

--format nvfp4 needs no text: the scale of each group of 16 is chosen for the least error (--recipe quick: the plain
scale). Linears whose inputs are no multiple of 16 are kept. It also takes DeepSeek-V4: attention and experts.
"""
RECIPES = ("quick", "good", "best")
RATES = (*map(str, range(1, 9)), "16")  # of any format; which ones it has, the API says


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="quantize a model to E8P (2 to 4 bits), trellis (1 to 8 bits) or NVFP4",
        description="Quantizes a causal language model to E8P (2 to 4 bits), trellis codes (1 to 8 bits) or NVFP4.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="unquantized model: a directory, a .gguf file, or ORG/NAME[@REVISION] of the Hugging Face hub",
    )
    parser.add_argument("output", metavar="OUT", help="directory to write; must not exist")
    parser.add_argument(
        "--format",
        choices=("e8p", "trellis", "nvfp4", "auto"),
        default="e8p",
        help="weight format: e8p; trellis (1 to 8 bits, 25 to 43 percent less error than e8p at the same size on a "
        "Gaussian source, slower to quantize); nvfp4 (4.5 bits per weight, no calibration, NVIDIA ModelOpt's layout); "
        "auto (e8p or trellis, by estimates) [e8p]",
    )
    parser.add_argument(
        "--prefer",
        choices=("quality", "speed"),
        help="what --format auto decides by: least error, or least time per token on this device [quality]",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--bits",
        type=average,
        help="bits of the linears in the blocks: 2, 3, 4 (trellis: 1 to 8), or an average with automatic rates [4]",
    )
    amount.add_argument(
        "--size", type=byte_count, metavar="SIZE", help="maximum size of all tensors, e.g. 3.2GB, with automatic rates"
    )
    parser.add_argument(
        "--per-linear",
        action="store_true",
        help="choose a rate for each linear, also where linears share an input: less loss at equal size, more launches",
    )
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        type=layer_rate,
        metavar="PATTERN=BITS",
        help="bits of matching linears, e.g. '*.down_proj=4'; repeatable",
    )
    parser.add_argument("--map", metavar="FILE", help="JSON object of pattern to bits, applied before --layer")
    end = {"type": end_rate, "metavar": "{BITS,16,auto}"}
    parser.add_argument("--lm-head", help="bits of the output head; 16 keeps it, auto chooses the rate [16]", **end)
    parser.add_argument("--embed-tokens", help="bits of the embedding; 16 keeps it, auto chooses the rate [16]", **end)
    parser.add_argument(
        "--experts",
        type=int,
        choices=(*range(1, 9), 16),
        help="bits of routed experts; 16 keeps them [as --bits; published MXFP4 experts are kept]",
    )
    parser.add_argument(
        "--draft-layers",
        type=int,
        choices=(*range(1, 9), 16),
        help="bits of the draft layer (MTP) that the checkpoint has for --speculative mtp; 16 keeps it [16]",
    )
    parser.add_argument(
        "--calibration",
        nargs="+",
        default=["bundled"],
        metavar="SOURCE[=WEIGHT]",
        help="calibration text: files, directories, '-' for stdin, hub:ORG/NAME, 'bundled', all with a weight or none "
        "with; or 'self' for text that the model writes (slow on a CPU) [bundled]",
    )
    parser.add_argument(
        "--num-calibration-tokens",
        type=number(int, 64, 1 << 24),
        metavar="N",
        help="maximum number of calibration tokens [24576 for quick, 196608 for good and best]",
    )
    parser.add_argument(
        "--self-generate",
        action=argparse.BooleanOptionalAction,
        help="let the model extend a short text; holds the whole model [no]",
    )
    parser.add_argument(
        "--calibration-seq-len",
        type=number(int, 16, 1 << 17),
        default=512,
        metavar="T",
        help="tokens per calibration sequence, at most the model's context [512]",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="quantization recipe: quick (one pass), good (Hessians of the model's KL, by backward passes), best (good "
        "with tuned scales; holds the whole model) [quick on a CPU, good on a GPU]",
    )
    parser.add_argument(
        "--activation-memory",
        type=number(int, 0, 1 << 20),
        metavar="MB",
        help="maximum megabytes of activations in memory; the rest goes to disk next to OUT [an eighth of free memory]",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0, 2**31 - 1),
        default=0,
        metavar="N",
        help="seed; the same seed gives the same bytes [0]",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print sizes, time and memory from the headers; write nothing"
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def average(text: str) -> float:
    """--bits: a rate as an int, what lies between rates as it is."""
    bits = number(float, 1, 8)(text)
    return int(bits) if bits == int(bits) else bits


def byte_count(text: str) -> int:
    """--size: 3.2GB, 800 mb, 98000000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower(), re.ASCII)
    if found is None or not (size := round(float(found[1]) * 1000.0 ** " kmgt".index(found[2] or " "))):
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


def calibration_of(words: list[str]) -> Any:
    """--calibration as `quantize` takes it: one source, several, or {source: weight}."""
    found: list[tuple[str | Path, float | None]] = []
    for word in words:
        name, equals, last = word.rpartition("=")
        weight = _weight(last) if equals and not Path(word).exists() else None
        name = word if weight is None else name
        if name in ("self", "bundled") or name.startswith("hub:"):
            found.append((name, weight))
        else:
            found.append((read_text("-") if name == "-" else Path(name), weight))
    sources = [source for source, _ in found]
    if twice := next((source for at, source in enumerate(sources) if source in sources[:at]), None):
        raise UsageError(f"--calibration: {one_line(str(twice), 80)} is given twice; give its weight once")
    weights = [weight for _, weight in found]
    if all(weight is None for weight in weights):
        return sources[0] if len(sources) == 1 else sources
    if None in weights:
        raise UsageError(
            f"--calibration: {sum(weight is not None for weight in weights)} of {len(weights)} sources have a weight; "
            "give one to each (SOURCE=0.5), or none"
        )
    return dict(found)


def _weight(text: str) -> float | None:
    """None where the text is no number, and so part of a name."""
    try:
        return float(text)
    except ValueError:
        return None


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

    chosen = {
        "bits": args.bits,
        "size": args.size,
        "format": args.format,
        "prefer": args.prefer,
        "recipe": args.recipe,
        "calibration": calibration_of(args.calibration) if args.format != "nvfp4" else "bundled",
        "num_calibration_tokens": args.num_calibration_tokens,
        "self_generate": args.self_generate,
        "calibration_seq_len": args.calibration_seq_len,
        "layers": rates_of(args.map, args.layer),
        "lm_head": args.lm_head,
        "embed_tokens": args.embed_tokens,
        "experts": args.experts,
        "per_linear": args.per_linear,
        "draft_layers": args.draft_layers,
        "activation_memory": None if args.activation_memory is None else args.activation_memory * 10**6,
        "seed": args.seed,
        "device": pick_device(args.device),
    }
    with options(*(f"{name}:" for name in chosen if name != "layers")):
        if args.dry_run:
            return tell(plan(args.source, args.output, **chosen), args.json)
        with Progress(**QUANTIZING) as shown:
            made = quantize(args.source, args.output, progress=shown, on_message=remark, **chosen)
    if args.json:
        told: dict[str, Any] = {"source": made.source, "output": args.output}
        if args.format != "e8p":
            told |= {"format": made.format}
        if made.format != "nvfp4":
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
    for line in (*found.left_lines, *found.notes, *found.text_lines):
        print(one_line(line, 400))
    print(f"{found.source}: {found}")
    if found.chosen:
        print(AVERAGE)
    print(f"{found.after}; nothing written")
    return 0
