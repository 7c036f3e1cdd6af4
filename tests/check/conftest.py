"""The further steps of a simulation are few in most tests: each takes a millisecond, and there are thousands."""

import subprocess
from pathlib import Path

import pytest
from programs import Command

from onegraph.cli import main


@pytest.fixture
def whole_scan() -> None:
    """Asked for by tests that need as many steps as users get."""


@pytest.fixture(autouse=True)
def _short_scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "whole_scan" not in request.fixturenames:
        monkeypatch.setattr("onegraph.check.simulate.run.SCAN", 0.03)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`onegraph check` in tmp_path, in this process: one of its own takes two seconds to start."""

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(tmp_path)
        status = main(["check", *words])
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run
