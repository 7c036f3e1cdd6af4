"""What a launch bakes in: scalars, grids, metadata of the step. Norms, rotary embeddings and paged caches."""

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(x, y, position, half, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    a = tl.load(x + row * 2 * half + at, mask=at < half, other=0.0)
    b = tl.load(x + row * 2 * half + half + at, mask=at < half, other=0.0)
    angle = position * tl.exp2(-at.to(tl.float32) / half)
    tl.store(y + row * 2 * half + at, a * tl.cos(angle) - b * tl.sin(angle), mask=at < half)
    tl.store(y + row * 2 * half + half + at, a * tl.sin(angle) + b * tl.cos(angle), mask=at < half)


@triton.jit
def rotate_on_device(x, y, positions, half, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    a = tl.load(x + row * 2 * half + at, mask=at < half, other=0.0)
    b = tl.load(x + row * 2 * half + half + at, mask=at < half, other=0.0)
    angle = tl.load(positions) * tl.exp2(-at.to(tl.float32) / half)
    tl.store(y + row * 2 * half + at, a * tl.cos(angle) - b * tl.sin(angle), mask=at < half)
    tl.store(y + row * 2 * half + half + at, a * tl.sin(angle) + b * tl.cos(angle), mask=at < half)


@triton.jit
def square(x):
    return x * x


@triton.jit
def rms_norm(x, weight, y, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(square(value), axis=0) / width + eps)
    out = value * scale * tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, out.to(y.dtype.element_ty), mask=at < width)


@triton.jit
def add_rows(table, rows, y, width, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(rows + tl.program_id(0))
    value = tl.load(table + row * width + at, mask=at < width, other=0.0)
    tl.store(y + tl.program_id(0) * width + at, value, mask=at < width)


@triton.jit
def fill_prefix(x, y, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < width) + 1.0, mask=at < width)


@triton.jit
def noise(x, y, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(seed, at) > 0.5
    tl.store(y + at, tl.where(kept, tl.load(x + at, mask=at < n) * 2.0, 0.0), mask=at < n)


@triton.jit
def noise_on_device(x, y, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(tl.load(seed), at) > 0.5
    tl.store(y + at, tl.where(kept, tl.load(x + at, mask=at < n) * 2.0, 0.0), mask=at < n)


def _rows(i):
    return (torch.linspace(-1.0, 1.0, 64).reshape(4, 16).to("cuda") * (i + 1),)


class Rotary:
    def __init__(self):
        self.position = 0

    def __call__(self, x):
        y = torch.empty_like(x)
        self.position += 1
        rotate[(x.shape[0],)](x, y, self.position, x.shape[1] // 2, BLOCK=8)  # expect: CG202 @position
        return y


def factory_bad_position():
    return Rotary(), _rows


def factory_ok_position_on_device():
    positions = torch.zeros(1, device="cuda")

    def step(x):
        positions.add_(1)
        y = torch.empty_like(x)
        rotate_on_device[(x.shape[0],)](x, y, positions, x.shape[1] // 2, BLOCK=8)
        return y

    return step, _rows


def factory_ok_norm():
    weight = torch.linspace(0.5, 1.5, 16, device="cuda").to(torch.bfloat16)

    def step(x):
        x = x.to(torch.bfloat16)
        y = torch.empty_like(x)
        rms_norm[(x.shape[0],)](x, weight, y, x.shape[1], 1e-6, BLOCK=triton.next_power_of_2(x.shape[1]))
        return y.float()

    return step, _rows


def factory_bad_eps():
    weight = torch.ones(16, device="cuda")

    def step(x):
        y = torch.empty_like(x)
        eps = float(x.abs().mean())  # expect: CG101
        rms_norm[(x.shape[0],)](x, weight, y, x.shape[1], eps, BLOCK=16)  # expect: CG202 optional
        return y

    return step, _rows


def factory_bad_grid_of_device_value():
    count = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step(x):
        count.add_(4)
        y = torch.zeros_like(x)
        fill_prefix[lambda meta: (triton.cdiv(count.item(), meta["BLOCK"]),)](x, y, 64, BLOCK=4)  # expect: CG101|CG202
        return y

    return step, _rows


def factory_bad_growing_grid():
    length = [8]

    def step(x):
        length[0] += 8  # expect: CG210 optional
        y = torch.zeros_like(x)
        fill_prefix[(length[0] // 8,)](x, y, 64, BLOCK=8)  # expect: CG202|CG201
        return y

    return step, _rows


def factory_ok_grid_of_shape():
    def step(x):
        y = torch.zeros_like(x)
        fill_prefix[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]), 1, 1)](x, y, x.numel(), BLOCK=8)
        return y

    return step, _rows


def factory_bad_seed():
    state = {"seed": 7}

    def step(x):
        state["seed"] += 1  # expect: CG210 optional
        y = torch.empty_like(x)
        noise[(8,)](x, y, state["seed"], x.numel(), BLOCK=8)  # expect: CG202
        return y

    return step, _rows


def factory_ok_seed():
    seed = torch.full((1,), 7, dtype=torch.int64, device="cuda")

    def step(x):
        seed.add_(1)
        y = torch.empty_like(x)
        noise_on_device[(8,)](x, y, seed, x.numel(), BLOCK=8)
        return y

    return step, _rows


def factory_ok_fixed_seed():
    def step(x):
        y = torch.empty_like(x)
        noise[(8,)](x, y, 1234, x.numel(), BLOCK=8)
        return y

    return step, _rows


class Pages:
    """Block tables built for each step."""

    def __init__(self):
        self.table = torch.linspace(0.0, 1.0, 8 * 16).reshape(8, 16).to("cuda")
        self.free = [0, 3, 5, 6, 1, 2, 7, 4]

    def step(self, x):
        self.free.append(self.free.pop(0))
        rows = torch.tensor(self.free[:4], dtype=torch.int32, device="cuda")  # expect: CG102|CG204 @pages
        y = torch.empty_like(x)
        add_rows[(4,)](self.table, rows, y, 16, BLOCK=16)
        return y + x


def factory_bad_pages():
    return Pages().step, _rows


def factory_ok_pages_on_device():
    pages = Pages()
    rows = torch.tensor([0, 3, 5, 6], dtype=torch.int32, device="cuda")

    def step(x):
        y = torch.empty_like(x)
        add_rows[(4,)](pages.table, rows, y, 16, BLOCK=16)
        rows.add_(1).remainder_(8)
        return y + x

    return step, _rows


def factory_ok_unused_counter():
    calls = [0]

    def step(x):
        y = torch.empty_like(x)
        noise[(8,)](x, y, 5 if calls[0] >= 0 else calls[0], x.numel(), BLOCK=8)
        return y

    return step, _rows
