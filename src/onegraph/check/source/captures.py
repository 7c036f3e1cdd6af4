"""Where a file captures (`with torch.cuda.graph(...)` under whatever name, `capture_begin`, `make_graphed_callables`),
and functions that are named as steps are. What is found here by name is read, and counts where the reader meets it."""

import ast
import re
from collections.abc import Iterator

from onegraph.check.source.files import SourceFile

Function = ast.FunctionDef | ast.AsyncFunctionDef

_WORDS = ("graph", "capture_begin", "make_graphed_callables")
_CALLS = frozenset(["graph", "capture_begin", "make_graphed_callables"])

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


def concerns(file: SourceFile) -> bool:
    """False where no word of the file's can be a capture."""
    return any(word in file.text for word in _WORDS)


def names(file: SourceFile) -> frozenset[str]:
    """Names that stand for `torch.cuda.graph` and its like in a file: imported, or bound to it."""
    found = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {alias.asname or alias.name for alias in node.names if alias.name in _CALLS}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in _CALLS:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def within(node: ast.AST, aliases: frozenset[str]) -> bool:
    """True where something under `node`, functions in it included, may capture."""
    return any(_captures(inner, aliases) for inner in ast.walk(node))


def own(body: list[ast.stmt], aliases: frozenset[str]) -> bool:
    """True where these statements may capture, without what the functions and classes among them do."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if _captures(node, aliases):
            return True
        todo += ast.iter_child_nodes(node)
    return False


def _captures(node: ast.AST, aliases: frozenset[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in _CALLS
    return isinstance(node.func, ast.Name) and node.func.id in aliases
