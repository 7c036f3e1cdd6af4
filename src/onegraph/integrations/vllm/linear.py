"""How vLLM's linears, output head and embedding run on weights of our formats: one opaque op a launch, for tracer and
graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from onegraph.formats.weight import WeightFormat
from onegraph.integrations.vllm.shards import Shard, Slots
from onegraph.ops.weight import weight_ops


@dataclass
class OnegraphState:
    """What onegraph keeps on a linear, output head or embedding of vLLM, as the layer's `onegraph`.

    joined: one launch runs all parts. dummy: vLLM makes the weights up. norm, eps: the RMSNorm inside the launch.
    deferred: the decoder layer runs this linear (`fused.py`). sum_name: of the linear in `ranks.linear_sum`. stand_in:
    dtype and shape of what vLLM is shown as `weight`, where it looks at one.
    """

    slots: Slots
    joined: bool
    dummy: bool
    norm: nn.Module | None = None
    eps: float | None = None
    deferred: bool = False
    sum_name: str | None = None
    stand_in: tuple[torch.dtype, tuple[int, int]] | None = None


class OnegraphLinearMethod(LinearMethodBase):
    """Column- and row-parallel, fused and plain linears. `parts`: the checkpoint's linears and their formats, in order.

    What one launch can do is done in one: parts of one format that are one layer as they lie (`WeightFormat.joins`).
    Otherwise there is a launch a part. `check` is called once vLLM's model is built and loaded.
    """

    def __init__(self, parts: Mapping[str, WeightFormat], check: Callable[[], None]) -> None:
        self.parts, self._check = parts, check

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Registers what `Slots` describes. vLLM's own loader, among the keywords, is not needed."""
        share = Shard(getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1))
        _create(layer, Slots(self.parts, output_partition_sizes, input_size_per_partition, share, params_dtype))
        _show_weight(layer, params_dtype, sum(output_partition_sizes), input_size_per_partition)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Also gives the layer a `qweight`, by which vLLM finds its device where it multiplies by the identity to get
        a dense weight: latent attention absorbs that of `kv_b_proj` so."""
        self._check()
        _finish(layer)
        layer.qweight = next(layer.parameters()).new_empty(0)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] -> [..., n] in x's dtype; after the norm in front, where `fused.py` gave the layer one."""
        if layer.onegraph.deferred:
            return x
        return self.run(layer, x, bias)

    def run(
        self, layer: Any, x: Tensor, bias: Tensor | None, *, add: Tensor | None = None, silu: bool = False
    ) -> Tensor:
        """x [..., k] ([..., 2k] with `silu`) -> [..., n]; what `add` and `silu` fuse: `nn.linear.Linear`."""
        x = x.contiguous()
        state: OnegraphState = layer.onegraph
        slots, eps = state.slots, state.eps
        if state.joined:
            part = slots.parts[0]
            weight = slots.kernel_args(layer, None, after_norm=eps is not None)
            return part.ops.linear(part.format, x, weight, bias, add, eps, silu, False)
        assert add is None
        assert not silu
        outputs = []
        for i, part in enumerate(slots.parts):
            weight = slots.kernel_args(layer, i, after_norm=eps is not None)
            own = None if bias is None else bias[part.first : part.last]
            outputs.append(part.ops.linear(part.format, x, weight, own, None, eps, False, False))
        return torch.cat(outputs, dim=-1)


class OnegraphEmbeddingMethod(QuantizeMethodBase):
    """The output head (a linear) and the token embedding (a lookup), cut by rows of the vocabulary. Raises ValueError
    for an embedding in a format without a lookup."""

    def __init__(self, name: str, format: WeightFormat, *, head: bool) -> None:
        if not head and weight_ops(format).embedding is None:
            raise ValueError(f"{name}: an embedding cannot be stored as {format}; keep it dense")
        self.name, self.format = name, format

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        indices = layer.shard_indices
        if layer.num_added_embeddings:
            raise ValueError(f"{self.name}: rows added to the vocabulary (LoRA) cannot be stored as {self.format}")
        used = indices.org_vocab_start_index, indices.org_vocab_end_index
        share = Shard(layer.tp_rank, layer.tp_size, vocabulary=used, by_row=not isinstance(layer, ParallelLMHead))
        parts = {self.name: self.format}
        _create(layer, Slots(parts, output_partition_sizes, input_size_per_partition, share, params_dtype))
        _show_weight(layer, params_dtype, sum(output_partition_sizes), input_size_per_partition, compared=True)
        self.dtype, self.used = params_dtype, used[1] - used[0]

    def process_weights_after_loading(self, layer: Any) -> None:
        _finish(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] -> logits [..., padded vocabulary]; the padding's are zero, and vLLM drops them."""
        slots, n = layer.onegraph.slots, self.used
        part = slots.parts[0]
        weight = slots.kernel_args(layer, None, rows=n if n < part.rows else None)
        bias = None if bias is None else bias[:n]
        logits = part.ops.linear(part.format, x.contiguous(), weight, bias, None, None, False, False)
        return logits if n == part.rows else nn.functional.pad(logits, (0, part.rows - n))

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> rows [..., k] in the model's dtype."""
        slots = layer.onegraph.slots
        part = slots.parts[0]
        rows: Tensor = part.ops.embedding(part.format, ids, slots.kernel_args(layer, None))
        return rows.to(self.dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return layer  # quantizing either unties them


class UntiedMethod(UnquantizedEmbeddingMethod):
    """An unquantized head or embedding whose counterpart is quantized: nothing to share."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return layer


def _create(layer: Any, slots: Slots) -> None:
    slots.create(layer)
    dummy = get_current_vllm_config().load_config.load_format == "dummy"
    layer.onegraph = OnegraphState(slots, joined=len(slots.parts) == 1, dummy=dummy)


def _show_weight(layer: Any, dtype: torch.dtype, n: int, k: int, *, compared: bool = False) -> None:
    """Where vLLM looks at a `weight`: layers for adapters take device, dtype and shape of theirs from it, and a draft
    model's own head and embedding are `compared` with the model's, to share those that are equal. None is."""
    config = get_current_vllm_config()
    if config.lora_config is not None:
        layer.onegraph.stand_in = dtype, (n, k)
    elif compared and config.speculative_config is not None:
        layer.onegraph.stand_in = dtype, (0, k)


def _finish(layer: Any) -> None:
    """Checks and folds what was loaded, and settles how the layer is launched."""
    state: OnegraphState = layer.onegraph
    slots = state.slots
    slots.finish(layer, made_up=state.dummy)
    state.joined = slots.joined(layer)
    if state.stand_in is not None and not hasattr(layer, "weight"):
        (dtype, shape), device = state.stand_in, next(layer.parameters()).device
        layer.weight = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)  # nobody may read it
    if state.norm is not None:
        norm = cast(Tensor, state.norm.weight)
        if norm.is_meta:
            parts = ", ".join(part.name for part in slots.parts)
            raise ValueError(f"{parts}: reloaded without the norm in front; reload all weights of the layer")
        slots.follow_norm(layer, norm)
