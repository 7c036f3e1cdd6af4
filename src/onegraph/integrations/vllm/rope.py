"""Attention of vLLM's Llama, Mistral and Qwen2 whose RoPE is in a launch of ours.

With vLLM's FlashAttention it is the launch that writes keys and values, which then may overlap the linear in front
(`ops/triton/launch.py`); with our KV cache the launch that writes codes, which takes qkv as the linear gave it.
Attention that does not suit (norms of q and k, another RoPE, another backend) stays vLLM's.
"""

from functools import cache
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

from onegraph.ops.rope_slots import rope_slots_write

KINDS = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention)


class _Attention(nn.Module):
    qkv_proj: Any
    o_proj: Any
    rotary_emb: Any
    attn: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(self._attend(positions, qkv).view(-1, self.num_heads * self.head_dim))
        return cast(Tensor, output)

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        raise NotImplementedError


class WritesCache(_Attention):
    """One launch turns q and k and writes the cache of vLLM's FlashAttention."""

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        name, table = _encode_layer_name(self.attn.layer_name), self.rotary_emb.cos_sin_cache
        q = torch.ops.vllm.onegraph_rope_and_cache(qkv, positions, table, self.num_heads, name).view(
            -1, self.num_heads, self.head_dim
        )
        kv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)[:, self.num_heads :]
        k, v = kv.split(self.num_kv_heads, dim=1)  # not read: they stand in the cache
        output = torch.empty_like(q)
        torch.ops.vllm.unified_attention_with_output(q, k, v, output, name)
        return output


class WritesCodes(_Attention):
    """Our KV cache's backend gets qkv as it is (`attention.py`)."""

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        packed = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        output = qkv.new_empty(qkv.shape[0], self.num_heads, self.head_dim)
        name = _encode_layer_name(self.attn.layer_name)
        torch.ops.vllm.unified_attention_with_output(packed, packed, packed, output, name)
        return output


def take_over(attention: Any) -> None:
    """Turns the attention of a decoder layer into one of these where it suits."""
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
        return
    backend = type(attention.attn.impl).__name__
    if backend == "TurboQuantImpl":
        table = rope._compute_cos_sin_cache().float()
        attention.attn.impl.rope = tuple(half.contiguous() for half in table.chunk(2, dim=-1))
        attention.__class__ = _turned(WritesCodes, cast(Any, type(attention)))
    elif backend == "FlashAttentionImpl" and attention.attn.kv_cache_dtype == "auto":
        attention.__class__ = _turned(WritesCache, cast(Any, type(attention)))


@cache
def _turned(how: type, kind: type) -> type:
    return type(f"{how.__name__}{kind.__name__}", (how, kind), {})


def _rope_and_cache(qkv: Tensor, positions: Tensor, table: Tensor, heads: int, layer_name: LayerNameType) -> Tensor:
    _, _, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    dim = table.shape[1]
    if slots is None:  # the run that measures memory
        return qkv[:, : heads * dim].clone()
    keys, values = cache.transpose(1, 2).split(dim, dim=-1)  # as FlashAttentionImpl.do_kv_cache_update
    return cast(Tensor, rope_slots_write.overload(qkv, positions, table, slots, keys, values, heads))


def _fake(qkv: Tensor, positions: Tensor, table: Tensor, heads: int, layer_name: LayerNameType) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads * table.shape[1])


direct_register_custom_op("onegraph_rope_and_cache", _rope_and_cache, fake_impl=_fake)
