"""C on the user's machine: compiled by the GCC that is there, cached as a shared library, called through ctypes.

There need not be a compiler: what is compiled has a form in torch's calls beside it, which is slower.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from onegraph.ops import family

FLAGS = "-O3", "-march=native", "-shared", "-fPIC"
SECONDS = 60  # of a compiler that does not come back


def cache_dir() -> Path:
    """Where libraries are kept: $XDG_CACHE_HOME/onegraph/cpu or ~/.cache/onegraph/cpu."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onegraph" / "cpu"


def compiler() -> str | None:
    """The path of the compiler, None where there is none."""
    return shutil.which(os.environ.get("CC") or "gcc")


@cache
def library(source: Path, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    """What `source` compiles to, from the cache or by the compiler; None where there is none, or it refuses."""
    found = compiler()
    if found is None or family.FORCED == "reference":
        return None
    command = [found, *FLAGS, *(f"-D{name}={value}" for name, value in defines)]
    try:
        version = _run([found, "-dumpfullversion", "-dumpmachine"])
        text = _whole(source)
        key = hashlib.sha256("\0".join([*command, version, _processor()]).encode() + text).hexdigest()[:32]
        cached = cache_dir() / f"{source.stem}-{key}.so"
        if cached.exists():
            return ctypes.CDLL(str(cached))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.so"
            _run([*command, "-o", str(made), str(source), "-lm"])
            return ctypes.CDLL(str(_kept(made, cached)))
    except (OSError, subprocess.SubprocessError):
        return None


def _whole(source: Path) -> bytes:
    """The source and the files of ours that it includes."""
    text = source.read_bytes()
    included = re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE)
    return text + b"".join(_whole(source.parent / name.decode()) for name in included)


def _kept(made: Path, cached: Path) -> Path:
    """`made` in the cache; where it is where that cannot be written, which costs the compilation each time."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            file.write(made.read_bytes())
        os.replace(file.name, cached)  # another process may do the same at the same time: both write the same code
    except OSError:
        return made
    return cached


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


def _processor() -> str:
    """What `native` stands for: a home may be shared by machines that are not alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    )
