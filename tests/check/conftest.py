"""The further steps of a simulation are few in most tests: each takes a millisecond, and there are thousands."""

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def whole_scan() -> None:
    """Asked for by tests that need as many steps as users get."""


@pytest.fixture(autouse=True)
def _short_scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "whole_scan" not in request.fixturenames and find_spec("torch"):  # the reader's tests run without it, too
        monkeypatch.setattr("onegraph.check.simulate.run.SCAN", 0.01)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """`onegraph check` in tmp_path, in this process: one of its own takes two seconds to start."""
    from onegraph.cli import main

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(tmp_path)
        status = main(["check", *words])
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run
