"""What is published: the sdist, the wheel that is built from it, and the wheel in an environment without a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from onegraph import __version__

pytest.importorskip("hatchling", reason="needs hatchling: make .venv/.dev")
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
STEPS = """
import torch


def decode():
    model = torch.nn.Linear(8, 8, device="cuda")

    @torch.no_grad()
    def step(x):
        y = model(x)
        return y / y.abs().max(){host}

    return step, lambda i: (torch.full((1, 8), float(i + 1), device="cuda"),)
"""

TEST = """

def test_it():
    from onegraph.check.pytest_plugin import assert_capturable
    assert_capturable(decode)
"""


def built(kind: str, tree: Path, folder: Path) -> Path:
    """The sdist or the wheel of a source tree, made as pip would: by the build backend, in the tree."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", repo, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"onegraph-{__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


class Environment:
    """A fresh environment that has the wheel, and behind it the packages of this one: not its editable installs, whose
    .pth files are read in the site directory itself alone."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (self.site / "main.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-index"]
        more = "--no-deps", "--ignore-installed", "--disable-pip-version-check"  # this environment may have a wheel too
        subprocess.run([*pip, *more, str(wheel)], check=True)
        self.folder = folder

    def run(self, *command: object, status: int = 0, given: str = "", cwd: Path | None = None, **more: str) -> str:
        """What a program of the environment prints; the checkout is neither its directory nor on its path."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
        done = subprocess.run(
            [str(self.python.with_name(str(command[0]))), *map(str, command[1:])],
            cwd=cwd or self.folder,
            env=environment | {"HOME": str(self.folder)},
            input=given,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def value(self, code: str, **environment: str) -> Any:
        """What the code prints, as JSON."""
        return json.loads(self.run("python", "-c", f"import json, onegraph\n{code}", **environment))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed"), wheel)


def tracked(repo: Path, under: str = "") -> set[str]:
    if not (repo / ".git").exists():
        pytest.skip("no checkout: git says what belongs to it")
    listed = subprocess.run(
        ["git", "ls-files", "-z", under or "."], cwd=repo, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name and (repo / name).exists()}


def test_the_sdist_has_every_file_and_the_wheel_every_file_of_the_package(repo: Path, sdist: Path, wheel: Path) -> None:
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert tracked(repo) - packed == {".ci/run", ".github/workflows/release.yml"}, "which are for the checkout"
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name.removeprefix("src/") for name in tracked(repo, "src/onegraph")}
    for suffix in (".c", ".cu", ".cuh", ".html", ".md", ".toml", ".xz", "py.typed"):
        assert any(name.endswith(suffix) for name in wanted)
    assert wanted == {name for name in inside if ".dist-info/" not in name}, "nothing else: no tools, no tests"


def test_what_is_imported_is_the_wheel_without_torch(installed: Environment) -> None:
    file, torch, version = installed.value(
        "import sys; print(json.dumps([onegraph.__file__, 'torch' in sys.modules, onegraph.__version__]))"
    )
    assert Path(file).is_relative_to(installed.site)
    assert (torch, version) == (False, __version__)
    assert installed.run("onegraph", "--version") == f"onegraph {__version__}\n"


def test_entry_points_lead_somewhere(installed: Environment) -> None:
    groups = "('console_scripts', 'pytest11', 'vllm.general_plugins')"
    found = installed.value(
        "from importlib.metadata import distribution\n"
        f"points = [p for p in distribution('onegraph').entry_points if p.group in {groups}]\n"
        "print(json.dumps({p.group: [p.name, callable(getattr(p.load(), 'register', p.load()))] for p in points}))"
    )
    assert set(found) == {"console_scripts", "pytest11", "vllm.general_plugins"}
    assert {name for name, _ in found.values()} == {"onegraph"}
    test = installed.folder / "test_steps.py"
    test.write_text(STEPS.format(host="") + TEST)
    assert "1 passed" in installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", test)


def test_check_from_the_wheel(installed: Environment) -> None:
    steps = installed.folder / "steps.py"
    steps.write_text(STEPS.format(host=".item()"))
    assert "CG101 error device-value-read-on-host" in installed.run("onegraph", "check", f"{steps}:decode", status=1)
    assert "CG101" in installed.run("onegraph", "rule", "CG101")


def test_from_a_checkpoint_to_an_answer(installed: Environment) -> None:
    """With the calibration text that comes along, and the processes that run templates and tokenizers."""
    model, out = tiny.write_model(installed.folder / "model"), installed.folder / "out"
    words = ("--num-calibration-tokens", 128, "--calibration-seq-len", 64, "--recipe", "quick", "--device", "cpu")
    assert "bits per weight" in installed.run("onegraph", "quantize", model, out, *words)
    assert installed.run("onegraph", "chat", out, "--max-tokens", 4, "--device", "cpu", given="the\n")


def test_a_kernel_compiles_from_the_wheel(installed: Environment) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    found = [str(path.parent) for path in Path(sysconfig.get_path("purelib"), "nvidia").rglob("libnvrtc.so.*")]
    size = installed.value(
        "from onegraph.ops.cuda import build, e8p\n"
        "source = next(s for s in build.Source.every if s.capabilities == build.HOPPER)\n"
        "print(json.dumps([str(source.path), len(source.cubin(source.example, (9, 0)))]))",
        LD_LIBRARY_PATH=":".join(found),  # it is looked for in the environment's own site directory
    )
    assert Path(size[0]).is_relative_to(installed.site)
    assert size[1] > 1000


def test_the_tests_of_the_sdist_run_on_the_wheel(sdist: Path, installed: Environment) -> None:
    """Those that read the documents, the raw lines and the fixtures; the package that they import is the wheel."""
    tests = ["tests/test_figures.py", "tests/formats/test_forms.py"]
    out = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=sdist)
    assert " passed" in out
    where = "import onegraph; print(onegraph.__file__)"
    assert Path(installed.run("python", "-c", where, cwd=sdist).strip()).is_relative_to(installed.site)
