"""Statements as text that can be compiled a second time: what they bind, and what their place in a class adds to them.

Inside of a class the compiler spells `self.__x` as `self._C__x`, and `super()` finds class and object by itself. Taken
out of their class, statements have to say both.
"""

import ast
import copy
import dis
import itertools
from collections.abc import Iterator
from types import CodeType
from typing import Any

from onegraph.check import constructs


def stored(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that nodes bind."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def targets(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What statements assign, by its text: names, attributes and elements."""
    found: dict[str, ast.expr] = {}
    for node in constructs.own_nodes(body):
        assigned: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            assigned = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            assigned = [node.target]
        for target in (t for a in assigned for t in constructs.targets(a)):
            if not any(isinstance(n, ast.Call) for n in ast.walk(target)):  # which may do more than to name it
                found[ast.unparse(target)] = target
    return found


def outside_of_class(body: list[ast.stmt], code: CodeType) -> list[ast.stmt]:
    """Statements of the function `code` that mean the same outside of its class; themselves where they do anyway."""
    first = code.co_varnames[0] if code.co_argcount else ""
    spell = _Spelled(_class_of(code), first)
    if not any(spell.differs(node) for statement in body for node in ast.walk(statement)):
        return body
    return [spell.visit(copy.deepcopy(statement)) for statement in body]


def _class_of(code: CodeType) -> str:
    """The class whose names are private where `code` is: that of the method, for functions in it too; "" for none."""
    parts = code.co_qualname.split(".")
    for name, following in reversed(list(itertools.pairwise(parts))):
        if "<locals>" not in (name, following):
            return name
    return ""


class _Spelled(ast.NodeTransformer):
    """Private names as the compiler spells them in class `owner`; `super()` with the class and the method's `first`
    argument."""

    def __init__(self, owner: str, first: str) -> None:
        self.owner, self.first, self.depth = owner.lstrip("_"), first, 0

    def differs(self, node: ast.AST) -> bool:
        return self._super(node) or any(self._name(name) != name for _, name in _names(node))

    def _name(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__")
        return f"_{self.owner}{name}" if private and self.owner else name

    def _super(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or node.args or node.keywords or not self.first:
            return False
        return isinstance(node.func, ast.Name) and node.func.id == "super"

    def visit(self, node: ast.AST) -> Any:
        for field, name in _names(node):
            setattr(node, field, self._name(name))
        if isinstance(node, ast.ClassDef):  # in its own body its own name counts
            outer = [*node.bases, *node.keywords, *node.decorator_list]
            for part in outer:
                self.visit(part)
            return node
        if isinstance(node, ast.Call) and self._super(node) and not self.depth:
            names = ("__class__", self.first)
            node.args = [ast.copy_location(ast.Name(name, ast.Load()), node.func) for name in names]
            return node
        self.depth += isinstance(node, constructs.Functions)
        self.generic_visit(node)
        self.depth -= isinstance(node, constructs.Functions)
        return node


def _names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(field, name) of what a node calls by a name that the compiler may spell in another way; keywords it leaves."""
    for field in () if isinstance(node, ast.alias | ast.keyword) else ("id", "attr", "arg", "name"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield field, value


def compiled(body: list[ast.stmt], binds: frozenset[str], names: tuple[str, ...], path: str) -> CodeType:
    """`def __outer__(*names)`, which gives a function of the statements over cells of `names`; called, it returns by
    its text a function for each target that they assigned.

    Args:
        binds: names that the statements bind. path: of their file, whose lines they keep.
    """
    told = ", ".join(f"{text!r}: (lambda: {text})" for text in targets(body))
    text = f"def __outer__({', '.join(names)}):\n def __body__():\n  return {{{told}}}\n return __body__"
    module = ast.parse(text)
    outer = module.body[0]
    assert isinstance(outer, ast.FunctionDef)
    inner = outer.body[0]
    assert isinstance(inner, ast.FunctionDef)
    first = body[0]
    for node in (inner, *ast.walk(inner.body[0])):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = first.lineno
    shared = sorted(binds & set(names))
    head: list[ast.stmt] = [ast.copy_location(ast.Nonlocal(names=shared), first)] if shared else []
    inner.body = [*head, *body, inner.body[0]]
    return compile(module, path, "exec", dont_inherit=True)


def twins(original: CodeType, copy: CodeType) -> dict[CodeType, tuple[CodeType, dict[int, int]]]:
    """For `copy`, and the functions defined in it, the code of the program's own that says the same, with the index of
    the instruction for that of each of the copy's."""
    known: dict[Any, list[int]] = {}
    for instruction in dis.get_instructions(original):
        known.setdefault((instruction.opname, instruction.positions), []).append(instruction.offset)
    pairs: dict[int, int] = {}
    met: dict[Any, int] = {}
    last = 0
    for instruction in dis.get_instructions(copy, show_caches=True):
        if instruction.opname == "CACHE":  # where a frame that calls Python code says that it is
            if last in pairs:
                pairs[instruction.offset] = pairs[last] + instruction.offset - last
            continue
        last, key = instruction.offset, (instruction.opname, instruction.positions)
        offsets, nth = known.get(key, []), met.get(key, 0)
        met[key] = nth + 1
        if nth < len(offsets):
            pairs[last] = offsets[nth]
    found = {copy: (original, pairs)}
    theirs = [c for c in original.co_consts if isinstance(c, CodeType)]
    for code in (c for c in copy.co_consts if isinstance(c, CodeType)):
        other = next((t for t in theirs if _same_place(t, code)), None)
        if other is not None:
            found |= twins(other, code)
    return found


def _same_place(one: CodeType, other: CodeType) -> bool:
    return (one.co_name, list(one.co_positions())[:1]) == (other.co_name, list(other.co_positions())[:1]) or (
        one.co_name == other.co_name and one.co_firstlineno == other.co_firstlineno
    )
