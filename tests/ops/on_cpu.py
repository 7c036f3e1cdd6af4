"""CUDA sources as programs for this CPU, each compiled once for the same bytes: `build/on_cpu` keeps what g++ made.
`python -m tests.ops.kernel_table` and NVRTC's tests keep what NVRTC made likewise.

Half of the compiler's time is `standard.h` of nvfp4_on_cpu/, which is parsed once for all folders.
"""

import hashlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch

from onegraph.ops.cuda import launcher

HEADER = Path(__file__).parent / "nvfp4_on_cpu" / "standard.h"
MADE = Path(__file__).parents[2] / "build"
UNUSED = 14 * 24 * 3600  # seconds after which what nobody asked for goes
GCC = ["g++", "-Og", "-fno-exceptions", "-std=c++17", "-w", "-fPIC"]


@cache
def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def put(file: Path, out: Path) -> None:
    """A copy, which appears whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, f"{out}.{os.getpid()}")
    os.replace(f"{out}.{os.getpid()}", out)


def once(kind: str, key: bytes, name: str, make: Callable[[Path], None]) -> Path:
    """What `make` writes, in a folder of build/`kind`: once for the same key. Two processes may make it at once."""
    out = MADE / kind / hashlib.sha256(key).hexdigest()[:32] / name
    if out.exists():
        os.utime(out.parent)
        return out
    for old in (MADE / kind).glob("*"):
        if old.stat().st_mtime < time.time() - UNUSED:
            shutil.rmtree(old, ignore_errors=True)
    with TemporaryDirectory() as folder:
        make(Path(folder, name))
        put(Path(folder, name), out)
    return out


def made(command: list[str], sources: Iterable[Path], main: Path, name: str = "made", *libraries: str) -> Path:
    """What `command` makes of `main`, which includes `sources` alone."""
    texts = [part for file in sorted(sources) for part in (file.name.encode(), file.read_bytes())]
    key = b"\0".join([version(command[0]).encode(), *map(str.encode, command), *texts])
    make = lambda out: subprocess.run([*command, main, "-o", out, *libraries], check=True)  # noqa: E731
    return once("on_cpu", key, name, make)


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
    """What a `host.py` prints, which compiles and compares: in a fork of this process, that a program's fault ends."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            status = 1
            try:
                torch.set_num_threads(1)  # OpenMP's others are not in a fork
                os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)  # where C prints
                with redirect_stdout(out), redirect_stderr(err):
                    sys.argv = [str(host), *map(str, arguments)]
                    runpy.run_path(str(host), run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc(file=err)
            finally:
                out.flush(), err.flush()
                os._exit(status)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:  # a timeout
            os.kill(child, signal.SIGKILL)
            raise
        out.seek(0), err.seek(0)
        text, problem = out.read(), err.read()
    assert status == 0, f"status {status}\n{text}\n{problem}"
    return text.splitlines()
