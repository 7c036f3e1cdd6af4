"""What Triton compiles or tunes for the first time while a step is captured. Kernels are made by the factory: one that
an earlier run of the process compiled would be loaded already."""

import torch
import triton
import triton.language as tl


def _kernel():
    @triton.jit
    def shift(x, y, n, by, BLOCK: tl.constexpr, TWICE: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0) + by
        if TWICE:
            value = value * 2.0
        tl.store(y + at, value, mask=at < n)

    return shift


def _row(i):
    return (torch.linspace(-1.0, 1.0, 64).to("cuda") * (i + 1),)


def factory_ok_warm():
    shift = _kernel()

    def step(x):
        y = torch.empty_like(x)
        shift[(4,)](x, y, 64, 3, BLOCK=16, TWICE=False)
        return y

    return step, _row


def factory_quiet_first_launch():
    shift = _kernel()
    calls = [0]

    def step(x):
        calls[0] += 1  # expect: CG210 optional
        y = x + 1.0
        if calls[0] > 1:  # expect: CG201 optional
            shift[(4,)](x, y, 64, 3, BLOCK=16, TWICE=False)  # expect: CG307
        return y

    return step, _row


def factory_quiet_new_constant():
    shift = _kernel()
    calls = [0]

    def step(x):
        calls[0] += 1  # expect: CG210 optional
        y = torch.empty_like(x)
        shift[(4,)](x, y, 64, 3, BLOCK=16, TWICE=calls[0] > 1)  # expect: CG307, CG202 optional
        return y

    return step, _row


def factory_bad_divisible_by_16():
    shift = _kernel()
    calls = [14]

    def step(x):
        calls[0] += 1  # expect: CG210 optional
        y = torch.empty_like(x)
        shift[(4,)](x, y, 64, calls[0], BLOCK=16, TWICE=False)  # expect: CG307|CG202
        return y

    return step, _row


def factory_quiet_other_dtype():
    shift = _kernel()
    calls = [0]

    def step(x):
        calls[0] += 1  # expect: CG210 optional
        y = torch.empty_like(x, dtype=torch.float32 if calls[0] < 2 else torch.float64)
        shift[(4,)](x, y, 64, 3, BLOCK=16, TWICE=False)  # expect: CG307
        return y.float()

    return step, _row


def factory_quiet_kernel_made_in_the_step():
    def step(x):
        y = torch.empty_like(x)
        _kernel()[(4,)](x, y, 64, 3, BLOCK=16, TWICE=False)  # expect: CG307
        return y

    return step, _row


def factory_ok_not_specialized():
    @triton.jit(do_not_specialize=["by"])
    def shift(x, y, by, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) + by, mask=at < n)

    counts = iter([1, 48])
    start = torch.zeros(64, device="cuda")
    shift[(4,)](start, torch.empty_like(start), next(counts), 64, BLOCK=16)
    by = next(counts)

    def step(x):
        y = torch.empty_like(x)
        shift[(4,)](x, y, by, 64, BLOCK=16)
        return y

    return step, _row


def _tuned(key=("n",), **options):
    @triton.autotune(
        configs=[triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 32}, num_warps=2)],
        key=list(key),
        **options,
    )
    @triton.jit
    def add(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(y + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)

    return add


def factory_ok_tuned_in_warm_up():
    add = _tuned(restore_value=["y"])

    def step(x):
        y = torch.ones_like(x)
        add[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, y, 64)
        return y

    return step, _row


def factory_bad_tuned_for_each_length():
    add = _tuned(restore_value=["y"])
    length = [32]

    def step(x):
        length[0] += 1  # expect: CG210 optional
        y = torch.ones_like(x)
        add[lambda meta: (triton.cdiv(length[0], meta["BLOCK"]),)](x, y, length[0])  # expect: CG307, CG202 optional
        return y

    return step, _row


def factory_bad_tuned_first_in_the_capture():
    add = _tuned(restore_value=["y"])
    calls = [0]

    def step(x):
        calls[0] += 1  # expect: CG210 optional
        y = torch.ones_like(x)
        if calls[0] > 1:  # expect: CG201 optional
            add[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, y, 64)  # expect: CG307
        return y

    return step, _row


def factory_ok_heuristics():
    @triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
    @triton.jit
    def copy(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if EVEN:
            tl.store(y + at, tl.load(x + at))
        else:
            tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

    def step(x):
        y = torch.empty_like(x)
        copy[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, y, 64, BLOCK=16)
        return y

    return step, _row


def factory_ok_reset_to_zero():
    add = _tuned(reset_to_zero=["y"])
    total = torch.zeros(64, device="cuda")

    def step(x):
        add[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, total, 64)
        return total.clone()

    return step, _row
