"""vLLM's KV cache in TurboQuant codes: an attention backend with a cache of its own, for vLLM 0.33 and newer.

A page is what `formats.turboquant_layout` describes, uint8 [pages, kv_heads, page_bytes], so that vLLM's block manager
counts true bytes. Tokens are written in one launch and decoded straight from codes in the next. What is derived from a
step's metadata is computed in `build`, outside the graph, into buffers at fixed addresses: our kernels read positions
and block tables before the kernels in front of them have ended (`ops/triton/launch.py`).

A prompt's first chunk attends to its own exact keys and values; everything later, to codes alone (`mode=full`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_layout import KVCacheLayout

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant_layout import BLOCK, TurboQuantLayout
from onegraph.integrations.vllm import KV_RATES
from onegraph.ops.attention import rotate_half
from onegraph.ops.turboquant import turboquant_write
from onegraph.ops.turboquant_attention import turboquant_attention

NAME = "CUSTOM"  # vLLM's word for a backend from outside: `--attention-backend CUSTOM`
SCALE = "matched"  # what `formats.turboquant` calls the scale that keeps norms


class TurboQuantBackend(AttentionBackend):
    """What the backend takes; vLLM refuses the rest by these answers, in its own words."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_RATES)
    forward_includes_kv_cache_update = True
    accept_output_buffer = True
    rate: ClassVar[tuple[int, int] | None] = None  # of this process's model: bits of keys and of values

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["TurboQuantImpl"]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type["TurboQuantBuilder"]:
        return TurboQuantBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(formats.HEAD_DIMS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # the bytes of a page and head lie together

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # not tried

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A token and head take `bytes_per_token_head` bytes: this is what the block manager allots."""
        if cls.rate is None or spec.state_content_bytes is not None:
            return spec
        layout = TurboQuantLayout(spec.head_size, *cls.rate)
        return replace(spec, dtype=torch.uint8, state_content_bytes=layout.bytes_per_token_head)


@dataclass
class TurboQuantMetadata(AttentionMetadata):
    """A step's batch: `decodes` requests of one token come first, then `prefills`.

    page [T, 1], place [T], real [T]: where each token is written, and whether it is (int32). Not set for decodes alone
    whose qkv comes as it is: block_table and positions say it too.
    block_table [B, P], positions [B], counts [B]: which keys each request sees (int32).
    prefills: (request, first token, last token, tokens that the request holds afterwards at most) of each.
    """

    tokens: int
    decodes: int
    prefills: list[tuple[int, int, int, int]]
    page: Tensor
    place: Tensor
    real: Tensor
    block_table: Tensor
    positions: Tensor
    counts: Tensor


class TurboQuantBuilder(AttentionMetadataBuilder[TurboQuantMetadata]):
    """Graph support: one token a request. Longer queries (drafts) run between the pieces of a piecewise graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        most = max(vllm_config.compilation_config.cudagraph_capture_sizes or [0])
        tokens = max(most, vllm_config.scheduler_config.max_num_batched_tokens)
        rows = max(most, vllm_config.scheduler_config.max_num_seqs)
        self._page = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
        self._place = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._real = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._counts = torch.zeros(rows, dtype=torch.int32, device=device)
        _constants(kv_cache_spec.head_size, _rate(), vllm_config.model_config.dtype, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._turns = all(layers[name].impl.rope is not None for name in layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TurboQuantMetadata:
        batch = common_attn_metadata
        tokens, rows, size = batch.num_actual_tokens, batch.num_reqs, self.kv_cache_spec.block_size
        starts = batch.query_start_loc[: rows + 1]
        torch.sub(starts[1:], starts[:-1], out=self._counts[:rows])
        torch.sub(batch.seq_lens[:rows], self._counts[:rows], out=self._positions[:rows])

        decodes, prefills, _, _ = split_decodes_and_prefills(batch, decode_threshold=1)
        if prefills or not self._turns:
            slots = batch.slot_mapping[:tokens]  # page * size + place, -1 for padding
            self._page[:tokens, 0].copy_(slots // size)
            self._place[:tokens].copy_(slots % size)
            self._real[:tokens].copy_(slots >= 0)
        found = []
        if prefills:
            bounds, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound.tolist()
            found = [(i, bounds[i], bounds[i + 1], lengths[i]) for i in range(decodes, rows)]
        return TurboQuantMetadata(
            tokens=tokens,
            decodes=decodes,
            prefills=[row for row in found if row[2] > row[1]],
            page=self._page[:tokens],
            place=self._place[:tokens],
            real=self._real[:tokens],
            block_table=batch.block_table_tensor[:rows],
            positions=self._positions[:rows],
            counts=self._counts[:rows],
        )


class TurboQuantImpl(AttentionImpl[TurboQuantMetadata]):
    """One layer. Raises ValueError for kinds of attention that codes are not read for.

    With `rope` (cosines and sines, float32 [positions, D / 2]) `forward` is given qkv [T, heads + 2 kv_heads, D] as the
    query, before RoPE.
    """

    rope: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        wrong = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap of logits": logits_soft_cap,
            "a cache that layers share": kv_sharing_target_layer_name,
            "attention sinks": others.get("sinks") is not None,  # a tensor
            f"attention of the kind {attn_type!r}": attn_type != "decoder",
        }
        if found := [name for name, value in wrong.items() if value]:
            raise ValueError(f"the TurboQuant KV cache does not reach {found[0]}; serve with --kv-cache-dtype auto")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        TurboQuantBackend.rate = KV_RATES.get(kv_cache_dtype, TurboQuantBackend.rate)
        self.rate = _rate()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TurboQuantMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, heads, D], key and value [T, kv_heads, D], kv_cache uint8 [pages, kv_heads, page_size, bytes]."""
        m = attn_metadata
        if m is None:  # the run that measures memory
            return output.zero_()
        tables = _constants(self.head_size, self.rate, query.dtype, query.device)
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_size
        out = output.view(-1, heads, dim)
        cache = kv_cache.view(kv_cache.shape[0], kv_heads, -1)
        codebooks = tables.k_codebook, tables.v_codebook

        rope, places = self.rope, (m.place, m.real, m.page)
        if rope is not None and not m.prefills:
            qkv = query[: m.tokens]
            places = m.positions[: m.tokens], m.counts[: m.tokens], m.block_table[: m.tokens]
        else:
            q, k, v = self._turned(query, m) if rope is not None else (query, key, value)
            q, k, v = (t[: m.tokens].view(m.tokens, -1, dim) for t in (q, k, v))
            qkv, rope = torch.cat((q, k, v), dim=1), None
        turned, _ = turboquant_write.overload(
            qkv.view(m.tokens, 1, -1), None, None, 0.0, *(rope or (None, None)), *places, tables.turn, *codebooks,
            cache, None, None, heads, SCALE, False,
        )  # fmt: skip

        def read(queries: Tensor, rows: slice) -> Tensor:
            """Rotated queries [B, Q, heads, D] of some requests against all that their pages hold."""
            result, _ = turboquant_attention.overload(
                queries, cache, m.block_table[rows], m.positions[rows], m.counts[rows], None, tables.rotation,
                *codebooks, None, self.scale, 0,
            )  # fmt: skip
            return result

        if m.decodes:
            out[: m.decodes].copy_(read(turned[: m.decodes], slice(0, m.decodes)).squeeze(1))
        for row, first, last, length in m.prefills:
            if last - first == length:
                exact_q, exact_k, exact_v = (t[first:last].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
                exact = nn.functional.scaled_dot_product_attention(
                    exact_q, exact_k, exact_v, is_causal=True, scale=self.scale, enable_gqa=heads != kv_heads
                )
                out[first:last].copy_(exact[0].transpose(0, 1))
            else:
                chunk = turned[first:last].transpose(0, 1)
                out[first:last].copy_(read(chunk, slice(row, row + 1))[0])
        return output

    def _turned(self, qkv: Tensor, m: TurboQuantMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v after RoPE, of a batch with a prompt in it, which no full graph holds."""
        assert self.rope is not None
        steps = [(row, torch.arange(last - first, device=qkv.device)) for row, first, last, _ in m.prefills]
        token = torch.cat([m.positions[: m.decodes], *(m.positions[row] + step for row, step in steps)])
        cos, sin = (half.index_select(0, token).unsqueeze(1) for half in self.rope)
        q, k, v = qkv[: m.tokens].split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        both = rotate_half(torch.cat((q, k), dim=1).float(), cos, sin).to(qkv.dtype)
        return both[:, : self.num_heads], both[:, self.num_heads :], v


@dataclass(frozen=True)
class _Constants:
    turn: Tensor
    rotation: Tensor
    k_codebook: Tensor
    v_codebook: Tensor


@lru_cache(maxsize=8)
def _constants(head_dim: int, rate: tuple[int, int], dtype: torch.dtype, device: torch.device) -> _Constants:
    """What all layers share, made before any capture; outside the memory that a sleeping engine gives up."""
    with torch.device("cpu"):
        rotation = formats.rotation(head_dim).to(dtype)
        codebooks = [formats.codebook(head_dim, bits) for bits in rate]
    turn = rotation.T.contiguous()
    return _Constants(*(tensor.to(device) for tensor in (turn, rotation, *codebooks)))


def _rate() -> tuple[int, int]:
    if TurboQuantBackend.rate is None:
        raise ValueError(f"--attention-backend {NAME} needs --kv-cache-dtype, one of {', '.join(KV_RATES)}")
    return TurboQuantBackend.rate
