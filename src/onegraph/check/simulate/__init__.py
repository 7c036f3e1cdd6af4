"""Capture and replay of a step, simulated on a CPU: every finding in one run, without a GPU and without a compiler."""
