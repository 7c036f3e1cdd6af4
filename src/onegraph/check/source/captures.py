"""Where a file captures (`with torch.cuda.graph(...)` under whatever name, `capture_begin`, `make_graphed_callables`),
and functions that are named as steps are. What is found here by name is read, and counts where the reader meets it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from onegraph.check.constructs import end_of, own_nodes
from onegraph.check.source.files import SourceFile

Function = ast.FunctionDef | ast.AsyncFunctionDef

_CALLS = frozenset(["graph", "capture_begin", "make_graphed_callables"])
_WORD = re.compile(rf"\b(?:{'|'.join(sorted(_CALLS))})\b")

_OF = "decode|decoding|denoise|denoising|forward|generate|generation|inference|model|prefill|sampling|train|training"

STEP = re.compile(rf"step|forward|decode(?:_one)?(?:_tokens?)?|(?:{_OF})_step")
"""Names of functions at the top level that are read as a step, whoever calls them."""

STEP_METHOD = re.compile(rf"_?(?:{_OF})_step")
"""Names of methods, of classes that are no modules. `step` alone is an optimizer's or a scheduler's."""


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under its conditions too, but for `if __name__ == "__main__"`: that is run."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.TryStar | ast.With):
            for part in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from statements(part)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


@dataclass(frozen=True)
class Captures:
    """`names`: what stands for `torch.cuda.graph` and its like in a file, imported or bound to it; `places`: lines and
    columns of the calls that may capture."""

    names: frozenset[str]
    places: tuple[tuple[int, int], ...]

    def within(self, node: Function | ast.ClassDef) -> bool:
        """True where something under `node`, functions in it included, may capture."""
        first = min([node, *node.decorator_list], key=lambda n: n.lineno)
        begin, end = (first.lineno, first.col_offset), end_of(node)
        return any(begin <= place < end for place in self.places)


def found_in(file: SourceFile) -> Captures:
    """Where a file may capture: nowhere, mostly, which its text tells without a look at the tree."""
    if not _WORD.search(file.text):
        return Captures(frozenset(), ())
    names, calls = set(), []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name in _CALLS}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in _CALLS:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found = frozenset(names)
    return Captures(found, tuple((c.lineno, c.col_offset) for c in calls if _captures(c, found)))


def own(body: list[ast.stmt], names: frozenset[str]) -> bool:
    """True where these statements may capture, without what the functions and classes among them do."""
    return any(_captures(node, names) for node in own_nodes(body))


def _captures(node: ast.AST, names: frozenset[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in _CALLS
    return isinstance(node.func, ast.Name) and node.func.id in names
