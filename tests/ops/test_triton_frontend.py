"""What the interpreter does not see of Triton's kernels: that the compiler takes them, with PDL, for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onegraph
from on_cpu import once

triton = pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on this machine, see test_triton.py")
def test_the_compiler_takes_every_kernel() -> None:
    """Once for the same files and versions: `build/triton` keeps the names of what it took."""
    here = Path(__file__).parent
    asked = [here / f"{name}.py" for name in ("triton_frontend", "test_triton", "test_gated_delta_chunk")]
    files = [*sorted(Path(onegraph.__file__).parent.rglob("*.py")), *asked]
    key = [f"{sys.version} {torch.__version__} {triton.__version__}".encode(), *(file.read_bytes() for file in files)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def take(out: Path) -> None:
        command = [sys.executable, "triton_frontend.py"]
        run = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        out.write_text(run.stdout)

    taken = once("triton", b"\0".join(key), "taken", take).read_text().split()
    assert {"_decode", "_attend", "_score", "_rms_norm", "_solve", "_scan"} <= set(taken)
