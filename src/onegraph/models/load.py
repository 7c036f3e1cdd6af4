"""A checkpoint's decoder, whichever family it is of."""

from collections.abc import Mapping
from typing import Any

import torch

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.llama import Llama


def parse_config(config: Mapping[str, Any]) -> LlamaConfig | DeepseekV4Config:
    """config.json, validated. Raises one ValueError that names what is unsupported or makes no sense."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    return DeepseekV4Config.from_dict(config) if kind == "deepseek_v4" else LlamaConfig.from_dict(config)


def load_decoder(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype, *, max_context: int | None = None
) -> Llama | DeepseekV4:
    """`load` of the family's own class: see `Llama.load` and `DeepseekV4.load`."""
    family = DeepseekV4 if isinstance(parse_config(checkpoint.config), DeepseekV4Config) else Llama
    return family.load(checkpoint, device, dtype, max_context=max_context)
