"""The lightning indexer of DeepSeek-V4: which compressed entries a query attends to.

The result has a fixed width, and how many entries there are is read on the device: what is not there is -1.
"""

import torch
from torch import Tensor

from onegraph.ops.deepseek_compress import INT32, angles, check_paged, check_rows, paged_rows, rotate
from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _deepseek_index(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    entries: Tensor,
    ratio: int,
    top_k: int,
) -> Tensor:
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


def _check(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    entries: Tensor,
    ratio: int,
    top_k: int,
) -> None:
    name = "deepseek_index"
    if q.dim() != 4 or q.dtype not in FLOATS or not q.is_contiguous():
        raise ValueError(f"{name}: q is {q.dtype} {tuple(q.shape)}; it must be a contiguous float [B, Q, H, D]")
    batch, length, heads, dim = q.shape
    if weights.shape != (batch, length, heads) or weights.stride(-1) != 1 or weights.dtype not in FLOATS:
        raise ValueError(f"{name}: weights is {tuple(weights.shape)}; q asks for {(batch, length, heads)}")
    check_paged(name, batch, block_table, entries)
    check_rows(name, batch, {"positions": positions, "counts": counts})
    if entries.shape[2] != dim or entries.dtype != q.dtype:
        raise ValueError(
            f"{name}: entries are {entries.dtype} of {entries.shape[2]} dimensions, q is {q.dtype} of {dim}"
        )
    if 2 * cos.shape[1] > dim or cos.shape != sin.shape:
        raise ValueError(f"{name}: cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; [positions, R] with 2 R <= {dim}")
    if ratio < 1 or top_k < 1:
        raise ValueError(f"{name}: ratio is {ratio}, top_k {top_k}; both must be at least 1")


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
        schema=(
            "(Tensor q, Tensor weights, Tensor cos, Tensor sin, Tensor positions, Tensor counts, Tensor block_table, "
            "Tensor entries, int ratio, int top_k) -> Tensor"
        ),
        reference=_deepseek_index,
        fake=lambda q, weights, cos, sin, positions, counts, table, entries, ratio, top_k: q.new_empty(
            (q.shape[0], q.shape[1], top_k), dtype=INT32
        ),
        kernel="onegraph.ops.cuda.deepseek_index:deepseek_index",
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
        bytes_moved=lambda q, weights, cos, sin, positions, counts, table, entries, ratio, top_k: (
            nbytes(q, weights) + table.numel() * nbytes(entries[0]) + 4 * q.shape[0] * q.shape[1] * top_k
        ),
        flops=lambda q, weights, cos, sin, positions, counts, table, entries, *rest: (
            2 * q[0].numel() * table.numel() * entries.shape[1]
        ),
    )
)  # fmt: skip
"""q [B, Q, H, D], weights [B, Q, H] -> int32 [B, Q, top_k]: places in the pool (rows of it, pages flattened) of the
entries with the largest scores, in the sequence's order (of equal scores any); then -1 where the query sees fewer.

Query i of row b stands at t = positions[b] + i and sees the entries below (t + 1) // ratio; tokens beyond counts[b] see
none. score = Σ_h weights_h ReLU(rope(q_h) · entry) / sqrt(D H), the rotated query rounded to its dtype."""
