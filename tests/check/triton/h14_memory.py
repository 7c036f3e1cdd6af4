"""Memory that kernels read and write: state, caches, split-k buffers, tables of addresses, temporaries."""

import torch
import triton
import triton.language as tl


@triton.jit
def accumulate(x, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.atomic_add(total + at, value, mask=at < n)


@triton.jit
def split_sum(x, out, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + row, tl.sum(tl.load(x + row * n + at, mask=at < n, other=0.0), axis=0))


@triton.jit
def append(key, cache, length, width, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    slot = tl.load(length)
    tl.store(cache + slot * width + at, tl.load(key + at, mask=at < width), mask=at < width)
    tl.store(length, slot + 1)


@triton.jit
def attend(query, cache, length, out, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)
    held = slots < tl.load(length)
    keys = tl.load(cache + slots[:, None] * width + at[None, :], mask=held[:, None], other=0.0)
    scores = tl.sum(keys * tl.load(query + at)[None, :], axis=1)
    scores = tl.where(held, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    tl.store(out + at, tl.sum(weights[:, None] * keys, axis=0))


@triton.jit
def gather(table, out, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(COUNT):
        source = tl.load(table + index).to(tl.pointer_type(tl.float32))
        total += tl.load(source + at, mask=at < width, other=0.0)
    tl.store(out + at, total, mask=at < width)


@triton.jit
def scale(x, y, by, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * tl.load(by), mask=at < n)


def _row(i):
    return (torch.linspace(-1.0, 1.0, 16).to("cuda") * (i + 1),)


def factory_ok_running_total():
    total = torch.zeros(16, device="cuda")

    def step(x):
        accumulate[(2,)](x, total, 16, BLOCK=8)
        return total.clone()

    return step, _row


def factory_ok_split_sum():
    def step(x):
        x = x.reshape(2, 8)
        out = torch.zeros(2, device="cuda")
        split_sum[(2, 2)](x, out, 8, PARTS=2, BLOCK=4)
        return out

    return step, _row


def factory_bad_split_buffer_zeroed_by_the_host():
    buffer = torch.zeros(2, device="cuda")

    class Once:
        fresh = True

    def step(x):
        if Once.fresh:  # expect: CG201 optional
            buffer.zero_()  # expect: CG201 optional
        Once.fresh = not Once.fresh  # expect: CG210|CG201 optional
        split_sum[(2, 2)](x, buffer, 8, PARTS=2, BLOCK=4)
        return buffer.clone()

    return step, lambda i: (torch.linspace(-1.0, 1.0, 16).reshape(2, 8).to("cuda") * (i + 1),)


class Cache:
    def __init__(self):
        self.keys = torch.zeros(16, 16, device="cuda")
        self.length = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step(self, x):
        append[(1,)](x, self.keys, self.length, 16, BLOCK=16)
        out = torch.empty_like(x)
        attend[(1,)](x, self.keys, self.length, out, 16, SLOTS=16, BLOCK=16)
        return out


def factory_ok_cache():
    return Cache().step, _row


def factory_bad_rebound_scale():
    class Scaler:
        by = torch.ones(1, device="cuda")

    scaler = Scaler()

    def step(x):
        y = torch.empty_like(x)
        scale[(2,)](x, y, scaler.by, 16, BLOCK=8)  # expect: CG205|CG206
        scaler.by = scaler.by + 1.0  # expect: CG205|CG206 optional
        return y

    return step, _row


def factory_ok_scale_in_place():
    by = torch.ones(1, device="cuda")

    def step(x):
        y = torch.empty_like(x)
        scale[(2,)](x, y, by, 16, BLOCK=8)
        by.add_(1.0)
        return y

    return step, _row


def factory_bad_table_of_temporaries():
    def step(x):
        parts = [x * 2.0, x * 3.0]
        addresses = [part.data_ptr() for part in parts]
        table = torch.tensor(addresses, dtype=torch.int64, device="cuda")  # expect: CG102
        out = torch.empty_like(x)
        gather[(1,)](table, out, 16, COUNT=2, BLOCK=16)  # expect: CG206|CG205 optional
        return out

    return step, _row


def factory_ok_table_made_once():
    parts = [torch.ones(16, device="cuda"), torch.zeros(16, device="cuda")]
    table = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cuda")

    def step(x):
        parts[1].copy_(x)
        out = torch.empty_like(x)
        gather[(1,)](table, out, 16, COUNT=2, BLOCK=16)
        return out

    return step, _row


def factory_ok_table_of_what_the_step_made():
    """The address of a tensor that the captured step made is the same in every replay."""
    held = [torch.ones(16, device="cuda")]
    table = torch.zeros(1, dtype=torch.int64, device="cuda")
    table.fill_(held[0].data_ptr())

    def step(x):
        held[0] = x * 2.0
        table.fill_(held[0].data_ptr())  # expect: CG401 optional
        out = torch.empty_like(x)
        gather[(1,)](table, out, 16, COUNT=1, BLOCK=16)
        return out

    return step, _row


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        y = torch.empty_like(x)
        scale[(2,)](x, y, by, 16, BLOCK=8)
        return y

    @staticmethod
    def backward(ctx, grad):
        (by,) = ctx.saved_tensors
        out = torch.empty_like(grad)
        scale[(2,)](grad.contiguous(), out, by, 16, BLOCK=8)
        return out, None


def factory_ok_autograd():
    weight = torch.ones(16, device="cuda", requires_grad=True)
    by = torch.full((1,), 0.5, device="cuda")

    def step(x):
        loss = (Scaled.apply(x * weight, by) ** 2).sum()
        (grad,) = torch.autograd.grad(loss, weight)
        return grad

    return step, _row
