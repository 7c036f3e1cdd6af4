"""Skips GPU tests where there is no GPU, and keeps torch to one core a process there."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Long ones first: what is left at the end is short, and no worker waits for another's last test.
    items.sort(key=lambda item: "slow" not in item.keywords)
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


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).parent.parent
