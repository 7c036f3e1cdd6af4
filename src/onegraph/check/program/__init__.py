"""`onegraph check --run`: a program of one's own, run on the CPU against the simulated machine."""

from onegraph.check.program.run import run_program

__all__ = ["run_program"]
