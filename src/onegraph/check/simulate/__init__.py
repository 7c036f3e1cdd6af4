"""Capture and replay of a step, simulated on a CPU: every finding in one run, without a GPU and without a compiler."""

from onegraph.check.simulate.run import simulate_step

__all__ = ["simulate_step"]
