"""Attention of vLLM's Llama, Mistral and Qwen2 whose RoPE is in a launch of ours.

With vLLM's FlashAttention it is the launch that writes keys and values, or, in a step of single tokens, the one launch
that attends too (`flash.py`); with our KV cache the launch that writes codes. All take qkv as the linear gave it, and
may overlap that linear (`ops/triton/launch.py`). Attention that does not suit (norms of q and k, another RoPE, another
backend) stays vLLM's.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import llama, mistral, qwen2
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from onegraph.integrations.vllm import flash
from onegraph.ops.attention import rope_cache_write

KINDS = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention)


class _Attention(nn.Module):
    """Made of the modules of an attention of vLLM, whose place it takes."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj
        self.rotary_emb, self.attn = attention.rotary_emb, attention.attn
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(self._attend(positions, qkv).view(-1, self.num_heads * self.head_dim))
        return cast(Tensor, output)

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        raise NotImplementedError


class WritesCache(_Attention):
    """One launch turns q and k and writes the cache of vLLM's FlashAttention, unless attention's launch does."""

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        name, table = _encode_layer_name(self.attn.layer_name), self.rotary_emb.onegraph_table
        q = torch.ops.vllm.onegraph_rope_and_cache(qkv, positions, table, self.num_heads, name).view(
            -1, self.num_heads, self.head_dim
        )
        packed = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        output = torch.empty_like(q)
        torch.ops.vllm.unified_attention_with_output(q, packed, packed, output, name)  # k and v stand in the cache
        return output


class WritesCodes(_Attention):
    """Our KV cache's backend gets qkv as it is (`turboquant.py`)."""

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        packed = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        output = qkv.new_empty(qkv.shape[0], self.num_heads, self.head_dim)
        name = _encode_layer_name(self.attn.layer_name)
        torch.ops.vllm.unified_attention_with_output(packed, packed, packed, output, name)
        return output


def take_over(attention: Any) -> nn.Module:
    """What runs in place of the attention of a decoder layer: one of these where it suits, else itself."""
    rope = getattr(attention, "rotary_emb", None)
    if (
        type(attention) not in KINDS
        or not isinstance(rope, RotaryEmbedding)
        or not rope.is_neox_style
        or rope.rotary_dim != attention.head_dim
        or getattr(attention, "qk_norm", False)
        or getattr(attention, "do_llama_4_scaling", False)
        or attention.attn.kv_sharing_target_layer_name is not None
        or attention.attn.attn_type != "decoder"  # an encoder's keys and values stand in no cache
        or attention.attn.impl.dcp_world_size * attention.attn.impl.pcp_world_size > 1  # ranks that exchange them
    ):
        return cast(nn.Module, attention)
    backend = type(attention.attn.impl).__name__
    if backend == "TurboQuantImpl":
        attention.attn.impl.rope = _halves(rope)
        return WritesCodes(attention)
    if backend == "FlashAttentionImpl" and attention.attn.kv_cache_dtype == "auto":
        flash.take_over(attention.attn, _table(rope))
        return WritesCache(attention)
    return cast(nn.Module, attention)


def _table(rope: Any) -> Tensor:
    """float32 [positions, D], cosines and then sines. One for all layers, and a buffer, which an engine that sleeps
    gets back, as vLLM's own table in the model's dtype is."""
    if not hasattr(rope, "onegraph_table"):
        rope.register_buffer("onegraph_table", rope._compute_cos_sin_cache().float().contiguous(), persistent=False)
    return cast(Tensor, rope.onegraph_table)


def _halves(rope: Any) -> tuple[Tensor, Tensor]:
    """The same as two tensors [positions, D / 2]."""
    if not hasattr(rope, "onegraph_cos"):
        for name, half in zip(("cos", "sin"), rope._compute_cos_sin_cache().float().chunk(2, dim=-1), strict=True):
            rope.register_buffer(f"onegraph_{name}", half.contiguous(), persistent=False)
    return rope.onegraph_cos, rope.onegraph_sin


def _rope_and_cache(qkv: Tensor, positions: Tensor, table: Tensor, heads: int, layer_name: LayerNameType) -> Tensor:
    metadata, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    dim = table.shape[1]
    if slots is None or flash.in_one_launch(layer.impl, metadata):  # the run that measures memory has no slots
        return _fake(qkv, positions, table, heads, layer_name)
    keys, values = cache.transpose(1, 2).split(dim, dim=-1)  # as FlashAttentionImpl.do_kv_cache_update
    cos, sin = table.chunk(2, dim=1)
    q = rope_cache_write.overload(
        qkv.unsqueeze(1), None, None, 0.0, cos, sin, positions, None, None, keys, values, heads, slots
    )
    return cast(Tensor, q.view(len(qkv), heads * dim))


def _fake(qkv: Tensor, positions: Tensor, table: Tensor, heads: int, layer_name: LayerNameType) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads * table.shape[1])


direct_register_custom_op("onegraph_rope_and_cache", _rope_and_cache, fake_impl=_fake)
