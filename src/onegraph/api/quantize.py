"""A checkpoint made smaller: from a source and a few choices to a directory that appears whole at the end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.device import pick_device, pick_dtype
from onegraph.api.provenance import digest_of, source_of, versions
from onegraph.api.size import Size, size_of
from onegraph.api.text import read_text
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.generate import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.e8p import KEEP, resolve_rates
from onegraph.formats.nvfp4 import NVFP4
from onegraph.formats.weight import WeightFormat
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama, LlamaSource
from onegraph.models.load import parse_config
from onegraph.models.loader import Loader
from onegraph.quant import nvfp4
from onegraph.quant.calibrate import packed_tokens, sampled_tokens
from onegraph.quant.partial import Partial, fingerprint
from onegraph.quant.quantize import quantize as quantize_blocks
from onegraph.quant.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `quantize` made. Sizes are of the checkpoints on disk; `config` is the quantization_config that was written;
    `recipe`, `seed` and `calibration_tokens` are None for a format that is not calibrated."""

    source: str
    output: str
    format: str
    seconds: float
    before: Size
    after: Size
    config: dict[str, Any]
    bits: int
    recipe: str | None = None
    seed: int | None = None
    calibration_tokens: int | None = None


def quantize(
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    bits: int = 4,
    format: str = "e8p",
    recipe: str = "good",
    calibration: str | Path = "self",
    tokens: int = 16384,
    sequence: int = 512,
    layers: Mapping[str, int] | None = None,
    lm_head: int | None = None,
    embed_tokens: int | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    progress: Progress | None = None,
) -> Quantization:
    """Quantize the unquantized checkpoint `source` (a directory or a .gguf file) into the new directory `out`.

    Works block by block. Finished blocks lie in `out`.partial: the same call resumes after a crash and ends with the
    same bytes.

    Args:
        bits: 2, 3 or 4, of every linear inside the blocks.
        format: "e8p", or "nvfp4": 4.5 bits a weight, no calibration, also of DeepSeek-V4.
        recipe: "quick" (one pass), "good", or "best" (also tunes scales; holds the whole model).
        calibration: text to calibrate on, a pathlib.Path to a UTF-8 file of it, or "self" for text that the model
            samples. tokens: of it to use. sequence: tokens of a row of it.
        layers: {pattern: bits} of linears that differ, {"*.down_proj": 4}; 16 keeps a layer; the last match wins.
        lm_head, embed_tokens: bits of the output head and of the embedding; None leaves them as they are.
        seed: the same one gives the same bytes.
        device: "cpu", "cuda", "cuda:N", or "auto" for the GPU where there is one.
        progress: called as progress(what, done, total); total is 0 while it is not known.

    Raises ValueError (CheckpointError among them) for anything that is wrong, before anything is written.
    """
    say = progress or (lambda what, done, total: None)
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another output directory or remove it")
    target = pick_device(device)
    if format == "nvfp4":
        if bits != 4 or lm_head or embed_tokens or any(rate != KEEP for rate in (layers or {}).values()):
            raise ValueError(
                "nvfp4 has one rate and keeps both ends: it takes no other bits, no lm_head or embed_tokens, and "
                "layers may only keep a linear ({pattern: 16})"
            )
        return _to_nvfp4(source, out, layers or {}, recipe, target, say)
    if format != "e8p":
        raise ValueError(f"format: got {format!r}; allowed are 'e8p' and 'nvfp4'")
    for name, value in (("tokens", tokens), ("sequence", sequence)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: got {value!r}; allowed is a count of 1 and more")
    levers = {"bits": bits, "lm_head": lm_head, "embed_tokens": embed_tokens, "seed": seed}
    chosen = Recipe.preset(recipe, layers=dict(layers or {}), **levers)
    text = read_text(calibration) if isinstance(calibration, Path) else calibration
    return _to_e8p(source, out, chosen, recipe, text, tokens, sequence, target, say)


def _to_e8p(
    source: str | PathLike[str],
    out: Path,
    chosen: Recipe,
    recipe: str,
    text: str,
    tokens: int,
    sequence: int,
    device: torch.device,
    say: Progress,
) -> Quantization:
    started = time.perf_counter()
    with Checkpoint.open(source) as checkpoint:
        sequence = min(sequence, LlamaConfig.from_dict(checkpoint.config).max_positions, tokens)
        model = LlamaSource(checkpoint, device, max_context=sequence)
        tokenizer = Tokenizer(checkpoint)
        if text == "self":
            rows = sample_text(checkpoint, tokenizer, device, -(-tokens // sequence), sequence, chosen.seed, say)
        else:
            rows = packed_tokens(tokenizer.encode(text), length=sequence, limit=tokens)
        partial = Partial(
            out.with_name(out.name + ".partial"), fingerprint(identity(checkpoint), chosen.to_dict(), rows)
        )

        def outer(name: str) -> torch.Tensor:  # a tied head is the embedding
            return checkpoint.tensor(name if name in checkpoint else "model.embed_tokens.weight")

        say("quantizing", 0, 0)
        quantized = quantize_blocks(
            model, rows, chosen, partial, outer=outer, progress=lambda done, total, _: say("quantizing", done, total)
        )
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        config["quantization_config"] = quantized.config.to_dict()
        tensors = quantized.tensors(checkpoint.names, checkpoint.tensor)
        about = {
            "format": "e8p",
            "source": source_of(checkpoint),
            "recipe": {"name": recipe} | chosen.to_dict(),
            "calibration": {
                "text": "sampled by the model" if text == "self" else "given",
                "tokens": rows.numel(),
                "sequence": sequence,
                "sha256": digest_of(rows),
            },
            "versions": versions(),
        }
        write_checkpoint(out, config, tensors, copy_from=checkpoint, about=about)
        partial.remove()
        before = size_of(checkpoint)
    return Quantization(
        source=str(source),
        output=str(out),
        format="e8p",
        seconds=round(time.perf_counter() - started, 1),
        before=before,
        after=_size(out),
        config=config["quantization_config"],
        bits=chosen.bits,
        recipe=recipe,
        seed=chosen.seed,
        calibration_tokens=rows.numel(),
    )


def _to_nvfp4(
    source: str | PathLike[str], out: Path, layers: Mapping[str, int], recipe: str, device: torch.device, say: Progress
) -> Quantization:
    started = time.perf_counter()
    with Checkpoint.open(source) as checkpoint:
        parse_config(checkpoint.config)
        if checkpoint.config.get("quantization_config") is not None:
            raise ValueError(f"{source}: is quantized already; give the unquantized model")
        names = rounded_layers(checkpoint, NVFP4)
        kept = resolve_rates(dict(layers), names, bits=4)
        chosen = [name for name in names if name not in kept]
        wide = [name.removesuffix(".weight") for name in checkpoint.names if len(checkpoint.shape(name)) == 2]
        told = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        told["quantization_config"] = nvfp4.config_for({*wide, "lm_head"} - set(chosen)).to_dict()
        done = 0

        def count(_: str) -> None:
            nonlocal done
            done += 1
            say("quantizing", done, len(chosen))

        say("quantizing", 0, len(chosen))
        tensors = nvfp4.quantized_tensors(
            checkpoint.names, checkpoint.tensor, chosen, search=recipe != "quick", device=device, on_linear=count
        )
        about = {
            "format": "nvfp4",
            "source": source_of(checkpoint),
            "recipe": {"name": recipe, "layers": dict(layers)},
            "versions": versions(),
        }
        write_checkpoint(out, told, tensors, copy_from=checkpoint, about=about)
        before = size_of(checkpoint)
    return Quantization(
        source=str(source),
        output=str(out),
        format="nvfp4",
        seconds=round(time.perf_counter() - started, 1),
        before=before,
        after=_size(out),
        config=told["quantization_config"],
        bits=4,
    )


def _size(path: Path) -> Size:
    with Checkpoint.open(path) as checkpoint:
        return size_of(checkpoint)


def rounded_layers(checkpoint: Checkpoint, format: WeightFormat) -> list[str]:
    """The checkpoint's names of the linears that may be stored in `format`: all that its size allows but the head."""
    loader = Loader(checkpoint, parse_config(checkpoint.config), torch.float32)
    return [
        loader.stored[f"{name}.weight"].removesuffix(".weight")
        for name, (_, k, _) in loader.parts.linears.items()
        if name != loader.parts.head and k % format.group == 0 and f"{name}.weight" in loader
    ]


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
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    device: torch.device,
    rows: int,
    length: int,
    seed: int,
    progress: Progress,
) -> torch.Tensor:
    """Calibration tokens that the model writes, int64 [rows, length]: the same seed, the same text."""
    model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=length)
    engine = Engine(model, max_batch=min(rows, 64), max_context=length)
    calls = written = 0

    def tell(index: int, token: int) -> None:
        nonlocal written
        written += 1
        progress("sampling text", written, rows * length)

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
        return engine.generate(prompts, params, on_token=tell)

    progress("sampling text", 0, rows * length)
    start = checkpoint.config.get("bos_token_id")
    first = start if type(start) is int else min(tokenizer.stops, default=0)
    return sampled_tokens(generate, rows=rows, length=length, start=[first])
