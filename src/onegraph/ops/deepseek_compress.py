"""The compressor of DeepSeek-V4's attention: every `ratio` tokens become one entry of a paged pool.

A token's contribution, (content | score), enters a ring that a sequence owns, and an entry is written by whichever call
brings the last token of its window. Which call that is depends on positions that live on the device, so the work is
done for as many entries as the call's tokens could complete, and what is not complete is not written.

With overlap (width c d = 2 d of content) an entry also sees the window before: the first d columns are what a token
adds to the next window's entry, the last d what it adds to its own.
"""

import torch
from torch import Tensor

from onegraph.formats.deepseek_kv import pack_rows, row_bytes
from onegraph.ops.calls import DeepseekCompress
from onegraph.ops.checks import FLOATS, Wanted, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register

INT32 = torch.int32


def write_rows(pool: Tensor, row: Tensor, value: Tensor, live: Tensor) -> None:
    """pool[row[i]] = value[i] where live[i]; pool [R, D], row int64 [N], value [N, D], live bool [N].

    What is not live goes to row 0, which belongs to nobody, as its own content: the result never depends on an order.
    """
    row = torch.where(live, row, 0)
    pool.index_copy_(0, row, torch.where(live.unsqueeze(1), value, pool.index_select(0, row)))


def write_ring(ring: Tensor, value: Tensor, slots: Tensor, positions: Tensor, counts: Tensor) -> None:
    """Token at position p into ring[slot, p mod R]; value [B, Q, D], of which the first counts[b] are real.

    Of more than R tokens only the latest R are written: the others would be overwritten at once.
    """
    row, live = ring_rows(ring.shape[1], value.shape[1], slots, positions, counts)
    write_rows(ring.view(-1, ring.shape[2]), row, value.flatten(0, 1), live)


def ring_rows(size: int, length: int, slots: Tensor, positions: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where `write_ring` writes `length` tokens of each row in rings of `size`: the row of all rings int64 [B * Q], and
    whether it does, bool [B * Q]."""
    step = torch.arange(length, dtype=INT32, device=slots.device)
    live = (step < counts.unsqueeze(1)) & (step >= counts.unsqueeze(1) - size) & (slots > 0).unsqueeze(1)
    row = slots.unsqueeze(1) * size + (positions.unsqueeze(1) + step) % size
    return row.flatten().long(), live.flatten()


def as_rows(x: Tensor, dtype: torch.dtype, rope: int) -> Tensor:
    """x float32 [..., D] as state of `dtype` keeps it: uint8 means rows of FP8 (`formats/deepseek_kv.py`)."""
    return pack_rows(x, rope) if dtype == torch.uint8 else x.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Interleaved RoPE on the trailing 2R dimensions: x float32 [..., H, D], tables [max, R], positions [...]."""
    at = positions.clamp(0, cos.shape[0] - 1).flatten().long()
    shape = (*positions.shape, 1, cos.shape[1])
    c, s = cos.index_select(0, at).view(shape), sin.index_select(0, at).view(shape)
    plain, pairs = x[..., : -2 * cos.shape[1]], x[..., -2 * cos.shape[1] :].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1)
    return torch.cat((plain, turned.flatten(-2)), dim=-1)


def _deepseek_compress(call: DeepseekCompress) -> None:
    states, ring, bias, norm, eps, cos, sin, slots, positions, counts, block_table, entries = call
    (batch, length, _), (ratio, wide) = states.shape, bias.shape
    per_page, dim = entries.shape[1], norm.shape[0]
    width = ratio * (wide // dim)  # tokens that one entry sees
    entry = (positions // ratio).unsqueeze(1) + torch.arange(-(-length // ratio), dtype=INT32, device=states.device)
    token = (entry * ratio).unsqueeze(2) + torch.arange(ratio - width, ratio, dtype=INT32, device=states.device)
    here = token - positions.view(-1, 1, 1)  # [B, N, width]: index among the call's tokens where it is not negative
    past = (slots.view(-1, 1, 1) * ring.shape[1] + token % ring.shape[1]).flatten().long()
    now = (here.clamp(0, length - 1) + torch.arange(batch, device=states.device).view(-1, 1, 1) * length).flatten()
    shape = (*token.shape, 2 * wide)
    old = ring.view(-1, 2 * wide).index_select(0, past).view(shape)
    new = states.reshape(-1, 2 * wide).index_select(0, now.long()).view(shape)
    seen = torch.where((here >= 0).unsqueeze(3), new, old).float()
    seen = torch.where((token >= 0).unsqueeze(3), seen, 0.0)  # before the start: whatever the ring held
    content, score = seen.chunk(2, dim=3)
    if width > ratio:  # previous window: first half of the columns; own window: second half
        content = torch.cat((content[:, :, :ratio, :dim], content[:, :, ratio:, dim:]), dim=2)
        score = torch.cat((score[:, :, :ratio, :dim], score[:, :, ratio:, dim:]), dim=2)
        bias = torch.cat((bias[:, :dim], bias[:, dim:]))
    weight = torch.where((token >= 0).unsqueeze(3), score + bias, -torch.inf).softmax(dim=2)
    value = (content * weight).sum(2)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * norm.float()
    value = as_rows(rotate(value.unsqueeze(2), cos, sin, entry * ratio).squeeze(2), entries.dtype, 2 * cos.shape[1])

    capacity = block_table.shape[1] * per_page
    live = ((entry + 1) * ratio <= (positions + counts).unsqueeze(1)) & (entry < capacity)
    inside = entry.clamp(0, capacity - 1)
    page = block_table.gather(1, (inside // per_page).long())
    row = (page * per_page + inside % per_page).flatten().long()
    write_rows(entries.view(-1, entries.shape[2]), row, value.flatten(0, 1), (live & (page > 0)).flatten())
    write_ring(ring, states, slots, positions, counts)


def check_rows(op: str, like: Tensor, block_table: Tensor | None = None, **rows: Tensor) -> None:
    """Each of `rows` is an int32 [batch], of as many rows as `like` has; block_table int32 [batch, P]."""
    wanted: dict[str, Wanted] = {name: (row, INT32, like.shape[:1]) for name, row in rows.items()}
    check_tensors(op, like.device, block_table=(block_table, INT32, (*like.shape[:1], -1)), **wanted)


def check_tables(op: str, dim: int, cos: Tensor, sin: Tensor) -> None:
    """Float32 [positions, R] with 2 R <= dim."""
    for table in (cos, sin):
        if table.shape != cos.shape or table.dim() != 2 or table.dtype != torch.float32 or 2 * table.shape[1] > dim:
            raise ValueError(
                f"{op}: cos is {cos.dtype} {tuple(cos.shape)}, sin {sin.dtype} {tuple(sin.shape)}; they must be "
                f"float32 [positions, R] with 2 R <= {dim}"
            )


def check_compress(call: DeepseekCompress) -> None:
    op, states, bias, dim = "deepseek_compress", call.states, call.bias, call.norm.numel()
    if states.dim() != 3 or states.dtype not in FLOATS or states.stride(-1) != 1:
        raise ValueError(f"{op}: states is {states.dtype} {tuple(states.shape)}; it must be a float [B, Q, 2 c d]")
    rows = {"slots": call.slots, "positions": call.positions, "counts": call.counts}
    check_rows(op, states, call.block_table, **rows)
    check_width(op, "entries", call.entries, dim, 2 * call.cos.shape[1], states.dtype)
    if bias.dim() != 2 or bias.shape[1] not in (dim, 2 * dim) or bias.dtype != torch.float32:
        raise ValueError(
            f"{op}: bias is {bias.dtype} {tuple(bias.shape)}; entries of {dim} need float32 [ratio, {dim}] or, "
            f"with overlap, [ratio, {2 * dim}]"
        )
    ratio, wide = bias.shape
    if states.shape[2] != 2 * wide:
        raise ValueError(f"{op}: states has width {states.shape[2]}; bias {tuple(bias.shape)} needs {2 * wide}")
    check_tensors(
        op, states.device, ring=(call.ring, states.dtype, (-1, -1, 2 * wide)),
        entries=(call.entries, call.entries.dtype, (-1, -1, -1)),
    )  # fmt: skip
    if call.ring.shape[1] < (reach := ratio * (wide // dim)):
        raise ValueError(f"{op}: ring has {call.ring.shape[1]} places; an entry is made of {reach} tokens")
    check_tables(op, dim, call.cos, call.sin)


def check_width(name: str, what: str, state: Tensor, dim: int, rope: int, dtype: torch.dtype) -> None:
    """State holds rows of `dim` numbers of `dtype`, or of FP8 as uint8."""
    wanted = row_bytes(dim, rope) if state.dtype == torch.uint8 else dim
    if state.shape[-1] != wanted or state.dtype not in (torch.uint8, dtype):
        raise ValueError(
            f"{name}: {what} is {state.dtype} {tuple(state.shape)}; {dim} dimensions need rows of {dim} {dtype}, "
            f"or of {row_bytes(dim, rope)} uint8"
        )


def paged_rows(
    generator: torch.Generator, positions: list[int], counts: list[int], tokens: int, page_tokens: int
) -> tuple[dict[str, Tensor], int]:
    """Slots, positions, counts and a shuffled block table for an example case, and the number of pages."""
    batch, per_row = len(positions), -(-(max(positions) + tokens) // page_tokens)
    table = 1 + torch.randperm(batch * per_row, generator=generator, dtype=INT32).view(batch, per_row)
    slots = torch.arange(batch, 0, -1, dtype=INT32)
    rows = {"slots": slots, "positions": torch.tensor(positions, dtype=INT32)}
    return rows | {"counts": torch.tensor(counts, dtype=INT32), "block_table": table}, 1 + batch * per_row


def angles(positions: int, half: int) -> Tensor:
    """Angles of RoPE for example cases, float32 [positions, half]."""
    return torch.arange(positions).unsqueeze(1) * 1000.0 ** -(torch.arange(half) / half)


def _case(
    name: str,
    *,
    ratio: int,
    overlap: bool,
    dim: int,
    half: int,
    per_page: int,
    positions: list[int],
    counts: list[int],
    spare: int = 0,
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        tokens, wide = max(counts), dim * (2 if overlap else 1)
        rows, pages = paged_rows(generator, positions, counts, tokens, per_page * ratio)
        width = ratio * (2 if overlap else 1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        angle = angles(max(positions) + tokens, half)
        args = (
            randn(len(positions), tokens, 2 * wide).to(dtype),
            randn(len(positions) + 1, width + spare, 2 * wide).to(dtype),
            randn(ratio, wide),
            (1 + 0.2 * randn(dim)).to(dtype),
            1e-6,
            angle.cos(),
            angle.sin(),
            *rows.values(),
            randn(pages, per_page, dim).to(dtype),
        )
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)

    return Case(name=name, make=make)


deepseek_compress = register(
    Op(
        name="deepseek_compress",
        call=DeepseekCompress,
        schema="-> ()",
        reference=_deepseek_compress,
        fake=lambda call: None,
        kernel="onegraph.ops.triton.deepseek_compress:deepseek_compress",
        check=check_compress,
        cases=(
            _case(
                "csa_decode", ratio=4, overlap=True, dim=512, half=32, per_page=32,
                positions=[3, 0, 130, 63], counts=[1, 1, 1, 0],
            ),
            _case(
                "csa_chunk", ratio=4, overlap=True, dim=48, half=8, per_page=4,
                positions=[0, 5, 40, 7], counts=[21, 3, 17, 0],
            ),
            _case(
                "hca_decode", ratio=128, overlap=False, dim=512, half=32, per_page=1,
                positions=[127, 128, 383], counts=[1, 1, 1],
            ),
            _case(
                "hca_chunk", ratio=16, overlap=False, dim=40, half=4, per_page=2,
                positions=[0, 9, 31], counts=[40, 33, 1],
            ),
            _case(
                "csa_spare", ratio=4, overlap=True, dim=48, half=8, per_page=4, spare=5,
                positions=[3, 11, 40, 63], counts=[1, 1, 1, 1],
            ),
            _case(
                "hca_spare", ratio=16, overlap=False, dim=40, half=4, per_page=2, spare=3,
                positions=[0, 9, 31], counts=[40, 33, 1],
            ),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            2 * nbytes(call.states) + call.states.shape[0] * nbytes(call.ring[0]) + nbytes(call.bias, call.norm)
        ),
        flops=lambda call: 4 * call.states.shape[0] * call.ring[0].numel(),
    )
)  # fmt: skip
"""states [B, Q, 2 c d], content | score -> entries [pages, per page, d] that these tokens complete, and the ring.

Row b's tokens stand at positions[b] + i, the first counts[b] are real. ring [slots, R, 2 c d], R at least c ratio,
holds the latest tokens of the sequence in slots[b] (slot 0 belongs to nobody), token t at t mod R. Entry e of row b
covers the tokens from e ratio to (e + 1) ratio (with overlap, c = 2, also the window before): per dimension the mean of
contents weighted by softmax(score + bias), then RMSNorm, then interleaved RoPE at position e ratio, at
entries[block_table[b, e // per page], e mod per page]. float32 inside, rounded once. Page 0 and slot 0 are never
written. entries may be rows of FP8, uint8 [pages, per page, row_bytes] (`formats/deepseek_kv.py`)."""
