"""What quantizing would make and what it costs, from config.json and the headers of the weights alone."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api.cost import Work, available_memory, estimate
from onegraph.api.device import pick_device
from onegraph.api.hub import locate
from onegraph.api.size import Size, human_bytes, size_of
from onegraph.formats.checkpoint import Checkpoint, TensorInfo, read_config
from onegraph.formats.e8p import E8P, KEEP, E8PConfig, E8PFormat, fits, resolve_rates
from onegraph.formats.nvfp4 import NVFP4, written_config
from onegraph.formats.weight import WeightFormat
from onegraph.models.blocks import DOWN, OUT
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import refuse_unquantizable
from onegraph.models.load import parse_config
from onegraph.models.loader import Loader
from onegraph.quant.quantize import EMBED, HEAD
from onegraph.quant.recipe import Recipe

RECIPES = {"cpu": "quick", "cuda": "good"}  # where none is asked for
TOKENS = {"cpu": 8192, "cuda": 16384}  # likewise; of a text, as many as it has


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of `quantize`, checked, with what was left open filled in for the device."""

    device: torch.device
    format: str
    recipe: str
    levers: Recipe
    calibration: str | Path
    tokens: int
    sequence: int

    @property
    def layers(self) -> Mapping[str, int]:
        return self.levers.layers


def choose(
    *,
    bits: int = 4,
    format: str = "e8p",
    recipe: str | None = None,
    calibration: str | Path = "bundled",
    tokens: int | None = None,
    sequence: int = 512,
    layers: Mapping[str, int] | None = None,
    lm_head: int | None = None,
    embed_tokens: int | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
) -> Choices:
    """Raises ValueError for an option that is not allowed; the rest is in `quantize`."""
    target = pick_device(device)
    if format == "nvfp4" and (bits != 4 or lm_head or embed_tokens or any(r != KEEP for r in (layers or {}).values())):
        raise ValueError(
            "nvfp4 has one rate and keeps both ends: it takes no other bits, no lm_head or embed_tokens, and "
            "layers may only keep a linear ({pattern: 16})"
        )
    if format not in ("e8p", "nvfp4"):
        raise ValueError(f"format: got {format!r}; allowed are 'e8p' and 'nvfp4'")
    for name, value in (("tokens", tokens), ("sequence", sequence)):
        if not (type(value) is int and value >= 1) and not (name == "tokens" and value is None):
            raise ValueError(f"{name}: got {value!r}; allowed is a count of 1 and more")
    recipe = recipe or (RECIPES[target.type] if format == "e8p" else "good")
    rates = {"bits": bits, "lm_head": lm_head, "embed_tokens": embed_tokens, "seed": seed}
    return Choices(
        device=target,
        format=format,
        recipe=recipe,
        levers=Recipe.preset(recipe, layers=dict(layers or {}), **rates),
        calibration=calibration,
        tokens=tokens or TOKENS[target.type],
        sequence=sequence,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `quantize` would make of a model, and what that costs on a device.

    Args:
        source: the path, or org/name@commit of the hub. matched: the linears of each pattern of `layers`.
        linears: how many linears are quantized. before, after: sizes on disk, `after` exact.
        seconds: an estimate, on a CPU right within a factor of two or so. memory: bytes on the device, at the least.
        disk: bytes of OUT and of finished blocks beside it. hessians: what they add where there is room to keep them.
        recipe, calibration, tokens: None for a format that is not calibrated; calibration is "bundled", "self" or
            "text".
    """

    source: str
    device: str
    format: str
    bits: int
    recipe: str | None
    calibration: str | None
    tokens: int | None
    matched: Mapping[str, list[str]]
    linears: int
    before: Size
    after: Size
    seconds: float
    memory: int
    disk: int
    hessians: int

    def __str__(self) -> str:
        """In a line: what is done, and what it costs."""
        weights = f"{self.before.linear_parameters / 1e6:.4g}M weights in {self.linears} linears"
        how = f"{self.format}, {self.bits} bits"
        if self.recipe is not None:
            text = {"self": "text that the model samples", "bundled": "the bundled text", "text": "the text"}
            how += f", recipe {self.recipe}, at most {self.tokens} tokens of {text[str(self.calibration)]}"
        size = f"{human_bytes(self.before.total_bytes)} -> {human_bytes(self.after.total_bytes)}"
        minutes = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{self.seconds / 60:.0f} min"
        return (
            f"{weights} ({how}) on {self.device}: {size}, some {minutes}, {human_bytes(self.memory)} of memory there, "
            f"{human_bytes(self.disk)} of disk"
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON; the linears of a pattern are counted."""
        told = {name: getattr(self, name) for name in ("source", "device", "format", "bits", "recipe", "calibration")}
        told |= {"tokens": self.tokens, "linears": self.linears}
        told |= {"layers": {pattern: len(names) for pattern, names in self.matched.items()}}
        told |= {"before": self.before.as_dict(), "after": self.after.as_dict()}
        return told | {"seconds": round(self.seconds, 1), "memory": self.memory, "disk": self.disk}


def plan(source: str | PathLike[str], out: str | PathLike[str] | None = None, **options: Any) -> Plan:
    """What `quantize(source, out, **options)` would do, in a moment: nothing is read but config.json and headers.

    Args:
        source: as for `quantize`; a directory that holds only config.json will do, and of a name on the hub only that
            is fetched.
        out: checked as `quantize` checks it, where it is given.
        options: those of `quantize`.

    Raises ValueError for what `quantize` would refuse before it begins.
    """
    choices = choose(**options)
    located = locate(source, weights=False)
    with _described(located.path) as checkpoint:
        found = survey(checkpoint, located.name, choices)
        if out is not None:
            check_room(found, Path(out))
    return found


def _described(path: Path) -> Checkpoint:
    """The checkpoint at a path; where only its config.json is there, one that has the tensors it asks for."""
    if not (path / "config.json").is_file() or next(path.glob("*.safetensors"), None) is not None:
        return Checkpoint.open(path)
    config = read_config(path)
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    parsed = parse_config(config)
    refuse_unquantizable(parsed)
    expected = Loader(Checkpoint(path, config, {}), parsed, dtype).expected()
    return Checkpoint(path, config, {name: _info(path, shape, dtype) for name, (shape, _) in expected.items()})


def _info(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    return TensorInfo(tuple(shape), dtype, math.prod(shape) * dtype.itemsize, path)


def survey(checkpoint: Checkpoint, name: str, choices: Choices) -> Plan:
    """The plan for an open checkpoint. Raises ValueError for what cannot be quantized as asked."""
    calibrated = choices.format == "e8p"
    parsed = (LlamaConfig.from_dict if calibrated else parse_config)(checkpoint.config)
    refuse_unquantizable(parsed)
    if checkpoint.config.get("quantization_config") is not None:
        raise ValueError(f"{checkpoint.path}: is quantized already; give the unquantized model")
    loader = Loader(checkpoint, parsed, torch.float32)
    if calibrated:
        loader.check()
    names = rounded_layers(loader, choices.format)
    rates = resolve_rates(choices.layers, names, choices.levers.bits)
    formats: dict[str, WeightFormat] = {
        layer: E8P[rate] if calibrated else NVFP4
        for layer in names
        if (rate := rates.get(layer, choices.levers.bits)) != KEEP
    }
    made = _made(checkpoint, formats, rates, choices)
    before, after = size_of(checkpoint), size_of(made)
    work = _work(loader, formats, before, choices)
    seconds, memory = estimate(work, choices.device)
    return Plan(
        source=name,
        device=str(choices.device),
        format=choices.format,
        bits=choices.levers.bits,
        recipe=choices.recipe if calibrated else None,
        calibration=kind_of(choices.calibration) if calibrated else None,
        tokens=choices.tokens if calibrated else None,
        matched={pattern: [layer for layer in names if fits(layer, pattern)] for pattern in choices.layers},
        linears=len(formats),
        before=before,
        after=after,
        seconds=seconds,
        memory=memory,
        disk=after.total_bytes + (after.linear_bytes if calibrated else 0),
        hessians=work.hessians if calibrated and choices.levers.inputs == "reference" else 0,
    )


def kind_of(calibration: str | Path) -> str:
    """ "self", "bundled" or "text"."""
    return str(calibration) if calibration in ("self", "bundled") else "text"


def rounded_layers(loader: Loader, format: str) -> list[str]:
    """The checkpoint's names of the linears that may be rounded: all but the head, and to NVFP4 only those whose inputs
    come in its groups."""
    group = NVFP4.group if format == "nvfp4" else 1
    return [
        loader.stored[f"{name}.weight"].removesuffix(".weight")
        for name, (_, k, _) in loader.parts.linears.items()
        if name != loader.parts.head and k % group == 0 and f"{name}.weight" in loader
    ]


def _made(
    checkpoint: Checkpoint, formats: Mapping[str, WeightFormat], rates: Mapping[str, int], choices: Choices
) -> Checkpoint:
    """The table of tensors that `quantize` would write; there is no file behind it."""
    recipe, e8p = choices.levers, choices.format == "e8p"
    formats = dict(formats)
    config = nvfp4_config(checkpoint, formats)
    if e8p:
        told = E8PConfig(bits=recipe.bits, layers=rates, lm_head=recipe.lm_head, embed_tokens=recipe.embed_tokens)
        config, ends = told.to_dict(), {HEAD: recipe.lm_head, EMBED: recipe.embed_tokens}
        formats |= {layer: E8P[rate] for layer, rate in ends.items() if rate is not None}
    tensors: dict[str, TensorInfo] = {}

    def put(layer: str, shape: tuple[int, ...]) -> None:
        n, k = shape
        try:
            layout = formats[layer].layout(n, k)
        except ValueError as error:
            local = ".".join(layer.split(".")[-2:])
            raise ValueError(f"{layer}: {error}; keep it with the rate 16 for '*{local}'") from None
        files = formats[layer].names((), layer)
        tensors.update({files[key]: _info(checkpoint.path, *found) for key, found in layout.items()})

    for name in checkpoint.names:
        layer, _, kind = name.rpartition(".")
        info = checkpoint.info(name)
        if layer in formats and kind == "weight":
            put(layer, info.shape)
        else:
            wide = e8p and layer in formats and kind == "bias"
            tensors[name] = _info(checkpoint.path, info.shape, torch.float32 if wide else info.dtype)
    if f"{HEAD}.weight" not in checkpoint and HEAD in formats:
        put(HEAD, checkpoint.shape(f"{EMBED}.weight"))
    elif f"{HEAD}.weight" not in checkpoint and EMBED in formats:
        info = checkpoint.info(f"{EMBED}.weight")
        tensors[f"{HEAD}.weight"] = _info(checkpoint.path, info.shape, info.dtype)
    return Checkpoint(checkpoint.path, checkpoint.config | {"quantization_config": config}, tensors)


def nvfp4_config(checkpoint: Checkpoint, chosen: Collection[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose linears `chosen` become NVFP4."""
    wide = [name.removesuffix(".weight") for name in checkpoint.names if len(checkpoint.shape(name)) == 2]
    return written_config({*wide, HEAD} - set(chosen))


def _work(loader: Loader, formats: Mapping[str, WeightFormat], before: Size, choices: Choices) -> Work:
    sizes = {layer: loader.checkpoint.shape(f"{layer}.weight") for layer in formats}
    if choices.format == "nvfp4":
        return Work(levers=None, search=choices.recipe != "quick", groups=[(n, k, 4) for n, k in sizes.values()])
    parsed = LlamaConfig.from_dict(loader.checkpoint.config)
    groups = []
    for i in range(parsed.layers):
        for names in (parsed.qkv, (OUT,), parsed.gate_up, (DOWN,)):
            found = [layer for name in names if (layer := f"model.layers.{i}.{name}") in formats]
            for rate in {format.rate for layer in found if isinstance(format := formats[layer], E8PFormat)}:
                some = [sizes[layer] for layer in found if formats[layer] is E8P[rate]]
                groups.append((sum(n for n, _ in some), some[0][1], rate))
    block = [n * k for name, (n, k, _) in loader.parts.linears.items() if name.startswith("model.layers.0.")]
    return Work(
        levers=choices.levers,
        groups=groups,
        block=sum(block),
        blocks=parsed.layers,
        hidden=parsed.hidden_size,
        inner=parsed.intermediate_size,
        vocab=parsed.vocab_size,
        tokens=choices.tokens,
        sequence=min(choices.sequence, choices.tokens, parsed.max_positions),
        sampled=choices.calibration == "self",
        parameters=before.parameters,
        cached=2 * parsed.layers * parsed.kv_heads * parsed.head_dim,
    )


def refuse_existing(out: Path) -> None:
    """Raises ValueError where `out` is there already."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another output directory or remove it")


def existing(out: Path) -> Path:
    """The nearest directory above `out` that is there."""
    return next(folder for folder in out.absolute().parents if folder.exists())


def check_room(found: Plan, out: Path) -> None:
    """Raises ValueError where `out` cannot be written, or memory or disk would not do: now, not after hours of work."""
    refuse_existing(out)
    parent = existing(out)
    if not parent.is_dir():
        raise ValueError(f"{out}: {parent} is no directory; choose another output directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{out}: {parent} cannot be written to; choose another output directory")
    free = shutil.disk_usage(parent).free
    if found.disk > free:
        raise ValueError(
            f"{out}: needs {human_bytes(found.disk)} of this disk and {human_bytes(free)} are free; make room, or "
            "choose another output directory"
        )
    memory = available_memory(torch.device(found.device))
    if memory is not None and found.memory > memory:
        whole = {"self": "calibration 'self' holds the whole model; give a text"}.get(str(found.calibration))
        if whole is None and found.recipe == "best":
            whole = "recipe 'best' holds the whole model; choose 'good'"
        raise ValueError(
            f"{found.source}: takes at least {human_bytes(found.memory)} of memory on {found.device} and "
            f"{human_bytes(memory)} are free; {whole or 'ask for fewer tokens'}"
        )
