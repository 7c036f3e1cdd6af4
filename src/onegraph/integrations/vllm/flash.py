"""vLLM's FlashAttention, whose steps of single tokens are one launch of ours: RoPE, the cache's write, attention.

All else is vLLM's: the cache and how it lies, and batches with a prompt or with drafts in them. So are the pieces of a
piecewise graph, which hold RoPE and the write (`rope.py`) whatever batch they are replayed for.
"""

from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from onegraph.ops.cuda.decode_attention import KERNEL, supports_input
from onegraph.ops.cuda.decode_plan import TILE
from onegraph.ops.strided_decode import strided_decode


def take_over(attention: Any, table: Tensor) -> None:
    """Gives a layer of vLLM's `Attention` this backend where it suits; table: float32 [positions, D], cos | sin."""
    impl = attention.impl
    plain = impl.sliding_window == (-1, -1) and impl.alibi_slopes is None and impl.sinks is None
    if not plain or impl.logits_soft_cap or attention.kv_cache_dtype != "auto":
        return
    if table.is_cuda and not (  # FlashAttention's pages are multiples of 16 tokens too
        supports_input(attention.dtype, impl.head_size, impl.num_queries_per_kv, TILE)
        and KERNEL.is_built(table.device.index)
    ):
        return
    attention.impl, attention.attn_backend = FlashDecodeImpl(impl, table), FlashDecodeBackend


def in_one_launch(impl: Any, metadata: Any) -> bool:
    """Whether the forward pass that runs leaves RoPE and the write to `FlashDecodeImpl`."""
    return (
        isinstance(impl, FlashDecodeImpl)
        and metadata is not None  # the run that measures memory
        and metadata.max_query_len == 1
        and get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
    )


class FlashDecodeImpl(FlashAttentionImpl):
    def __init__(self, impl: FlashAttentionImpl, table: Tensor) -> None:
        """Takes the place of `impl` with all that it holds. vLLM's models build `Attention` without naming a backend,
        and a backend registered as FLASH_ATTN would run every model of the process."""
        self.__dict__.update(vars(impl))
        self.table = table

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """key: qkv [T, heads + 2 kv_heads, D] as the linear gave it. query: q after RoPE, where attention is vLLM's."""
        m = attn_metadata
        if not in_one_launch(self, m):
            return super().forward(
                layer, query, key, value, kv_cache, m, output, output_scale, output_block_scale
            )  # fmt: skip
        rows = slice(0, m.num_actual_tokens)
        qkv, lengths, pages = key[rows].flatten(1), m.seq_lens[rows], m.block_table[rows]
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        strided_decode.overload(qkv, self.table, lengths, pages, keys, values, output[rows], self.scale)
        return output


class FlashDecodeBuilder(FlashAttentionMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Without FlashAttention's plan, whose launches the host pays for, where FlashAttention will not run: a step
        of single tokens, unless a graph of mixed batches (FULL) or pieces (PIECEWISE) may be replayed for it."""
        mode = self.compilation_config.cudagraph_mode
        ours = mode == CUDAGraphMode.NONE or mode.separate_routine()
        single = common_attn_metadata.max_query_len == 1
        return super().build(common_prefix_len, common_attn_metadata, fast_build or (ours and single))


class FlashDecodeBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashDecodeImpl]:
        return FlashDecodeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashDecodeBuilder]:
        return FlashDecodeBuilder
