"""`onegraph env`: what this machine has and what will run on it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from onegraph import __version__
from onegraph.cli.common import add_json, one_line, print_json
from onegraph.formats.extras import EXTRAS, install, packages

EPILOG = """\
examples:
  onegraph env
  onegraph env --json > env.json      # to attach to a bug report
"""
DESCRIPTION = """\
Prints what this machine has, one line each. Where there is a GPU, also which family of kernels each op runs on it and
why no better one (ONEGRAPH_KERNELS forces one: hopper, portable, triton or reference), and whether a small CUDA graph
that it captures and replays is right.
"""
# Families of kernels; "only": of ops that have no kernel of another; "none": whose only one cannot be had.
FAMILIES = "hopper", "portable", "triton", "reference"
ORDER = (*FAMILIES, *(f"{family} only" for family in FAMILIES), "none")
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "transformers", "vllm")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "env",
        help="versions, GPU, driver, which kernels run, and whether a CUDA graph can be captured here",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        print_json(found)
        return 0
    width = max(map(len, found))
    for key, value in found.items():
        for i, line in enumerate(value if isinstance(value, list) else [value]):
            print(f"{key if i == 0 else '':<{width}}  {'-' if line is None else line}")
    return 0


def collect() -> dict[str, Any]:
    """Name -> value; a value is text, None where there is none, or a list with an entry for each GPU."""
    found: dict[str, Any] = {"onegraph": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    import torch

    from onegraph.api.sandbox import state
    from onegraph.ops import family

    found["extras"] = extras()
    found["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    found["cpu"] = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    found["gcc"] = _gcc()
    found["cuda (torch)"] = torch.version.cuda
    found["driver"] = _driver()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    found["gpu"] = [_gpu(i) for i in gpus] or None
    found[family.VARIABLE] = family.FORCED
    found["kernels"] = [*(line for i in gpus for line in kernels(i)), *cpu_kernels(found["gcc"] is not None)]
    found["sandbox"] = state()
    found["capture"] = [try_capture(i) for i in gpus] or "no GPU: steps run eagerly"
    return found


def extras() -> list[str]:
    """Lines: each extra of onegraph with the versions of its packages, or how it is installed."""
    lines = []
    for extra in EXTRAS:
        versions: dict[str, str | None] = {}
        for package in packages(extra):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = None
        if missing := [package for package, version in versions.items() if version is None]:
            lines.append(f"{extra}: {', '.join(missing)} missing; {install(extra)}")
        else:
            lines.append(f"{extra}: {', '.join(f'{package} {version}' for package, version in versions.items())}")
    return lines


def _gcc() -> str | None:
    from onegraph.ops.cpu.build import compiler

    path = compiler()
    if path is None:
        return None
    try:
        answer = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return f"{path}, which does not run"
    return f"{answer.stdout.strip()} ({path})" if answer.returncode == 0 else f"{path}, which is not GCC"


def cpu_kernels(gcc: bool) -> list[str]:
    """Lines: what runs on the CPU: the ops with a form of its own, and the C that GCC compiles."""
    from onegraph.ops import cpu
    from onegraph.ops.choices import registered

    own = sorted(op.name for op in registered().values() if op.cpu is not None)
    sources = ", ".join(sorted(path.stem for path in Path(cpu.__file__).parent.glob("*.c")))
    made = f"cpu C: {sources}" if gcc else f"cpu not C ({sources}): gcc is not found; torch's operations take longer"
    return [f"cpu own form: {', '.join(own)}", made, "cpu reference: all other ops"]


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def _gpu(index: int) -> str:
    import torch

    p = torch.cuda.get_device_properties(index)
    return (
        f"cuda:{index} {p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
    )


def kernels(index: int) -> list[str]:
    """Lines: the ops of each family of kernels, and why what stands before it does not run."""
    from onegraph.ops.choices import choices

    found: dict[str, list[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for choice in choices(index):
        family = f"{choice.family} only" if choice.only else choice.family
        name = f"{choice.op} ({', '.join(choice.sources)})" if choice.sources and choice.refused else choice.op
        found.setdefault(family, []).append(name)
        for source, why in choice.refused.items():
            reasons.setdefault(why, {})[source] = None
    lines = [f"{family}: {', '.join(found[family])}" for family in ORDER if family in found]
    lines += [f"not {', '.join(sources)}: {why}" for why, sources in reasons.items()]
    return [f"cuda:{index} {line}" for line in lines]


def try_capture(index: int) -> str:
    """Captures a small step, replays it on another input and says whether the result is right."""
    import torch

    from onegraph.runtime.graph import Runner

    device = torch.device("cuda", index)
    try:
        x = torch.zeros(4, device=device)
        runner = Runner(lambda x: x * 2 + 1, {"x": x})
        for value in (3.0, 5.0):
            if not torch.equal(runner(x=torch.full_like(x, value)), torch.full_like(x, 2 * value + 1)):
                return f"cuda:{index} replays a wrong result"
        return f"cuda:{index} works"
    except Exception as error:  # whatever goes wrong is the answer
        return f"cuda:{index} fails: {type(error).__name__}: {one_line(error, 200)}"
