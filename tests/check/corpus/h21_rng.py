"""Hazards 21 and 22: generators that the graph does not know, seeds set inside the step.

Reading the state, or seeding a generator that nobody draws from, did no harm on torch 2.11: a warning, no error.
"""

import torch


def _inputs(i):
    return (torch.arange(64.0, device="cuda") + i,)


def factory_bad_own_generator():
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)

    def step(x):
        return x + torch.rand(64, device="cuda", generator=generator)  # expect: CG301

    return step, _inputs


def factory_bad_exponential_generator():
    generator = torch.Generator(device="cuda")

    def step(x):
        noise = torch.empty_like(x).exponential_(1.0, generator=generator)  # expect: CG301
        return torch.argmax(x / noise)

    return step, _inputs


def factory_bad_seed():
    def step(x):
        torch.cuda.manual_seed(3)  # expect: CG302
        return x + torch.rand(64, device="cuda")

    return step, _inputs


def factory_quiet_get_state():
    def step(x):
        torch.cuda.get_rng_state()  # expect: CG302
        return x + torch.rand(64, device="cuda")

    return step, _inputs


def factory_quiet_generator_seed():
    generator = torch.Generator(device="cuda")

    def step(x):
        generator.manual_seed(3)  # expect: CG302
        return x + 1

    return step, _inputs


def factory_ok_default_generator():
    def step(x):
        return x + torch.rand(64, device="cuda") + torch.empty_like(x).normal_()

    return step, _inputs


def factory_ok_dropout():
    layer = torch.nn.Dropout(0.5).to("cuda")

    def step(x):
        return layer(x)

    return step, _inputs


def factory_ok_hash_noise():
    seed = torch.tensor([7], device="cuda")

    def step(x):
        index = torch.arange(64, device="cuda")
        bits = (index * 2654435761 + seed * 40503) & 0xFFFF
        return x + bits.float() / 65536

    return step, _inputs
