"""Time and memory of `onegraph quantize` on a model shape with random weights, without waiting for all of its layers.

    PYTHONPATH=src python3 benchmarks/quantize_time.py --tokenizer .demo/SmolLM2-135M-Instruct-4bit --recipe best

The shape is written with each number of --layers and quantized as the command does it, on text of the corpus. The
difference of two runs is what a layer takes; `whole_s` and `whole_gpu_gib` add the layers that the shape has beyond the
longest run, in proportion; of activations that holds with an --activation-memory that both runs fill. Random weights
take as long as trained ones. Prints a JSON line; --out appends it.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from step import shape_of

from onegraph.api.quantize import quantize
from onegraph.engine.record import emit, machine
from onegraph.models.config import LlamaConfig


def write(directory: Path, config: dict[str, Any], tokenizer: Path, device: str) -> None:
    """A checkpoint of random bfloat16 weights, whose layers keep the size of the residual stream."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    parts = LlamaConfig.from_dict(config).parts
    if parts.stacks or any(bias for *_, bias in parts.linears.values()):
        raise SystemExit("only shapes of dense layers without biases are written")
    name, rows = parts.embedding
    shapes = {name: rows} | {name: (n, k) for name, (n, k, _) in parts.linears.items()}
    made = {f"{name}.weight": torch.randn(shape, device=device) * shape[1] ** -0.5 for name, shape in shapes.items()}
    tensors = {name: weight.bfloat16().cpu() for name, weight in made.items()}
    tensors |= {name: torch.ones(shape, dtype=torch.bfloat16) for name, (shape, _) in parts.tensors.items()}
    save_file(tensors, directory / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a tokenizer.json")
    parser.add_argument("--layers", type=int, nargs=2, default=[1, 3])
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument("--format", default="e8p")
    parser.add_argument("--recipe", default="best")
    parser.add_argument("--tokens", type=int, help="of calibration; the default is the recipe's")
    parser.add_argument("--activation-memory", type=float, help="GB of activations in memory, as on a smaller GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = shape_of(args.shape)
    activations = None if args.activation_memory is None else int(args.activation_memory * 1e9)
    seconds, memory, tokens = [], [], None
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="onegraph-quantize-time-") as scratch:
            source = Path(scratch) / "source"
            write(source, shape | {"num_hidden_layers": layers}, args.tokenizer, args.device)
            if cuda := torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun = time.time()
            made = quantize(
                source, Path(scratch) / "out", bits=args.bits, format=args.format, recipe=args.recipe,
                num_calibration_tokens=args.tokens, device=args.device, activation_memory=activations,
            )  # fmt: skip
            seconds.append(round(time.time() - begun, 1))
            memory.append(round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else 0.0)
            tokens = made.calibration_tokens
            print(f"{layers} layers: {seconds[-1]} s, {memory[-1]} GiB", flush=True)
    (few, many), whole = args.layers, shape["num_hidden_layers"]

    def at(found: list[float]) -> float:
        return round(found[1] + (found[1] - found[0]) / (many - few) * (whole - many), 1)

    row = {
        "bench": "quantize_time", "run": args.recipe, "name": args.shape, "bits": args.bits, "format": args.format,
        "calibration_tokens": tokens, "activation_memory": activations, "layers_run": args.layers,
        "seconds": seconds, "gpu_gib": memory,
        "whole_layers": whole, "whole_s": at(seconds), "whole_gpu_gib": at(memory),
    }  # fmt: skip
    emit(row | machine(args.device), args.out)


if __name__ == "__main__":
    main()
