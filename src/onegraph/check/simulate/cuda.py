"""`torch.cuda` for a machine without CUDA, and all else of torch that asks for a driver."""

import builtins
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.report import SILENT, Severity
from onegraph.check.simulate import (
    aliases,
    collectives,
    frames,
    graphs,
    hazards,
    loading,
    streams,
    third_party_kernels,
    threads,
    traced,
    triton,
)
from onegraph.check.simulate.backward import Backward
from onegraph.check.simulate.device import DeviceTensor
from onegraph.check.simulate.generators import Generators
from onegraph.check.simulate.guard import device_guard
from onegraph.check.simulate.imports import when_imported
from onegraph.check.simulate.modes import modes
from onegraph.check.simulate.world import World

_H200 = {
    "name": "NVIDIA H200 (simulated)", "major": 9, "minor": 0, "total_memory": 150_000_000_000, "warp_size": 32,
    "multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "L2_cache_size": 62914560,
    "shared_memory_per_multiprocessor": 233472, "gcnArchName": "", "is_integrated": 0, "is_multi_gpu_board": 0,
}  # fmt: skip
_CUDA = "13.0"
"""The version of CUDA that a CPU build says it has while it runs on the simulated machine."""

_OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs themselves."""


def _stand_ins(world: World, recorder: graphs.Recorder, made_generators: Generators) -> dict[str, Any]:
    made = streams.make(world)
    world.streams_main = made.pop("main")

    def synchronize(device: Any = None) -> None:
        world.see(*hazards.WAITED)
        for stream in list(world.streams.order.clocks):
            world.streams.host_waits(stream, world.streams.order.now(stream))

    def capturing() -> bool:
        if world.phase != "step":
            return False
        chain = world.chain() if frames.asks_itself(2) else ()
        if chain and world.roots.owns(chain[0][0]):
            world.asked_capturing.append(chain)
        return world.step == world.captured_step and world.streams.captured(torch.cuda.current_stream())

    def generator(device: Any = "cuda") -> Any:
        return made_generators.defaults[streams._index(device, world)]

    def seed(value: int = 0, *_: Any) -> None:
        generator().manual_seed(int(value))

    def set_device(device: Any) -> None:
        world.device_index = streams._index(device, world)

    class device_context:
        def __init__(self, device: Any) -> None:
            self.index = streams._index(device, world)

        def __enter__(self) -> None:
            self.before, world.device_index = world.device_index, self.index

        def __exit__(self, *_: object) -> None:
            world.device_index = self.before

    properties = SimpleNamespace(**_H200)
    return (
        made
        | graphs.stand_ins(recorder)
        | {
            compat.LAZY_INIT: lambda: None,
            compat.SLEEP: lambda cycles: None,
            "init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "device_count": lambda: world.gpus,
            "current_device": lambda: world.device_index,
            "set_device": set_device,
            "device": device_context,
            "synchronize": synchronize,
            "is_current_stream_capturing": capturing,
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: properties.name,
            "mem_get_info": lambda device=None: (140_000_000_000, 150_000_000_000),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "set_per_process_memory_fraction": lambda fraction, device=None: None,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "default_generators": made_generators.defaults,
            "manual_seed": seed,
            "manual_seed_all": seed,
            "initial_seed": lambda: generator().initial_seed(),
            "get_rng_state": lambda device="cuda": generator(device).get_state(),
            "get_rng_state_all": lambda: [known.get_state() for known in made_generators.defaults],
            "set_rng_state": lambda state, device="cuda": generator(device).set_state(state),
            "set_rng_state_all": lambda states: [generator(i).set_state(s) for i, s in enumerate(states)] and None,
            "can_device_access_peer": lambda a, b: True,
        }
    )


@contextmanager
def machine(world: World, recorder: graphs.Recorder | None = None) -> Iterator[None]:
    """Inside this context torch believes that it has a GPU, and everything that it does with it goes to `world`;
    captures that the code makes itself go to `recorder`."""
    with ExitStack() as stack:
        stack.enter_context(device_guard())
        # What is compiled already runs as it is written, and torch does not learn to leave it uncompiled for good.
        eager = stack.enter_context(ExitStack())
        stance = functools.partial(torch.compiler.set_stance, "force_eager")
        compiler = when_imported("torch._dynamo", lambda: eager.enter_context(stance()), lambda: _as_it_is(world))
        stack.enter_context(compiler)
        generators = Generators(world)
        stand_ins = _stand_ins(world, recorder or graphs.StepRecorder(world), generators)
        taken = []
        for name, value in stand_ins.items():
            if hasattr(torch.cuda, name):
                taken.append((getattr(torch.cuda, name), value))
            for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random):
                if hasattr(module, name):
                    stack.enter_context(_swapped(module, name, value))
        for name in _OF_ANY_ACCELERATOR:
            if hasattr(torch, "accelerator") and hasattr(torch.accelerator, name):
                stack.enter_context(_swapped(torch.accelerator, name, functools.partial(stand_ins[name])))
        if torch.version.cuda is None:
            stack.enter_context(_swapped(torch.version, "cuda", _CUDA))
        stack.enter_context(_swapped(torch.cuda.nvtx, compat.NVTX, _NoRanges()))
        stack.enter_context(_swapped(torch, "Generator", generators.kind))
        for owner, name, value in collectives.stand_ins(world):
            taken.append((getattr(owner, name), value))
            stack.enter_context(_swapped(owner, name, value))
        stack.enter_context(collectives.ended())
        compile = _compile(world, torch.compile)
        taken.append((torch.compile, compile))
        stack.enter_context(_swapped(torch, "compile", compile))
        stack.enter_context(aliases.rebound(taken))
        stack.enter_context(_swapped(torch.jit, "trace", _trace(world, torch.jit.trace)))
        for module in (torch, torch.random):
            for name in ("get_rng_state", "set_rng_state"):
                stack.enter_context(_swapped(module, name, _random_state(world, getattr(module, name))))
        if hasattr(torch, "get_device_module"):
            real = torch.get_device_module
            stack.enter_context(_swapped(torch, "get_device_module", lambda device="cuda": real(device or "cuda")))
        stack.enter_context(_swapped(torch, "load", loading.load(torch.load)))
        stack.enter_context(_swapped(ThreadPoolExecutor, "submit", threads.submit(world, ThreadPoolExecutor.submit)))
        start = threads.start(world, threading.Thread.start, functools.partial(modes, world))
        stack.enter_context(_swapped(threading.Thread, "start", start))
        stack.enter_context(_swapped(os, "urandom", _noted(world, os.urandom)))
        stack.enter_context(_swapped(builtins, "print", _print(world, builtins.print)))
        backward = Backward(world)
        for module in (torch.autograd, torch.autograd.graph):
            stack.enter_context(_swapped(module, compat.RUN_BACKWARD, backward))
        stack.enter_context(triton.stand_ins(world, _H200))
        stack.enter_context(third_party_kernels.stand_ins(world))
        stack.enter_context(_only_lift_cpu_tensors())
        stack.enter_context(modes(world))
        try:
            yield
        finally:
            world.threads.closed = True  # for threads that live on


def importing() -> AbstractContextManager[None]:
    """For the import of what will be simulated: modules that ask Triton's driver for the GPU are answered."""
    return triton.driver_while_importing(_H200)


def _noted(world: World, real: Callable[..., Any]) -> Callable[..., Any]:
    """A source of random numbers without a state to look at (`uuid4`, `secrets`), that says when a step asks it."""

    def noted(*given: Any) -> Any:
        if world.phase == "step" and not world.muted:
            world.randomness.asked += 1
        return real(*given)

    return noted


def _random_state(world: World, real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.get_rng_state` or `set_rng_state`, told to the world: its device draws from the same generator."""

    @functools.wraps(real)
    def state(*given: Tensor) -> Any:
        out = real(*given)
        with compat.no_torch_function(), compat.no_modes():
            world.random_state(given[0] if given else out, read=not given)
        return out

    return state


class _NoRanges:
    """NVTX, which a CPU build has no functions of: ranges and marks for a profiler that is not there."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


_OF_ANY_ACCELERATOR = (
    *("synchronize", "current_stream", "set_stream", "empty_cache", "reset_peak_memory_stats"),
    *("memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated"),
)
"""Functions of torch.accelerator that are torch.cuda's, where the accelerator is a GPU."""

_SWAPPED: list[tuple[Any, str, Any, Any]] = []
"""What is stood in for now: (owner, name, what it is, what stands in for it)."""


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _SWAPPED.append((owner, name, before, value))
    try:
        yield
    finally:
        _SWAPPED.pop()
        setattr(owner, name, before)


@contextmanager
def _as_it_is(world: World) -> Iterator[None]:
    """torch without the simulation: for a module of its own that takes names from it while it is imported."""
    now = [(owner, name, getattr(owner, name)) for owner, name, _, _ in _SWAPPED]  # a program may wrap a stand-in
    for owner, name, before, _ in reversed(_SWAPPED):
        setattr(owner, name, before)
    try:
        with compat.no_torch_function(), world.off():
            yield
    finally:
        for owner, name, value in now:
            setattr(owner, name, value)


@contextmanager
def _only_lift_cpu_tensors() -> Iterator[None]:
    """`torch.tensor(..., device="cuda")` makes its values on the CPU and then copies them, where we can see it."""
    before = compat.only_lifts_cpu_tensors()
    compat.set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        compat.set_only_lift_cpu_tensors(before)


def _compile(world: World, real: Any) -> Any:
    def compile(*args: Any, **kwargs: Any) -> Any:
        asked = frames.asks_itself(2)  # or torch for itself, to run cond and the like
        if asked:
            world.see("CG307", "torch.compile is called inside the step", hazards.NOT_PERMITTED)
        if world.phase not in ("build", "step"):
            return real(*args, **kwargs)
        own = kwargs.get("mode") in _OWN_GRAPHS or kwargs.get("backend") == "cudagraphs"
        own = own or (kwargs.get("options") or {}).get("triton.cudagraphs", False)

        def compiled(function: Any) -> Any:
            """Runs as it is written, and is known to be compiled while it does."""
            if isinstance(function, torch.nn.Module):  # in place, as its own compile() does
                function._compiled_call_impl = compiled(function._call_impl)
                function.__dict__["_orig_mod"] = function
                return function

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                world.compiled += 1
                try:
                    return world.own_graphs(function, args, kwargs) if own else function(*args, **kwargs)
                finally:
                    world.compiled -= 1

            return run if asked else function

        return compiled(args[0]) if args and args[0] is not None else compiled

    return compile


def _trace(world: World, real: Any) -> Any:
    @functools.wraps(real)
    def trace(func: Any, *args: Any, **kwargs: Any) -> Any:
        world.see("CG307", "torch.jit.trace is called inside the step", hazards.NOT_PERMITTED)
        return traced.trace(func, *args, **kwargs)

    return trace


def _print(world: World, real: Any) -> Any:
    def print(*args: Any, **kwargs: Any) -> None:
        chain = world.chain()
        if chain and not any(isinstance(a, DeviceTensor) for a in args) and world.roots.owns(chain[0][0]):
            world.see(
                "CG210", "print runs in Python, which a replay does not", SILENT, chain=chain, severity=Severity.WARNING
            )
        real(*args, **kwargs)

    return print
