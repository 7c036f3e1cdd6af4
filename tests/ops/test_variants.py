"""Compiling CUDA sources ahead and at once: which variants the tests on a GPU run, and that each is compiled once."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import variants
from onegraph.ops.cuda import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux alone")
NO_OPS = {"occupancy", "e8p_encode", "trellis_encode"}  # sources that no op runs


@pytest.mark.slow
def test_every_source_has_variants_and_every_case_is_known() -> None:
    found, failed = variants.of_ops()
    assert failed == {}
    assert {each.source for each in found} == {source.path.stem for source in build.Source.every} - NO_OPS
    assert {each.portable for each in found} == {True, False}
    assert len(found) > 500
    assert build.device.__module__ == "onegraph.ops.cuda.build", "what was patched is as it was"


def test_a_pool_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = {variants.Variant("occupancy", False, ()), variants.Variant("occupancy", True, ())}
    assert variants.compile_all(chosen, 1) > 0
    names = {file.suffix for file in build.cache_dir().iterdir() if file.name != "lock"}
    assert names == {".cubin", ".ptx"} or names == {".cubin"}


def _compile(source: Path, barrier: Any, results: Any) -> None:
    real, count = build._compile, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(1)  # so that all of them are under way
        return real(*args)

    build._compile = counted
    barrier.wait(60)
    results.put((build.compile_cubin(source, {}, (9, 0)), count))


@pytest.mark.parametrize("locks", [True, False])
def test_several_processes_compile_a_variant_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """With an empty cache; on a file system without locks each compiles it, and all have the same bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.cu").write_text('extern "C" __global__ void one(float* y) { *y = 1.0f; }\n')
    if not locks:
        (build.cache_dir() / "lock").mkdir(parents=True)
    context = get_context("fork")  # a fresh process would import torch first
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_compile, args=(tmp_path / "one.cu", barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({cubin for cubin, _ in found}) == 1
    assert sorted(count for _, count in found) == ([0, 0, 1] if locks else [1, 1, 1])
    assert len([name for name in os.listdir(build.cache_dir()) if name.endswith(".cubin")]) == 1
    assert not [name for name in os.listdir(build.cache_dir()) if name.startswith("tmp")]
