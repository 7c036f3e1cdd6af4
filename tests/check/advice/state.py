"""What the host changes from step to step: CG201 to CG210, CG311."""

import random

import torch
from torch import nn


def ones(i):
    return (torch.full((4,), float(i + 1), device="cuda"),)


def with_number(i):
    return torch.full((4,), float(i + 1), device="cuda"), i % 3 + 1


def with_tensor(i):
    return torch.full((4,), float(i + 1), device="cuda"), torch.full((1,), i % 3 + 1, device="cuda")


def bad_CG201_loop_count():
    def step(x, count):
        for _ in range(count):
            x = x * 2
        return x

    return step, with_number


def good_CG201_loop_count():
    def step(x, count):
        for i in range(3):
            x = torch.where(i < count, x * 2, x)
        return x

    return step, with_tensor


def trained(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device="cuda")
    return model, torch.optim.Adam(model.parameters(), lr=0.1, **options)


def learning(model, optimizer):
    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step, ones


def bad_CG202_optimizer():
    return learning(*trained())


def good_CG202_optimizer():
    return learning(*trained(capturable=True))


def falling(lr, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device="cuda")
    sgd = torch.optim.SGD(model.parameters(), lr=lr, **options)

    def step(x):
        sgd.zero_grad(set_to_none=True)
        loss = model(x).sum()
        loss.backward()
        sgd.step()
        return loss

    return step, sgd.param_groups[0]


def bad_CG202_learning_rate():
    step, group = falling(0.1)

    def inputs(i):
        group["lr"] = 0.1 / (i + 1)
        return ones(i)

    return step, inputs


def good_CG202_learning_rate():
    step, group = falling(torch.tensor(0.1, device="cuda"), fused=True)

    def inputs(i):
        group["lr"].fill_(0.1 / (i + 1))
        return ones(i)

    return step, inputs


def bad_CG202_fill_value():
    return lambda x, count: x + torch.full((4,), count, device="cuda"), with_number


def good_CG202_fill_value():
    return lambda x, count: x + count.expand(4), with_tensor


def bad_CG202_random():
    return lambda x: x * random.random(), ones


def good_CG202_random():
    return lambda x: x * torch.rand((), device="cuda"), ones


def bad_CG202_slice_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache[at : at + 1] = x
        return cache * 2

    return step, with_number


def good_CG202_slice_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache.index_copy_(0, at, x[None])
        return cache * 2

    return step, with_tensor


def bad_CG202_slice_bound():
    keys = torch.arange(8.0, device="cuda")
    return lambda x, at: x * keys[:at].sum(), with_number


def good_CG202_slice_bound():
    keys = torch.arange(8.0, device="cuda")
    return lambda x, at: x * torch.where(torch.arange(8, device="cuda") < at, keys, 0).sum(), with_tensor


def bad_CG202_index_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache[at] = x
        return cache * 2

    return step, with_number


def good_CG202_index_write():
    cache = torch.zeros(8, 4, device="cuda")

    def step(x, at):
        cache.index_copy_(0, at, x[None])
        return cache * 2

    return step, with_tensor


def bad_CG202_index():
    table = torch.arange(32.0, device="cuda").view(8, 4)
    return lambda x, at: x + table[at], with_number


def good_CG202_index():
    table = torch.arange(32.0, device="cuda").view(8, 4)
    return lambda x, at: x + table.index_select(0, at), with_tensor


def bad_CG202_size():
    return lambda x, count: x * torch.arange(float(count), device="cuda").sum(), with_number


def good_CG202_size():
    def step(x, count):
        i = torch.arange(3.0, device="cuda")
        return x * torch.where(i < count, i, 0).sum()

    return step, with_tensor


class Counting:
    def __init__(self):
        self.seen = 0

    def step(self, x):
        self.seen += 1
        return x * self.seen


class CountingOnTheDevice:
    def __init__(self):
        self.seen = torch.zeros((), device="cuda")

    def step(self, x):
        self.seen.add_(1)
        return x * self.seen


def bad_CG202_counter():
    return Counting().step, ones


def good_CG202_counter():
    return CountingOnTheDevice().step, ones


class Recurrent:
    def __init__(self):
        self.state = torch.zeros(4, device="cuda")

    def step(self, x):
        self.state = self.state * 0.5 + x
        return self.state * 2


class RecurrentInPlace(Recurrent):
    def step(self, x):
        new = self.state * 0.5 + x
        self.state.copy_(new)
        return self.state * 2


def bad_CG205_rebinding():
    return Recurrent().step, ones


def good_CG205_rebinding():
    return RecurrentInPlace().step, ones


class Cache:
    def __init__(self):
        self.keys = torch.zeros(1, 4, device="cuda")

    def step(self, x):
        self.keys = torch.cat([self.keys, x[None]])
        return self.keys.sum(0)


class FixedCache:
    def __init__(self):
        self.keys = torch.zeros(64, 4, device="cuda")
        self.at = torch.ones(1, dtype=torch.int64, device="cuda")

    def step(self, x):
        self.keys.index_copy_(0, self.at, x[None])
        self.at.add_(1)
        return self.keys.sum(0)


def bad_CG208_cat():
    return Cache().step, ones


def good_CG208_cat():
    return FixedCache().step, ones


def bad_CG210_print_or_log():
    def step(x):
        print("one more step")
        return x * 2

    return step, ones


def good_CG210_print_or_log():
    return lambda x: x * 2, ones


class Appending:
    def __init__(self):
        self.outputs = []

    def step(self, x):
        y = x * 2
        self.outputs.append(y)
        return y


def bad_CG210_append():
    return Appending().step, ones


def good_CG210_append():
    return lambda x: x * 2, ones


class CountingForNothing:
    def __init__(self):
        self.seen = 0

    def step(self, x):
        self.seen += 1
        return x * 2


def bad_CG210_counter():
    return CountingForNothing().step, ones


def good_CG210_counter():
    return lambda x: x * 2, ones


def bad_CG210_return():
    return lambda x, count: (x * 2, count), with_number


def good_CG210_return():
    return lambda x, count: (x * 2, count), with_tensor


class HookedLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.register_forward_hook(lambda *_: None)
        return self.layer(x)


class HookedOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_forward_hook(lambda *_: None)

    def forward(self, x):
        return self.layer(x)


def bad_CG311_hook():
    return HookedLate().cuda(), ones


def good_CG311_hook():
    return HookedOnce().cuda(), ones
