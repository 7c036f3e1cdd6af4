"""Compiles the kernels of a step in threads: one after the other they take a first run 12 s.

Only launchers know which variants a step needs. So the first CUDA variant that is in no cache is answered with dry runs
of the steps; if one was missing while weights were read, they come first. In a dry run launches of missing kernels
begin to compile and launch nothing; torch's own ops and Triton's kernels that are compiled already run for real, on
rows that stand still. Memory that a kernel would write is zero, which every torch op may read as a number or as an
index. In the run behind it each launch waits for its own kernel.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onegraph.ops.cuda import build
from onegraph.ops.registry import OPS

Key = tuple[build.Source, tuple[tuple[str, int], ...], int]
ALLOCATING = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


class Ahead:
    """Threads that compile, while it is `active`. See `build.Ahead`.

    Errors of the compiler are raised where a kernel is loaded, as without it.

    Attributes:
        missed: of the process: a kernel that was `expected` was in no cache, and no step has run dry since.
    """

    missed = False

    def __init__(self) -> None:
        self.is_dry = self._expects = False
        self._steps: Sequence[Callable[[], object]] = ()
        self._renew()

    def _renew(self) -> None:
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "kernels")
        self._begun: dict[Key, Future[bytes]] = {}
        self._triton: dict[tuple[Any, Any], Future[None]] = {}  # by kernel and what Triton knows a variant by

    @contextmanager
    def _dropped_on_errors(self) -> Iterator[None]:
        """What waits to be compiled is dropped where its user fails: the process would end behind all of it."""
        try:
            yield
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._renew()
            raise

    @contextmanager
    def active(self, steps: Sequence[Callable[[], object]]) -> Iterator[None]:
        """Within it, the first kernel that is in no cache is answered with a dry run of `steps`, each once. A step runs
        on what its buffers hold, where zeros stand for every value that a kernel of ours makes."""
        self._steps, token = steps, build.AHEAD.set(self)
        try:
            _install_hook()
            with self._dropped_on_errors():
                if steps and Ahead.missed:
                    self._run_dry()
                yield
        finally:
            build.AHEAD.reset(token)
            self._steps = ()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Within it `Source.is_built` begins to compile, and expects that to succeed. Whoever acts on the answer has to
        ask once more in `active`, which waits."""
        token, self.is_dry, self._expects = build.AHEAD.set(self), True, True
        try:
            with self._dropped_on_errors():
                yield
        finally:
            build.AHEAD.reset(token)
            self.is_dry = self._expects = False

    def want(self, source: build.Source, defines: Mapping[str, int], device: int) -> None:
        """Begins to compile a variant for a GPU."""
        key = source, tuple(defines.items()), device
        if key not in self._begun:
            capability = torch.cuda.get_device_capability(device)
            self._begun[key] = self._pool.submit(_compile, source, dict(defines), capability, self._expects)

    def cubin(self, source: build.Source, defines: Mapping[str, int], device: int) -> bytes:
        """`Source.cubin`, waited for."""
        key = source, tuple(defines.items()), device
        if self._steps and key not in self._begun:
            compilation = source.compilation(defines, torch.cuda.get_device_capability(device))
            if (found := compilation.cached()) is not None:
                return found
            self.want(source, defines, device)
            self._run_dry()
        self.want(source, defines, device)
        return self._begun.pop(key).result()

    def takes(self, kernel: Any, key: Any, compile: dict[str, Any]) -> bool:
        """Whether a variant of a Triton kernel that Triton does not have is not launched: in a dry run, for which the
        threads compile it. In the run behind it, waits for it."""
        variant = kernel, key
        if self.is_dry:
            if variant not in self._triton:
                self._triton[variant] = self._pool.submit(_compile_triton, kernel, compile)
            return True
        if (begun := self._triton.pop(variant, None)) is not None:
            begun.exception()  # waits: what failed is compiled once more, and fails in front of the user
        return False

    def _run_dry(self) -> None:
        steps, self._steps, self.is_dry, Ahead.missed = self._steps, (), True, False
        try:
            with _Zeroed():  # type: ignore[no-untyped-call]
                for step in steps:
                    with suppress(build.BuildError):  # the run behind tells, or does without the kernel
                        step()
        finally:
            self.is_dry = False


def _install_hook() -> None:
    """Has Triton, which calls a hook before it compiles, ask the `Ahead` that is active in the thread."""
    try:
        from triton import knobs
    except ImportError:  # a torch of CUDA brings it along
        return
    if getattr(before := knobs.runtime.jit_cache_hook, "of_onegraph", False):
        return

    def hook(*, key: Any, fn: Any, compile: dict[str, Any], **more: Any) -> Any:
        ahead = build.AHEAD.get()
        if isinstance(ahead, Ahead) and ahead.takes(fn.jit_function, key, compile):
            return True
        return before and before(key=key, fn=fn, compile=compile, **more)

    hook.of_onegraph = True  # type: ignore[attr-defined]
    knobs.runtime.jit_cache_hook = hook


def _compile(source: build.Source, defines: Mapping[str, int], capability: tuple[int, int], expected: bool) -> bytes:
    compilation = source.compilation(defines, capability)
    if (found := compilation.cached()) is not None:
        return found
    Ahead.missed |= expected
    return compilation.compiled()


def _compile_triton(kernel: Any, variant: dict[str, Any]) -> None:
    """Puts a variant of a Triton kernel into Triton's caches, and its launcher, which is made by a C compiler."""
    from triton.runtime import driver

    with torch.cuda.device(variant["device"]):
        made = kernel.preload(variant["specialization_data"])
        driver.active.launcher_cls(made.src, made.metadata)


class _Zeroed(TorchDispatchMode):
    """Memory that torch allocates without values has zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = OPS.get(func._opname) if func.namespace == "onegraph" else None
        if op is not None and op.on_cuda is not None:
            with self:  # it allocates, too
                return op.on_cuda(*args, **kwargs)
        made = func(*args, **kwargs)
        return made.zero_() if func._schema.name in ALLOCATING else made
