"""Ops that are not torch's own: custom ops, with and without a fake, and ops that only a GPU has."""

import pytest
import torch

from onegraph.check import CheckError, Verdict, check_step, declared

LIBRARY = torch.library.Library("checktests", "FRAGMENT")
LIBRARY.define("unfinished(Tensor x) -> Tensor")
LIBRARY.define("fills(Tensor(a!) y, Tensor x) -> ()")
LIBRARY.define("scales(Tensor x, float by) -> Tensor")
torch.library.register_fake("checktests::scales", lambda x, by: torch.empty_like(x), lib=LIBRARY)


@torch.library.custom_op("checktests::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1, 3, device="cuda") / x.max().item()


@torch.library.custom_op("checktests::adds", mutates_args=("total",))
def adds(total: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    total.add_(x, alpha=factor)


def test_a_declared_name_that_no_op_has_is_told():
    def factory():
        op = torch.ops.checktests.scales
        return (lambda x: op(x, 2.0) + 1), (lambda i: (torch.ones(2, device="cuda") * i,))

    with declared("checktests::sclaes", "checktests.scales", "checktests::nothing_like_it", "chektests::scales"):
        report = check_step(factory)
    assert report.facts["declared"] == [
        'declare("checktests::sclaes"): there is no such op; is it checktests::scales?',
        'declare("checktests.scales"): there is no such op; is it checktests::scales?',
        'declare("checktests::nothing_like_it"): there is no such op',
        'declare("chektests::scales"): there is no such op; is it checktests::scales?',
    ]
    assert '  declare("checktests::sclaes"): there is no such op; is it checktests::scales?\n' in f"{report}\n"
    # Kernels have names of their own, and a library may not be imported.
    with declared("checktests::scales", "checktests::*", "triton:scales", "a_kernel", "otherlibrary::op"):
        assert "declared" not in check_step(factory).facts


def test_an_op_without_a_cpu_kernel_is_unverified():
    def factory():
        op = torch.ops.checktests.scales
        return (lambda x: op(x, 2.0) + 1), (lambda i: (torch.ones(2, device="cuda") * i,))

    report = check_step(factory)
    assert report.verdict is Verdict.UNVERIFIED
    assert report.exit_code(strict=True) == 1


def needs_a_driver(x, by):
    x.add_(1.0)
    raise OSError("libcuda.so.1: cannot open shared object file")


def hands_out(x, by):
    return torch.full_like(x, float(x.data_ptr() % 7))


def as_library(body):
    """An op with `body` for CUDA and a reference for the CPU, as libraries register them."""
    library = torch.library.Library("onegraph_test_both", "FRAGMENT")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.impl("scale", body, "CUDA")
    library.impl("scale", lambda x, by: x * by, "CPU")
    torch.library.register_fake("onegraph_test_both::scale", lambda x, by: torch.empty_like(x), lib=library)
    return library, torch.ops.onegraph_test_both.scale


def as_custom_op(body):
    """The same by `torch.library.custom_op`."""
    types = "(Tensor x, float by) -> Tensor"
    op = torch.library.custom_op(
        "onegraph_test_both_too::scale", body, mutates_args=(), device_types="cuda", schema=types
    )
    op.register_kernel("cpu")(lambda x, by: x * by)
    op.register_fake(lambda x, by: torch.empty_like(x))
    return torch.library.Library("onegraph_test_both_too", "FRAGMENT"), op


@pytest.mark.parametrize("body", [lambda x, by: x * by, lambda x, by: x * by * x.max().item(), needs_a_driver])
def test_a_kernel_for_cuda_that_is_python_is_looked_into_where_it_runs(body):
    library = torch.library.Library("onegraph_test_gpu_only", "FRAGMENT")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.impl("scale", body, "CUDA")
    torch.library.register_fake("onegraph_test_gpu_only::scale", lambda x, by: torch.empty_like(x), lib=library)

    def factory():
        op = torch.ops.onegraph_test_gpu_only.scale
        return (lambda x: op(x, 2.0) + 1), (lambda i: (torch.ones(2, device="cuda") * i,))

    report = check_step(factory)
    library._destroy()
    read = [f.line for f in report.errors if f.code == "CG101"]
    if body is needs_a_driver:
        assert report.codes == {"CG401"}
        assert "onegraph_test_gpu_only::scale" in report.facts["unknown"]
    else:
        assert "CG401" not in report.codes
        assert "unknown" not in report.facts
        assert read == ([body.__code__.co_firstlineno] if "item" in body.__code__.co_names else [])


BOTH = [lambda x, by: x * by, lambda x, by: x * by * x.max().item(), needs_a_driver, hands_out]


@pytest.mark.parametrize("made", [as_custom_op, as_library], ids=["custom_op", "library"])
@pytest.mark.parametrize("body", BOTH, ids=["fine", "reads", "needs a driver", "hands out an address"])
def test_a_kernel_for_cuda_beside_one_for_the_cpu_is_looked_into_where_it_runs(body, made):
    """Where it cannot be run nothing of it counts, also not what it wrote until then."""
    library, op = made(body)
    seen = []

    def factory():
        def step(x):
            y = op(x, 2.0)
            seen.append((x.tolist(), y.tolist()))
            return y

        return step, lambda i: (torch.full((2,), i + 1.0, device="cuda"),)

    def quiet():
        return (lambda x: op(x, 2.0)), lambda i: (torch.full((2,), i + 1.0, device="cuda"),)

    report, _ = check_step(quiet, source=False), check_step(factory, source=False)
    runs = body in BOTH[:2]
    assert report.codes == ({"CG101"} if body is BOTH[1] else set() if runs else {"CG401"})
    assert "unknown" not in report.facts
    assert [x for x, _ in seen[:2]] == [[1.0, 1.0], [2.0, 2.0]]
    assert seen[1][1] == ([8.0, 8.0] if body is BOTH[1] else [4.0, 4.0])
    with declared(f"{library.ns}::scale"):
        assert check_step(quiet, source=False).findings == ()  # its author's word
    library._destroy()


def test_a_custom_op_written_in_python_is_looked_into():
    def factory():
        return (lambda x: torch.ops.checktests.reads(x)), lambda i: (torch.ones(2, device="cuda") * i,)

    report = check_step(factory)
    line = reads._init_fn.__code__.co_firstlineno + 2
    assert [f.line for f in report.errors if f.code == "CG101"] == [line]
    with declared("checktests::reads"):
        assert "CG101" not in check_step(factory).codes  # its author's word
    with declared("checktests::reads", capturable=False):
        assert any("is declared not capturable" in f.message for f in check_step(factory).errors)


@pytest.mark.parametrize("grows", [False, True])
def test_a_custom_op_that_writes_is_replayed(grows):
    def factory():
        total, factor = torch.zeros(2, device="cuda"), [1.0]

        def step(x):
            factor[0] += grows
            adds(total, x, factor[0])
            return total.clone()

        return step, lambda i: (torch.ones(2, device="cuda") * i,)

    report = check_step(factory)
    assert {f.code for f in report.errors} == ({"CG202"} if grows else set())


def test_what_an_opaque_kernel_would_have_written_is_no_difference():
    def step(x):
        y = torch.empty_like(x)
        torch.ops.checktests.fills(y, x)
        return y + torch.empty(512, device="cuda"), y

    report = check_step(lambda: (step, lambda i: (torch.full((512,), float(i), device="cuda"),)))
    assert report.codes == {"CG401"}, [(f.code, f.message) for f in report.findings]


def test_an_op_of_cuda_alone_without_a_fake_is_said_in_one_line():
    def factory():
        return torch.ops.checktests.unfinished, lambda i: (torch.ones(2, device="cuda"),)

    with pytest.raises(CheckError, match="checktests::unfinished has neither a CPU implementation nor a fake one"):
        check_step(factory)


def test_an_op_of_cuda_alone_with_a_fake_is_unverified():
    def step(x):
        weight = torch.zeros(4, 1, 32, 4, dtype=torch.int32, device="cuda")
        scales = torch.ones(1, 32, 2, dtype=torch.bfloat16, device="cuda")
        return torch.ops.aten._weight_int4pack_mm(x, weight, 32, scales) + x

    x = torch.ones(32, 32, dtype=torch.bfloat16)
    report = check_step(lambda: (step, lambda i: (x.to("cuda") * i,)))
    assert report.codes == {"CG401"}, [(f.code, f.message) for f in report.findings]
    assert "what it gives is unknown" in report.findings[0].message


@torch.library.custom_op("checktests::splits", mutates_args=())
def splits(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return x * float(sizes[0])


@pytest.mark.parametrize("changes", [False, True])
def test_an_op_of_ones_own_may_take_a_tensor_of_the_host_whose_values_are_frozen(changes):
    """Torch looks at the devices of its own ops' tensors alone; what the host holds is read when the op is captured."""

    def factory():
        sizes = torch.tensor([2, 3])

        def step(x):
            if changes:
                sizes.add_(1)
            return torch.ops.checktests.splits(x, sizes)

        return step, lambda i: (torch.full((2,), float(i), device="cuda"),)

    with declared("checktests::splits"):
        report = check_step(factory)
    assert (report.verdict is Verdict.CAPTURABLE) is not changes, [(f.code, f.message) for f in report.findings]
