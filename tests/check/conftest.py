"""What tests of the checker share."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def whole_scan() -> None:
    """Asked for by tests that need as many steps as users get."""


@pytest.fixture(autouse=True)
def _as_users(request: pytest.FixtureRequest, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in limits if "whole_scan" in request.fixturenames else limits.keys() & {"SWEEP"}:
        monkeypatch.setattr(f"onegraph.check.simulate.run.{name}", limits[name])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """`onegraph check` in tmp_path, in this process: one of its own takes two seconds to start."""
    from onegraph.cli import main

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(tmp_path)
        status = main(["check", *words])
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run
