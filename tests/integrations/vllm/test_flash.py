"""vLLM's FlashAttention with steps of single tokens in one launch of ours, on a CPU: the tokens are our engine's.

There is no FlashAttention for CPUs: here its kernel is torch's, in vLLM's own backend, which stands in the place of the
CPU's own. Which launch attends to which batch, and that both leave one cache, is what this can show.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import PROMPTS, ours, serving, tokens_of


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, block_table: Tensor, **_: Any
) -> None:
    """What the backend asks of FlashAttention: each request's queries against its pages, causal."""
    bounds = cu_seqlens_q.tolist()
    for row, (first, last, length) in enumerate(zip(bounds, bounds[1:], seqused_k.tolist(), strict=False)):
        pages = block_table[row]
        keys, values = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k, v))
        seen = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
        queries = q[first:last].transpose(0, 1)
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)
        out[first:last] = found.transpose(0, 1)


@contextmanager
def flash_attention(log: list[str]) -> Iterator[pytest.MonkeyPatch]:
    """vLLM's backend on a CPU; `log` gets which kernel attends, call by call, and each plan for vLLM's."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from onegraph.integrations.vllm import flash

    decode = flash.strided_decode

    class Recorded:
        @staticmethod
        def overload(*args: Any) -> None:
            log.append("ours")
            decode(*args)  # with its check

    def theirs(**settings: Any) -> None:
        log.append("theirs")
        attend(**settings)

    def plan(**settings: Any) -> Tensor:
        log.append("plan")
        return torch.zeros(4, dtype=torch.int32)

    selector._cached_get_attn_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "strided_decode", Recorded)
        patch.setattr(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", theirs)
        patch.setattr(flash_attn, "get_scheduler_metadata", plan, raising=False)
        patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
        patch.setattr(flash_attn.FlashAttentionBackend, "get_name", staticmethod(lambda: "CPU_ATTN"))
        patch.setattr(flash_attn.FlashAttentionBackend, "supported_dtypes", [torch.float32])
        path = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        try:
            yield patch
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_are_our_engines(tiny_chat: Path, compiled: bool) -> None:
    """Prompts, one of them in chunks, go to vLLM's kernel, single tokens to ours; only the former are planned for."""
    log: list[str] = []
    with flash_attention(log), serving(tiny_chat, compiled=compiled, max_num_batched_tokens=32) as llm:
        log.clear()  # of what ran to warm up
        found = tokens_of(llm, PROMPTS, 12)
    assert found == ours(tiny_chat, PROMPTS, 12)
    assert log.count("ours") > log.count("theirs") == 2 * log.count("plan") > 2, "of two layers"


def test_pieces_of_a_graph_hold_rope_and_the_write(tiny_chat: Path) -> None:
    """They were captured for any batch, so that attention is vLLM's whatever comes."""
    from onegraph.integrations.vllm import flash

    log: list[str] = []
    piecewise = SimpleNamespace(cudagraph_runtime_mode=flash.CUDAGraphMode.PIECEWISE)
    with flash_attention(log) as patch, serving(tiny_chat) as llm:
        patch.setattr(flash, "get_forward_context", lambda: piecewise)
        log.clear()
        found = tokens_of(llm, PROMPTS, 12)
    assert found == ours(tiny_chat, PROMPTS, 12)
    assert "theirs" in log
    assert "ours" not in log
