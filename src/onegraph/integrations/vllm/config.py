"""The quantization "onegraph" as vLLM sees it: which layer is stored at which rate, and so gets which method."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from onegraph.formats.e8p import KEEP, E8PConfig
from onegraph.integrations.vllm import FUSED, fuses, unsupported

HEAD, EMBED = "lm_head", "embed_tokens"
DRAFT = "draft_model."  # what vLLM puts before the names of a model that drafts for another


@register_quantization_config("onegraph")
class OnegraphConfig(QuantizationConfig):
    """`quantization_config` of a checkpoint, read by the same parser that our own engine uses."""

    def __init__(self, e8p: E8PConfig) -> None:
        super().__init__()
        self.e8p = e8p

    def __repr__(self) -> str:
        return f"OnegraphConfig({self.e8p})"

    @classmethod
    def get_name(cls) -> str:
        return "onegraph"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # it stands in config.json

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "OnegraphConfig":
        """Raises ValueError on a vLLM that is too old, and on keys, versions and rates that we do not know."""
        if why := unsupported():
            raise ValueError(why)
        return cls(E8PConfig.from_dict(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Tells vLLM's model and loader where head and embedding are two, and names our class of the model."""
        if hf_config is not None and self.unties:
            hf_config.get_text_config().tie_word_embeddings = hf_config.tie_word_embeddings = False
        names = getattr(hf_config, "architectures", None) or [""]
        if names[0] in FUSED and fuses():
            hf_config.architectures = [FUSED[names[0]]]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.e8p = replace(self.e8p, layers=hf_to_vllm_mapper.apply_dict(dict(self.e8p.layers)))

    @property
    def unties(self) -> bool:
        """Whether head and embedding are two, whatever the config says of ties: one of them is quantized."""
        return not self.e8p.bits_of(HEAD) == self.e8p.bits_of(EMBED) == KEEP

    def parts_of(self, prefix: str) -> list[str]:
        """The linears of the checkpoint that vLLM's layer `prefix` is made of: q, k and v of a qkv_proj."""
        parent, _, name = prefix.removeprefix(DRAFT).rpartition(".")
        names = self.packed_modules_mapping.get(name, [name])
        return [f"{parent}.{part}" if parent else part for part in names]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves it to vLLM. Raises ValueError for experts, which E8P does not reach."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from onegraph.integrations.vllm.linear import E8PEmbeddingMethod, E8PLinearMethod, UntiedMethod

        if isinstance(layer, VocabParallelEmbedding):
            name = HEAD if isinstance(layer, ParallelLMHead) else EMBED
            if (bits := self.e8p.bits_of(name)) != KEEP:
                return E8PEmbeddingMethod(prefix or name, bits)
            return UntiedMethod() if self.unties else None
        if isinstance(layer, LinearBase):
            parts = {name: self.e8p.bits_of(name) for name in self.parts_of(prefix)}
            if all(bits == KEEP for bits in parts.values()):
                return UnquantizedLinearMethod()
            return E8PLinearMethod(parts)
        if any(kind.__name__ in ("FusedMoE", "RoutedExperts") for kind in type(layer).__mro__):
            raise ValueError(f"{prefix}: onegraph's checkpoints hold no experts; serve the unquantized model")
        return None
