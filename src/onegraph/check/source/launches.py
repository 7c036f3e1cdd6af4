"""Kernels that are neither torch's nor Triton's, known by the names that launch them: CUDA, CuPy, CuTe, numba."""

import ast
from collections.abc import Iterable

from onegraph.check.source.machine import Machine, short
from onegraph.check.source.values import UNKNOWN, Const, Ext, ExtObj, Value, tensors
from onegraph.check.tables import LAUNCHES, MAKERS, PLANNERS

_KERNEL = "kernel of "
PLANNER = "planner of "
TRITON = "triton.kernel"


def made(name: str) -> ExtObj | None:
    """The kernel, or the object that plans launches, which a call of the external `name` makes; None for others."""
    if name in PLANNERS:
        return ExtObj(PLANNER + PLANNERS[name])
    return ExtObj(_KERNEL + MAKERS[name]) if name in MAKERS else None


def decorated(name: str) -> ExtObj | None:
    """The kernel that the decorator of the external `name` makes of a function; None for other decorators."""
    last = name.rsplit(".", 1)[-1]
    if name.startswith("triton.") and last == "jit":
        return ExtObj(TRITON)
    if name.startswith(("cutlass.cute.", "numba.cuda.", "cupyx.")) and last in ("jit", "rawkernel"):
        return ExtObj(_KERNEL + MAKERS.get(name, "CuTe DSL"))
    return None


def is_kernel(value: Value) -> bool:
    """Whether calling this launches; a function under somebody's `jit` that is not Triton's too."""
    if isinstance(value, ExtObj):
        return value.kind.startswith(_KERNEL) or value.kind == TRITON
    return isinstance(value, Ext) and (value.name in LAUNCHES or value.name.startswith("triton.kernel."))


def launch(machine: Machine, func: Value, given: Iterable[Value], node: ast.AST) -> Value:
    """A call of such a kernel: nothing here knows what it does."""
    whose = "compiled"
    if isinstance(func, ExtObj) and func.kind.startswith(_KERNEL):
        whose = func.kind.removeprefix(_KERNEL)
    elif isinstance(func, Ext):
        whose = LAUNCHES.get(func.name, whose)
    given = tuple(given)
    machine.used(given, node)
    machine.worked()
    if whose != "compiled" or any(t.on_device for v in given for t in tensors(v)):
        text = f"`{short(node)}` launches a {whose} kernel, which is not looked into"
        machine.report("CG401", node, text)
        return UNKNOWN
    return Const(None)
