"""LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from onegraph.formats.files import CheckpointError, parse_json, quote
from onegraph.nn.lora import Adapters, LowRank

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
MAX_ALPHA = 1e9
# Fields of peft's LoraConfig (0.21) that say nothing of how an adapter adds, or only what its tensors say too
_READ = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "r", "rank_pattern", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "megatron_core", "ensure_weight_tying",
}  # fmt: skip
# Values of other fields that leave it a low-rank addition to the model's own weights, besides nothing and false. Other
# initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) replace the base weights by a residual that the adapter lacks.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}


def read_adapters(folders: Mapping[str, Path], rename: Callable[[str], str]) -> Adapters:
    """folders: by the adapters' names. rename: from a tensor's name in the model's files to the loader's. Raises
    CheckpointError that says what is wrong with which."""
    return Adapters({name: read_adapter(folder, rename) for name, folder in folders.items()})


def adapter_bytes(
    folders: Mapping[str, Path],
    rename: Callable[[str], str],
    layers: Mapping[str, tuple[int, int, bool]],
    siblings: Sequence[Sequence[str]],
    itemsize: int,
) -> int:
    """Bytes that `Adapters` takes on the device. Reads no weights. Raises CheckpointError.

    layers: (n, k, bias) of the model's linears by name. siblings: ends of the names of those that become one linear.
    """
    ranks: dict[str, int] = {}
    for folder in folders.values():
        _config(folder)
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    layer, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
                    if kind == "A.weight":
                        layer = rename(f"{layer}.weight").removesuffix(".weight")
                        ranks[layer] = max(ranks.get(layer, 0), file.get_slice(name).get_shape()[0])
        except (OSError, SafetensorError) as error:
            raise _unreadable(folder, error) from None
    total = 0
    for layer, rank in ranks.items():
        ends = next((names for names in siblings if layer.endswith(tuple(names))), ())
        own = next((end for end in ends if layer.endswith(end)), "")
        joined = [layer.removesuffix(own) + end for end in ends] or [layer]
        sizes = [layers[name] for name in joined if name in layers]
        total += rank * (sum(n for n, _, _ in sizes) + max((k for _, k, _ in sizes), default=0))
    return (len(folders) + 1) * total * itemsize


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder / WEIGHTS}: cannot be read: {' '.join(str(error).split())[:200]}")


def read_adapter(folder: Path, rename: Callable[[str], str]) -> dict[str, LowRank]:
    """What it adds to which layer."""
    config = _config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    found: dict[str, LowRank] = {}
    for name, a in tensors.items():
        layer, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
        if not layer or kind not in ("A.weight", "B.weight") or not name.startswith(PREFIX):
            raise CheckpointError(
                f"{folder / WEIGHTS}: tensor {quote(name)} is no lora_A or lora_B of a linear; allowed are LoRA "
                "adapters as peft saves them"
            )
        if kind == "B.weight":
            if f"{PREFIX}{layer}.lora_A.weight" not in tensors:
                raise CheckpointError(f"{folder / WEIGHTS}: {quote(layer)} has lora_B and no lora_A")
            continue
        b = tensors.get(f"{PREFIX}{layer}.lora_B.weight")
        if b is None or a.dim() != 2 or b.dim() != 2 or not 0 < len(a) == b.shape[1]:
            raise CheckpointError(f"{folder / WEIGHTS}: lora_A and lora_B of {quote(layer)} do not fit")
        if not (_finite(a) and _finite(b)):
            raise CheckpointError(f"{folder / WEIGHTS}: {quote(layer)} has values that are not finite")
        rank = len(a)
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        found[rename(f"{layer}.weight").removesuffix(".weight")] = a.float(), b.float() * scale
    if not found:
        raise CheckpointError(f"{folder / WEIGHTS}: has no tensors; train the adapter, then save it again")
    return found


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = parse_json(path.read_bytes(), str(path))
    except OSError:
        raise CheckpointError(f"{folder}: has no {CONFIG}; give the directory of an adapter that peft saved") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path}: peft_type is {quote(kind)}; allowed is LORA")
    for name in sorted(config.keys() - _READ):
        if (value := config[name]) and value not in _PLAIN.get(name, ()):
            raise CheckpointError(
                f"{path}: {name if name.isidentifier() else quote(name)} is {json.dumps(value)[:80]}; {_cure(name)}"
            )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{path}: lora_alpha is {quote(alpha)}; a number is expected, up to {MAX_ALPHA:.0e}")
    return config


def _cure(name: str) -> str:
    if name == "init_lora_weights":
        return (
            "its weights belong to a changed base model; save it with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
    return "it is not supported; allowed are plain LoRA adapters"


def _finite(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and bool(torch.isfinite(tensor).all())
