"""The checker's tests with other versions of torch than the one that this environment has: `make torch-versions`.

    python -m tests.torch_versions 2.11.0 newest

Each version gets an environment of its own over this one. A build that brings CUDA's packages along (gigabytes) is not
installed: it is told as not covered. Ends with status 1 where tests fail with a version that could be had.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TESTS = ["tests/check/test_compat.py", "tests/check/test_simulate.py", "tests/check/test_torch_features.py"]
CUDA = ("nvidia", "cuda", "triton")


def pip(*args: str) -> str:
    """What pip prints. Raises CalledProcessError with what it says is wrong."""
    extra = os.environ.get("PIP_ARGS", "").split()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, *extra]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def offered(version: str, *options: str) -> tuple[str, list[str]]:
    """The version that pip, called with `options`, would install, and what of CUDA it would bring along."""
    wanted = "torch" if version == "newest" else f"torch=={version}"
    args = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", wanted]
    (torch,) = json.loads(pip(*options, *args))["install"]
    needs = torch["metadata"].get("requires_dist", [])
    return torch["metadata"]["version"], [n for n in needs if n.startswith(CUDA)]


def environment(version: str, folder: Path) -> Path:
    """The interpreter of an environment that has this torch, and everything else from this one."""
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        venv.create(folder, with_pip=False, clear=True)
        (purelib,) = (folder / "lib").glob("python*/site-packages")
        here = sysconfig.get_path("purelib")
        (purelib / "main.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        pip("--python", str(python), "install", "--quiet", "--no-deps", f"torch=={version}")
        (folder / ".done").touch()
    return python


def why_not(error: subprocess.CalledProcessError) -> str:
    """What pip says of its failure."""
    return ([line for line in (error.stderr or "").splitlines() if line.startswith("ERROR")] or ["pip failed"])[-1]


def covered(asked: str, root: Path) -> tuple[bool, str]:
    """Whether nothing failed with this version, and what to say of it."""
    try:
        version, cuda = offered(asked)
        if cuda:
            why = f"the build that can be had brings {len(cuda)} packages of CUDA along"
            return True, f"torch {version}: not covered: {why}; name an index of CPU builds in PIP_ARGS"
        python = environment(version, root / f"torch-{version}")
    except subprocess.CalledProcessError as error:
        return True, f"torch {asked}: not covered: {why_not(error)}"
    status = subprocess.run([python, "-m", "pytest", "-q", "-m", "not gpu", "-n", "2", *TESTS]).returncode
    return status == 0, f"torch {version}: {'tested' if status == 0 else 'tests FAILED'}"


def main(versions: list[str]) -> int:
    results = [covered(version, Path(sys.prefix)) for version in versions]
    print("\n".join(text for _, text in results))
    return int(not all(good for good, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
