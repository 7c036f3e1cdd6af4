"""Triton for a machine without a GPU: launches go to the simulated one, and its driver says what that is."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from onegraph.check.simulate import kernels, specialized
from onegraph.check.simulate.aliases import changed
from onegraph.check.simulate.imports import when_imported
from onegraph.check.simulate.machine import Machine


@contextmanager
def stand_ins(world: Machine, properties: dict[str, Any]) -> Iterator[None]:
    """While this lasts, launches are interpreted on `world`, whether Triton is imported already or will be.

    Args:
        properties: of the simulated GPU, as torch names them.
    """
    with _once_imported(lambda: _changes(world, properties)):
        yield


@contextmanager
def driver_while_importing(properties: dict[str, Any]) -> Iterator[None]:
    """While this lasts, Triton's driver says what the simulated GPU is, and a launch raises.

    Modules ask it when they are imported (`DEVICE = triton.runtime.driver.active.get_active_torch_device()`).
    """

    def run(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        raise RuntimeError(f"Triton kernel {self.fn.__name__} is launched by the import; launch it in the factory")

    stand_in = _Driver(SimpleNamespace(device_index=0), properties)
    with _once_imported(lambda: [(sys.modules["triton.runtime.jit"].JITFunction, "run", run), _driver(stand_in)]):
        yield


@contextmanager
def _once_imported(changes: Callable[[], list[tuple[Any, str, Any]]]) -> Iterator[None]:
    with ExitStack() as stack, when_imported("triton", lambda: stack.enter_context(changed(changes()))):
        yield


def _driver(stand_in: "_Driver") -> tuple[Any, str, Any]:
    driver = importlib.import_module("triton.runtime.driver").driver
    return driver, "_active" if "_active" in vars(driver) else "active", stand_in


def _changes(world: Machine, properties: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    jit = sys.modules["triton.runtime.jit"]
    autotuner = sys.modules["triton.runtime.autotuner"]

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup:
            kernels.launch(world, self, args, kwargs, grid)
        return _Compiled(world, self)

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        return specialized.tune(world, self, args, kwargs)

    found: list[tuple[Any, str, Any]] = [(jit.JITFunction, "run", run), (autotuner.Autotuner, "run", tuned)]
    interpreter = sys.modules.get("triton.runtime.interpreter")  # only where TRITON_INTERPRET decorates with it
    if interpreter is not None:
        found.append((interpreter.InterpretedFunction, "run", run))
    found.append(_driver(_Driver(world, properties)))
    return found


class _Compiled:
    """What a launch gives back and `warmup` makes: a kernel with made-up, plausible resources; it can be launched."""

    n_regs, n_spills, n_max_threads = 32, 0, 1024

    def __init__(self, world: Machine, kernel: Any) -> None:
        self._world, self._kernel = world, kernel
        self.name = kernel.fn.__name__
        self.metadata = SimpleNamespace(shared=0, num_warps=4, num_stages=3, num_ctas=1, name=self.name)
        self.asm: dict[str, str] = {}
        self.function = self.module = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            kernels.launch(self._world, self._kernel, args, kwargs, grid)

        return run

    def _init_handles(self) -> None:
        """Loads the code; nothing to load."""


class _Driver:
    """`triton.runtime.driver.active` of the simulated GPU; of `world` it knows the current device."""

    def __init__(self, world: Machine | SimpleNamespace, properties: dict[str, Any]) -> None:
        self._world = world
        self.utils = SimpleNamespace(get_device_properties=lambda index=0: _named(properties))

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._world.device_index

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self._world.device_index)

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def set_current_device(self, index: int) -> None:
        self._world.device_index = index

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return 9, 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Any:
        return torch.empty(1, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: Any) -> None:
        """Benchmarks clear the L2 cache."""


def _named(properties: dict[str, Any]) -> dict[str, Any]:
    """The same properties under the names of Triton's driver."""
    return {
        "max_shared_mem": properties["shared_memory_per_block_optin"],
        "max_num_regs": properties["regs_per_multiprocessor"],
        "multiprocessor_count": properties["multi_processor_count"],
        "warpSize": properties["warp_size"],
        "sm_clock_rate": 1_980_000,
        "mem_clock_rate": 3_201_000,
        "mem_bus_width": 6144,
    }
