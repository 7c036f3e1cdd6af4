"""Hazard 26: a backward pass through a graph that was recorded before capture, on another stream."""

import torch


def factory_bad_stale_node():
    weight = torch.ones(64, device="cuda", requires_grad=True)
    loss = (weight * 2).pow(2).sum()

    def step(x):
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)  # expect: CG306
        return x + grad

    return step, lambda i: (torch.ones(64, device="cuda") * i,)


def factory_ok_fresh_node():
    weight = torch.ones(64, device="cuda", requires_grad=True)

    def step(x):
        loss = (weight * x).pow(2).sum()
        (grad,) = torch.autograd.grad(loss, weight)
        return grad

    return step, lambda i: (torch.ones(64, device="cuda") * i,)
