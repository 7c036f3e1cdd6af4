"""The thread that makes a GPU's context: which GPUs, and that a driver that refuses or is missing is nobody's error."""

import ctypes
import threading
from typing import Any

import pytest

from onegraph.api import gpu_context


class Library:
    """A driver that has `gpus` and says what was made."""

    def __init__(self, gpus: int, init: int = 0) -> None:
        self.gpus, self.init = gpus, init
        self.made: list[int] = []
        self.thread = ""

    def cuInit(self, flags: int) -> int:
        self.thread = threading.current_thread().name
        return self.init

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return 0 if index < self.gpus else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.made.append(device.value - 100)
        return 0


@pytest.mark.parametrize(
    ("device", "count", "made"),
    [
        ("auto", 1, [0]), ("cuda", 1, [0]), ("cuda:1", 1, [1]), ("cuda", 2, [0, 1]), ("cuda", 4, [0, 1]),
        ("cuda:7", 1, []), ("cpu", 1, None), ("cuda:x", 1, None), ("cuda:\u0661", 1, None), ("tpu", 1, None),
    ],
)  # fmt: skip
def test_contexts_are_of_the_gpus_that_are_named(
    device: str, count: int, made: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Library(2)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = gpu_context.start_context(device, count)
    if made is None:
        assert thread is None
        return
    assert thread is not None
    thread.join(10)
    assert driver.made == made
    assert driver.thread == "cuda-context"


@pytest.mark.parametrize("missing", [True, False])
def test_a_driver_that_is_missing_or_refuses_is_left_to_torch(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Library(1, init=100)

    def load(name: str) -> Library:
        if missing:
            raise OSError(name)
        return driver

    errors: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    thread = gpu_context.start_context("auto")
    assert thread is not None
    thread.join(10)
    assert (driver.made, errors) == ([], [])
