"""Every variant of a CUDA source that tests of the ops run, found without a GPU, and compiled ahead by all cores.

A launcher is called with a case's tensors on the CPU, as an H200's: what it asks `launcher.kernels` for is a variant.
`python tests/ops/variants.py` fills the cache of cubins (`build.cache_dir`), which is the same on every machine with
this NVRTC; a run of the tests marked gpu begins with it (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import time
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch

import onegraph.ops
from h200 import H200, PLAIN
from kernel_family import forced
from on_cpu import launch_on_cpu
from onegraph.ops.cuda import build, tensor_map, workspace
from onegraph.ops.registry import OPS, Op

CAPABILITY = (9, 0)
TRITON = "onegraph.ops.triton"


class Variant(NamedTuple):
    """A source by name and what it is compiled with. portable: whether portable kernels are forced."""

    source: str
    portable: bool
    defines: tuple[tuple[str, int], ...]


class Elsewhere(Exception):
    """The call is not one of CUDA's kernels: Triton's would run, or torch."""


class _Kernel:
    def launch(self, *_: Any) -> None:
        pass


class _Triton(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def elsewhere(*args: Any, **named: Any) -> Any:
            raise Elsewhere

        return elsewhere


def registered() -> dict[str, Op]:
    for module in pkgutil.iter_modules(onegraph.ops.__path__):
        if not module.ispkg:
            importlib.import_module(f"onegraph.ops.{module.name}")
    return OPS


def with_sources() -> set[str]:
    """Names of the ops that a CUDA source runs: others run the same kernel in either family."""
    for module in pkgutil.iter_modules(importlib.import_module("onegraph.ops.cuda").__path__):
        importlib.import_module(f"onegraph.ops.cuda.{module.name}")
    return {name for source in build.Source.every for name in source.ops}


@contextlib.contextmanager
def _as_h200(portable: bool, found: set[Variant]) -> Iterator[None]:
    """Launchers take CPU tensors for an H200's; what they need is put into `found`."""

    def kernels(source: build.Source, device: Any, *defines: tuple[str, int]) -> Mapping[str, Any]:
        found.add(Variant(source.path.stem, portable, defines))
        return dict.fromkeys(source.functions, _Kernel())

    def is_built(self: build.Source, device: Any) -> bool:
        built = self._permitted(CAPABILITY) and not self.unavailable_reason(CAPABILITY)
        if built:
            found.add(Variant(self.path.stem, portable, tuple(self.example.items())))
        return built

    triton = {name: _Triton(name) for name in (f"{TRITON}.{m}" for m in _triton_modules())}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context

        def patch(owner: Any, name: str, value: Any) -> None:
            enter(mock.patch.object(owner, name, value))

        launch_on_cpu(kernels, patch)
        patch(torch.Tensor, "is_cuda", True)
        patch(torch.cuda, "get_device_capability", lambda *_: CAPABILITY)
        patch(torch.cuda, "current_device", lambda: None)
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch(build, "device", lambda index: PLAIN if portable else H200)
        patch(build.Source, "is_built", is_built)
        patch(build.Source, "is_portable", lambda self, device: self.form(CAPABILITY).portable)
        patch(build, "resident", lambda data, device: 0)
        patch(build, "host_copy", torch.clone)
        patch(build, "clusters", lambda *_: 8)
        patch(build, "capture_id", lambda stream: 0)
        patch(tensor_map, "_encode", lambda *_, **named: bytes(128))
        patch(workspace.Counters, "of", lambda self, device: 0)
        enter(mock.patch.dict(sys.modules, triton))
        package = importlib.import_module(TRITON)
        for name, module in triton.items():  # `from package import module` takes one that is imported from here
            enter(mock.patch.object(package, name.rpartition(".")[2], module, create=True))
        yield


def _triton_modules() -> list[str]:
    folder = os.path.join(os.path.dirname(onegraph.ops.__file__), "triton")
    return [name.removesuffix(".py") for name in os.listdir(folder) if name.endswith(".py")]


def of_ops() -> tuple[set[Variant], dict[str, str]]:
    """The variants that tests/ops/test_ops.py runs on an H200, and the cases whose variants are not found, with why."""
    ops, own = registered(), with_sources()
    found: set[Variant] = set()
    failed: dict[str, str] = {}
    for family in ("own", "portable"):
        for _ in forced(family):
            with _as_h200(family == "portable", found):
                for name in sorted(own & ops.keys()):
                    op = ops[name]
                    for case in op.cases:
                        for dtype in op.tolerance:
                            _dry(op, case, dtype, f"{name}-{case.name}", failed)
    return found, failed


def _dry(op: Op, case: Any, dtype: torch.dtype, what: str, failed: dict[str, str]) -> None:
    assert op.kernel is not None
    module, _, name = op.kernel.partition(":")
    kernel: Any = importlib.import_module(module)
    for part in name.split("."):
        kernel = getattr(kernel, part)
    args = case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
    try:
        (kernel(op.call(*args)) if op.call is not None else kernel(*args))
    except (Elsewhere, NotImplementedError):  # behind a dequantizer, torch multiplies as CPUs cannot
        pass
    except AssertionError as error:  # Triton, whose kernels are no variants of a CUDA source
        if "not compiled with CUDA" not in str(error):
            failed[what] = f"{type(error).__name__}: {error}"
    except Exception as error:  # a launcher does what the CPU has not
        failed[what] = f"{type(error).__name__}: {error}"


def compile_one(variant: Variant) -> float:
    """In a process of the pool: seconds that it took."""
    started = time.perf_counter()
    with_sources()
    source = next(each for each in build.Source.every if each.path.stem == variant.source)
    for _ in forced("portable" if variant.portable else "own"):
        with contextlib.suppress(build.BuildError):  # the test that needs it says so
            source.cubin(dict(variant.defines), CAPABILITY)
    return time.perf_counter() - started


def compile_all(variants: set[Variant], processes: int) -> float:
    """Fills the cache; how many seconds the processes worked together."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return sum(pool.map(compile_one, sorted(variants)))


if __name__ == "__main__":
    begun = time.perf_counter()
    every, unknown = of_ops()
    print(
        f"{len(every)} variants of {len({each.source for each in every})} sources, {time.perf_counter() - begun:.0f} s"
    )
    for case, why in unknown.items():
        print(f"unknown: {case}: {why}")
    if "--list" not in sys.argv:
        busy = compile_all(every, len(os.sched_getaffinity(0)))
        print(f"compiled in {time.perf_counter() - begun:.0f} s, {busy:.0f} s of work")
