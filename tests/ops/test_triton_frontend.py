"""What the interpreter does not see of Triton's kernels: that the compiler takes them, with PDL, for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on this machine, see test_triton.py")
def test_the_compiler_takes_every_kernel() -> None:
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "triton_frontend.py"], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert {"_decode", "_attend", "_score", "_rms_norm", "_solve", "_scan"} <= set(run.stdout.split())
