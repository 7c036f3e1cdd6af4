"""LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from onegraph.formats.files import CheckpointError, parse_json, quote
from onegraph.nn.lora import Adapters, LowRank

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# What makes an adapter more than a low-rank addition, and the values that do not
_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "modules_to_save": (None, []),
    "fan_in_fan_out": (False,), "alpha_pattern": ({}, None), "trainable_token_indices": (None,),
    "target_parameters": (None, []), "alora_invocation_tokens": (None,),
}  # fmt: skip


def read_adapters(folders: Mapping[str, Path], rename: Callable[[str], str]) -> Adapters:
    """folders: by the adapters' names. rename: from a tensor's name in the model's files to the loader's. Raises
    CheckpointError that says what is wrong with which."""
    return Adapters({name: read_adapter(folder, rename) for name, folder in folders.items()})


def read_adapter(folder: Path, rename: Callable[[str], str]) -> dict[str, LowRank]:
    """What it adds to which layer."""
    config = _config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read: {' '.join(str(error).split())[:200]}") from None
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
        if b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1]:
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
    for name, fine in _OFF.items():
        if config.get(name, fine[0]) not in fine:
            raise CheckpointError(f"{path}: {name} is {json.dumps(config[name])[:80]}; it is not supported")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CheckpointError(f"{path}: lora_alpha is {quote(alpha)}; a number is expected")
    return config


def _finite(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and bool(torch.isfinite(tensor).all())
