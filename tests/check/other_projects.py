"""Other projects' tests that capture graphs, each as a program under `onegraph check --run`.

    python tests/check/other_projects.py PROJECT FOLDER PATTERN TESTS.py ...    # results: FOLDER, other_projects.json

It runs in a checkout of the project, of which nothing is part of this repository; TESTS.py are relative to it. pytest
collects them once, on the simulated GPU. Then each test whose name matches PATTERN ("": whose source captures) goes on
in a process of its own, as the rest of the program, so that its report is about it alone. A row of other_projects.json
says what the test found and what was reported.
"""

import inspect
import json
import os
import re
import signal
import sys
import types
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_suffix(".json")
LONGEST = 90
"""Seconds of one test and its report."""

MOST = 8
"""Parameter sets of one test function that are run."""

CAPTURES = re.compile(
    r"cuda\.graph\(|make_graphed_callables|(?i:cuda_?graph)|reduce-overhead|max-autotune|capture_begin"
)
PLACE = "ONEGRAPH_OTHER_PROJECT"
"""The variable of the environment in which the process of a test says where its results belong."""

OPTIONS = ["-q", "-s", "--noconftest", "--continue-on-collection-errors", "-c", os.devnull]
OPTIONS += [word for plugin in ("cacheprovider", "xdist", "timeout") for word in ("-p", f"no:{plugin}")]


class Missing(type):
    """A name of such a module: a class, and so is what is in it; none can be made."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is not there")


class Absent(types.ModuleType):
    """In place of a module that is not there (CUDA binaries): all of it can be imported, and raises when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        return Missing(f"{self.__name__}.{name}", (), {})


def vllm() -> None:
    """vLLM's wheel for CPUs as if it were the one for CUDA, and its tests without processes of their own."""
    for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        Absent(name)
    import torch
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda name: False  # it turns Triton off
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()
    for name in (
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_group_gemm_supported",
    ):
        torch.library.define(f"_C::{name}", "(int capability) -> bool")
        torch.library.impl(f"_C::{name}", "CompositeExplicitAutograd")(lambda capability: False)
    from vllm.utils import torch_utils

    torch_utils.weak_ref_tensor = borrowed
    import tests.utils

    for way in ("fork", "spawn"):
        setattr(tests.utils, f"{way}_new_process_for_each_test", lambda function: function)


def borrowed(tensor: Any) -> Any:
    """A tensor in the same memory that does not keep it alive; vLLM has an op in CUDA for it."""
    import torch

    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return tensor
    numbers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    owner = types.SimpleNamespace(__cuda_array_interface__=numbers.__cuda_array_interface__)
    return torch.as_tensor(owner, device=tensor.device).view(tensor.dtype)


class AnyOf(MetaPathFinder):
    """Finds what lies below some packages that are not there as `Absent`."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> Absent:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def sglang() -> None:
    """SGLang's sources without its kernels and media libraries, and the one function of CUDA's runtime it calls."""
    import torch

    import_module("transformers.models.auto.processing_auto")  # it parses torchvision's version, where there is one
    import_module("transformers").AutoImageProcessor = types.SimpleNamespace(register=lambda *_, **__: None)
    sys.meta_path.append(
        AnyOf(
            "torchvision",
            "sgl_kernel",
            "cuda",
            "flashinfer",
            "datasets",
            "decord",
            "soundfile",
            "IPython",
            "llguidance",
        )
    )
    import sgl_kernel

    sgl_kernel.weak_ref_tensor = borrowed
    from cuda.bindings import runtime

    status = types.SimpleNamespace(cudaStreamCaptureStatusActive=1)
    error = types.SimpleNamespace(cudaSuccess=0)
    vars(runtime).update(cudaStreamCaptureStatus=status, cudaError_t=error)

    def info(stream: int) -> tuple[int, int, int]:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            return 0, int(torch.cuda.is_current_stream_capturing()), 0

    runtime.cudaStreamGetCaptureInfo = info


def transformers() -> None:
    Absent("datasets")


def pytorch() -> None:
    """torch's TestCase without its policies: they ask for functions of torch._C that a CPU build lacks."""
    from torch.testing._internal.common_utils import TestCase

    TestCase.wrap_with_cuda_policy = lambda *_: None


BEFORE: dict[str, Callable[[], None]] = {
    "vllm": vllm,
    "sglang": sglang,
    "pytorch": pytorch,
    "transformers-5.6": transformers,
}
"""What a project needs before its tests can be imported."""


class OneByOne:
    """A pytest plugin that runs every test in a process of its own, which then ends the session; the first goes on."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.folder, self.pattern = folder, pattern

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: Counter[str] = Counter()
        items[:] = [item for item in items if self.wanted(item)]
        for item in list(items):
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > MOST or self.place(item).with_suffix(".test").exists():
                items.remove(item)

    def wanted(self, item: pytest.Item) -> bool:
        return re.search(self.pattern, item.nodeid) is not None if self.pattern else captures(item)

    def place(self, item: pytest.Item) -> Path:
        path, _, name = item.nodeid.partition("::")
        return self.folder / path.replace("/", "+") / (re.sub(r"[^\w:,=-]", "-", name)[:180] + ".x")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        place = self.place(item)
        place.parent.mkdir(parents=True, exist_ok=True)
        process = os.fork()
        if process == 0:
            os.environ[PLACE] = str(place)
            signal.alarm(LONGEST)
            run(item, place)
            item.session.shouldstop = "this process is of one test"
            return True
        _, status = os.waitpid(process, 0)
        if not place.with_suffix(".test").exists():
            place.with_suffix(".test").write_text(json.dumps({"test": "died", "why": f"status {status}"}))
        return True


def program(project: str, folder: str, pattern: str, *files: str) -> None:
    """Fork for every test that is not in `folder` yet. The process of a test returns; the first one never does."""
    sys.path.insert(0, os.getcwd())
    sys.argv = [files[0]]
    BEFORE.get(project, lambda: None)()
    status = pytest.main([*OPTIONS, "--rootdir", os.getcwd(), *files], plugins=[OneByOne(Path(folder), pattern)])
    if PLACE not in os.environ:
        sys.stderr.flush()
        os._exit(int(status))


def captures(item: pytest.Item) -> bool:
    """Whether the test's name or source says that it captures."""
    try:
        text = inspect.getsource(inspect.unwrap(getattr(item, "function")))  # noqa: B009 -- doctests have none
    except (AttributeError, OSError, TypeError):
        text = ""
    return CAPTURES.search(item.nodeid.partition("::")[2] + text) is not None


def run(item: pytest.Item, place: Path) -> None:
    """Run one test, and note what it found."""
    from _pytest.runner import runtestprotocol

    told: dict[str, Any] = {"test": "passed"}
    for phase in reversed(runtestprotocol(item, log=False, nextitem=None)):
        if phase.outcome == "passed":
            continue
        text = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
        place.with_suffix(".err").write_text(text)
        raised = re.findall(r"^E +([\w.]+(?:Error|Exception|Exit)\b.*|fixture .* not found)", text, re.MULTILINE)
        raised = raised or text.splitlines()[-1:]
        how = "skipped" if phase.outcome == "skipped" else "raised"
        told = {
            "test": "failed" if raised and "AssertionError" in raised[-1] else how,
            "why": "".join(raised[-1:])[:160],
        }
    place.with_suffix(".test").write_text(json.dumps(told))


def reported(words: list[str]) -> dict[str, Any]:
    """What the check says of a program: its verdict, captures, compared replays, codes by severity."""
    from onegraph.check.program.run import run_program
    from onegraph.check.report import CheckError

    try:
        report = run_program(words)
    except CheckError as error:
        return {"check": str(error).partition(f"{words[0]} ")[2].partition(": ")[2][:160] or str(error)[-160:]}
    found = report.facts["captures"]
    return {
        "check": str(report.verdict),
        "captures": len(found) + report.facts["compiled calls"],
        "compared": sum(capture["compared"] for capture in found),
        "findings": dict(sorted(Counter(f"{f.code} {f.severity}" for f in report.findings).items())),
        "lines": sorted({f"{f.code} {os.path.basename(f.path)}:{f.line}" for f in report.findings}),
    }


def main(project: str, folder: str, pattern: str, *files: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process == 0:
        row = reported([__file__, "--program", project, str(Path(folder).resolve()), pattern, *files])
        place = Path(os.environ.get(PLACE, f"{folder}/module"))
        place.with_suffix(".report").write_text(json.dumps(row))
        os._exit(0)
    os.waitpid(process, 0)
    collect(project, folder)


def collect(project: str, folder: str) -> None:
    """Write what is in the folder to other_projects.json."""
    known = json.loads(LIST.read_text()) if LIST.is_file() else {}
    for path in sorted(Path(folder).glob("*/*.test")):
        told = path.with_suffix(".report")
        row = json.loads(path.read_text()) | (
            json.loads(told.read_text()) if told.is_file() else {"check": "no report"}
        )
        if "Only runs on" not in row.get("why", ""):  # the same test for another device
            known.setdefault(f"{project}/{path.parent.name.replace('+', '/')}", {})[path.stem] = row
    LIST.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    rows = [row for name, tests in known.items() if name.startswith(f"{project}/") for row in tests.values()]
    print(project, len(rows), Counter((row["test"], row["check"][:24]) for row in rows))


if __name__ == "__main__":
    if sys.argv[1] == "--program":
        program(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
