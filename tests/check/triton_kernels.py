"""Kernels for test_triton_steps.py: each launches one and gives (what it wrote, what it should have written)."""

import torch
import triton
import triton.language as tl
from triton.language import load as fetch
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

THREE = tl.constexpr(3)


@triton.jit
def _gate(x, KIND: tl.constexpr):
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    return x * tl.sigmoid(x)


@triton.jit
def _gated(x, y, n, by, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, _gate(tl.load(x + at, mask=at < n), KIND) * by, mask=at < n)


def helper_functions():
    x = torch.randn(50, device="cuda")
    y = torch.empty_like(x)
    _gated[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, 50, 2.0, BLOCK=16, KIND="silu")
    return y, 2.0 * torch.nn.functional.silu(x)


@triton.jit
def _matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(tl.cdiv(k, BK)):
        inner = start * BK + tl.arange(0, BK)
        held = (rows < m)[:, None] & (inner < k)[None, :]
        left = tl.load(a + rows[:, None] * k + inner[None, :], mask=held, other=0.0)
        held = (inner < k)[:, None] & (columns < n)[None, :]
        right = tl.load(b + inner[:, None] * n + columns[None, :], mask=held, other=0.0)
        total = tl.dot(left, right, total)
    held = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=held)


def _product(dtype):
    a, b = torch.randn(20, 33, device="cuda").to(dtype), torch.randn(33, 17, device="cuda").to(dtype)
    c = torch.empty(20, 17, device="cuda", dtype=dtype)
    _matmul[(2, 2)](a, b, c, 20, 17, 33, BM=16, BN=16, BK=16)
    return c, (a.float() @ b.float()).to(dtype)


def matmul_of_float32():
    return _product(torch.float32)


def matmul_of_bfloat16():
    return _product(torch.bfloat16)


@triton.jit
def _narrow(x, y, z, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    c = a * b + 1.0
    c = tl.where(a > b, c, -c)
    tl.store(z + at, tl.maximum(c, a))


def arithmetic_of_bfloat16():
    x, y = torch.randn(32, device="cuda").bfloat16(), torch.randn(32, device="cuda").bfloat16()
    z = torch.empty_like(x)
    _narrow[(1,)](x, y, z, BLOCK=32)
    c = x * y + 1.0
    return z, torch.maximum(torch.where(x > y, c, -c), x)


@triton.jit
def _cast(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


def rounding_to_eight_bits():
    x = torch.randn(64, device="cuda") * 4
    y = torch.empty(64, device="cuda", dtype=torch.float8_e4m3fn)
    _cast[(1,)](x, y, BLOCK=64)
    return y.float(), x.to(torch.float8_e4m3fn).float()


@triton.jit
def _of_libdevice(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = fetch(x + at)
    tl.store(y + at, libdevice.tanh(a) + libdevice.rsqrt(tl.abs(a) + THREE) + tl.extra.libdevice.pow(tl.abs(a), 2.0))


def libdevice_functions():
    x = torch.randn(16, device="cuda")
    y = torch.empty_like(x)
    _of_libdevice[(1,)](x, y, BLOCK=16)
    return y, torch.tanh(x) + torch.rsqrt(x.abs() + 3) + x.abs() ** 2


@triton.jit
def _count(x, counts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + at, mask=at < n, other=0), 1, mask=at < n)


def atomics():
    x = (torch.arange(100, device="cuda") ** 2 % 8).int()
    counts = torch.zeros(8, dtype=torch.int32, device="cuda")
    _count[(4,)](x, counts, 100, BLOCK=32)
    return counts, (x[:, None] == torch.arange(8, device="cuda")[None, :]).sum(0).int()


@triton.jit
def _merge(mean, spread, count, other_mean, other_spread, other_count):
    total = count + other_count
    apart = other_mean - mean
    return (
        mean + apart * other_count / total,
        spread + other_spread + apart * apart * count * other_count / total,
        total,
    )


@triton.jit
def _moments(x, y, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    mean, spread, count = tl.reduce((v, tl.zeros_like(v), v * 0 + 1.0), 0, _merge)
    tl.store(y, mean)
    tl.store(y + 1, spread / count)


def reduce_with_a_function():
    x = torch.randn(32, device="cuda")
    y = torch.empty(2, device="cuda")
    _moments[(1,)](x, y, BLOCK=32)
    return y, torch.stack([x.mean(), x.var(unbiased=False)])


@triton.jit
def _many(x, y, flag, floor, bias, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    if flag:
        v = tl.cumsum(v, 0)
    if bias is not None:
        v += tl.load(bias + at)
    turns = 0
    while turns < 3:
        v = tl.where(v > floor, v, floor)
        turns += 1
    w = tl.softmax(tl.reshape(tl.sort(v), (2, BLOCK // 2)).trans(), 0)
    tl.device_print("w", w)
    print("turns", turns)
    tl.static_assert(BLOCK == 16)
    tl.store(y + tl.arange(0, BLOCK // 2)[:, None] * 2 + tl.arange(0, 2)[None, :], w)


def control_flow_scans_sorts_prints():
    x = torch.randn(16, device="cuda")
    y = torch.empty(8, 2, device="cuda")
    _many[(1,)](x, y, True, 0.5, None, BLOCK=16)
    return y, x.cumsum(0).clamp_min(0.5).sort().values.reshape(2, 8).t().softmax(0)


@triton.jit
def _blocks(x, y, n, m, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (n, m), (m, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    target = tl.make_block_ptr(y, (n, m), (m, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="zero") * 2, boundary_check=(0, 1))


def block_pointers():
    x = torch.randn(5, 6, device="cuda")
    y = torch.empty_like(x)
    _blocks[(1,)](x, y, 5, 6, BLOCK=8)
    return y, x * 2


@triton.jit
def _described(source, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at[:, None] * BLOCK + at[None, :], source.load([0, 0]))


def host_descriptors():
    x = torch.randn(16, 16, device="cuda")
    y = torch.empty_like(x)
    _described[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), y, BLOCK=16)
    return y, x + 0


def kernel_of_a_closure():
    @triton.jit
    def plus(x, y, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at) + amount)

    amount = tl.constexpr(2.5)
    x = torch.randn(8, device="cuda")
    y = torch.empty_like(x)
    plus[(1,)](x, y, BLOCK=8)
    return y, x + 2.5


@triton.jit
def _ranges(x, N: tl.constexpr):
    for i in tl.static_range(N):
        tl.store(x + i, i)
    for i in tl.range(0, 2, num_stages=2):
        tl.store(x + i, 7)
    a, b = tl.split(tl.join(tl.full((4,), 1, tl.float32), tl.full((4,), 2, tl.float32)))
    tl.store(x + 4 + tl.arange(0, 4), a + b)


def ranges_and_run():
    x = torch.zeros(8, device="cuda")
    _ranges.run(x, N=4, grid=(1,), warmup=False)
    wanted = torch.full((8,), 3.0, device="cuda")
    wanted[:2], wanted[2] = 7, 2
    return x, wanted


FORMS = (
    helper_functions, matmul_of_float32, matmul_of_bfloat16, arithmetic_of_bfloat16, rounding_to_eight_bits,
    libdevice_functions, atomics, reduce_with_a_function, control_flow_scans_sorts_prints, block_pointers,
    host_descriptors, kernel_of_a_closure, ranges_and_run,
)  # fmt: skip


@triton.jit
def assembly(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 0.0)
    doubled = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + at)], tl.float32, True, 1)
    tl.store(y + at, doubled)


@triton.jit
def without_a_mask(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * 1000000))


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2.0, mask=at < n)


@triton.jit
def add_into(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(y + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def through_a_table(table, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(y + at, tl.load(x + at))


@triton.jit
def counts(rounds, y):
    most, i = tl.load(rounds), 0
    while i < most:
        i += 1
    tl.store(y, i)
