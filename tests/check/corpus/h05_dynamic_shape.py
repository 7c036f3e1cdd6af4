"""Hazard 5: shapes that depend on device values."""

import torch


def _inputs(i):
    return (torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 0.0], device="cuda") * (i + 1) - 1,)


def factory_bad_nonzero():
    def step(x):
        return torch.zeros_like(x).index_fill_(0, x.nonzero().flatten(), 1.0)  # expect: CG104

    return step, _inputs


def factory_bad_mask_select():
    def step(x):
        return x[x > 0].sum()  # expect: CG104

    return step, _inputs


def factory_bad_masked_select():
    def step(x):
        return torch.masked_select(x, x > 0).sum()  # expect: CG104

    return step, _inputs


def factory_bad_unique():
    def step(x):
        return torch.unique(x).sum()  # expect: CG104

    return step, _inputs


def factory_bad_where():
    def step(x):
        (rows,) = torch.where(x > 0)  # expect: CG104
        return x.index_select(0, rows).sum()

    return step, _inputs


def factory_bad_repeat_interleave():
    counts = torch.tensor([1, 2, 0, 1, 1, 1], device="cuda")

    def step(x):
        return x.repeat_interleave(counts)  # expect: CG104

    return step, _inputs


def factory_bad_bincount():
    """As a mixture of experts did for its token counts."""

    def step(experts):
        return torch.bincount(experts, minlength=4)  # expect: CG104|CG105

    return step, lambda i: (torch.tensor([0, 1, 3, 3, i % 4], device="cuda"),)


def factory_bad_mask_assign_tensor():
    def step(x):
        y = torch.zeros_like(x)
        y[x > 0] = x[x > 0] * 2  # expect: CG104
        return y

    return step, _inputs


def factory_bad_argwhere():
    def step(x):
        return torch.argwhere(x > 0).sum()  # expect: CG104

    return step, _inputs


def factory_ok_where_three():
    def step(x):
        return torch.where(x > 0, x, 0.0).sum()

    return step, _inputs


def factory_ok_masked_fill():
    def step(x):
        return x.masked_fill(x > 0, 5.0)

    return step, _inputs


def factory_ok_repeat_with_size():
    counts = torch.tensor([1, 2, 0, 1, 1, 1], device="cuda")

    def step(x):
        return x.repeat_interleave(counts, output_size=6)

    return step, _inputs


def factory_ok_one_hot_counts():
    experts_known = torch.arange(4, device="cuda")

    def step(experts):
        return (experts[:, None] == experts_known).sum(0)

    return step, lambda i: (torch.tensor([0, 1, 3, 3, i % 4], device="cuda"),)


def factory_ok_topk():
    def step(x):
        values, indices = x.topk(3)
        return torch.zeros_like(x).scatter_(0, indices, values)

    return step, _inputs


def factory_ok_scatter_add_counts():
    counts = torch.zeros(4, device="cuda")
    ones = torch.ones(5, device="cuda")

    def step(experts):
        counts.zero_()
        return counts.scatter_add_(0, experts, ones) + 0

    return step, lambda i: (torch.tensor([0, 1, 3, 3, i % 4], device="cuda"),)


def factory_bad_mask_assign_device_number():
    """torch makes it a masked_fill_ for a number of Python's alone."""

    def step(x):
        y = x.clone()
        y[x > 0] = x.amax()  # expect: CG104
        return y

    return step, _inputs


def factory_ok_mask_assign_number():
    def step(x):
        y = x.clone()
        y[x > 0] = 5.0
        return y

    return step, _inputs
