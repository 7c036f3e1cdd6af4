"""CUDA sources as programs for this CPU, each compiled once for the same bytes: `build/on_cpu` keeps what g++ made.

Half of the compiler's time is `standard.h` of nvfp4_on_cpu/, which is parsed once for all folders.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onegraph.ops.cuda import launcher

HEADER = Path(__file__).parent / "nvfp4_on_cpu" / "standard.h"
MADE = Path(__file__).parents[2] / "build" / "on_cpu"
UNUSED = 14 * 24 * 3600  # seconds after which what nobody asked for goes
GCC = ["g++", "-Og", "-fno-exceptions", "-std=c++17", "-w", "-fPIC"]


@cache
def version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def put(file: Path, out: Path) -> None:
    """A copy, which appears whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, f"{out}.{os.getpid()}")
    os.replace(f"{out}.{os.getpid()}", out)


def made(command: list[str], sources: Iterable[Path], main: Path, name: str = "made") -> Path:
    """What `command` makes of `main`, which includes `sources` alone. Two processes may make it at once."""
    digest = hashlib.sha256("\0".join([version(), *command]).encode())
    for file in sorted(sources):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    out = MADE / digest.hexdigest()[:32] / name
    if out.exists():
        os.utime(out.parent)
        return out
    for old in MADE.glob("*"):
        if old.stat().st_mtime < time.time() - UNUSED:
            shutil.rmtree(old, ignore_errors=True)
    with TemporaryDirectory() as folder:
        subprocess.run([*command, main, "-o", Path(folder, name)], check=True)
        put(Path(folder, name), out)
    return out


@cache
def header() -> Path:
    """A folder with `standard.h` and what the compiler made of it."""
    folder = made([*GCC, "-x", "c++-header"], [HEADER], HEADER, "standard.h.gch").parent
    put(HEADER, folder / HEADER.name)
    return folder


def compile_run(folder: Path, defines: Iterable[str], out: Path, *flags: str, gcc: list[str] | None = None) -> None:
    """`run.cpp` of the folder with these "-DNAME=VALUE" into `out`."""
    command = [*(gcc or [*GCC, "-I", str(header()), "-include", HEADER.name]), *flags, *defines]
    sources = [file for file in folder.iterdir() if file.suffix in (".cu", ".cuh", ".cpp", ".h")]
    put(made(command, sources, folder / "run.cpp"), out)  # a file of its own: what is loaded has its own memory


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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, host, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
