"""How vLLM's linears, output head and embedding run on E8P codes: one opaque op a launch, for tracer and graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from onegraph.formats.e8p import KEEP, hadamard_block
from onegraph.integrations.vllm.shards import Share, Slots
from onegraph.nn.linear import shared_codebook
from onegraph.ops.e8p import e8p_embedding, e8p_linear


class E8PLinearMethod(LinearMethodBase):
    """Column- and row-parallel, fused and plain linears. `parts`: the checkpoint's linears and their rates, in order.

    What one launch can do is done in one: parts of one rate with bit-identical in_scale, whose rotation blocks the
    fused layer keeps. Otherwise there is a launch a part.
    """

    def __init__(self, parts: Mapping[str, int]) -> None:
        self.parts = parts

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
        share = Share(getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1))
        _create(layer, Slots(self.parts, output_partition_sizes, input_size_per_partition, share), params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        _finish(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] -> [..., n] in x's dtype; after the norm in front, where `fused.py` gave the layer one."""
        if getattr(layer, "onegraph_deferred", False):
            return x  # the decoder layer runs it, with what it adds
        return self.run(layer, x, bias)

    def run(
        self, layer: Any, x: Tensor, bias: Tensor | None, *, add: Tensor | None = None, silu: bool = False
    ) -> Tensor:
        """x [..., k] ([..., 2k] with `silu`) -> [..., n]; what `add` and `silu` fuse: `ops/e8p.py`."""
        x = x.contiguous()
        eps = getattr(layer, "onegraph_eps", None)
        in_scale = layer.in_scale if eps is None else layer.in_scale_after_norm
        if layer.onegraph_fused:
            return e8p_linear.overload(
                x, layer.codes, _residual(layer), layer.codebook, in_scale[0], layer.out_scale, bias, _rate(layer),
                add, eps, silu,
            )  # fmt: skip
        assert add is None
        assert not silu
        slots: Slots = layer.onegraph_slots
        outputs = []
        for i, part in enumerate(slots.parts):
            b = None if bias is None else bias[part.first : part.last]
            if part.bits == KEEP:
                outputs.append(nn.functional.linear(x, slots.view("weight", layer.weight, i), b))
                continue
            residual = None if part.residual is None else slots.view("residual", layer.residual, i)
            scales = slots.view("in_scale", in_scale, i), slots.view("out_scale", layer.out_scale, i)
            codes = slots.view("codes", layer.codes, i)
            outputs.append(e8p_linear.overload(x, codes, residual, layer.codebook, *scales, b, part.bits, None, eps))
        return torch.cat(outputs, dim=-1)


class E8PEmbeddingMethod(QuantizeMethodBase):
    """The output head (a linear) and the token embedding (a lookup), cut by rows of the vocabulary."""

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits

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
            raise ValueError(f"{self.name}: rows added to the vocabulary (LoRA) cannot be stored as E8P")
        used = indices.org_vocab_start_index, indices.org_vocab_end_index - indices.org_vocab_start_index
        share = Share(layer.tp_rank, layer.tp_size, vocabulary=used, rotated=isinstance(layer, ParallelLMHead))
        _create(
            layer, Slots({self.name: self.bits}, output_partition_sizes, input_size_per_partition, share), params_dtype
        )
        layer.onegraph_dtype, layer.onegraph_used = params_dtype, used[1]

    def process_weights_after_loading(self, layer: Any) -> None:
        _finish(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] -> logits [..., padded vocabulary]; the padding's are zero, and vLLM drops them."""
        n, padded = layer.onegraph_used, layer.codes.shape[0]
        rows: tuple[Any, ...] = layer.codes, _residual(layer), layer.out_scale, bias
        if n < padded:
            rows = tuple(None if tensor is None else tensor[:n] for tensor in rows)
        codes, residual, out_scale, bias = rows
        logits: Tensor = e8p_linear.overload(
            x.contiguous(), codes, residual, layer.codebook, layer.in_scale[0], out_scale, bias, self.bits
        )
        return logits if n == padded else nn.functional.pad(logits, (0, padded - n))

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> rows [..., k] in the model's dtype."""
        rows = e8p_embedding.overload(
            ids, layer.codes, _residual(layer), layer.codebook, layer.in_scale[0], layer.out_scale, self.bits
        )
        return rows.to(layer.onegraph_dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return layer  # quantizing either unties them


class UntiedMethod(UnquantizedEmbeddingMethod):
    """An unquantized head or embedding whose counterpart is quantized: nothing to share."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return layer


def _create(layer: Any, slots: Slots, dtype: torch.dtype) -> None:
    slots.create(layer, dtype)
    layer.onegraph_slots = slots
    layer.onegraph_dummy = get_current_vllm_config().load_config.load_format == "dummy"
    layer.onegraph_fused = len(slots.parts) == 1


def _finish(layer: Any) -> None:
    """Checks and folds what was loaded, and settles how the layer is launched."""
    slots: Slots = layer.onegraph_slots
    if layer.onegraph_dummy:
        slots.fill(layer)
    else:
        slots.finish(layer)
    layer.register_buffer("codebook", shared_codebook(layer.codes.device), persistent=False)
    blocks = {hadamard_block(part.rows) for part in slots.parts} | {hadamard_block(slots.parts[-1].last)}
    same = bool((layer.in_scale == layer.in_scale[0]).all())
    layer.onegraph_fused = len(slots.parts) == 1 or (slots.uniform and len(blocks) == 1 and same)
    if getattr(layer, "onegraph_norm", None) is not None:
        _multiply_norm(layer)


def _multiply_norm(layer: Any) -> None:
    """in_scale_after_norm = in_scale * the weight of the norm in front, in place, once both are loaded."""
    weight = layer.onegraph_norm[0].weight
    if weight.is_meta:
        parts = ", ".join(part.name for part in layer.onegraph_slots.parts)
        raise ValueError(f"{parts}: reloaded without the norm in front; reload all weights of the layer")
    layer.in_scale_after_norm.copy_(layer.in_scale * weight.float())


def _residual(layer: Any) -> Tensor | None:
    return getattr(layer, "residual", None)


def _rate(layer: Any) -> int:
    slots: Slots = layer.onegraph_slots
    return slots.parts[0].bits
