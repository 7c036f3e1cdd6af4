"""Parts of torch beside its ops that a factory or a step may use: they simulate, and are judged as a GPU would."""

import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._C import DispatchKey
from torch._higher_order_ops.scan import scan
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from onegraph.check import CheckError, Report, check_step

X = torch.arange(16.0).view(4, 4).div(7).sin()


def checked(make) -> Report:
    return check_step(lambda: (make(), lambda i: ((X + i).to("cuda"),)))


@pytest.fixture
def saved():
    """A checkpoint as `torch.save` writes it, of a tensor and a parameter."""
    file = io.BytesIO()
    torch.save({"rows": [X], "weight": nn.Parameter(X.t().contiguous())}, file)
    return file


@pytest.mark.parametrize("place", ["cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}])
def test_a_checkpoint_is_loaded_to_the_gpu(saved, place):
    seen = []

    def make():
        saved.seek(0)
        state = torch.load(saved, map_location=place)
        seen.append((state["weight"].is_cuda, isinstance(state["weight"], nn.Parameter), state["rows"][0].is_cuda))
        return torch.no_grad()(lambda x: x @ state["weight"] + state["rows"][0])

    assert not checked(make).findings
    assert seen == [(True, True, True)] * len(seen) != []


@pytest.mark.parametrize("place", [None, "cpu", lambda storage, location: storage, {"cuda:0": "cpu"}])
def test_a_checkpoint_of_the_host_stays_there(saved, place):
    def make():
        saved.seek(0)
        rows = torch.load(saved, map_location=place)["rows"][0]
        assert not rows.is_cuda
        return lambda x: x + rows.to("cuda")

    assert checked(make).codes == {"CG102"}


def test_threads_that_load_weights_see_the_gpu():
    def make():
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda t: t.to("cuda"), [X, X + 1])
            broken = pool.submit(lambda: 1 / 0)
        assert isinstance(broken.exception(), ZeroDivisionError)
        return lambda x: x @ first + second

    assert not checked(make).findings


def test_a_traced_function_runs_its_python_once():
    """What its Python counts is a constant of the trace, in eager too; what it writes happens in each call."""
    calls = []

    def make():
        held = torch.zeros(4, 4, device="cuda")

        def scaled(x):
            calls.append(1)
            held.add_(x)
            return {"out": x.relu() * len(calls) + held}

        example = torch.ones(4, 4, device="cuda")
        traced = torch.jit.trace(func=scaled, example_inputs=example, strict=False)
        assert torch.equal(traced(example + 1)["out"].cpu(), (example + 1 + 3).cpu())
        return traced

    report = checked(make)
    assert not report.findings, [(f.code, f.message) for f in report.findings]
    assert len(calls) == 1


def test_a_traced_module_keeps_its_parameters():
    def make():
        layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("cuda")
        traced = torch.jit.trace(layer, torch.ones(4, 4, device="cuda"))
        assert traced[0].weight is layer[0].weight
        example = torch.randn(4, 4, device="cuda")
        assert torch.equal(traced(example).detach().cpu(), layer(example).detach().cpu())
        return torch.no_grad()(lambda x: traced(x))

    assert not checked(make).findings


def test_tracing_in_the_step_is_lazy_work():
    report = checked(lambda: lambda x: torch.jit.trace(lambda y: y.relu() + 1, x)(x))
    assert [f.code for f in report.errors] == ["CG307"]


ATTEND = torch.compile(flex_attention)


@pytest.mark.parametrize("compiled", ["in the factory", "before", ""])
def test_attention_with_a_mask_is_clean_where_it_is_compiled(compiled):
    def make():
        attend = (
            torch.compile(flex_attention) if compiled == "in the factory" else ATTEND if compiled else flex_attention
        )
        causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cuda")
        return lambda x: attend(x[None, None], x[None, None], x[None, None], block_mask=causal)

    assert checked(make).codes == (set() if compiled else {"CG102"})


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "cudagraphs", None])
def test_what_captures_graphs_of_its_own_cannot_be_captured(mode):
    how = {"backend": mode} if mode == "cudagraphs" else {"mode": mode}

    def make():
        layer = torch.compile(nn.Linear(4, 4).to("cuda"), **how)
        assert layer._orig_mod.weight is layer.weight
        return torch.no_grad()(lambda x: layer(x))

    assert checked(make).codes == ({"CG307"} if mode in ("reduce-overhead", "max-autotune", "cudagraphs") else set())


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (torch.nonzero, "CG104"),
        (torch.linalg.inv, "CG105"),
        (torch.func.grad(lambda x: x.sum() / x.max().item()), "CG101"),
    ],
)
def test_a_step_without_a_line_of_its_own_is_told_of_at_its_factory(step, code):
    def make():
        return step, lambda i: ((X + i).to("cuda") if code != "CG105" else torch.eye(4, device="cuda"),)

    finding = next(f for f in check_step(make).errors if f.code == code)
    own = code == "CG101"  # of the three it alone has a line
    assert (finding.line == make.__code__.co_firstlineno) is not own
    assert finding.path == __file__


def test_a_branch_that_torch_takes_reads_the_device():
    def make():
        return lambda x: torch.cond(x.sum() > 0, lambda t: t + torch.ones(4, device="cuda"), lambda t: t - 1, (x,))

    assert checked(make).codes == {"CG101"}


def test_a_scan_is_simulated():
    got = []

    def make():
        def step(x):
            sums = scan(lambda total, row: (total + row, (total + row).clone()), x[0], x)[1]
            got.append(torch.allclose(sums.inner, x.inner[0] + x.inner.cumsum(0)))
            return sums

        return step

    assert not checked(make).errors
    assert all(got)


class Unheard(HigherOrderOperator):
    """An op that calls a function, of which torch has no eager form."""

    def __init__(self):
        super().__init__("onegraph_tests_unheard")
        self.fallthrough(DispatchKey.AutogradCUDA)

    def __call__(self, function, x):
        return super().__call__(function, x)


def test_an_op_without_an_eager_form_is_an_error_of_one_line():
    unheard = Unheard()
    with pytest.raises(CheckError, match="onegraph_tests_unheard calls functions in a way") as error:
        checked(lambda: lambda x: unheard(torch.sin, x))
    assert "\n" not in str(error.value)


def test_second_derivatives_in_forward_mode_are_right():
    got = []

    def make():
        second = torch.func.hessian(lambda row: (row**3).sum())

        def step(x):
            y = second(x[0])
            got.append(torch.equal(y.inner, torch.diag(6 * x.inner[0])))
            return y

        return step

    assert not checked(make).errors
    assert all(got)
