"""Device values that the host reads: CG101 and CG108. `bad_CODE_construct` has it, `good_...` follows the fix."""

import logging

import torch
from torch import nn
from torch.nn import functional as F

LOG = logging.getLogger(__name__)


def numbers(n=8):
    return lambda i: (torch.arange(float(n), device="cuda") + i,)


def with_index(i):
    return torch.full((4,), float(i + 1), device="cuda"), torch.full((1,), i % 3, device="cuda")


def with_scalar_index(i):
    return torch.full((4,), float(i + 1), device="cuda"), torch.full((), i % 3, device="cuda")


def bad_CG101_print_or_log():
    def step(x):
        y = x * 2
        LOG.debug("largest %s", y.max().item())
        return y

    return step, numbers()


def good_CG101_print_or_log():
    def step(x):
        y = x * 2
        return y, y.max()

    return step, numbers()


def bad_CG101_assert():
    def step(x):
        assert (x >= 0).all().item()
        return x * 2

    return step, numbers()


def good_CG101_assert():
    def step(x):
        torch._assert_async((x >= 0).all())
        return x * 2

    return step, numbers()


def trained(**options):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, device="cuda")
    return model, torch.optim.Adam(model.parameters(), lr=0.1, **options)


def bad_CG101_clip_grad_norm_():
    model, optimizer = trained(capturable=True)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return x * 2

    return step, numbers()


def good_CG101_clip_grad_norm_():
    model, optimizer = trained(capturable=True)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return x * 2, norm

    return step, numbers()


def bad_CG101_GradScaler():
    model, optimizer = trained(capturable=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return x * 2

    return step, numbers()


def good_CG101_GradScaler():
    model, optimizer = trained(fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return x * 2

    return step, numbers()


def ids(i):
    return (torch.tensor([0, 1, i % 4, 3], device="cuda"),)


def bad_CG101_one_hot():
    return lambda chosen: F.one_hot(chosen).sum(0), ids


def good_CG101_one_hot():
    return lambda chosen: F.one_hot(chosen, num_classes=4).sum(0), ids


def bad_CG101_loop_count():
    def step(x, count):
        for _ in range(count.item()):
            x = x * 2
        return x

    return step, with_scalar_index


def good_CG101_loop_count():
    def step(x, count):
        for i in range(3):
            x = torch.where(i < count, x * 2, x)
        return x

    return step, with_scalar_index


def bad_CG101_branch():
    def step(x, at):
        if at.item() > 1:
            return x * 2
        return x + 1

    return step, with_index


def good_CG101_branch():
    def step(x, at):
        return torch.where(at > 1, x * 2, x + 1)

    return step, with_index


def bad_CG101_slice_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        n = at.item()
        cache[n : n + 1] = x
        return cache * 2

    return step, with_index


def good_CG101_slice_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache.index_copy_(0, at, x[None])
        return cache * 2

    return step, with_index


def bad_CG101_slice_bound():
    keys = torch.arange(8.0, device="cuda")

    def step(x, at):
        return x * keys[: at[0]].sum()

    return step, with_index


def good_CG101_slice_bound():
    keys = torch.arange(8.0, device="cuda")

    def step(x, at):
        return x * torch.where(torch.arange(8, device="cuda") < at[0], keys, 0).sum()

    return step, with_index


def bad_CG101_list_index():
    tables = [torch.full((4,), float(n), device="cuda") for n in range(3)]

    def step(x, at):
        return x * tables[at.item()]

    return step, with_index


def good_CG101_list_index():
    tables = [torch.full((4,), float(n), device="cuda") for n in range(3)]
    stacked = torch.stack(tables)

    def step(x, at):
        return x * stacked.index_select(0, at)

    return step, with_index


def bad_CG101_index_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache[at.item()] = x
        return cache * 2

    return step, with_index


def good_CG101_index_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache.index_copy_(0, at, x[None])
        return cache * 2

    return step, with_index


def bad_CG101_index():
    table = torch.arange(32.0, device="cuda").view(8, 4)

    def step(x, at):
        return x + table[at.item()]

    return step, with_index


def good_CG101_index():
    table = torch.arange(32.0, device="cuda").view(8, 4)

    def step(x, at):
        return x + table.index_select(0, at)

    return step, with_index


def bad_CG101_size():
    def step(x, at):
        return x * torch.ones(int(at), device="cuda").sum()

    return step, with_index


def good_CG101_size():
    def step(x, at):
        return x * torch.where(torch.arange(3, device="cuda") < at, torch.ones(3, device="cuda"), 0).sum()

    return step, with_index


def bad_CG101_tensor_of_tensors():
    return lambda x: torch.tensor([x.max(), x.min()], device="cuda"), numbers()


def good_CG101_tensor_of_tensors():
    return lambda x: torch.stack((x.max(), x.min())), numbers()


def bad_CG101_Python_reduction():
    return lambda x: x / max(x), numbers()


def good_CG101_Python_reduction():
    return lambda x: x / x.max(), numbers()


def bad_CG101_comparison():
    def step(x):
        same = torch.equal(x, x.flip(0))
        return x * 2 if same else x + 1

    return step, numbers()


def good_CG101_comparison():
    def step(x):
        same = (x == x.flip(0)).all()
        return torch.where(same, x * 2, x + 1)

    return step, numbers()


def bad_CG101_operand():
    def step(x):
        scale = x.abs().max().item()
        return x / scale

    return step, numbers()


def good_CG101_operand():
    def step(x):
        scale = x.abs().max()
        return x / scale

    return step, numbers()


def bad_CG101_return():
    def step(x):
        y = x * 2
        return y, y.sum().item()

    return step, numbers()


def good_CG101_return():
    def step(x):
        y = x * 2
        return y, y.sum()

    return step, numbers()


def bad_CG101_numpy():
    def step(x):
        host = x.cpu().sort().values
        return host.to("cuda")

    return step, numbers()


def good_CG101_numpy():
    def step(x):
        return x.sort().values

    return step, numbers()


def bad_CG108_assert():
    def step(x):
        assert (x >= 0).all()
        return x * 2

    return step, numbers()


def good_CG108_assert():
    def step(x):
        torch._assert_async((x >= 0).all())
        return x * 2

    return step, numbers()


def bad_CG108_while():
    def step(x):
        while x.sum() < 1000:
            x = x * 4
        return x

    return step, numbers()


def good_CG108_while():
    def step(x):
        rounds = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(6):
            rounds = rounds + (x.sum() < 1000)
            x = torch.where(x.sum() < 1000, x * 4, x)
        return x, rounds

    return step, numbers()


def bad_CG108_and_or_not():
    def step(x):
        both = x.sum() > 30 and x.max() > 8
        return torch.where(both, x, 0)

    return step, numbers()


def good_CG108_and_or_not():
    def step(x):
        both = (x.sum() > 30) & (x.max() > 8)
        return torch.where(both, x, 0)

    return step, numbers()
