"""Skips GPU tests where there is no GPU, and keeps torch to one core a process there."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # workers share the cores, and a thread that waits would spin

try:
    import torch
except ModuleNotFoundError:  # tests/python_versions.py, where of torch there is only a build for CUDA
    GPU, torch = False, None
else:
    GPU = torch.cuda.is_available()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if torch is not None and not GPU:
    # Kernels are interpreted. Triton reads this where a function is decorated, those of its own library too, and
    # torch._dynamo imports Triton (tests/integrations/hf does): so it is set before any test module.
    os.environ["TRITON_INTERPRET"] = "1"
    # Tensors are tiny, and xdist runs a worker a core: threads of several would wait for each other, spinning.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


if GPU:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
    # A graph of an earlier test that a collection destroys inside a capture voids it. Most tests use torch.cuda.graph
    # directly, which with this collects before it begins.
    torch.compiler.config.force_cudagraph_gc = True


@pytest.hookimpl(tryfirst=True)  # before xdist starts its workers
def pytest_sessionstart(session: pytest.Session) -> None:
    """Of all tests on a GPU, by several workers: kernels are compiled first, by all cores, each once."""
    option = session.config.option
    several = getattr(option, "numprocesses", None) and not hasattr(session.config, "workerinput")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    every = [*map(str, session.config.args)] in (["tests"], ["tests/ops"])
    if GPU and several and option.markexpr == "gpu" and every:
        subprocess.run([sys.executable, Path(__file__).parent / "ops" / "variants.py"], env=environment, check=False)


_frozen: tuple[object, int] | None = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What imported modules hold is walked by no collection: each Runner asks for one, which takes a tenth of a second.

    Again for each file, since a simulation ends with nothing frozen, and where a test has imported torch._dynamo.
    """
    global _frozen
    now = item.getparent(pytest.Module), len(sys.modules) // 100
    if now != _frozen:
        gc.freeze()
        _frozen = now


@pytest.hookimpl(trylast=True)  # behind what sorts by the parameters of fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Long ones first: what is left at the end is short, and no worker waits for another's last test. In a module those
    # of no family of kernels come before the others: the last family is forced until the module ends.
    modules: dict[object, int] = {}
    for item in items:
        modules.setdefault(item.getparent(pytest.Module), len(modules))
    items.sort(
        key=lambda item: (
            "slow" not in item.keywords,
            modules[item.getparent(pytest.Module)],
            "kernel_family" in getattr(item, "fixturenames", ()),
        )
    )
    if not any("gpu" in item.keywords for item in items):
        return
    if GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", params=["own", "portable"])
def kernel_family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test marked gpu with the GPU's own kernels, then with the portable ones in their place."""
    from kernel_family import forced

    yield from forced(request.param)


@pytest.fixture(scope="session", autouse=True)
def limits() -> Iterator[dict[str, float]]:
    """Seconds that a simulation takes for further steps and for variations of inputs. Tests get few, since each takes
    milliseconds and there are thousands; the value is what users get."""
    if torch is None:
        yield {}
        return
    from onegraph.check.simulate import run

    with pytest.MonkeyPatch.context() as patch:
        found = {name: getattr(run, name) for name in ("SCAN", "SWEEP")}
        for name in found:
            patch.setattr(run, name, 0.01)
        yield found


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).parent.parent
