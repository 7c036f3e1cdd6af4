"""What stands between the linears of a DeepSeek-V4 layer with a compressor and its attention, as one op."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.deepseek_kv import row_bytes
from onegraph.ops.calls import DeepseekPrepare
from onegraph.ops.deepseek_attention import check_qkv, deepseek_qkv
from onegraph.ops.deepseek_compress import angles, check_compress, deepseek_compress, paged_rows
from onegraph.ops.registry import Case, Op, nbytes, register


def _deepseek_prepare(call: DeepseekPrepare) -> tuple[Tensor, Tensor]:
    for each in call.compressed:
        deepseek_compress.reference(*each)
    q, kv = deepseek_qkv.reference(*call.qkv)
    return q, kv


def _check(call: DeepseekPrepare) -> None:
    index = {
        name: getattr(call, f"index_{name}") is None for name in ("states", "ring", "bias", "norm", "entries")
    }  # fmt: skip
    if len(set(index.values())) > 1:
        missing = [f"index_{name}" for name, none in index.items() if none]
        raise ValueError(f"deepseek_prepare: {', '.join(missing)} are None, the indexer's others not; give all or none")
    check_qkv(*call.qkv)
    for each in call.compressed:
        check_compress(each)
    if call.states.shape[:2] != call.q.shape[:2] or call.norm.shape != call.kv.shape[2:]:
        raise ValueError(
            f"deepseek_prepare: states are {tuple(call.states.shape)}, entries of {call.norm.shape[0]}, q "
            f"{tuple(call.q.shape)}, kv {tuple(call.kv.shape)}; they must be of as many tokens, entries as wide as kv"
        )
    if (call.entries.dtype == torch.uint8) != call.fp8:
        raise ValueError(f"deepseek_prepare: fp8 is {call.fp8}, entries {call.entries.dtype}; keys are of one kind")


def _case(
    name: str, *, ratio: int, overlap: bool, heads: int, dim: int, half: int, per_page: int, positions: list[int],
    counts: list[int], index: int = 0, gap: int = 0,
) -> Case:  # fmt: skip
    """`index`: dimensions of the indexer's entries, 0 without one; `gap`: numbers behind each row of q."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        tokens, batch, many = max(counts), len(positions), 2 if overlap else 1
        rows, pages = paged_rows(generator, positions, counts, tokens, per_page * ratio)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        angle = angles(max(positions) + tokens, half)
        states = randn(batch, tokens, 2 * many * (dim + index)).to(device, dtype)
        both: list[Any] = []
        for of, part in ((dim, states[..., : 2 * many * dim]), (index, states[..., 2 * many * dim :])):
            ring, bias, norm = randn(batch + 1, many * ratio, 2 * many * of), randn(ratio, many * of), randn(of)
            entries = randn(pages, per_page, of).to(dtype)
            both += [part, ring.to(dtype), bias, 1 + 0.2 * norm, entries] if of else [None] * 5
        args = (
            randn(batch, tokens, heads * dim + gap).to(device, dtype)[..., : heads * dim],
            randn(batch, tokens, dim).to(dtype), 1 + 0.2 * randn(dim), 1e-6, angle.cos(), angle.sin(), False,
            *rows.values(), *both,
        )  # fmt: skip
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


deepseek_prepare = register(
    Op(
        name="deepseek_prepare",
        call=DeepseekPrepare,
        schema="-> (Tensor, Tensor)",
        reference=_deepseek_prepare,
        fake=lambda call: (
            call.q.new_empty((*call.q.shape[:2], call.q.shape[2] // call.kv.shape[2], call.kv.shape[2])),
            call.kv.new_empty((*call.kv.shape[:2], row_bytes(call.kv.shape[2], 2 * call.cos.shape[1])),
                              dtype=torch.uint8)
            if call.fp8
            else call.kv.new_empty(call.kv.shape),
        ),
        kernel="onegraph.ops.triton.deepseek_prepare:deepseek_prepare",
        check=_check,
        cases=(
            _case(
                "csa_decode", ratio=4, overlap=True, heads=3, dim=512, half=32, per_page=4, index=128, gap=256,
                positions=[3, 0, 30, 63], counts=[1, 1, 1, 0],
            ),
            _case(
                "hca_decode", ratio=16, overlap=False, heads=2, dim=48, half=8, per_page=1,
                positions=[15, 16, 47], counts=[1, 1, 1],
            ),
            _case(
                "csa_chunk", ratio=4, overlap=True, heads=2, dim=48, half=8, per_page=4, index=24,
                positions=[0, 5, 40, 7], counts=[9, 3, 7, 0],
            ),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            2 * nbytes(call.q, call.kv, call.states, call.index_states)
            + sum(one.states.shape[0] * nbytes(one.ring[0]) + nbytes(one.bias, one.norm) for one in call.compressed)
        ),
        flops=lambda call: (
            4 * (call.q.numel() + call.kv.numel())
            + sum(4 * each.states.shape[0] * each.ring[0].numel() for each in call.compressed)
        ),
    )
)  # fmt: skip
"""`deepseek_qkv(q, kv, kv_norm, ...)`, after `deepseek_compress` of states, which writes ring and entries, and of the
indexer's, all or none of which are None. Of one token a row one launch."""
