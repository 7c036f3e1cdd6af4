"""Skips GPU tests where there is no GPU, and keeps torch to one core a process there."""

import gc
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    # Kernels are interpreted. Triton reads this where a function is decorated, those of its own library too, and
    # torch._dynamo imports Triton (tests/hf does): so it is set before any test module.
    os.environ["TRITON_INTERPRET"] = "1"
    # Tensors are tiny, and xdist runs a worker a core: threads of several would wait for each other, spinning.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def pytest_collection_finish() -> None:
    """What importing 150 modules has left is walked by no collection after this."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).parent.parent
