"""The corpus: cases, what their comments expect, and what was measured on a GPU (`truth.json`)."""

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (
    "corpus",
    "heldout",
    "heldout2",
    "heldout3",
    "heldout4",
    "heldout5",
    "heldout6",
    "heldout7",
    "heldout8",
    "heldout9",
    "heldout10",
    "heldout11",
    "heldout12",
    "triton",
    "triton_users",
)
STEPS = 6  # that are measured of a case whose file says nothing else
_EXPECT = re.compile(r"#\s*expect:\s*(.+)$")


@dataclass(frozen=True)
class Expected:
    """A line that must be reported under one of `codes`; `optional` lines may be reported and need not.

    `# expect: CG104 @vanilla_experts` in a shared class is expected by `factory_bad_vanilla_experts` alone.
    """

    line: int
    codes: frozenset[str]
    optional: bool
    only: str = ""


@dataclass(frozen=True)
class Case:
    """One factory of one file. kind: "bad", "ok" or "quiet" (a side effect without a wrong result)."""

    name: str
    path: Path
    kind: str
    expected: tuple[Expected, ...]
    gpus: int
    hazard: int
    steps: int

    @property
    def factory(self) -> Callable[[], Any]:
        return getattr(module(self.path), self.name.split(":")[1])

    @property
    def target(self) -> str:
        return f"{self.path}:{self.name.split(':')[1]}"


def module(path: Path) -> Any:
    name = f"onegraph_corpus_{path.parent.name}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


@functools.cache
def cases(folder: str = "corpus") -> tuple[Case, ...]:
    return tuple(_cases(folder))


def _cases(folder: str) -> Iterator[Case]:
    for path in sorted((HERE / folder).glob("h*.py")):
        lines = path.read_text().splitlines()
        starts = [(i, m) for i, text in enumerate(lines, 1) if (m := re.match(r"(def|class) (\w+)", text))]
        gpus, steps = (
            next((int(m.group(1)) for text in lines if (m := re.match(rf"{name} = (\d+)", text))), default)
            for name, default in (("GPUS", 1), ("STEPS", STEPS))
        )
        shared = [e for start, end, match in _spans(starts, len(lines)) if not match.group(2).startswith("factory_")
                  for e in _expected(lines, start, end)]  # fmt: skip
        for start, end, match in _spans(starts, len(lines)):
            name = match.group(2)
            if not name.startswith("factory_"):
                continue
            kind = name.split("_")[1]
            own = name.split("_", 2)[2]
            expected = _expected(lines, start, end) + [e for e in shared if e.only == own and kind != "ok"]
            if kind == "bad" and all(e.optional for e in expected):
                expected += [e for e in shared if not e.only]
            told = re.search(r"# hazard: (\d+)", lines[start - 1]) or re.match(r"h(\d+)", path.stem)
            hazard = int(told.group(1))  # type: ignore[union-attr]
            yield Case(f"{path.stem}:{name}", path, kind, tuple(expected), gpus, hazard, steps)


@functools.cache
def truth() -> dict[str, dict[str, Any]]:
    file = HERE / "truth.json"
    return json.loads(file.read_text())["cases"] if file.is_file() else {}


def _spans(starts: list[Any], count: int) -> Iterator[tuple[int, int, Any]]:
    for index, (line, match) in enumerate(starts):
        yield line, (starts[index + 1][0] - 1 if index + 1 < len(starts) else count), match


def _expected(lines: list[str], start: int, end: int) -> list[Expected]:
    found = []
    for number in range(start, end + 1):
        match = _EXPECT.search(lines[number - 1])
        for part in match.group(1).split(",") if match else ():
            words = part.split()
            only = next((w[1:] for w in words if w.startswith("@")), "")
            found.append(Expected(number, frozenset(words[0].split("|")), "optional" in words[1:], only))
    return found
