"""What ptxas makes of every CUDA source, for each card that it is for: the table of docs/how-it-works/kernels.md.

    python -m tests.ops.kernel_table     # writes it and the record anew; NVRTC is enough, no GPU

tests/ops/test_kernel_sources.py holds the table to what ptxas says. kernel_usage.txt records that by a digest of all
that it rests on (NVRTC's version, its options, the source and what it includes), so that tests compile what changed.
"""

import hashlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from unittest import mock

import triton

from onegraph.ops import choices
from onegraph.ops.cuda import build, e8p_common, e8p_portable

sys.path += map(str, Path(__file__).parents[:2])  # where this is run as a module

from h200 import H200
from on_cpu import once

RECORD = Path(__file__).with_name("kernel_usage.txt")
USED = "ONEGRAPH_TEST_KERNELS_USED"  # a file that takes the line of each kernel whose usage a test asks for
VERBOSE = b"--ptxas-options=-v"
PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "kernels.md"
BEGIN, END = "<!-- kernels: python -m tests.ops.kernel_table -->\n", "<!-- end of kernels -->\n"
CAPABILITIES = build.PORTABLE
REGISTERS = 255  # of a thread
SHARED = {8: 163, 9: 227, 10: 227, 12: 99}  # KB a block can have, by major version; 8.6 and 8.9 have 99


@dataclass(frozen=True)
class Usage:
    """Of a source's kernels the most that one takes: registers a thread, bytes of local memory (what is spilled, and
    what stands on the stack), bytes of shared memory a block."""

    registers: int
    spilled: int
    stack: int
    shared: int


def room(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block can have."""
    return (99 if capability in ((8, 6), (8, 9)) else SHARED[capability[0]]) << 10


def usage(source: build.Source, capability: tuple[int, int], defines: Mapping[str, int] | None = None) -> Usage:
    """Of a source, its example where `defines` says no other: recorded, or `compiled`."""
    key = digest(compilation(source, capability, defines))
    found = recorded().get(key) or compiled(source, capability, defines)
    if used := os.environ.get(USED):
        with open(used, "a") as file:
            file.write(f"{key} {' '.join(map(str, astuple(found)))}\n")
    return found


def compilation(
    source: build.Source, capability: tuple[int, int], defines: Mapping[str, int] | None = None
) -> build.Compilation:
    checks = source.arguments.checks if source.arguments else ""
    return source.compilation(source.example if defines is None else defines, capability, checks)


def digest(asked: build.Compilation) -> str:
    options = [option.encode() for option in asked.options]
    return hashlib.sha256(_all_of(asked.name, asked.text, [*options, VERBOSE], asked.headers)).hexdigest()[:32]


@cache
def recorded() -> dict[str, Usage]:
    """By digest. A kernel that is not among them is compiled."""
    lines = map(str.split, RECORD.read_text().splitlines())
    return {key: Usage(*map(int, numbers)) for key, *numbers in lines}


def compiled(source: build.Source, capability: tuple[int, int], defines: Mapping[str, int] | None = None) -> Usage:
    """As `usage`, of the compiler's own log. BuildError where NVRTC refuses."""
    logs: list[str] = []

    def with_log(*given: Any) -> tuple[bytes, str]:
        made = compiled_once(*given, VERBOSE)
        logs.append(made[1])
        return made

    with TemporaryDirectory() as fresh, mock.patch.multiple(build, cache_dir=lambda: Path(fresh), _compile=with_log):
        cubin = compilation(source, capability, defines).compiled()
    assert cubin.startswith(b"\x7fELF")
    functions = source.form(capability).functions
    assert all(function.encode() in cubin for function in functions)
    (log,) = logs
    assert log.count("Compiling entry function") == log.count(" registers") >= len(functions), log
    return Usage(*(max(map(int, re.findall(form, log)), default=0) for form in FORMS))


COMPILE = build._compile


def compiled_once(
    nvrtc: Any, text: bytes, name: str, options: list[bytes], headers: Mapping[str, bytes], *more: bytes
) -> tuple[bytes, str]:
    """`build._compile`, once for the same bytes: `build/nvrtc` keeps what it makes, and its log."""
    key = _all_of(name, text, [*options, *more], headers)

    def make(out: Path) -> None:
        out.write_bytes(pickle.dumps(COMPILE(nvrtc, text, name, [*options, *more], headers)))

    return pickle.loads(once("nvrtc", key, "made", make).read_bytes())


def _all_of(name: str, text: bytes, options: list[bytes], headers: Mapping[str, bytes]) -> bytes:
    """All that a compilation rests on."""
    texts = [text]
    for each in texts:  # those that it includes, and they
        found = [headers[file] for file in re.findall(r'#include "([\w.]+)"', each.decode())]
        texts += [header for header in found if header not in texts]
    parts = [version().encode(), name.encode(), *options, *texts]
    return b"".join(len(part).to_bytes(8) + part for part in parts)


def accepts(source: build.Source, capability: tuple[int, int], defines: Mapping[str, int], checks: str) -> None:
    """That the compiler's front end takes it with `checks` behind it, in a twentieth of the time that code takes.
    BuildError where it does not."""
    asked = source.compilation(defines, capability, checks)
    nvrtc, options = build.bindings()[1], [option.encode() for option in (*asked.options, "--fdevice-syntax-only")]
    COMPILE(nvrtc, asked.text, asked.name, options, asked.headers)


FORMS = r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame", r"(\d+) bytes smem"


def version() -> str:
    return ".".join(map(str, build.check(build.bindings()[1].nvrtcVersion())))


def cell(found: Usage) -> str:
    return f"{found.registers}, {found.spilled} spilled" if found.spilled else str(found.registers)


def row(source: build.Source, found: Mapping[tuple[int, int], Usage]) -> str:
    """A line of the table."""
    cells = [cell(found[each]) if each in found else "" for each in CAPABILITIES]
    shared = f"{source.shared / 1024:.0f}" if source.shared else ""
    return f"| {' | '.join([source.path.name, ', '.join(source.families), shared, *cells])} |"


def sources() -> Iterator[build.Source]:
    """Those of ops, by name."""
    yield from sorted((each for each in choices.sources() if each.ops), key=lambda each: each.path.name)


def table() -> str:
    head = f"| | family | KB | {' | '.join(f'{major}.{minor}' for major, minor in CAPABILITIES)} |"
    lines = [head, "|---" * (3 + len(CAPABILITIES)) + "|"]
    lines += [row(source, {each: usage(source, each) for each in source.capabilities}) for source in sources()]
    return f"\nNVRTC {version()}.\n\n" + "\n".join(lines) + "\n\n"


def written() -> tuple[str, dict[tuple[str, tuple[int, int]], str]]:
    """The version and the cells that the page has, those of cards that a source is for."""
    page = between(PAGE.read_text(), (BEGIN, END))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if ".cu |" in line]
    cells = {(row[0], each): text for row in rows for each, text in zip(CAPABILITIES, row[3:], strict=True) if text}
    return re.findall(r"NVRTC ([\d.]+\d)", page)[0], cells


# ------------------------------------------------------------------------------------- the loop of the portable linear

LOOP = "<!-- loop -->\n", "<!-- end of loop -->\n"


def loop(bits: int) -> int:
    """Instructions that a warp of the portable E8P linear runs for a row tile, at one token on sm_80: of the smallest
    loop that holds products, by row tile."""
    plan = e8p_portable.E8PTiling.plan(14336, 4096, bits, 1, H200)
    defines = plan.defines(14336, 4096, bits, False, (True, False, False, True, False))
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(e8p_portable.KERNELS.cubin(defines, (8, 0)))
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", "-fun", "e8p_portable", file.name]
        environment = os.environ | {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [(int(at, 16), word) for at, word in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    products = [at for at, word in lines if "IMMA" in word]
    jumps = [(at, int(to, 16)) for at, word in lines for to in re.findall(r"BRA.*?0x([0-9a-f]+)", word)]
    first, last = min(
        ((to, at) for at, to in jumps if to <= products[0] < products[-1] <= at), key=lambda x: x[1] - x[0]
    )
    inside = sum(first <= at <= last for at, _ in lines)
    return round(inside / (len(products) / PRODUCTS[bits]))


TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCTS = {2: 8, 3: 16, 4: 16}  # of a row tile


def loops() -> str:
    lines = [
        "| bits | bytes of codes | instructions per warp | lane instructions per weight | bytes/clock/SM, at most |"
    ]
    lines.append("|---" * 5 + "|")
    for bits in (2, 3, 4):
        size, count = e8p_common.SLOT[bits], loop(bits)
        lines.append(f"| {bits} | {size} | {count} | {count * 32 / (16 * 256):.1f} | {4 * size / count:.0f} |")
    return "\n" + "\n".join(lines) + "\n\n"


def between(page: str, markers: tuple[str, str]) -> str:
    return page.partition(markers[0])[2].partition(markers[1])[0]


def replaced(page: str, markers: tuple[str, str], text: str) -> str:
    before, _, rest = page.partition(markers[0])
    return before + markers[0] + text + markers[1] + rest.partition(markers[1])[2]


def main() -> None:
    PAGE.write_text(replaced(replaced(PAGE.read_text(), LOOP, loops()), (BEGIN, END), table()))
    tests = [path for path in Path(__file__).parent.glob("test_*.py") if "kernel_table.usage" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not gpu", "-k", "spill or compiles", *tests]
    with TemporaryDirectory() as folder:
        used = Path(folder, "used")
        subprocess.run(command, env=os.environ | {USED: str(used)}, check=True)
        RECORD.write_text("".join(sorted({*used.read_text().splitlines(keepends=True)})))


if __name__ == "__main__":
    main()
