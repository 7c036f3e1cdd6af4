"""Capture and replay on a real GPU: what CUDA says, at the line that made it say so."""

from onegraph.check.live.run import live_step

__all__ = ["live_step"]
