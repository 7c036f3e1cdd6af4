"""A checkpoint's decoder, whichever family it is of."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.e8p import E8PConfig
from onegraph.models.chain import ChainedLlama, chained
from onegraph.models.config import LlamaConfig
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_mtp import draft_bytes
from onegraph.models.families import FAMILIES
from onegraph.models.llama import Llama, config_of
from onegraph.models.loader import Held, Loader
from onegraph.models.memory import GB
from onegraph.models.ranks import Ranks
from onegraph.ops import family

Split = Literal["tensor", "layer"]

IN_TRANSFORMERS = "`import onegraph.integrations.hf`, then AutoModelForCausalLM.from_pretrained"
# By model_type; else Llama's relatives. V4.1 is read as V4 to be refused with the reason.
CONFIGS: dict[str, type[DeepseekV4Config]] = dict.fromkeys(("deepseek_v4", "deepseek_v41"), DeepseekV4Config)


def parse_config(config: Mapping[str, Any]) -> LlamaConfig | DeepseekV4Config:
    """config.json, validated. Raises one ValueError that names what is unsupported or makes no sense; of a checkpoint
    that `onegraph quantize` wrote for transformers alone it says how to run it there, and of another that transformers
    may have that quantize makes one."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    try:
        return CONFIGS.get(str(kind), LlamaConfig).from_dict(config)
    except ValueError as error:
        if isinstance(config, Mapping) and _transformers_only(config):
            raise ValueError(f"{error}; this checkpoint runs in transformers: {IN_TRANSFORMERS}") from None
        if isinstance(kind, str) and _foreign(config) and "quantization_config" not in config:
            why, found, families = str(error).partition("; supported")  # a long list, which stands last
            cure = f"if transformers has this model, `onegraph quantize` makes a checkpoint for it: {IN_TRANSFORMERS}"
            raise ValueError(f"{why}; {cure}{found}{families}") from None
        raise


def _transformers_only(config: Mapping[str, Any]) -> bool:
    told = config.get("quantization_config")
    return isinstance(told, Mapping) and E8PConfig.matches(told) and _foreign(config)


def _foreign(config: Mapping[str, Any]) -> bool:
    """Whether it is of no family of ours."""
    kinds = {str(part.get("model_type")) for part in (config, config.get("text_config")) if isinstance(part, Mapping)}
    return not kinds & {*FAMILIES, *CONFIGS}


def checkpoint_config(checkpoint: Checkpoint) -> LlamaConfig | DeepseekV4Config:
    """`parse_config` of a checkpoint, and how its files hold what config.json leaves open."""
    parsed = parse_config(checkpoint.config)
    return config_of(checkpoint) if isinstance(parsed, LlamaConfig) else parsed


def packable(checkpoint: Checkpoint, rounded: bool) -> bool:
    """Whether a CPU may hold the linears of a model of the Llama kind in float16, with activations in float32.

    Not where experts are dense, which would be of the activations' dtype; nor, unless `rounded`, where its files have a
    linear in float32.
    """
    loader = Loader(checkpoint, config_of(checkpoint), torch.float32)
    dense = [layer for layer in loader.layers() if loader.format_of(layer) is DENSE]
    stacks = [loader.stack(name)[0] for name in loader.parts.stacks]
    experts = loader.parts.components.get("experts")
    if DENSE in stacks or (experts is not None and any(re.search(experts.layers, layer) for layer in dense)):
        return False
    names = [f"{layer}.weight" for layer in dense]
    return rounded or all(name not in loader or loader.info(name).dtype.itemsize < 4 for name in names)


def check_card(device: torch.device) -> None:
    """Raises ValueError for a GPU that no kernel is written for."""
    if device.type != "cuda" or family.FORCED == "reference":
        return
    if torch.version.hip is not None:
        raise ValueError("kernels are for NVIDIA GPUs; this torch is built for AMD's: take the device cpu")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} is of compute capability {capability[0]}.{capability[1]}; kernels "
            "are for 8.0 (Ampere) and newer: take the device cpu"
        )


def load_decoder(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    max_context: int | None = None,
    gpus: int | None = None,
    split: Split | None = None,
    fp8_kv: bool = False,
    drafts: bool = False,
    held: Held | None = None,
    fused: bool = True,
    adapters: Mapping[str, Path] | None = None,
    expert_memory: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Llama | ChainedLlama | Ranks | DeepseekV4:
    """`load` of the family's own class: see `Llama.load` and `DeepseekV4.load`.

    Args:
        gpus: use so many GPUs, from cuda:0 on; more than there are are a ValueError.
        split: "tensor": each GPU has its share of every layer (`models/ranks.py`); "layer": some of the layers, for
            DeepSeek-V4 alone, where it is the default.
        fp8_kv: keys or latents in FP8, for DeepSeek-V4 and models with latent attention. drafts: leave room for the
            draft layers that its checkpoint carries.
        held, fused, adapters, expert_memory: of the Llama family, see there; the last two on one device.
        progress: called as progress(bytes read, bytes in all).
    """
    if gpus is not None and gpus > (found := torch.cuda.device_count()):
        raise ValueError(f"gpus is {gpus}; torch sees {found} GPUs here")
    devices: Sequence[torch.device | str] = [device] if gpus is None else [f"cuda:{i}" for i in range(gpus)]
    for each in map(torch.device, devices):
        check_card(each)
    if split not in (None, "tensor", "layer"):
        raise ValueError(f"split: got {split!r}; allowed are 'tensor', 'layer' and None for the model's own")
    if adapters and (len(devices) > 1 or checkpoint.config.get("model_type") in CONFIGS):
        kind = checkpoint.config.get("model_type")
        raise ValueError(
            f"adapters: got some for {kind!r} on {len(devices)} devices; allowed are models of the Llama kind on one"
        )
    if expert_memory is not None and (len(devices) > 1 or checkpoint.config.get("model_type") in CONFIGS):
        kind = checkpoint.config.get("model_type")
        raise ValueError(
            f"expert_memory: got {expert_memory / GB:g} GB for {kind!r} on {len(devices)} devices; allowed are models "
            "of the Llama kind on one"
        )
    if checkpoint.config.get("model_type") in CONFIGS:
        if held is not None:
            raise ValueError(f"{held} holds weights of the Llama kind; DeepSeek-V4 is loaded as it is stored")
        own: dict[str, Any] = {"max_context": max_context, "progress": progress}
        own["drafts"] = draft_bytes(checkpoint, dtype) if drafts else 0
        if split == "tensor" and len(devices) > 1:
            ranks = Ranks.load(checkpoint, devices, dtype, kind=DeepseekV4, **own)
            for rank in ranks.ranks:
                rank.fp8_kv = fp8_kv
            return ranks
        model = DeepseekV4.load(checkpoint, devices, dtype, **own)
        model.fp8_kv = fp8_kv
        return model
    kind = checkpoint.config.get("model_type")
    if fp8_kv and config_of(checkpoint).latent is None:
        raise ValueError(
            f"kv fp8 is a way to keep keys for DeepSeek-V4 and for latent attention; this model is {kind!r}: take "
            "turboquant:4, a quarter of the memory, or leave it out"
        )
    if split == "layer":
        raise ValueError(f"split: layers are placed for DeepSeek-V4 alone; this model is {kind!r}: leave it out")
    options: dict[str, Any] = {"max_context": max_context, "held": held, "fused": fused}
    options["progress"] = progress
    if len(devices) > 1:
        ranks = Ranks.load(checkpoint, devices, dtype, **options)
        for rank in ranks.ranks:
            rank.fp8_kv = fp8_kv
        return ranks
    alone: dict[str, Any] = {"adapters": adapters, "expert_memory": expert_memory}
    llama = Llama.load(checkpoint, devices[0], dtype, **alone, **options)
    llama.fp8_kv = fp8_kv
    return chained(llama)
