"""The wheel on other Pythons than this environment's, and with the oldest dependencies: `make python-versions`.

    python -m tests.python_versions 3.12 3.13 3.14 lowest

Each gets an environment of its own with the wheel, what it depends on, and what tests it. Where the torch that can be
had brings CUDA's packages along (gigabytes) it gets none, and runs the tests that need none: the source reader,
reports, files. A Python that is not on this machine is told as not covered. "lowest" is this Python with the lowest
version of each dependency that pyproject.toml allows. Ends with status 1 where tests fail.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from .torch_versions import offered, pip, why_not

HERE = Path(__file__).parents[1]
EXTRAS = ("gguf", "serve", "constraints")
TESTS = ["tests/test_package.py", "tests/cli/test_cli.py", "tests/check/test_simulate.py", "tests/check/test_compat.py"]
NEWEST = ["tests/engine/test_engine_llama.py"]  # its oracle, transformers, wants newer dependencies than our lowest
READER = ("source", "source_tree", "source_corpus", "capture_files", "sarif", "html")
WITHOUT_TORCH = [*(f"tests/check/test_{name}.py" for name in READER), "tests/formats/test_files.py"]


def interpreter(version: str) -> Path | None:
    """Of "3.12" the newest that pyenv has, or the one on the path."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {int(path.name.split(".")[2]): path for path in root.glob(f"{version}.*") if path.name[-1].isdigit()}
    if found:
        return found[max(found)] / "bin" / "python"
    return Path(path) if (path := shutil.which(f"python{version}")) else None


def bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Name -> version of each requirement's lower bound."""
    return dict(re.findall(r"^([\w.-]+)>=([\w.]+)", "\n".join(requirements), re.M))


def environment(python: Path, oldest: bool) -> str:
    """Fills an environment. Returns the version of its torch, or "" where it has none."""
    about = tomllib.loads((HERE / "pyproject.toml").read_text())
    extras = about["project"]["optional-dependencies"]
    ours = [*about["project"]["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    into = ("--python", str(python))
    (pinned,) = re.findall(r"^torch==(\S+)", (HERE / "constraints.txt").read_text(), re.M)
    for asked in (bounds(ours)["torch"], pinned) if oldest else (pinned,):
        torch, cuda = offered(asked, *into)
        if not cuda:
            break
    with tempfile.TemporaryDirectory() as folder:
        held = HERE / "constraints.txt"
        if oldest:
            held = Path(folder) / "lowest.txt"
            held.write_text("".join(f"{n}=={v}\n" for n, v in (bounds(ours) | {"torch": torch}).items()))
        left_out = ("transformers", "accelerate") if cuda or oldest else ()
        wanted = [r for r in (*ours, *about["dependency-groups"]["test"]) if not r.startswith((*left_out, "torch"))]
        wanted += [] if cuda else [f"torch=={torch}", "triton==3.6.0"]  # which CPU builds of torch do not bring
        pip(*into, "install", "--quiet", "--no-compile", "-c", str(held), *wanted)
        pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, str(HERE))
        pip(*into, "install", "--quiet", "--no-deps", *map(str, Path(folder).glob("*.whl")))
    return "" if cuda else torch


def passes(python: Path, names: list[str]) -> bool:
    """Whether they pass, on the wheel: the checkout's src is not on their path."""
    words = ["-m", "pytest", "-q", "-m", "not gpu", "-n", "2", "-p", "no:cacheprovider", *names]
    environment = os.environ | {"PYTHONPATH": str(HERE / "tests")}
    return subprocess.run([python, *words], cwd=HERE, env=environment).returncode == 0


def covered(asked: str, newest: bool) -> tuple[bool, str]:
    """Whether nothing failed there, and what to say of it. The engine runs on the newest Python alone."""
    oldest = asked == "lowest"
    name = "the lowest dependencies" if oldest else f"Python {asked}"
    base = Path(sys.executable) if oldest else interpreter(asked)
    if base is None:
        return True, f"{name}: not covered: this machine has none"
    folder = Path(sys.prefix) / f"python-{asked}"
    try:
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True, capture_output=True, text=True)
        torch = environment(folder / "bin" / "python", oldest)
    except subprocess.CalledProcessError as error:
        return True, f"{name}: not covered: {why_not(error)}"
    chosen = [*TESTS, *(NEWEST if newest else ())] if torch else WITHOUT_TORCH
    good = passes(folder / "bin" / "python", chosen)
    what = f"with torch {torch}" if torch else "without torch: the build that can be had brings CUDA along"
    return good, f"{name}: {'tested' if good else 'tests FAILED'} {what}"


def main(asked: list[str]) -> int:
    here = [each for each in asked if each != "lowest" and interpreter(each)]
    results = [covered(each, each in here[-1:]) for each in asked]
    print("\n".join(text for _, text in results))
    return int(not all(good for good, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
