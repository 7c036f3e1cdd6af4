"""Kernels and ops that the checker cannot analyse, declared safe to capture by their authors.

A library declares its own ops without importing this package, in any of its modules:

    __capturable__ = ("mylib::*",)

A user declares any op with `declare`, which takes precedence.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

_DECLARED: dict[str, bool] = {}
_AT = " at "


def declare(op: Any, *, capturable: bool = True) -> None:
    """Say that a custom op, Triton kernel or other opaque launch is (not) safe to capture.

    Args:
        op: "namespace::name" (a `*` matches anything, e.g. "mylib::*"), a torch op or overload, or a Triton kernel.
        capturable: True: no host read, no lazy work, constant launch; it is no longer reported as unverified. False: it
            is an error wherever it is launched.

    A kernel or op that is given itself is meant alone; a name means every kernel that is called so.
    """
    _DECLARED[key_of(op)] = capturable


@contextmanager
def declared(*ops: Any, capturable: bool = True) -> Iterator[None]:
    """`declare` for the length of a block, for tests."""
    before = dict(_DECLARED)
    for op in ops:
        declare(op, capturable=capturable)
    try:
        yield
    finally:
        _DECLARED.clear()
        _DECLARED.update(before)


def capturable(key: str) -> bool | None:
    """What was declared about the op or kernel of this key; None where nobody said anything. The last word wins."""
    name = key.partition(_AT)[0]
    for pattern, value in reversed(_DECLARED.items()):
        if pattern in (key, name) or fnmatchcase(name, pattern):
            return value
    if any(fnmatchcase(name, pattern) for pattern in _of_libraries(len(sys.modules))):
        return True
    return None


def nameless(known: Callable[[], Collection[str]]) -> list[str]:
    """What was declared by a name that none of the known ops has, a sentence each. Names of kernels cannot be known,
    and ops of a library that is not imported are not there: a name is told where one like it is, or its namespace."""
    ops = known() if _DECLARED else ()  # torch has thousands
    found = []
    for name in _DECLARED:
        space, colons, _ = name.partition("::")
        if _AT in name or space == "triton" or name.startswith("triton:") or any(fnmatchcase(op, name) for op in ops):
            continue
        spelled = name if colons else name.removeprefix("torch.ops.").replace(".", "::", 1)
        like = [spelled] if spelled in ops else get_close_matches(spelled, ops, 1, 0.8) if colons else []
        if like or (colons and any(op.startswith(f"{space}::") for op in ops)):
            found.append(f'declare("{name}"): there is no such op' + "".join(f"; is it {op}?" for op in like))
    return found


@lru_cache(maxsize=1)
def _of_libraries(modules: int) -> tuple[str, ...]:
    """Every pattern of a `__capturable__` that names its namespace; read again when `modules` more are loaded."""
    found: list[str] = []
    for module in list(sys.modules.values()):
        words = getattr(module, "__dict__", {}).get("__capturable__", ())
        if isinstance(words, tuple | list):
            found += [w for w in words if isinstance(w, str) and "*" not in w.split("::")[0]]
    return tuple(found)


def key_of(op: Any) -> str:
    """What a declaration is kept by: the name, of a Triton kernel with the place of its code: names of kernels are
    common (`add`, `copy`)."""
    name = name_of(op)
    code = None if isinstance(op, str) else getattr(_function_of(op), "__code__", None)
    return name if code is None else f"{name}{_AT}{code.co_qualname}{_AT}{code.co_filename}"


def name_of(op: Any) -> str:
    """The name that a finding uses: "ns::op" of torch ops, "triton:kernel" of Triton kernels."""
    if isinstance(op, str):
        return op
    for attribute in ("_qualified_op_name", "_qualname"):  # OpOverloadPacket, CustomOpDef
        name = getattr(op, attribute, None)
        if isinstance(name, str):
            return name
    schema = getattr(op, "_schema", None)  # OpOverload
    if schema is not None:
        return str(schema.name)
    name = getattr(_function_of(op), "__name__", None)
    if name is None:
        raise ValueError(f"declare: got {type(op).__name__}, allowed an op, a Triton kernel or its name as text")
    return f"triton:{name}"


def _function_of(op: Any) -> Any:
    """What a kernel was made of: autotuner and JIT wrappers keep it."""
    while hasattr(op, "fn"):
        op = op.fn
    return op
