"""Hazard 4: indexing by host lists and tensors, assigning host scalars by index."""

import torch


def _inputs(i):
    return (torch.arange(16.0, device="cuda").view(4, 4) + i,)


def factory_bad_list_index():
    def step(x):
        return x[[0, 2]]  # expect: CG103

    return step, _inputs


def factory_bad_cpu_index():
    order = torch.tensor([3, 1, 2, 0])

    def step(x):
        return x[order]  # expect: CG103

    return step, _inputs


def factory_bad_list_column():
    def step(x):
        return x[:, [1, 3]] * 2  # expect: CG103

    return step, _inputs


def factory_bad_scalar_assign():
    offsets = torch.zeros(4, device="cuda")

    def step(x):
        offsets[1] = 5.0  # expect: CG103
        return x + offsets

    return step, _inputs


def factory_bad_expert_offsets():
    """As a mixture of experts did: offsets written one by one in a Python loop."""
    offsets = torch.zeros(5, device="cuda")
    sizes = [1, 2, 3, 4]

    def step(x):
        total = 0
        for expert, size in enumerate(sizes):
            total += size
            offsets[expert + 1] = total  # expect: CG103
        return x + offsets[1:]

    return step, _inputs


def factory_bad_index_put_scalar():
    rows = torch.tensor([0, 2], device="cuda")

    def step(x):
        y = x.clone()
        y[rows] = 7.0  # expect: CG103
        return y

    return step, _inputs


def factory_ok_device_index():
    rows = torch.tensor([0, 2], device="cuda")

    def step(x):
        return x[rows]

    return step, _inputs


def factory_ok_slices():
    def step(x):
        y = x.clone()
        y[1, 1:3].fill_(4.0)
        y[2:] += 1
        return y[::2, :-1]

    return step, _inputs


def factory_ok_cumsum_offsets():
    sizes = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    def step(x):
        return x + sizes.cumsum(0)

    return step, _inputs


def factory_ok_mask_assign():
    def step(x):
        y = x.clone()
        y[y > 5] = 0.0
        return y

    return step, _inputs


def factory_ok_row_fill():
    def step(x):
        y = x.clone()
        y[0] = 3.0
        return y

    return step, _inputs
