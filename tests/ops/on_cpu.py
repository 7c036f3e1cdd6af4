"""CUDA sources as programs for this CPU: `standard.h` of nvfp4_on_cpu/, half of the compiler's time, is parsed once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from onegraph.ops.cuda import launcher

HEADER = Path(__file__).parent / "nvfp4_on_cpu" / "standard.h"
GCC = ["g++", "-Og", "-fno-exceptions", "-std=c++17", "-w", "-fPIC"]


def compile_run(folder: Path, defines: Iterable[str], out: Path, *flags: str) -> None:
    """`run.cpp` of the folder with these "-DNAME=VALUE" into `out`."""
    header = folder / HEADER.name
    if not header.exists():
        shutil.copy(HEADER, folder)
        subprocess.run([*GCC, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    command = [*GCC, *flags, *defines, "-include", header, folder / "run.cpp", "-o", out]
    subprocess.run(command, check=True)


def flags(defines: Mapping[str, int]) -> tuple[str, ...]:
    """What the compiler is given for them."""
    return tuple(f"-D{name}={value}" for name, value in defines.items())


def launch_on_cpu(kernels: Callable[..., Mapping[str, Any]], patch: Callable[..., None] = setattr) -> None:
    """`launcher.launch` takes CPU tensors, of device None, and runs what `kernels(source, device, *defines)` has by
    function, each with the `launch` of `build.Kernel`. `patch`: in place of setattr, a monkeypatch's."""
    patch(launcher, "kernels", kernels)
    patch(launcher, "on_device", lambda device: nullcontext())
    patch(launcher, "raw_stream", lambda device: 0)


def host_lines(host: Path, *arguments: object) -> list[str]:
    """What a `host.py` prints, which compiles and compares: in a process of its own, that a program's fault ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HEADER.parents[1]), *sys.path])}
    command = [sys.executable, host, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
