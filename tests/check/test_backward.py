"""A backward pass in the simulation: gradients as torch's engine gives them, and what breaks a training step."""

import pytest
import torch
from torch import nn

from onegraph.check import CheckError, check_step
from onegraph.check.live.recorder import Numbers, Recorder
from onegraph.check.live.watch import calls_noted
from onegraph.check.simulate import frames
from onegraph.check.simulate.calling import call_step
from onegraph.check.simulate.records import Step


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def train(device):
    """Loss and gradients of a few steps: shared weights, broadcasting, two dtypes, a function of one's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).to(device)
    scale = nn.Parameter(torch.ones(1, device=device))
    half = nn.Parameter(torch.ones(8, 1, device=device, dtype=torch.bfloat16))
    parameters = [*model.parameters(), scale, half]
    optimizer = torch.optim.SGD(parameters, lr=0.001, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad(set_to_none=False)
        hidden = model[2](model[1](model[0](x)))
        out = model[3](hidden) * scale + scale + (hidden.bfloat16() @ half).float()
        loss = (Square.apply(out) - y).pow(2).mean() + (model[0].weight * model[0].weight).sum()
        loss.backward()
        optimizer.step()
        return (loss.detach(), *[p.grad * 1 for p in parameters])

    return step, lambda i: (
        torch.linspace(-1, 1 + i, 12, device=device).view(3, 4),
        torch.ones(3, 1, device=device) * i,
    )


def test_a_backward_pass_gives_what_torchs_engine_gives():
    step, inputs = train("cpu")
    want = [[t.clone() for t in step(*inputs(i))] for i in range(4)]
    got = []

    def factory():
        step, inputs = train("cuda")

        def kept(*arguments):
            out = step(*arguments)
            got.append([t.inner.clone() for t in out])
            return out

        return kept, inputs

    report = check_step(factory)
    assert not report.errors, [(f.code, f.message) for f in report.findings]
    for ours, theirs in zip(got[:4], want, strict=True):  # it may be run more often
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_inside_of_functorch_are_those_of_the_cpu():
    torch.manual_seed(0)
    weight, x = torch.randn(3, 3), torch.randn(5, 3)

    def dynamics(device):
        w = weight.to(device)
        return torch.func.vmap(torch.func.jacrev(lambda row: (row @ w).tanh()))

    got = []

    def factory():
        jacobian = dynamics("cuda")

        def step(rows):
            got.append(jacobian(rows).inner.detach().clone())
            return jacobian(rows)

        return step, lambda i: ((x * i).to("cuda"),)

    assert not check_step(factory).errors
    want = [dynamics("cpu")(x * i) for i in range(len(got))]
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


def test_a_read_inside_of_a_training_step_is_found():
    def factory():
        step, inputs = train("cuda")
        return (lambda x, y: step(x, y)[0] / step(x, y)[1].norm().item()), inputs

    assert "CG101" in check_step(factory).codes


def test_gradients_of_what_was_not_used_are_an_error_of_the_step():
    def factory():
        a, b = (torch.ones(2, device="cuda", requires_grad=True) for _ in range(2))
        return (lambda x: torch.autograd.grad((a * x).sum(), b)[0]), lambda i: (torch.ones(2, device="cuda"),)

    with pytest.raises(CheckError, match="not have been used in the graph"):
        check_step(factory)


def test_live_notes_a_backward_pass_through_work_of_before_and_puts_torch_back():
    recorder = Recorder(call_step.__code__, frames.Roots(), Numbers())
    recorder.step = Step(1)
    x = torch.ones(2, requires_grad=True)
    old = (x * x).sum()
    recorder.first_node = torch._C._autograd._get_sequence_nr()
    owners = (torch, torch.cuda, torch.autograd, torch.autograd.graph)
    before = [dict(vars(owner)) for owner in owners]
    with calls_noted(recorder):
        call_step(lambda: (x * x).sum().backward(), (), {})
        assert recorder.raw_findings == []
        call_step(lambda: old.backward(), (), {})
    assert [s.code for s in recorder.raw_findings] == ["CG306"]
    assert [dict(vars(owner)) for owner in owners] == before


def test_live_takes_gradients_of_gradients_for_work_of_the_step():
    """Their nodes are numbered by the threads of torch's engine, from one on."""
    recorder = Recorder(call_step.__code__, frames.Roots(), Numbers())
    recorder.step = Step(1)
    x = torch.ones(2, requires_grad=True)
    recorder.first_node = torch._C._autograd._get_sequence_nr()

    def step():
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        recorder.first_node = 2**40  # as if the nodes of `first` had been numbered elsewhere
        return torch.autograd.grad(first.sum(), x)

    with calls_noted(recorder):
        call_step(step, (), {})
    assert recorder.raw_findings == []
