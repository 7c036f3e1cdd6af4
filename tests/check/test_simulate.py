"""The simulated machine: that it is a GPU to torch, that the referee is fair, that errors are one clear line."""

import copy
import functools
import json
import re

import pytest
import torch
from torch import nn

from onegraph.check import CheckError, Severity, Verdict, check_step, declared
from onegraph.check.simulate import frames, records
from onegraph.check.simulate.run import simulate_step


def inside(body):
    """Run `body` while the simulated machine stands; its result comes back."""
    result = []

    def factory():
        result.append(body())
        return (lambda x: x + 1), (lambda i: (torch.zeros(2, device="cuda"),))

    simulate_step(factory, steps=3)
    return result[0]


def test_tensors_say_that_they_are_on_the_gpu():
    def body():
        x = torch.arange(6.0, device="cuda").view(2, 3)
        return (
            x.device,
            x.is_cuda,
            (x + 1).device,
            x.cpu().device,
            x.to("cpu").is_cuda,
            torch.ones(2).cuda().device.index,
        )

    device, is_cuda, result, host, moved, index = inside(body)
    assert (device, is_cuda, result) == (torch.device("cuda", 0), True, torch.device("cuda", 0))
    assert (host, moved, index) == (torch.device("cpu"), False, 0)


def test_values_flow_and_views_alias():
    def body():
        x = torch.zeros(3, 4, device="cuda")
        x[1].fill_(2.0)
        x.view(-1)[0] = 5.0
        x.t()[3].add_(1.0)
        return x.cpu()

    want = torch.zeros(3, 4)
    want[1] = 2.0
    want[0, 0] = 5.0
    want[:, 3] += 1
    assert torch.equal(inside(body), want)


def test_metadata_changes_in_place_reach_the_tensor():
    def body():
        x = torch.arange(6.0, device="cuda")
        x.unsqueeze_(0)
        y = torch.zeros(2, device="cuda")
        y.resize_(5)
        return x.shape, y.shape, x.squeeze_().shape

    assert inside(body) == ((1, 6), (5,), (6,))


@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(torch.device("cuda", 0))])
def test_modules_move(move):
    def body():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        x = torch.linspace(-1, 1, 4)
        with torch.no_grad():
            want = model(x)
        model = copy.deepcopy(move(model))
        assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in model.parameters())
        return want, model(x.cuda()).cpu()

    want, got = inside(body)
    torch.testing.assert_close(got, want)


def test_tensors_of_two_devices_do_not_mix():
    def factory():
        bias = torch.ones(3)
        return (lambda x: x + bias), (lambda i: (torch.ones(3, device="cuda"),))

    with pytest.raises(CheckError, match=r"step 0 raised RuntimeError: Expected all tensors to be on the same device"):
        check_step(factory)


def test_torch_is_put_back():
    before = (torch.cuda.is_available(), torch.cuda.synchronize, torch.Generator, torch.cuda.Stream, print)
    state = torch.get_rng_state()
    inside(lambda: torch.rand(3, device="cuda"))
    with pytest.raises(CheckError):
        check_step(lambda: 1 / 0)
    assert before == (torch.cuda.is_available(), torch.cuda.synchronize, torch.Generator, torch.cuda.Stream, print)
    assert torch.equal(state, torch.get_rng_state())
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_the_referee_leaves_the_eager_run_alone():
    """State after simulating is what N eager steps give, although every step was replayed in between."""
    seen = []

    def factory():
        state = torch.zeros(2, device="cuda")

        def step(x):
            state.mul_(0.5).add_(x)
            seen.append(state)
            return state * 2

        return step, lambda i: (torch.full((2,), float(i), device="cuda"),)

    check_step(factory, steps=6)
    want = 0.0
    for i in range(6):
        want = want * 0.5 + i
    assert seen[-1].inner.tolist() == [want, want]


def test_a_number_that_changes_without_an_effect_is_a_warning():
    def factory():
        def step(x, scale):
            return x * scale

        return step, lambda i: (torch.zeros(4, device="cuda"), float(i))

    report = check_step(factory)
    assert [(f.code, f.severity) for f in report.findings] == [("CG202", Severity.WARNING)]
    assert report.facts["replay equals eager"]
    assert (report.verdict, report.exit_code(), report.exit_code(strict=True)) == (Verdict.WARNINGS, 0, 1)


def test_every_finding_comes_in_one_run_with_its_calls():
    def factory():
        def norm(x):
            return x / x.max().item()  # line of the read

        def step(x):
            if x.sum() > 0:
                x = norm(x)
            return x * torch.tensor([2.0], device="cuda")

        return step, lambda i: (torch.full((3,), 1.0 + i, device="cuda"),)

    report = check_step(factory)
    assert {"CG101", "CG102", "CG108"} <= report.codes
    read = next(f for f in report.findings if f.code == "CG101")
    assert "line of the read" in read.source
    assert [frame.function.rsplit(".", 1)[1] for frame in read.calls] == ["step", "norm"]
    assert read.path == __file__
    assert read.source[read.column - 1 :].startswith("x.max().item()")


def test_an_op_with_out_writes_the_tensor_that_it_is_given():
    def factory():
        held = torch.zeros(4, device="cuda")

        def step(x):
            torch.maximum(held, x, out=held)
            return held * 2

        return step, lambda i: (torch.rand(4, device="cuda"),)

    (event,) = [e for e in check_step(factory, source=False).timeline if e.name == "aten.maximum.out"]
    assert event.writes == event.reads[:1]


def test_random_numbers_are_the_same_in_replay_and_eager():
    def factory():
        return (lambda x: x + torch.rand(4, device="cuda")), (lambda i: (torch.ones(4, device="cuda") * i,))

    assert check_step(factory).verdict is Verdict.CAPTURABLE


def test_unseen_state_is_found_by_the_referee():
    library = torch.library.Library("onegraph_test_hidden", "FRAGMENT")
    library.define("count(Tensor x) -> Tensor")
    calls = []

    def count(x):
        calls.append(1)
        return x + len(calls) // 2

    library.impl("count", count, "CPU")

    def factory():
        op = torch.ops.onegraph_test_hidden.count
        return (lambda x: op(x) * 1), (lambda i: (torch.ones(2, device="cuda"),))

    with declared("onegraph_test_hidden::count"):
        assert check_step(factory, steps=6).codes == {"CG212"}
    report = check_step(factory, steps=6)
    assert {"CG401", "CG212"} <= report.codes
    with declared("onegraph_test_hidden::*", capturable=False):
        assert next(f for f in check_step(factory).findings if f.code == "CG401").severity is Severity.ERROR
    library._destroy()


@torch.no_grad()
def named_step(x, scale, power=1):
    return x * scale


def returns_nothing():
    torch.ones(2)


BAD = {
    "factory raises": (lambda: 1 / 0, r"factory\(\) raised ZeroDivisionError: division by zero"),
    "step for a factory": (named_step, r"named_step\(x, scale\) looks like a step.*return named_step, inputs"),
    "factory with arguments": (
        lambda n: None,
        r"\(n\) looks like a step.* a factory, give its arguments defaults",
    ),
    "module for a factory": (torch.nn.ReLU(), r"a ReLU\(input\) looks like a step.*return step, inputs"),
    "class for a factory": (torch.nn.Linear, r"Linear\(\) raised TypeError: .*missing 2 required"),
    "factory calls wrongly": (lambda: named_step(1), r"TypeError: .*missing 1 required.*test_simulate.py:\d+\)$"),
    "library raises": (lambda: json.loads("{"), rf"JSONDecodeError: .* \({re.escape(__file__)}:\d+\)$"),
    "factory returns nothing": (returns_nothing, r"^returns_nothing\(\): got None, allowed a tuple"),
    "factory returns one": (lambda: lambda x: x, r"factory\(\): got a function, allowed a tuple \(step, inputs\)"),
    "inputs no tuple": (lambda: (lambda x: x, lambda i: torch.ones(2)), r"inputs\(0\): got a tensor, allowed a tuple"),
    "inputs raise": (lambda: (lambda x: x, lambda i: {}[i]), r"inputs\(0\) raised KeyError"),
    "step does nothing": (lambda: (lambda: None, lambda i: ()), r'nothing of the step ran on device "cuda"'),
    "step raises later": (
        lambda: (lambda i: torch.ones(2, device="cuda")[[0, 1, 2][i]], lambda i: (i,)),
        r"step 2 raised IndexError",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_what_cannot_run_is_said_in_one_line(case):
    factory, text = BAD[case]
    with pytest.raises(CheckError, match=text) as error:
        check_step(factory)
    assert "\n" not in str(error.value)


def test_steps_below_three_are_refused():
    with pytest.raises(CheckError, match="steps: got 2, allowed 3 or more"):
        check_step(lambda: None, steps=2)


def test_live_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(CheckError, match="live: no CUDA GPU is visible"):
        check_step(lambda: None, simulate=False, live=True)


def test_a_fault_of_the_checker_is_not_told_as_one_of_the_step(monkeypatch):
    def broken(*_):
        return {}["books"]

    broken.__code__ = broken.__code__.replace(co_filename=frames.HERE + "/simulate/world.py")
    monkeypatch.setattr("onegraph.check.simulate.recording.record", broken)
    with pytest.raises(KeyError):  # the command line calls this an internal error, and asks to report it
        check_step(lambda: ((lambda x: x + 1), (lambda i: (torch.zeros(2, device="cuda"),))))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x + torch.ones(2),
        lambda x: x.view(7),
        lambda x: x.numpy().missing,
        lambda x: f"{x:.2f}",
        lambda x, y: x,
        lambda x: x.sum().backward(),
    ],
)
def test_an_error_of_the_step_is_told_as_one(body):
    with pytest.raises(CheckError, match=r"step 0 raised \w+Error"):
        check_step(lambda: (body, (lambda i: (torch.zeros(2, device="cuda"),))))


def test_a_dtype_that_only_a_gpu_has_an_op_for_is_widened():
    def factory():
        def step(x):
            return torch.histc(x.int(), bins=4, min=0, max=3), x.int().bincount(minlength=4) * 0

        return step, lambda i: (torch.tensor([0.0, 1, 1, 2, float(i % 4)], device="cuda"),)

    def body():
        counts = torch.histc(torch.tensor([0, 1, 1, 2], dtype=torch.int32, device="cuda"), bins=4, min=0, max=3)
        return counts.cpu()

    assert torch.equal(inside(body), torch.tensor([1, 2, 1, 0], dtype=torch.int32))
    assert check_step(factory).codes == {"CG104"}  # bincount alone


@pytest.mark.parametrize("cell", [torch.nn.GRUCell, torch.nn.LSTMCell])
def test_cells_that_a_gpu_fuses_are_written_out(cell):
    torch.manual_seed(0)
    model, x = cell(4, 5), torch.randn(3, 4)
    truth = torch.stack([model(x)] if cell is torch.nn.GRUCell else list(model(x)))

    def body():
        out = model.to("cuda")(x.to("cuda"))
        return torch.stack([out] if cell is torch.nn.GRUCell else list(out)).detach().cpu()

    torch.testing.assert_close(inside(body), truth.detach())


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_product_of_narrow_matrices_with_wide_sums_has_its_values(name, into):
    """torch has `out_dtype` for GPUs alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (4, 5)] if "add" not in name else [(3, 5), (3, 4), (4, 5)]
    batch = (2,) if "bmm" in name else ()
    given = [torch.randn(*batch, *shape, generator=generator).bfloat16() for shape in shapes]
    factors = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    truth = getattr(torch, name)(*(matrix.float() for matrix in given), **factors)

    def body():
        out = {"out": torch.empty(truth.shape, device="cuda")} if into else {}
        return getattr(torch, name)(*(m.to("cuda") for m in given), torch.float32, **factors, **out).cpu()

    torch.testing.assert_close(inside(body), truth)


def test_a_lazy_module_is_refused_by_name():
    with pytest.raises(CheckError, match="lazy module"):
        check_step(lambda: (torch.nn.LazyLinear(3).to("cuda"), lambda i: (torch.ones(2, 4, device="cuda"),)))


def test_a_lazy_parameter_is_no_argument_of_an_op_on_a_gpu():
    device, hosts, scalars = [], [], []
    records.convert_plain((torch.nn.LazyLinear(3).weight, 2.0), device, hosts, scalars)
    assert (device, hosts, scalars) == ([], [], [2.0])


def test_a_module_that_comes_and_goes_keeps_its_parameters():
    layer = nn.Linear(2, 2)
    layer.weight.tag = "mine"
    weight, before = layer.weight, layer.weight.detach().clone()

    def body():
        layer.to("cuda")
        there = (layer.weight is weight, isinstance(weight, nn.Parameter), weight.is_cuda, weight.tag)
        layer.to("cpu")
        return there

    assert inside(body) == (True, True, True, "mine")
    assert type(layer.weight) is nn.Parameter
    assert layer.weight is weight
    assert vars(weight) == {"tag": "mine"}
    assert torch.equal(weight, before)


def test_bounds_of_linspace_are_read_on_the_host_where_they_are_on_the_device():
    bound = torch.tensor(3.0)

    def factory(end):
        return (lambda x: torch.linspace(0, end(x), 4, device="cuda")), lambda i: (torch.ones(2, device="cuda"),)

    assert check_step(lambda: factory(lambda x: x.sum())).codes == {"CG101"}
    assert check_step(lambda: factory(lambda x: bound)).codes == set()


def test_ranges_for_a_profiler_are_no_part_of_the_step():
    def step(x):
        with torch.cuda.nvtx.range("step"):
            torch.cuda.nvtx.mark("here")
            return x + 1

    report = check_step(lambda: (step, lambda i: (torch.zeros(2, device="cuda"),)))
    assert not report.findings


def test_nested_tensors_are_refused_by_name():
    def factory():
        return (lambda x: torch.nested.nested_tensor([x, x[:1]]).to_padded_tensor(0.0)), (
            lambda i: (torch.ones(2, 2, device="cuda"),)
        )

    with pytest.raises(CheckError, match="nested tensors are not simulated"):
        check_step(factory)


def test_a_tensor_that_an_earlier_simulation_left_in_a_cache_is_alive():
    """A replay once took its storage for freed memory, since only views of it had an owner in the second simulation."""
    table = functools.lru_cache(lambda device: torch.arange(8.0, device=device))

    def factory():
        def step(x):
            return x + table("cuda").view(2, 4)[0]

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)

    for _ in range(2):
        assert not check_step(factory).findings


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0], pin_memory=True),
        lambda: torch.zeros(2, pin_memory=True),
        lambda: torch.empty(2, dtype=torch.float32, pin_memory=True),
        lambda: torch.full((2,), 3.0, pin_memory=True),
        lambda: torch.zeros(1).new_ones(2, pin_memory=True),
        lambda: torch.arange(2.0, pin_memory=True),
        lambda: torch.ones_like(torch.zeros(2), pin_memory=True),
    ],
)
def test_factories_make_pinned_memory(make):
    def factory():
        staging = make()
        assert staging.is_pinned()
        return lambda x: x + staging.to("cuda", non_blocking=True), lambda i: (
            torch.full((2,), 1.0 + i, device="cuda"),
        )

    assert not check_step(factory).findings


def test_a_branch_of_the_step_s_own_is_not_blamed_on_a_question_about_the_capture():
    """A library asks whether it is being captured; the path of one later step is another one for another reason."""

    def factory():
        state = {"n": 0}

        def step(x):
            if not torch.cuda.is_current_stream_capturing():
                x = x * 1
            x = x + 0.5
            if state["n"] % 3 == 0:
                x = x + 1
            state["n"] += 1
            return x * 2

        return step, lambda i: (torch.full((2,), 1.0 + i, device="cuda"),)

    report = check_step(factory)
    assert [(f.code, 'state["n"] % 3' in f.source) for f in report.errors] == [("CG201", True)]


def test_a_tensor_of_the_host_lends_its_shape():
    host = torch.ones(3)

    def factory():
        made = torch.zeros_like(host, device="cuda") + host.new_full((3,), 2.0, device="cuda")

        def step(x):
            return x + made + torch.ones_like(host, device="cuda")

        return step, lambda i: (torch.ones(3, device="cuda"),)

    assert not check_step(factory).findings
