"""Tests of kernels on a GPU by family: what the GPU runs of its own, and the portable kernels in its place."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

from onegraph.ops import cuda, family
from onegraph.ops.cuda import build


def forget() -> None:
    """What the launchers of CUDA kernels remember of a GPU: plans, kernels, whether these can be had."""
    modules = [
        importlib.import_module(f"onegraph.ops.cuda.{found.name}") for found in pkgutil.iter_modules(cuda.__path__)
    ]
    for value in [value for owner in (*modules, build.Source) for value in vars(owner).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def forced(name: str) -> Iterator[str]:
    """The family, for as long as a fixture yields it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "FORCED", None if name == "own" else name)
        forget()
        yield name
    forget()
