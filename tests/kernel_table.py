"""What ptxas makes of every CUDA source, for each card that it is for: the table of docs/cards.md.

    python -m tests.kernel_table     # writes it anew; NVRTC is enough, no GPU

tests/test_kernel_sources.py compiles them all and holds the table to what it finds.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from onegraph.ops import choices
from onegraph.ops.cuda import build

PAGE = Path(__file__).parent.parent / "docs" / "cards.md"
BEGIN, END = "<!-- kernels: python -m tests.kernel_table -->\n", "<!-- end of kernels -->\n"
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
    """Compiles a source, its example where `defines` says no other. BuildError where NVRTC refuses."""
    logs, compile_ = list[str](), build._compile

    def with_log(nvrtc: object, text: bytes, name: str, options: list[bytes], headers: Mapping[str, bytes]) -> tuple:
        made = compile_(nvrtc, text, name, [*options, b"--ptxas-options=-v"], headers)
        logs.append(made[1])
        return made

    checks = source.arguments.checks if source.arguments else ""
    with mock.patch.object(build, "_compile", with_log):
        cubin = source.cubin(source.example if defines is None else defines, capability, checks)
    assert cubin.startswith(b"\x7fELF")
    assert all(function.encode() in cubin for function in source.functions)
    (log,) = logs  # nothing of it was in the cache
    assert log.count("Compiling entry function") == log.count(" registers") >= len(source.functions), log
    return Usage(*(max(map(int, re.findall(form, log)), default=0) for form in FORMS))


FORMS = r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame", r"(\d+) bytes smem"


def version() -> str:
    return ".".join(map(str, build.check(build.bindings()[1].nvrtcVersion())))


def cell(found: Usage) -> str:
    return f"{found.registers}, {found.spilled} spilled" if found.spilled else str(found.registers)


def row(source: build.Source, found: Mapping[tuple[int, int], Usage]) -> str:
    """A line of the table."""
    cells = [cell(found[each]) if each in found else "" for each in CAPABILITIES]
    shared = f"{source.shared / 1024:.0f}" if source.shared else ""
    return f"| {' | '.join([source.path.name, source.family or '', shared, *cells])} |"


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
    page = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if ".cu |" in line]
    cells = {(row[0], each): text for row in rows for each, text in zip(CAPABILITIES, row[3:], strict=True) if text}
    return re.findall(r"NVRTC ([\d.]+\d)", page)[0], cells


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    with TemporaryDirectory() as fresh, mock.patch.object(build, "cache_dir", return_value=Path(fresh)):
        made = table()  # what is in the cache would tell nothing
    PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
