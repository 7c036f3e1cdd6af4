"""The further steps of a simulation are few in most tests: each takes a millisecond, and there are thousands."""

import pytest


@pytest.fixture
def whole_scan() -> None:
    """Asked for by tests that need as many steps as users get."""


@pytest.fixture(autouse=True)
def _short_scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "whole_scan" not in request.fixturenames:
        monkeypatch.setattr("onegraph.check.simulate.run.SCAN", 0.03)
