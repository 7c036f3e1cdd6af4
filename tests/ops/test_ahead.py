"""Kernels that are compiled in threads: the same bytes, each once, errors where a kernel is loaded; no GPU needed."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs

from onegraph.ops.ahead import Ahead
from onegraph.ops.cuda import build, launcher
from onegraph.ops.registry import OPS, Op, register

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux alone")

TEXT = """
struct Arguments { const float* x; float* y; int n; };
extern "C" __global__ void scale(const __grid_constant__ Arguments a) {
    if (threadIdx.x < a.n) a.y[threadIdx.x] = a.x[threadIdx.x] * FACTOR;
}
"""
ARGUMENTS = build.Arguments(pointers=("x", "y"), ints=("n",))


class Driver:
    """The driver's calls of `build.load`; what was loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    CUdevice_attribute = CUfunction_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=0,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=0,
    )
    CUresult = SimpleNamespace(CUDA_ERROR_NOT_FOUND=500)

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, int]:
        self.loaded.append(cubin)
        return 0, len(self.loaded)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: (0, 1 << 20)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Tensors of the CPU are a GPU's, whose driver is not there; NVRTC is, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found, nvrtc = Driver(), build.bindings()[1]
    monkeypatch.setattr(build, "bindings", lambda: (found, nvrtc))
    monkeypatch.setattr(build, "device", lambda index: None)
    monkeypatch.setattr(launcher, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Ahead, "missed", False)
    launcher.kernels.cache_clear()
    yield found
    launcher.kernels.cache_clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The factor of each kernel that ran, by its number of threads."""
    found: list[int] = []
    monkeypatch.setattr(build.Kernel, "launch", lambda self, grid, threads, *_: found.append(threads))
    return found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[build.Source]:
    yield of(tmp_path, TEXT)
    build.Source.every.pop()


def of(folder: Path, text: str) -> build.Source:
    made = build.Source(
        "scale", functions=("scale",), arguments=ARGUMENTS, capabilities=build.HOPPER, example={"FACTOR": 1}
    )
    made.path = folder / "scale.cu"
    made.path.write_text(text)
    return made


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How many variants were compiled, and how many at once."""
    found, real, lock = SimpleNamespace(count=0, now=0, most=0), build._compile, threading.Lock()

    def counted(*args: Any) -> Any:
        with lock:
            found.count, found.now = found.count + 1, found.now + 1
            found.most = max(found.most, found.now)
        time.sleep(0.2)
        try:
            return real(*args)
        finally:
            with lock:
                found.now -= 1

    monkeypatch.setattr(build, "_compile", counted)
    return found


def run(source: build.Source, x: Tensor, factor: int) -> Tensor:
    out = torch.empty_like(x)
    launcher.launch(source, {"FACTOR": factor}, launcher.Launch((1, 1, 1), factor), x=x, y=out, n=len(x))
    return out


@pytest.fixture
def op(source: build.Source) -> Iterator[Op]:
    """Of which a CPU runs what a GPU does."""
    made = register(
        Op(
            name="ahead_scale",
            schema="(Tensor x, int factor) -> Tensor",
            reference=lambda x, factor: run(source, x, factor),
            fake=lambda x, factor: torch.empty_like(x),
        )
    )
    yield made
    del OPS["ahead_scale"]


def test_what_is_missing_is_compiled_at_once_and_runs_afterwards(
    driver: Driver, launches: list[int], op: Op, compiling: SimpleNamespace
) -> None:
    seen: list[Tensor] = []

    def step(*factors: int) -> None:
        for factor in factors:
            made = op(torch.ones(4), factor)
            seen.append(made)
            torch.arange(4)[made.long()]  # an index, whatever the kernel would have made
            torch.empty(3, dtype=torch.int64).tolist()

    ahead = Ahead()
    ahead._pool._max_workers = 8
    with ahead.active([lambda: step(1, 2), lambda: step(2, 3, 4)]):
        op(torch.ones(4), 1)
        assert all(made.eq(0).all() for made in seen), "what no kernel wrote is zero"
        assert launches == [1]
        for factor in (2, 3, 4, 5):
            op(torch.ones(4), factor)
    assert launches == [1, 2, 3, 4, 5]
    assert compiling.count == 5
    assert compiling.most > 1, "one after the other"
    assert len(driver.loaded) == len(set(driver.loaded)) == 5
    assert build.AHEAD.get() is None


def test_what_is_under_way_starts_no_other_dry_run(
    driver: Driver, launches: list[int], source: build.Source, compiling: SimpleNamespace
) -> None:
    """Of decoding, say, whose kernels began to compile when prefill lacked one."""
    ahead, runs = Ahead(), [0]

    def step() -> None:
        runs[0] += 1
        run(source, torch.ones(4), 1)
        run(source, torch.ones(4), 2)

    for factor in (1, 2):
        with ahead.active([step]):
            run(source, torch.ones(4), factor)
    assert (runs, launches, compiling.count) == ([1], [1, 2], 2)


def test_a_kernel_that_was_missing_at_load_has_steps_run_dry_first(
    driver: Driver, launches: list[int], source: build.Source, compiling: SimpleNamespace
) -> None:
    """Once, in front of all that a step does before it comes to a kernel of CUDA's."""
    ahead, events = Ahead(), list[str]()
    load = Ahead()
    with load.expected():
        assert source.is_built(0)
    with load.active(()):
        assert source.is_built(0)
    for each in (ahead, ahead, Ahead()):
        with each.active([lambda: events.append("dry"), lambda: run(source, torch.ones(4), 2)]):
            events.append("built")
            run(source, torch.ones(4), 2)
    assert events == ["dry", "built", "built", "built"]
    assert (launches, compiling.count) == ([2, 2, 2], 2)


def test_the_bytes_are_those_of_one_after_the_other(
    driver: Driver, launches: list[int], source: build.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ahead().active([lambda: [run(source, torch.ones(4), factor) for factor in (1, 2, 3)]]):
        for factor in (1, 2, 3):
            run(source, torch.ones(4), factor)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert driver.loaded == [source.cubin({"FACTOR": factor}, (9, 0)) for factor in (1, 2, 3)]


def test_where_all_is_cached_nothing_runs_dry(
    driver: Driver, launches: list[int], source: build.Source, compiling: SimpleNamespace
) -> None:
    source.cubin({"FACTOR": 2}, (9, 0))
    with Ahead().active([lambda: pytest.fail("a dry run")]):
        run(source, torch.ones(4), 2)
    assert (compiling.count, launches) == (1, [2])


def test_an_error_of_the_compiler_is_raised_where_the_kernel_is_loaded(
    driver: Driver, launches: list[int], tmp_path: Path
) -> None:
    broken = of(tmp_path, TEXT.replace("FACTOR", "FACTOR + (FACTOR == 2 ? nonsense : 0)"))
    build.Source.every.pop()
    refused = pytest.raises(build.BuildError, match=r"NVRTC refused scale.cu: .*nonsense")
    with Ahead().active([lambda: run(broken, torch.ones(4), 2)]), refused:
        run(broken, torch.ones(4), 3)
    with Ahead().active([lambda: broken.is_built(0)]), pytest.warns(UserWarning, match="scale.cu cannot be built"):
        assert not broken.is_built(0)
    assert launches == []


def test_what_is_expected_is_compiled_and_what_was_refused_is_not_expected(
    driver: Driver, source: build.Source, compiling: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    broken, ahead = of(tmp_path / "other", "nonsense"), Ahead()
    build.Source.every.pop()
    with ahead.expected():
        assert source.is_built(0)
        assert broken.is_built(0)
    with ahead.active(()):
        assert source.is_built(0)
        with pytest.warns(UserWarning, match="scale.cu cannot be built"):
            assert not broken.is_built(0)
    with ahead.expected():
        assert source.is_built(0)
        assert not broken.is_built(0)
    ahead._pool.shutdown()
    assert build.AHEAD.get() is None
    assert not ahead.is_dry
    assert len(driver.loaded) == 1


def test_an_error_of_a_dry_run_is_the_callers(driver: Driver, source: build.Source, launches: list[int]) -> None:
    def step() -> None:
        raise ValueError("of the step")

    ahead = Ahead()
    with ahead.active([step]), pytest.raises(ValueError, match="of the step"):
        run(source, torch.ones(4), 1)
    with ahead.active([]):
        run(source, torch.ones(4), 1)
    assert launches == [1]


def test_a_home_that_cannot_be_written_compiles_each_variant_once(
    driver: Driver, launches: list[int], source: build.Source, compiling: SimpleNamespace, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with Ahead().active([lambda: [run(source, torch.ones(4), factor) for factor in (1, 2)]]):
        for factor in (1, 2):
            run(source, torch.ones(4), factor)
    assert (launches, compiling.count) == ([1, 2], 2)


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "another version's"])
def test_a_damaged_cubin_is_compiled_anew(
    driver: Driver, source: build.Source, compiling: SimpleNamespace, damage: str
) -> None:
    made = source.cubin({"FACTOR": 2}, (9, 0))
    (file,) = build.cache_dir().glob("*.cubin")
    data = file.read_bytes()
    changed = bytes([data[100] ^ 1])
    broken = {"truncated": data[:-40], "empty": b"", "changed": data[:100] + changed + data[101:]}
    file.write_bytes(broken.get(damage, made))
    assert source.cubin({"FACTOR": 2}, (9, 0)) == made
    assert file.read_bytes() == data
    assert compiling.count == 2


def test_a_full_disk_leaves_no_files(driver: Driver, source: build.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.os, "replace", full)
    assert source.cubin({"FACTOR": 2}, (9, 0)).startswith(b"\x7fELF")
    assert [file.name for file in build.cache_dir().iterdir()] == ["lock"]


def test_another_source_or_header_is_another_cubin(
    driver: Driver, source: build.Source, compiling: SimpleNamespace, tmp_path: Path
) -> None:
    first = source.cubin({"FACTOR": 2}, (9, 0))
    source.path.write_text(TEXT.replace("* FACTOR", "* FACTOR * 2"))
    assert source.cubin({"FACTOR": 2}, (9, 0)) != first
    (tmp_path / "beside.cuh").write_text("// a header that a source may include\n")
    source.cubin({"FACTOR": 2}, (9, 0))
    assert compiling.count == 3


class TritonKernel:
    """What `Ahead` needs of a kernel that Triton calls its hook for: `launch` does as `JITFunction.run`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.cached, self.events = error, False, list[str]()

    def preload(self, data: str) -> Any:
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        self.cached = True
        self.events.append(f"preloaded {data} {threading.current_thread().name.partition('_')[0]}")
        return SimpleNamespace(src="source", metadata="metadata")

    def launch(self, key: int) -> None:
        compile = {"device": 0, "specialization_data": str(key)}
        info = SimpleNamespace(jit_function=self)
        hook = knobs.runtime.jit_cache_hook
        if hook is not None and hook(key=key, fn=info, compile=compile, repr="", is_manual_warmup=False):
            return
        self.events.append("found in the cache" if self.cached else "compiled")


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Of which launchers were made."""
    found: list[tuple[str, str]] = []
    active = SimpleNamespace(launcher_cls=lambda *about: found.append(about))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return found


def test_triton_compiles_in_threads_what_a_dry_run_launches(
    driver: Driver, launches: list[int], source: build.Source, launchers: list[tuple[str, str]]
) -> None:
    kernel, broken = TritonKernel(), TritonKernel(ValueError("of the compiler"))

    def step() -> None:
        run(source, torch.ones(4), 1)
        kernel.launch(5)
        kernel.launch(5)
        broken.launch(6)

    with Ahead().active([step]):
        kernel.launch(4)  # in front of the first kernel of CUDA's
        step()
    assert kernel.events == ["compiled", "preloaded 5 kernels", "found in the cache", "found in the cache"]
    assert broken.events == ["compiled"], "where the user sees the error"
    assert launchers == [("source", "metadata")]


def test_a_hook_of_the_users_stays(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, key, **_: asked.append(key))
    kernel = TritonKernel()
    with Ahead().active([]):
        kernel.launch(1)
        thread = threading.Thread(target=kernel.launch, args=(2,))
        thread.start()
        thread.join()
    kernel.launch(3)
    assert asked == [1, 2, 3]
    assert kernel.events == ["compiled"] * 3
