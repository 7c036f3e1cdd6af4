"""Ops on a CPU, where the reference makes too many of torch's calls for a decode step: some microseconds each."""
