"""Hazard 31: modes, hooks and autocast that change what a step does."""

import torch
from torch import nn


def _inputs(i):
    return (torch.full((2, 8), 1.0 + i, device="cuda"),)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to("cuda")


def factory_bad_mode_flip():
    net = _net()
    state = {"n": 0}

    @torch.no_grad()
    def step(x):
        state["n"] += 1  # expect: CG210
        net.train(state["n"] % 2 == 0)  # expect: CG311
        return net(x)  # expect: CG201|CG202|CG311

    return step, _inputs


def factory_bad_hook_added():
    net = _net().eval()
    added = []

    @torch.no_grad()
    def step(x):
        y = net(x)  # expect: CG201
        if len(added) < 3:
            added.append(net[0].register_forward_hook(lambda m, a, out: out * 2))  # expect: CG311|CG210
        return y

    return step, _inputs


def factory_ok_autocast_inside():
    net = nn.Linear(8, 8).to("cuda")

    @torch.no_grad()
    def step(x):
        with torch.autocast("cuda", torch.bfloat16):
            return net(x)

    return step, _inputs


def factory_ok_eval():
    net = _net().eval()

    @torch.no_grad()
    def step(x):
        return net(x)

    return step, _inputs


def factory_ok_hook():
    net = _net().eval()
    net[0].register_forward_hook(lambda m, a, out: out * 2)

    @torch.no_grad()
    def step(x):
        return net(x)

    return step, _inputs
