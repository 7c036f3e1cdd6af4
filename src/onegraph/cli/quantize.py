"""`onegraph quantize`: a checkpoint of the Llama family to E8P-RVQ at 2, 3 or 4 bits, or to NVFP4."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import (
    UsageError,
    add_device,
    add_json,
    human_bytes,
    number,
    one_line,
    open_model,
    pick_device,
    print_json,
    progress,
    read_text,
)
from onegraph.formats.files import CheckpointError, read_json

if TYPE_CHECKING:
    import torch

    from onegraph.cli.tokenizer import Tokenizer
    from onegraph.formats.checkpoint import Checkpoint

EPILOG = """\
examples:
  onegraph quantize models/SmolLM2-135M-Instruct out/4bit --bits 4 --calibration text.txt
  onegraph quantize models/SmolLM2-135M-Instruct out/mixed --bits 2 --layer '*.down_proj=4' --layer '*.v_proj=3'
  onegraph quantize SmolLM2.gguf out/3bit --bits 3 --calibration self --recipe good --device cuda
  onegraph quantize models/SmolLM2-135M-Instruct out/nvfp4 --format nvfp4

A linear stores codes of 2, 3 or 4 bits a weight and a float16 scale for each row and column: 4.01 bits in all for
4096 x 4096. --map reads the same patterns as --layer from a JSON object, {"*.down_proj": 4}; 16 keeps a layer
unquantized; the last pattern that matches wins.

Works block by block, so memory holds one block and the calibration text's activations. Finished blocks lie in
OUT.partial: the same command resumes after a crash or Ctrl-C and ends with the same bytes. OUT appears whole, at
the end.

--format nvfp4 reads no text: weights are rounded under the scale of each 16 that errs least (--recipe quick: the plain
one), linears whose inputs are no multiple of 16 are kept. It also takes DeepSeek-V4: attention and experts.
"""
RECIPES = ("quick", "good", "best")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        help="make a checkpoint smaller: E8P-RVQ weights of 2, 3 or 4 bits, or NVFP4",
        description="Quantizes a checkpoint of the Llama family to E8P-RVQ weights of 2, 3 or 4 bits, or to NVFP4.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="unquantized model: a directory or a .gguf file")
    parser.add_argument("output", metavar="OUT", help="directory to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=("e8p", "nvfp4"),
        default="e8p",
        help="e8p (default), or nvfp4: 4.5 bits a weight, no calibration, in NVIDIA ModelOpt's form",
    )
    bits = {"type": int, "choices": (2, 3, 4)}
    parser.add_argument("--bits", default=4, help="of every linear inside the blocks (default: 4)", **bits)
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        type=layer_rate,
        metavar="PATTERN=BITS",
        help="another rate for the linears that match, e.g. '*.down_proj=4'; may be given again",
    )
    parser.add_argument("--map", metavar="FILE", help="JSON object of pattern to bits, read before any --layer")
    parser.add_argument("--lm-head", help="quantize the output head as well", **bits)
    parser.add_argument("--embed-tokens", help="quantize the embedding as well", **bits)
    parser.add_argument(
        "--calibration",
        default="self",
        metavar="FILE",
        help="text to calibrate on, '-' for stdin, or 'self' for text that the model samples (default)",
    )
    parser.add_argument(
        "--tokens", type=number(int, 64, 1 << 24), default=16384, metavar="N", help="of it to use (default: 16384)"
    )
    parser.add_argument(
        "--sequence", type=number(int, 16, 1 << 17), default=512, metavar="T", help="tokens a row (default: 512)"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="good",
        help="how hard to try: quick (one pass), good (default), best (also tunes scales; holds the whole model)",
    )
    parser.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, metavar="N", help="same seed, same bytes")
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def layer_rate(text: str) -> tuple[str, int]:
    """PATTERN=BITS of the command line."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or bits not in ("2", "3", "4", "16"):
        raise argparse.ArgumentTypeError(
            f"{one_line(repr(text), 80)} is not PATTERN=BITS with 2, 3, 4, or 16 to keep a layer, e.g. '*.down_proj=4'"
        )
    return pattern, int(bits)


def rates_of(map_file: str | None, layers: list[tuple[str, int]]) -> dict[str, int]:
    """Pattern -> bits, of --map and then --layer. Raises CheckpointError for a map that is not one."""
    rates: dict[str, int] = {}
    for pattern, bits in (read_json(Path(map_file)) if map_file is not None else {}).items():
        if type(bits) is not int or bits not in (2, 3, 4, 16):
            raise CheckpointError(
                f"{map_file}: {one_line(repr(pattern), 80)} has the rate {one_line(repr(bits), 40)}; "
                "allowed are 2, 3, 4, and 16 to keep a layer"
            )
        rates[pattern] = bits
    for pattern, bits in layers:
        rates.pop(pattern, None)  # given again, it comes last
        rates[pattern] = bits
    return rates


def run(args: argparse.Namespace) -> int:
    if args.format == "nvfp4":
        result = quantize_nvfp4(args)
    else:
        result = quantize_e8p(args)
    if args.json:
        print_json(result)
    else:
        before, after = result["before"], result["after"]
        print(
            f"{args.output}: {human_bytes(before['bytes'])} -> {human_bytes(after['bytes'])}, "
            f"{after['linear_bits']:.2f} bits a weight in the linears, {after['bits']:.2f} over the whole model, "
            f"in {result['seconds']:.0f} s"
        )
    return 0


def new_directory(output: str) -> Path:
    out = Path(output)
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists already; choose another output directory or remove it")
    return out


def quantize_nvfp4(args: argparse.Namespace) -> dict[str, Any]:
    """`--format nvfp4`: the linears of the blocks but those that --map and --layer keep. Returns what --json prints."""
    from onegraph.cli.size import size_of
    from onegraph.formats.checkpoint import write_checkpoint
    from onegraph.formats.e8p import KEEP, resolve_rates
    from onegraph.models.load import parse_config
    from onegraph.quant.nvfp4 import config_for, quantized_tensors

    started, out = time.perf_counter(), new_directory(args.output)
    rates = rates_of(args.map, args.layer)
    if args.bits != 4 or args.lm_head or args.embed_tokens or any(bits != KEEP for bits in rates.values()):
        raise UsageError(
            "nvfp4 has one rate and keeps both ends: no --bits, --lm-head or --embed-tokens, and --layer and --map can "
            "only keep a layer (PATTERN=16)"
        )
    with open_model(args.source) as checkpoint:
        parse_config(checkpoint.config)
        if checkpoint.config.get("quantization_config") is not None:
            raise UsageError(f"{args.source}: is quantized already; give the unquantized model")
        names = nvfp4_layers(checkpoint)
        kept = resolve_rates(rates, names, bits=4)
        chosen = [name for name in names if name not in kept]
        wide = [name.removesuffix(".weight") for name in checkpoint.names if len(checkpoint.shape(name)) == 2]
        told = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        told["quantization_config"] = config_for({*wide, "lm_head"} - set(chosen)).to_dict()
        with progress(total=len(chosen), what="quantizing", unit="linear") as bar:
            tensors = quantized_tensors(
                checkpoint.names,
                checkpoint.tensor,
                chosen,
                search=args.recipe != "quick",
                device=pick_device(args.device),
                on_linear=lambda _: bar.update(),
            )
            write_checkpoint(out, told, tensors, copy_from=checkpoint)
        before = size_of(checkpoint)
    with open_model(args.output) as written:
        after = size_of(written)
    seconds = round(time.perf_counter() - started, 1)
    told = {"source": args.source, "output": args.output, "format": "nvfp4", "seconds": seconds}
    return told | {"before": summary(before), "after": summary(after)}


def nvfp4_layers(checkpoint: Checkpoint) -> list[str]:
    """The checkpoint's names of the linears that may be NVFP4: all but the head, with inputs in groups of 16."""
    import torch

    from onegraph.formats.nvfp4 import NVFP4
    from onegraph.models.load import parse_config
    from onegraph.models.loader import Loader

    loader = Loader(checkpoint, parse_config(checkpoint.config), torch.float32)
    return [
        loader.stored[f"{name}.weight"].removesuffix(".weight")
        for name, (_, k, _) in loader.parts.linears.items()
        if name != loader.parts.head and k % NVFP4.group == 0 and f"{name}.weight" in loader
    ]


def quantize_e8p(args: argparse.Namespace) -> dict[str, Any]:
    return quantize_checkpoint(
        args.source,
        args.output,
        rates=rates_of(args.map, args.layer),
        calibration=args.calibration if args.calibration == "self" else read_text(args.calibration),
        tokens=args.tokens,
        sequence=args.sequence,
        recipe=args.recipe,
        device=pick_device(args.device),
        levers={"bits": args.bits, "lm_head": args.lm_head, "embed_tokens": args.embed_tokens, "seed": args.seed},
    )


def quantize_checkpoint(
    source: str,
    output: str,
    *,
    rates: dict[str, int],
    calibration: str,
    tokens: int,
    sequence: int,
    recipe: str,
    device: torch.device,
    levers: dict[str, Any],
) -> dict[str, Any]:
    """The whole command: reads `source`, calibrates on the text `calibration` ('self': on the model's own), writes
    `output`, shows progress on stderr. Returns what --json prints. Raises ValueError for anything that is wrong."""
    from onegraph.cli.size import size_of
    from onegraph.cli.tokenizer import Tokenizer
    from onegraph.formats.checkpoint import write_checkpoint
    from onegraph.models.config import LlamaConfig
    from onegraph.models.llama import LlamaSource
    from onegraph.quant.calibrate import packed_tokens
    from onegraph.quant.partial import Partial, fingerprint
    from onegraph.quant.quantize import quantize
    from onegraph.quant.recipe import Recipe

    started = time.perf_counter()
    out = new_directory(output)
    with open_model(source) as checkpoint:
        chosen = Recipe.preset(recipe, layers=rates, **levers)
        sequence = min(sequence, LlamaConfig.from_dict(checkpoint.config).max_positions, tokens)
        model = LlamaSource(checkpoint, device, max_context=sequence)
        tokenizer = Tokenizer(checkpoint)
        if calibration == "self":
            rows = sample_text(checkpoint, tokenizer, device, -(-tokens // sequence), sequence, chosen.seed)
        else:
            rows = packed_tokens(tokenizer.encode(calibration), length=sequence, limit=tokens)
        partial = Partial(
            out.with_name(out.name + ".partial"), fingerprint(identity(checkpoint), chosen.to_dict(), rows)
        )

        def outer(name: str) -> torch.Tensor:  # a tied head is the embedding
            return checkpoint.tensor(name if name in checkpoint else "model.embed_tokens.weight")

        with progress(what="quantizing", unit="group") as bar:

            def advance(done: int, total: int, _: str) -> None:
                bar.total = total
                bar.update(done - bar.n)

            quantized = quantize(model, rows, chosen, partial, outer=outer, progress=advance)
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        config["quantization_config"] = quantized.config.to_dict()
        tensors = quantized.tensors(checkpoint.names, checkpoint.tensor)
        write_checkpoint(out, config, tensors, copy_from=checkpoint)
        partial.remove()
        before = size_of(checkpoint)
    with open_model(output) as written:
        after = size_of(written)
    return {
        "source": source,
        "output": output,
        "bits": chosen.bits,
        "recipe": recipe,
        "seed": chosen.seed,
        "calibration_tokens": rows.numel(),
        "seconds": round(time.perf_counter() - started, 1),
        "before": summary(before),
        "after": summary(after),
    }


def summary(size: Any) -> dict[str, Any]:
    """A `Size` as JSON."""
    return {
        "bytes": size.total_bytes,
        "linear_bytes": size.linear_bytes,
        "bits": round(size.bits, 3),
        "linear_bits": round(size.linear_bits, 3),
        "parameters": size.parameters,
    }


def identity(checkpoint: Checkpoint) -> str:
    """Names a checkpoint for resuming: its config and tensor table, and size and time of its files. Reading hundreds
    of GB to hash them would take longer than the blocks it saves."""
    infos = {name: checkpoint.info(name) for name in checkpoint.names}
    files = {str(info.file.resolve()): info.file.stat() for info in infos.values()}
    parts = [
        checkpoint.config,
        {name: (info.shape, str(info.dtype), info.nbytes) for name, info in infos.items()},
        {name: (stat.st_size, stat.st_mtime_ns) for name, stat in sorted(files.items())},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sample_text(
    checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, rows: int, length: int, seed: int
) -> torch.Tensor:
    """Calibration tokens that the model writes, int64 [rows, length]: the same seed, the same text."""
    from onegraph.cli.common import pick_dtype
    from onegraph.engine.generate import Engine
    from onegraph.engine.params import SamplingParams
    from onegraph.models.llama import Llama
    from onegraph.quant.calibrate import sampled_tokens

    model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=length)
    engine = Engine(model, max_batch=min(rows, 64), max_context=length)
    calls = 0
    with progress(total=rows * length, what="sampling text", unit="token") as bar:

        def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
            nonlocal calls
            count = min(count, length - len(prompts[0]))
            params = [
                SamplingParams(
                    max_tokens=count, temperature=1.0, seed=seed * (1 << 31) + calls + i, stop=sorted(tokenizer.stops)
                )
                for i in range(len(prompts))
            ]
            calls += len(prompts)
            return engine.generate(prompts, params, on_token=lambda *_: bar.update())

        start = checkpoint.config.get("bos_token_id")
        first = start if type(start) is int else min(tokenizer.stops, default=0)
        return sampled_tokens(generate, rows=rows, length=length, start=[first])
