"""vLLM's draft layers (MTP) of DeepSeek-V3 and GLM-4.5 in codes.

vLLM builds the projection in front of such a layer as a plain linear, and looks tensors up by their names in a file. So
it builds these classes where a checkpoint has codes of the layer. They need no other change: the block is the model's
own, and vLLM gives the layer the model's embedding and head.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.utils import maybe_prefix


class _Coded:
    """Mixed into a draft model: builds it, then its projection anew, as a linear that may be in codes."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        cast(Any, super()).__init__(vllm_config=vllm_config, prefix=prefix)
        self._onegraph = vllm_config.quant_config
        for number, layer in cast(Any, self).model.layers.items():
            plain = layer.eh_proj
            layer.eh_proj = ReplicatedLinear(
                plain.in_features, plain.out_features, bias=False, return_bias=False, quant_config=self._onegraph,
                prefix=maybe_prefix(prefix, f"model.layers.{number}.eh_proj"),
            )  # fmt: skip

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's, which does not rename stacks of experts as its other loaders do. Raises ValueError, as
        `check_taken`."""
        found: set[str] = cast(Any, super()).load_weights(self._onegraph.get_checkpoint_weight_mapper().apply(weights))
        return found


class OnegraphDeepSeekMTP(_Coded, DeepSeekMTP):
    """vLLM's draft layer of DeepSeek-V3 on our checkpoints."""


class OnegraphGlm4MoeMTP(_Coded, Glm4MoeMTP):
    """vLLM's draft layer of GLM-4.5 on our checkpoints."""
