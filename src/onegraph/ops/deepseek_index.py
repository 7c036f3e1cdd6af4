"""The lightning indexer of DeepSeek-V4: which compressed entries a query attends to.

The result has a fixed width, and how many entries there are is read on the device: what is not there is -1.
"""

import torch
from torch import Tensor

from onegraph.ops.calls import DeepseekIndex
from onegraph.ops.checks import FLOATS, check_tensors
from onegraph.ops.deepseek_compress import INT32, angles, check_rows, check_tables, paged_rows, rotate
from onegraph.ops.registry import Case, Op, nbytes, register


def _deepseek_index(call: DeepseekIndex) -> Tensor:
    q, weights, cos, sin, positions, counts, block_table, entries, ratio, top_k = call
    batch, length, heads, dim = q.shape
    capacity = block_table.shape[1] * entries.shape[1]
    step = torch.arange(length, dtype=INT32, device=q.device)
    token = positions.unsqueeze(1) + step
    entry = torch.arange(capacity, dtype=INT32, device=q.device)
    ready = torch.where(step < counts.unsqueeze(1), (token + 1) // ratio, 0).unsqueeze(2)  # entries each query sees
    keys = entries.index_select(0, block_table.flatten()).view(batch, capacity, dim).float()
    turned = rotate(q.float(), cos, sin, token).to(q.dtype).float()
    dots = (turned.flatten(1, 2) @ keys.transpose(1, 2)).view(batch, length, heads, capacity)
    gain = weights.float() * (dim**-0.5 * heads**-0.5)
    scores = (dots.relu() * gain.unsqueeze(3)).sum(2).masked_fill(entry >= ready, -torch.inf)
    found = scores.topk(min(top_k, capacity), dim=2).indices.to(INT32)
    found = torch.where(found < ready, found, capacity).sort(dim=2).values
    page = block_table.gather(1, (found.clamp(max=capacity - 1) // entries.shape[1]).flatten(1).long()).view_as(found)
    found = torch.where(found < capacity, page * entries.shape[1] + found % entries.shape[1], -1)
    return torch.nn.functional.pad(found, (0, top_k - found.shape[2]), value=-1)


def _on_gpu(call: DeepseekIndex) -> Tensor:
    from onegraph.ops.cuda import deepseek_index as kernels

    if call.q.numel() == 0 or not kernels.KERNEL.is_built(call.q.device.index):
        return _deepseek_index(call)
    return kernels.deepseek_index(call)


def _check(call: DeepseekIndex) -> None:
    op, q, weights = "deepseek_index", call.q, call.weights
    if q.dim() != 4 or q.dtype not in FLOATS or q.stride()[2:] != (q.shape[3], 1):
        raise ValueError(
            f"{op}: q is {tuple(q.shape)} {q.dtype}; it must be float32, bfloat16 or float16 [batch, tokens, heads, "
            "head_dim], of each token contiguous"
        )
    if weights.shape != q.shape[:3] or weights.stride(-1) != 1 or weights.dtype not in FLOATS:
        raise ValueError(f"{op}: weights is {tuple(weights.shape)}; q needs {tuple(q.shape[:3])}")
    check_rows(op, q, call.block_table, positions=call.positions, counts=call.counts)
    check_tensors(op, q.device, entries=(call.entries, q.dtype, (-1, -1, q.shape[3])))
    check_tables(op, q.shape[3], call.cos, call.sin)
    if call.ratio < 1 or call.top_k < 1:
        raise ValueError(f"{op}: ratio is {call.ratio}, top_k {call.top_k}; both must be at least 1")


def _case(
    name: str, *, heads: int, dim: int, half: int, ratio: int, per_page: int, top_k: int, positions: list[int],
    counts: list[int],
) -> Case:  # fmt: skip
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        tokens, batch = max(counts), len(positions)
        rows, pages = paged_rows(generator, positions, counts, tokens, per_page * ratio)
        angle = angles(max(positions) + tokens, half)

        # Scores 5 % apart, so that no rounding changes who is among the best: one key direction, distinct lengths.
        direction = torch.ones(dim)
        direction[-2 * half :] = 0.0
        rank = torch.randperm(pages * per_page, generator=generator).view(pages, per_page, 1)
        entries = direction * torch.exp2(12 * rank / (pages * per_page) - 6)
        q = direction.expand(batch, tokens, heads, dim).contiguous()
        weights = 0.5 + torch.rand(batch, tokens, heads, generator=generator)
        args = (q.to(dtype), weights.to(dtype), angle.cos(), angle.sin(), rows["positions"], rows["counts"],
                rows["block_table"], entries.to(dtype), ratio, top_k)  # fmt: skip
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


deepseek_index = register(
    Op(
        name="deepseek_index",
        call=DeepseekIndex,
        schema="-> Tensor",
        reference=_deepseek_index,
        fake=lambda call: call.q.new_empty((*call.q.shape[:2], call.top_k), dtype=INT32),
        kernel="onegraph.ops.deepseek_index:_on_gpu",
        check=_check,
        cases=(
            _case(
                "flash_index", heads=64, dim=128, half=32, ratio=4, per_page=8, top_k=16,
                positions=[0, 3, 130, 42], counts=[1, 1, 1, 0],
            ),
            _case(
                "chunk", heads=8, dim=24, half=4, ratio=4, per_page=4, top_k=8,
                positions=[0, 9, 50], counts=[6, 2, 1],
            ),
        ),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda call: (
            nbytes(call.q, call.weights) + call.block_table.numel() * nbytes(call.entries[0])
            + 4 * call.q.shape[0] * call.q.shape[1] * call.top_k
        ),
        flops=lambda call: 2 * call.q[0].numel() * call.block_table.numel() * call.entries.shape[1],
    )
)  # fmt: skip
"""q [B, Q, H, D], weights [B, Q, H] -> int32 [B, Q, top_k]: places in the pool (rows of it, pages flattened) of the
entries with the largest scores, in the sequence's order (of equal scores any); then -1 where the query sees fewer.

Query i of row b stands at t = positions[b] + i and sees the entries below (t + 1) // ratio; tokens beyond counts[b] see
none. score = Σ_h weights_h ReLU(rope(q_h) · entry) / sqrt(D H), the rotated query rounded to its dtype."""
