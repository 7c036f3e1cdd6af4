"""Triton kernels in a simulation: they run, they are replayed, and what a launch bakes in or compiles is told."""

import os
import subprocess
import sys
from pathlib import Path

import corpus_tools
import pytest

pytest.importorskip("triton")
import torch
import triton
import triton.language as tl
import triton_kernels as kernels
from programs import in_copies

from onegraph.check import CheckError, Severity, Verdict, check_step, declared
from onegraph.check.declared import capturable, key_of
from onegraph.check.simulate import budget, interpret, specialized
from onegraph.check.simulate.run import simulate_step
from onegraph.check.source import check_source
from onegraph.cli import main

HERE = Path(__file__).parent
CASES = list(corpus_tools.cases("triton"))


def _inputs(i):
    return (torch.linspace(-1.0, 1.0, 16).to("cuda") * (i + 1),)


def _told(report):
    return [(f.code, f.severity.value, f.line, f.message) for f in report.findings]


@pytest.mark.parametrize("form", kernels.FORMS, ids=lambda form: form.__name__)
def test_a_kernel_computes_what_it_says(form):
    results = {}

    def factory():
        def step(x):
            results["got"], results["wanted"] = (t.inner.clone() for t in form())
            return x + 1.0

        return step, _inputs

    report = simulate_step(factory, steps=3)
    assert "CG401" not in report.codes, _told(report)
    torch.testing.assert_close(results["got"], results["wanted"], rtol=1e-2, atol=1e-5)


def test_there_are_enough_cases():
    assert len(CASES) >= 30


def test_a_clean_kernel_is_capturable_and_its_launch_is_an_op_with_reads_and_writes():
    def factory():
        y = torch.zeros(16, device="cuda")

        def step(x):
            kernels.double[(2,)](x, y, 16, BLOCK=8)
            return y

        return step, _inputs

    report = check_step(factory)
    assert report.verdict is Verdict.CAPTURABLE
    (launch,) = [e for e in report.timeline if e.kind == "launch"]
    assert launch.name == "triton:double"
    assert len(launch.reads) == 2
    assert len(launch.writes) == 1
    assert set(launch.writes) < set(launch.reads)


def test_a_number_that_follows_a_kernel_is_stale():
    """What a kernel wrote is not zero: a stale factor on it shows."""

    def factory():
        turns = [0.0]

        def step(x):
            turns[0] += 1.0
            y = torch.empty_like(x)
            kernels.double[(2,)](x, y, 16, BLOCK=8)
            return y * turns[0]

        return step, _inputs

    assert {f.code for f in check_step(factory).errors} == {"CG202"}


def test_a_launch_of_a_stale_branch_is_seen_by_the_referee():
    def factory():
        buffers = [torch.zeros(16, device="cuda") for _ in range(2)]
        turns = [0]

        def step(x):
            turns[0] += 1
            kernels.add_into[(2,)](x, buffers[turns[0] % 2], 16, BLOCK=8)
            return buffers[0] + 0.0

        return step, _inputs

    assert {f.code for f in check_step(factory).errors} == {"CG205"}


def _table_of(which):
    """A kernel that reads, by its address, what this step (which = 1) or the one before it (0) made."""

    def factory():
        table = torch.zeros(1, dtype=torch.int64, device="cuda")
        held = [torch.ones(16, device="cuda"), torch.ones(16, device="cuda")]

        def step(x):
            held[:] = held[1], x * 2.0
            table.fill_(held[which].data_ptr())
            out = torch.empty_like(x)
            kernels.through_a_table[(1,)](table, out, BLOCK=16)
            return out

        return step, _inputs

    return factory


def test_an_address_of_what_the_step_made_is_the_same_in_every_replay():
    report = check_step(_table_of(1))
    assert not report.errors, _told(report)
    assert report.verdict is Verdict.UNVERIFIED  # an address was handed out


def test_an_address_of_what_an_earlier_step_made_changes():
    report = check_step(_table_of(0))
    assert any(f.code == "CG202" and "fill_" in f.message for f in report.errors), _told(report)


def test_a_changing_argument_without_effect_is_a_warning():
    def factory():
        turns = [16]

        def step(x):
            turns[0] += 1
            y = torch.zeros_like(x)
            kernels.double[(1,)](x, y, min(turns[0], 19), BLOCK=16)
            return y

        return step, _inputs

    report = check_step(factory)
    assert not report.errors, _told(report)
    assert [f.severity for f in report.findings if f.code == "CG202"] == [Severity.WARNING]


@pytest.mark.parametrize(("own", "counted"), [(True, 2), (False, 1)], ids=["a number of its own", "a size"])
def test_a_launch_beside_a_changed_shape_tells_its_number_and_a_size_as_what_follows(own, counted):
    def factory():
        table, turns = torch.ones(64, device="cuda"), [0]

        def step(x):
            turns[0] += 1
            part = table[: turns[0]]
            y = torch.empty_like(part)
            if own:
                kernels.double[(1,)](part, y, turns[0] + 10, BLOCK=16)
            else:
                kernels.double[(1,)](part, y, part.shape[0], BLOCK=16)
            return y

        return step, _inputs

    report = check_step(factory)
    told = [f for f in report.findings if f.code == "CG202"]
    assert ["slice" in f.message for f in told] == [True, False], _told(report)
    assert len(report.errors) == counted


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(kernels.assembly, "inline_asm"), (kernels.without_a_mask, "memory outside of every tensor")],
)
def test_what_cannot_be_interpreted_is_unverified_and_leaves_memory_as_it_was(kernel, reason):
    seen = []

    def factory():
        y = torch.ones(16, device="cuda")

        def step(x):
            kernel[(1,)](x, y, BLOCK=16)
            seen.append(y.inner.clone())
            return x + 1.0

        return step, _inputs

    report = check_step(factory)
    assert report.verdict is Verdict.UNVERIFIED
    (finding,) = [f for f in report.findings if f.code == "CG401"]
    assert reason in finding.message
    assert all(bool((y == 1).all()) for y in seen)
    with declared(kernel):
        assert not check_step(factory).codes & {"CG401", "CG202", "CG212"}


@pytest.mark.parametrize(("first", "built"), [(0, 1), (1, 1), (2, 2)])
def test_a_kernel_that_takes_too_long_is_unverified(monkeypatch, first, built):
    """From step `first` on, in a loop that touches no memory. After the capture the check begins again without it."""
    for name in ("LONGEST", "STEP"):
        monkeypatch.setattr(budget, name, 0.2)
    factories = []

    def factory():
        factories.append(1)

        def step(rounds):
            y = torch.zeros_like(rounds)
            kernels.counts[(1,)](rounds, y)
            return rounds + y

        return step, lambda i: (torch.full((1,), 10**9 if i >= first else i, device="cuda"),)

    report = check_step(factory)
    (finding,) = report.findings
    assert finding.code == "CG401"
    assert "give the step smaller tensors" in finding.message
    assert len(factories) == built


def test_proven_kernels_share_the_seconds_of_a_step(monkeypatch):
    """Each launch is short; all of them together are not."""
    monkeypatch.setattr(budget, "STEP", 0.05)

    def factory():
        def step(x):
            y = torch.zeros_like(x)
            for _ in range(200):
                kernels.double[(1,)](x, y, 16, BLOCK=16)
            return y

        return step, _inputs

    assert check_step(factory).codes == {"CG401"}


def test_a_replay_that_takes_too_long_is_no_other_result(monkeypatch):
    for name in ("REPLAY", "LEAST"):
        monkeypatch.setattr(budget, name, 0.0)

    def factory():
        def step(x):
            y = torch.zeros_like(x)
            kernels.double[(2,)](x, y, 16, BLOCK=8)
            return y

        return step, _inputs

    assert check_step(factory).codes == {"CG401"}


def test_a_kernel_is_declared_alone_and_a_name_for_all_that_are_called_so():
    key = key_of(kernels.double)
    with declared(_kernel_of_the_same_name()):
        assert capturable(key) is None
        assert capturable(key_of(_kernel_of_the_same_name())) is True
    with declared("triton:double"):
        assert capturable(key) is True


def _kernel_of_the_same_name():
    @triton.jit
    def double(x):
        """Another one."""

    return double


def test_an_interpreted_kernel_declared_not_capturable_is_said():
    def factory():
        def step(x):
            y = torch.empty_like(x)
            kernels.double[(2,)](x, y, 16, BLOCK=8)
            return y

        return step, _inputs

    with declared(kernels.double, capturable=False):
        assert "CG401" in check_step(factory).codes
    assert check_step(factory).codes == set()


def test_a_tensor_of_the_host_is_refused_as_on_a_gpu():
    def factory():
        table = torch.ones(16)

        def step(x):
            y = torch.empty_like(x)
            kernels.double[(2,)](table, y, 16, BLOCK=8)
            return y

        return step, _inputs

    with pytest.raises(CheckError, match=r"Pointer argument \(at 0\) cannot be accessed from Triton \(cpu tensor\?\)"):
        check_step(factory)


def test_pinned_memory_is_accepted():
    def factory():
        table = torch.ones(16).pin_memory()

        def step(x):
            y = torch.empty_like(x)
            kernels.double[(2,)](table, y, 16, BLOCK=8)
            return y + x

        return step, _inputs

    assert not check_step(factory).errors


def test_triton_and_the_users_modules_are_as_they_were():
    owners = [tl, tl.core, tl.core.tensor, tl.core.dtype, kernels, triton.runtime.driver]
    owners += [triton.runtime.jit.JITFunction, triton.runtime.autotuner.Autotuner]
    before = [dict(vars(owner)) for owner in owners]

    def factory():
        def step(x):
            y = torch.empty_like(x)
            kernels.double[(2,)](x, y, 16, BLOCK=8)
            return y + kernels.libdevice_functions()[0]

        return step, _inputs

    check_step(factory)
    for owner, old in zip(owners, before, strict=True):
        now = dict(vars(owner))
        assert now.keys() == old.keys(), owner
        assert all(now[name] is value for name, value in old.items()), owner


def test_autotune_takes_the_first_config_that_pruning_keeps_and_leaves_its_cache_alone():
    chosen = []

    def last(configs, named, **_):
        return configs[1:]

    tuned = triton.autotune(
        [triton.Config({"BLOCK": b}, pre_hook=lambda given: chosen.append(given["BLOCK"])) for b in (4, 8, 16)],
        key=["n"], prune_configs_by={"early_config_prune": last}, reset_to_zero=["y"],
    )(kernels.add_into)  # fmt: skip
    starts = []

    def factory():
        y = torch.full((16,), 5.0, device="cuda")

        def step(x):
            tuned[lambda meta: (triton.cdiv(16, meta["BLOCK"]),)](x, y, 16)
            starts.append((y - x).inner.clone())
            return y

        return step, _inputs

    report = check_step(factory)
    assert report.codes <= {"CG210"}, _told(report)  # the lists of this test
    assert set(chosen) == {8}
    assert bool((starts[0] == 0).all())  # tuning set it to zero, and no later launch does
    assert not bool((starts[1] == 0).all())
    assert not tuned.cache


def test_the_driver_of_the_simulated_gpu_answers():
    def factory():
        active = triton.runtime.driver.active
        assert active.get_active_torch_device() == torch.device("cuda", 0)
        assert active.get_current_target().backend == "cuda"
        count = active.utils.get_device_properties(0)["multiprocessor_count"]

        def step(x):
            y = torch.empty_like(x)
            kernel = kernels.double.warmup(x, y, 16, BLOCK=8, grid=(1,))
            kernel._init_handles()
            kernel[(min(2, count // kernel.n_regs),)](x, y, 16, BLOCK=8)
            return y

        return step, _inputs

    assert check_step(factory).verdict is Verdict.CAPTURABLE


TUTORIAL = """
import torch
import triton
import triton.language as tl

active = triton.runtime.driver.active
DEVICE = active.get_active_torch_device()
PROCESSORS = active.utils.get_device_properties(DEVICE.index)["multiprocessor_count"]


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


{after}
def factory():
    def step(x):
        y = torch.empty_like(x)
        copy[(min(PROCESSORS, 1),)](x, y, BLOCK=16)
        return y

    return step, lambda i: (torch.ones(16, device=DEVICE),)
"""


def test_a_module_may_ask_the_driver_when_it_is_imported(tmp_path, capsys):
    """As the modules of Triton's tutorials do."""
    path = tmp_path / "tutorial.py"
    path.write_text(TUTORIAL.format(after=""))
    before = dict(vars(triton.runtime.driver)), triton.runtime.jit.JITFunction.run
    assert main(["check", f"{path}:factory"]) == 0, capsys.readouterr()
    assert "capturable" in capsys.readouterr().out
    assert (dict(vars(triton.runtime.driver)), triton.runtime.jit.JITFunction.run) == before


def test_a_launch_by_the_import_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "launching.py"
    path.write_text(TUTORIAL.format(after="triton.JITFunction(copy.fn).run(1, 2, BLOCK=16, grid=(1,), warmup=False)"))
    assert main(["check", f"{path}:factory"]) == 2
    error = capsys.readouterr().err
    assert "Triton kernel copy is launched by the import; launch it in the factory" in error


def test_what_is_compiled_in_the_capture_says_what_is_new():
    case = next(c for c in CASES if c.name.endswith("bad_divisible_by_16"))
    report = check_step(case.factory)
    (finding,) = [f for f in report.findings if f.code == "CG307"]
    assert "no earlier step launches it with by of 32 bits, divisible by 16" in finding.message
    assert finding.severity is Severity.WARNING  # it is loaded all the same; the number that changes is the error
    assert finding.happens == specialized.LOADS


def test_an_nvrtc_kernel_is_recognised():
    def factory():
        kernel = torch.cuda._compile_kernel('extern "C" __global__ void f(float* x) {}', "f")

        def step(x):
            y = torch.empty_like(x)
            kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[x, y, x.numel()])
            return x + 1.0

        return step, _inputs

    report = check_step(factory)
    assert report.verdict is Verdict.UNVERIFIED
    assert "torch.cuda._compile_kernel:f" in report.findings[0].message
    with declared("torch.cuda._compile_kernel:f"):
        assert check_step(factory).verdict is Verdict.CAPTURABLE


LAUNCHES = {
    "cupy": ("import cupy\nk = cupy.RawKernel('', 'f')", "k((1,), (32,), (x,))"),
    "module": ("import cupy\nk = cupy.RawModule(code='').get_function('f')", "k((1,), (32,), (x,))"),
    "cute": ("import cutlass.cute as cute\n@cute.jit\ndef k(x):\n    if x[0] > 1:\n        x.item()", "k(x)"),
    "cuda_core": ("from cuda.core import launch", "launch(stream, config, kernel, x.data_ptr())"),
    "driver": ("from cuda.bindings import driver", "driver.cuLaunchKernel(None, 1, 1, 1, x.data_ptr())"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_reader_names_kernels_of_other_libraries(tmp_path, name):
    before, call = LAUNCHES[name]
    path = tmp_path / "steps.py"
    path.write_text(
        f"import torch\n{before}\n\n\ndef factory():\n    def step(x):\n        {call}\n        return x + 1\n\n"
        '    return step, lambda i: (torch.ones(8, device="cuda"),)\n'
    )
    report = check_source(str(path), "factory")
    assert report.codes == {"CG401"}, _told(report)
    assert report.findings[0].line == path.read_text().splitlines().index(f"        {call}") + 1


def test_the_reader_takes_kernels_for_device_code(tmp_path):
    path = tmp_path / "steps.py"
    path.write_text(
        "import torch\nfrom triton import jit, autotune\nimport triton.language as tl\n\n\n@jit\ndef k(x, y, n):\n"
        "    v = tl.load(x)\n    if v > 0:\n        v = float(v)\n    tl.store(y, v)\n\n\n"
        "def factory():\n    n = [0]\n\n"
        "    def step(x):\n        y = torch.empty_like(x)\n        k[(1,)](x, y, 8)\n        n[0] += 1\n"
        "        k.run(x, y, n[0], grid=(1,), warmup=False)\n        return y\n\n"
        '    return step, lambda i: (torch.ones(8, device="cuda"),)\n'
    )
    report = check_source(str(path), "factory")
    assert [f.line for f in report.errors] == [21], _told(report)


SCRIPT = """
import sys
import torch
from onegraph.check import check_step
{before}

def factory():
{inside}
    return step, lambda i: (torch.ones(16, device="cuda") * i,)

report = check_step(factory)
print(report.verdict.value, "triton.runtime.interpreter" in sys.modules)
"""
INSIDE = """    from triton_kernels import double
    def step(x):
        y = torch.empty_like(x)
        double[(2,)](x, y, 16, BLOCK=8)
        return y
"""


@pytest.fixture(scope="module")
def outcomes():
    """Verdict, and whether Triton's interpreter was imported: where the factory imports Triton, where a module that
    decorates for its interpreter was imported before, and where there is none."""
    interpreted = 'import os\nos.environ["TRITON_INTERPRET"] = "1"\n'
    scripts = [
        SCRIPT.format(before="", inside=INSIDE),
        interpreted + SCRIPT.format(before="import triton_kernels", inside=INSIDE),
        SCRIPT.format(before="", inside="    step = lambda x: x + 1\n"),
    ]
    paths = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    printed = in_copies([(text,) for text in scripts], PYTHONPATH=paths, TRITON_INTERPRET="0")
    return dict(zip(("inside", "interpreted", "without"), map(str.split, printed), strict=True))


def test_an_interpreter_that_fails_halfway_leaves_the_language_as_it_was(monkeypatch):
    from triton.runtime import interpreter

    before = tl.load

    def fail(_):
        tl.load = None
        raise AttributeError("no such name")

    monkeypatch.setattr(interpret, "_PATCHES", [])
    monkeypatch.setattr(interpreter, "_patch_lang", fail)
    try:
        with pytest.raises(AttributeError):
            interpret._language_patches(interpreter, tl)
        assert tl.load is before
    finally:
        tl.load = before


def test_triton_may_be_imported_by_the_factory_or_decorate_for_its_interpreter(outcomes):
    assert outcomes["inside"] == ["capturable", "True"]
    assert outcomes["interpreted"] == ["capturable", "True"]


def test_a_step_without_triton_does_not_import_its_interpreter(outcomes):
    assert outcomes["without"] == ["capturable", "False"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this is the run without it")
def test_all_of_this_holds_for_kernels_that_were_decorated_to_be_compiled():
    """The tests of this repository decorate for the interpreter; users do not."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*command, "-k", "computes or were or autotune"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
