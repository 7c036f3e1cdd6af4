"""The attention of a decode step as one op: `rope_cache_write` and `paged_attention` for one token a row, or a round's
few."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.attention import _TOLERANCE, _write_case, keys_read, paged_attention, rope_cache_write
from onegraph.ops.calls import MAX_TOKENS, PagedDecode
from onegraph.ops.cases import Draw
from onegraph.ops.gate import gate_heads, split_gates
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.values import normed_values


def _paged_decode(call: PagedDecode) -> Tensor:
    call = call.values_normed(normed_values.reference)
    attend = lambda plain: plain.composed(rope_cache_write.reference, paged_attention.reference)  # noqa: E731
    out = call.ungated(attend, split_gates.reference, gate_heads.reference)
    step = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    place, reach = call.positions.unsqueeze(1) + step, call.block_table.shape[1] * call.k_cache.shape[1]
    real = (step < call.counts.unsqueeze(1)) & (place >= 0) & (place < reach)
    return out.masked_fill_(~real[..., None, None], 0.0)


def _empty(call: PagedDecode) -> Tensor:
    return call.qkv.new_empty((*call.qkv.shape[:2], call.heads, call.k_cache.shape[3]))


def _check(call: PagedDecode) -> None:
    assert rope_cache_write.check is not None
    assert paged_attention.check is not None
    qkv, tickets = call.qkv, call.tickets
    if call.value_norm:
        if call.gated:
            raise ValueError("paged_decode: gated and value_norm are both given; it takes one of them")
        assert normed_values.check is not None
        normed_values.check(qkv, call.heads, *call.k_cache.shape[2:], call.eps)
        rope_cache_write.check(*call.values_normed(lambda qkv, *how: normed_values.fake(qkv, *how)).write())
    elif call.gated:
        assert split_gates.check is not None
        split_gates.check(qkv, call.heads, call.k_cache.shape[-1])
        plain = qkv.new_empty((*qkv.shape[:2], qkv.shape[2] - call.heads * call.k_cache.shape[-1]))  # never filled
        rope_cache_write.check(*replace(call, qkv=plain).write())
    else:
        rope_cache_write.check(*call.write())
    if not 1 <= qkv.shape[1] <= MAX_TOKENS:
        raise ValueError(
            f"paged_decode: qkv holds {qkv.shape[1]} tokens a row; a decode step has 1, a round up to {MAX_TOKENS}: "
            "use rope_cache_write and paged_attention"
        )
    if not all(t is None or t.is_contiguous() for t in (qkv, call.cos, call.sin)):
        raise ValueError("paged_decode: qkv, cos and sin must be contiguous; call .contiguous() on them first")
    paged_attention.check(*call.attention(_empty(call)))  # never filled
    wanted = qkv.shape[0] * call.k_cache.shape[2]
    if tickets.dtype != torch.int32 or tickets.numel() < wanted or tickets.device != qkv.device:
        raise ValueError(
            f"paged_decode: tickets is {tickets.dtype} {tuple(tickets.shape)} on {tickets.device}; it must be int32 of "
            f"{wanted} zeros or more on {qkv.device}"
        )


def _case(
    name: str, window: int = 0, early: bool = False, sinks: bool = False, softcap: float = 0.0, tokens: int = 1,
    apart: bool = False, gated: bool = False, values: str = "", **options: Any,
) -> Case:  # fmt: skip
    """The write's case, its caches as long as the positions reach, and what attention needs besides. apart: a page of
    keys, one of values and one of neither, in turn. values: "normed", or "keys" where keys are they."""
    write = _write_case(name, tokens=tokens, **options)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        *tensors, heads, _ = write.make(device, dtype, generator)
        batch, (_, _, kv_heads, dim) = tensors[0].shape[0], tensors[-1].shape
        if apart:
            tensors[-2:] = torch.stack((*tensors[-2:], tensors[-1]), dim=1).unbind(1)[:2]
        tickets = torch.zeros(batch, kv_heads, dtype=torch.int32, device=device)
        draw = Draw(device, dtype, generator)
        logits = draw.sinks(heads) if sinks else None
        if gated:
            q, rest = tensors[0].split((heads * dim, 2 * kv_heads * dim), dim=2)
            gates = draw.randn(batch, tokens, heads, dim)
            tensors[0] = torch.cat((torch.stack((q.view_as(gates), gates), dim=3).flatten(2), rest), dim=2)
        if values == "keys":
            tensors[0] = tensors[0][..., : (heads + kv_heads) * dim].contiguous()
        return *tensors, tickets, heads, dim**-0.5, window, early, logits, softcap, gated, bool(values)

    return Case(name=name, make=make)


_SMOL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64, "page_size": 16}

paged_decode = register(
    Op(
        name="paged_decode",
        call=PagedDecode,
        schema="-> Tensor",
        reference=_paged_decode,
        fake=_empty,
        kernel="onegraph.ops.cuda.decode_attention:paged_decode",
        cpu="onegraph.ops.cpu.attention:paged_decode",
        check=_check,
        cases=(
            _case("smollm2", positions=[137], counts=[1], early=True, **_SMOL),
            _case("smollm2_batch", positions=[0, 15, 16, 64, 300], counts=[1, 1, 0, 1, 1], **_SMOL),
            _case("llama3", positions=[63, 200], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=32),
            _case(
                "llama3_early", positions=[63, 200], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=32,
                early=True,
            ),
            _case(
                "window", positions=[5, 64, 127, 200], counts=[1] * 4, heads=4, kv_heads=1, dim=64, page_size=16,
                window=33,
            ),
            _case(
                "wide_window", positions=[700, 3000], counts=[1, 1], heads=4, kv_heads=1, dim=128, page_size=32,
                window=600,
            ),
            _case("qwen3", positions=[70, 3], counts=[1, 1], heads=4, kv_heads=2, dim=128, page_size=16, norm=True),
            _case("eight", positions=[70, 800], counts=[1, 1], heads=8, kv_heads=1, dim=128, page_size=16, norm=True),
            _case("mha_80", positions=[7, 130], counts=[1, 1], heads=4, kv_heads=4, dim=80, page_size=8, rope=False),
            _case("mqa_96", positions=[61], counts=[1], heads=6, kv_heads=1, dim=96, page_size=4, norm=True),
            _case(
                "many_rows", positions=[37 * i % 150 for i in range(40)], counts=[1] * 40, heads=4, kv_heads=2, dim=64,
                page_size=16,
            ),
            _case(
                "round", tokens=4, positions=[63, 200, 14], counts=[4, 3, 2], heads=8, kv_heads=2, dim=128,
                page_size=16,
            ),
            _case("round_smollm2", tokens=8, positions=[12, 0, 700, 61], counts=[8, 8, 5, 0], **_SMOL),
            _case(
                "round_window", tokens=5, positions=[5, 64, 126, 3000], counts=[5, 1, 5, 5], heads=4, kv_heads=1,
                dim=64, page_size=16, window=33,
            ),
            _case(
                "round_narrow_window", tokens=7, positions=[2, 150, 31], counts=[7, 7, 6], heads=6, kv_heads=2, dim=64,
                page_size=32, window=3, norm=True, rope=False,
            ),
            _case(
                "round_qwen3", tokens=2, positions=[70, 3], counts=[2, 2], heads=4, kv_heads=2, dim=128, page_size=16,
                norm=True,
            ),
            _case(
                "round_eight", tokens=7, positions=[15, 800], counts=[7, 6], heads=8, kv_heads=1, dim=128,
                page_size=16, norm=True,
            ),
            _case(
                "round_gpt_oss", tokens=4, positions=[0, 9, 700], counts=[4, 2, 4], heads=16, kv_heads=2, dim=64,
                page_size=16, window=128, sinks=True,
            ),
            _case(
                "apart", positions=[63, 200, 5], counts=[1, 1, 0], heads=8, kv_heads=2, dim=128, page_size=16,
                apart=True,
            ),
            _case("apart_80", positions=[61], counts=[1], heads=4, kv_heads=4, dim=80, page_size=16, apart=True),
            _case("round_apart", tokens=4, positions=[12, 700], counts=[4, 3], apart=True, **_SMOL),
            _case("long_context", positions=[4000, 17], counts=[1, 1], heads=8, kv_heads=2, dim=128, page_size=64),
            _case(
                "gpt_oss", positions=[0, 9, 0, 700], counts=[1, 1, 0, 1], heads=16, kv_heads=2, dim=64, page_size=16,
                window=128, sinks=True,
            ),
            _case("sinks", positions=[1, 300], counts=[1, 1], heads=6, kv_heads=3, dim=80, page_size=16, sinks=True),
            _case(
                "gemma3", positions=[1, 300], counts=[1, 1], heads=8, kv_heads=4, dim=256, page_size=16, norm=True,
                window=100,
            ),
            _case("gemma3_1b", positions=[700], counts=[1], heads=4, kv_heads=1, dim=256, page_size=16, norm=True),
            _case(
                "gemma2", positions=[70, 800], counts=[1, 1], heads=8, kv_heads=4, dim=256, page_size=16, softcap=0.7
            ),
            _case(
                "half_turned", positions=[0, 300], counts=[1, 1], heads=12, kv_heads=1, dim=128, page_size=16,
                norm=True, turned=64,
            ),
            _case(
                "qwen3_5", positions=[0, 300], counts=[1, 1], heads=12, kv_heads=2, dim=256, page_size=16, norm=True,
                turned=64, gated=True,
            ),
            _case(
                "round_qwen3_5", tokens=4, positions=[12, 700, 3], counts=[4, 3, 0], heads=6, kv_heads=1, dim=256,
                page_size=16, norm=True, turned=64, gated=True,
            ),
            _case("gated_80", positions=[61], counts=[1], heads=4, kv_heads=2, dim=80, page_size=8, gated=True),
            _case("sixteen", positions=[70, 800], counts=[1, 1], heads=16, kv_heads=1, dim=128, page_size=16),
            _case(
                "gemma4", positions=[40, 800], counts=[1, 1], heads=8, kv_heads=1, dim=512, page_size=16, norm=True
            ),
            _case(
                "round_gemma4", tokens=3, positions=[12, 300], counts=[3, 2], heads=8, kv_heads=2, dim=512,
                page_size=16, norm=True,
            ),
            _case(
                "gemma4_keys_as_values", positions=[40, 800], counts=[1, 1], heads=8, kv_heads=1, dim=512,
                page_size=16, norm=True, values="keys",
            ),
            _case(
                "round_normed_values", tokens=3, positions=[12, 300], counts=[3, 2], heads=8, kv_heads=4, dim=256,
                page_size=16, norm=True, window=100, values="normed",
            ),
            _case(
                "normed_values_64", positions=[61], counts=[1], heads=4, kv_heads=2, dim=64, page_size=16, norm=True,
                values="normed",
            ),
            _case(
                "turned_24_of_80", positions=[61], counts=[1], heads=4, kv_heads=4, dim=80, page_size=8, turned=24
            ),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda call: (
            2 * nbytes(call.qkv)
            + 2 * keys_read(call.qkv, call) * call.k_cache[0, 0].numel() * call.k_cache.element_size()
        ),
        flops=lambda call: 4 * call.heads * call.k_cache.shape[3] * keys_read(call.qkv, call),
    )
)  # fmt: skip
"""qkv [B, Q, (heads + 2 kv_heads) D] -> [B, Q, heads, D], Q of 1 to MAX_TOKENS: arguments and meaning of
`rope_cache_write`, then of `paged_attention`, in one launch where there is a kernel. The bits of a result depend on Q,
since its keys are added up in other parts; not where `ops.invariant.on`.

`early`: what follows may start at once, in place of behind q, k and v: right for a launch that reads little before its
own wait, while one that needs many codes would take the memory from keys and values. The result is the same.

What is not real, of a row with count 0 or beyond the block table's reach, is not written; where Q is 1 it gets zeros,
elsewhere what nobody may read. gated: each query has a gate of D numbers behind it, so that qkv is
[B, Q, (2 heads + 2 kv_heads) D], and results are multiplied by its sigmoid (`ops.gate`). value_norm: values go
through `ops.values.normed_values` first, and are keys where qkv is [B, Q, (heads + kv_heads) D]. tickets int32
[>= B * kv_heads] must be zeros and is left as zeros: programs draw from it who merges. May run in a captured graph, or
after a kernel launched without the programmatic attribute (rule 4 of `ops/triton/launch.py`)."""
