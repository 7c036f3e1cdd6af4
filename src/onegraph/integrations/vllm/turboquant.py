"""vLLM's KV cache in TurboQuant codes: an attention backend with a cache of its own, for vLLM 0.33 and newer.

A page is what `formats.turboquant_layout` describes, uint8 [pages, kv_heads, page_bytes], so that vLLM's block manager
counts true bytes. Tokens are written in one launch and decoded straight from codes in the next. What is derived from a
step's metadata is computed in `build`, outside the graph, into buffers at fixed addresses: our kernels read positions
and block tables before the kernels in front of them have ended (`ops/triton/launch.py`).

A prompt's first chunk attends to its own exact keys and values; everything later, to codes alone (`mode=full`). So
there is no ring of exact tokens, and a rejected draft needs no undoing: vLLM sets the request back, its next token is
written over the rejected one, and no query reads past its own position.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
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
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # `build` divides a batch by the lengths that the host knows; adaptive verification cuts others

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A token and head take `bytes_per_token_head` bytes: this is what the block manager allots."""
        if cls.rate is None or spec.state_content_bytes is not None:
            return spec
        layout = TurboQuantLayout(spec.head_size, *cls.rate)
        return replace(spec, dtype=torch.uint8, state_content_bytes=layout.bytes_per_token_head)


@dataclass(frozen=True)
class Span:
    """Neighbouring requests of `length` new tokens each, which attend to codes alone: `rows` of them from request `row`
    on, whose tokens begin at `token`."""

    row: int
    rows: int
    token: int
    length: int


@dataclass(frozen=True)
class Places:
    """Where each token of a batch of several lengths stands in its request (`token` [T]) and is written: page [T, 1],
    place [T], and whether it is at all, real [T]. All int32."""

    token: Tensor
    page: Tensor
    place: Tensor
    real: Tensor


@dataclass
class TurboQuantMetadata(AttentionMetadata):
    """A step's batch of `tokens` tokens, the padding of a graph included.

    spans: the requests that attend to codes. prompts: (first, last) token of each request that begins, exactly.
    block_table [B, P], positions [B], counts [B]: which keys each request sees (int32). Requests that are padding have
    a count of 0.
    places: None where the batch is one span, so that block_table, positions and counts say it all. Only such a batch is
    captured, and what it then reads lies at addresses that stay.
    """

    tokens: int
    spans: list[Span]
    prompts: list[tuple[int, int]]
    block_table: Tensor
    positions: Tensor
    counts: Tensor
    places: Places | None


class TurboQuantBuilder(AttentionMetadataBuilder[TurboQuantMetadata]):
    """Graph support: requests of one length, which is one token or one and all drafts.

    A request with no more tokens than that attends to codes whatever it is, so that a batch gives the same in a graph
    and without one. A drafting model reads one more, the token that the round drew.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        drafts = vllm_config.speculative_config
        self._short = self.reorder_batch_threshold + (drafts is not None and drafts.uses_draft_model())
        most = max(vllm_config.compilation_config.cudagraph_capture_sizes or [0])
        rows = max(most, vllm_config.scheduler_config.max_num_seqs)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._counts = torch.zeros(rows, dtype=torch.int32, device=device)
        _constants(kv_cache_spec.head_size, _rate(), vllm_config.model_config.dtype, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TurboQuantMetadata:
        batch = common_attn_metadata
        tokens, rows, longest = batch.num_actual_tokens, batch.num_reqs, int(batch.max_query_len)
        starts, counts, positions = batch.query_start_loc[: rows + 1], self._counts[:rows], self._positions[:rows]
        torch.sub(starts[1:], starts[:-1], out=counts)
        torch.sub(batch.seq_lens[:rows], counts, out=positions)

        spans, prompts = [Span(0, rows, 0, longest)], list[tuple[int, int]]()
        short = longest <= self._short
        if not short or tokens != rows * longest:  # else all have one length, or are a graph's padding and have none
            bounds = batch.query_start_loc_cpu[: rows + 1].tolist()
            known = [0] * rows if short else batch.seq_lens_cpu_upper_bound.tolist()
            spans, prompts = _divided(bounds, known, self._short)
        whole = not prompts and len(spans) == 1 and spans[0].rows == rows and tokens == rows * spans[0].length
        return TurboQuantMetadata(
            tokens=tokens,
            spans=spans,
            prompts=prompts,
            block_table=batch.block_table_tensor[:rows],
            positions=positions,
            counts=counts,
            places=None if whole else self._places(batch.slot_mapping[:tokens], starts, tokens),
        )

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> TurboQuantMetadata:
        """As `build`. What vLLM drafts past the longest text it moves to position 0, without a slot (-1): a page that
        others may share is not written for it."""
        made = self.build(0, common_attn_metadata, fast_build=True)
        if made.places is None:
            made.counts.mul_(common_attn_metadata.slot_mapping[: made.tokens : made.spans[0].length] >= 0)
        return made

    def _places(self, slots: Tensor, starts: Tensor, tokens: int) -> Places:
        """slots [T]: page * size + place, -1 for padding."""
        size, rows = self.kv_cache_spec.block_size, len(starts) - 1
        offsets = (self._positions[:rows] - starts[:-1]).repeat_interleave(self._counts[:rows], output_size=tokens)
        token = torch.arange(tokens, dtype=torch.int32, device=slots.device) + offsets
        page, place, real = (t.to(torch.int32) for t in (slots // size, slots % size, slots >= 0))
        return Places(token, page.unsqueeze(1), place, real)


def _divided(bounds: list[int], known: list[int], short: int) -> tuple[list[Span], list[tuple[int, int]]]:
    """Requests between `bounds`, as spans and as prompts that begin: more than `short` tokens, which are all that the
    request has. `known` is no less than what it has, but for a drafting model, which reads one more: vLLM leaves that
    out, so that there a long chunk behind a single token passes for a prompt, which costs that drafter some of its
    drafts."""
    spans, prompts = list[Span](), list[tuple[int, int]]()
    for row, (first, last) in enumerate(pairwise(bounds)):
        length, before = last - first, spans[-1] if spans else None
        if length > short and length >= known[row]:
            prompts.append((first, last))
        elif before and before.length == length and before.row + before.rows == row:
            spans[-1] = replace(before, rows=before.rows + 1)
        elif length:
            spans.append(Span(row, 1, first, length))
    return spans, prompts


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

        rope, q, k, v = None, query, key, value
        if m.places is None:
            shape, places = (m.spans[0].rows, m.spans[0].length), (m.positions, m.counts, m.block_table)
            rope = self.rope
        else:  # each token is a row of one token, whose page is all that it knows
            shape, places = (m.tokens, 1), (m.places.place, m.places.real, m.places.page)
            if self.rope is not None:
                q, k, v = self._turned(query[: m.tokens], m.places.token)
        qkv = q[: m.tokens]
        if rope is None:
            q, k, v = (t[: m.tokens].view(m.tokens, -1, dim) for t in (q, k, v))
            qkv = torch.cat((q, k, v), dim=1)
        turned, _ = turboquant_write.overload(
            qkv.view(*shape, -1), None, None, 0.0, *(rope or (None, None)), *places, tables.turn, *codebooks,
            cache, None, None, heads, SCALE, False,
        )  # fmt: skip
        turned = turned.view(m.tokens, heads, dim)

        for span in m.spans:
            rows, its = slice(span.row, span.row + span.rows), slice(span.token, span.token + span.rows * span.length)
            result, _ = turboquant_attention.overload(
                turned[its].view(span.rows, span.length, heads, dim), cache, m.block_table[rows], m.positions[rows],
                m.counts[rows], None, tables.rotation, *codebooks, None, self.scale, 0,
            )  # fmt: skip
            out[its].copy_(result.view(-1, heads, dim))
        for first, last in m.prompts:
            exact_q, exact_k, exact_v = (t[first:last].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            exact = nn.functional.scaled_dot_product_attention(
                exact_q, exact_k, exact_v, is_causal=True, scale=self.scale, enable_gqa=heads != kv_heads
            )
            out[first:last].copy_(exact[0].transpose(0, 1))
        return output

    def _turned(self, qkv: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v after RoPE, of tokens that stand at `token` in their requests."""
        assert self.rope is not None
        token = token.clamp(0, len(self.rope[0]) - 1)  # a draft may stand behind the longest text
        cos, sin = (half.index_select(0, token).unsqueeze(1) for half in self.rope)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
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
