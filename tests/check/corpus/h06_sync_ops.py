"""Hazard 6: ops that wait for the device inside their host code."""

import torch


def _matrix(i):
    eye = torch.eye(4, device="cuda")
    return (eye * (i + 2) + 0.1,)


def factory_bad_inverse():
    def step(a):
        return torch.linalg.inv(a)  # expect: CG105|CG101

    return step, _matrix


def factory_bad_cholesky():
    def step(a):
        return torch.linalg.cholesky(a)  # expect: CG105|CG101

    return step, _matrix


def factory_bad_eigh():
    def step(a):
        return torch.linalg.eigh(a).eigenvalues  # expect: CG105|CG101

    return step, _matrix


def factory_bad_solve():
    def step(a):
        return torch.linalg.solve(a, a[0])  # expect: CG105|CG101

    return step, _matrix


def factory_ok_cholesky_ex():
    def step(a):
        return torch.linalg.cholesky_ex(a).L

    return step, _matrix


def factory_ok_inv_ex():
    def step(a):
        return torch.linalg.inv_ex(a).inverse

    return step, _matrix


def factory_ok_multinomial():
    def step(a):
        return torch.multinomial(torch.softmax(a, -1), 1)

    return step, _matrix


def factory_ok_sort_unique_free():
    def step(a):
        return a.flatten().sort().values.cumsum(0)

    return step, _matrix
