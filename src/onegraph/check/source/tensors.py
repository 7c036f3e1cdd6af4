"""Tensors: attributes, operators, indexing, contexts, and the hazards of each."""

import ast
from dataclasses import replace

from onegraph.check.constructs import function_around
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.state import Call, Position
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Device,
    Ext,
    ExtObj,
    Method,
    Plain,
    Seq,
    Tensor,
    Unknown,
    Value,
    is_plain,
    read_at,
    tensors,
    varies,
)
from onegraph.check.tables import PLAIN_ATTRIBUTES


def constant(name: str) -> Value:
    """A dotted name outside the user's code."""
    if name == "typing.TYPE_CHECKING":
        return Const(False)
    if name in ("math.pi", "math.inf", "math.e", "torch.inf", "torch.pi"):
        return Plain("float")
    return Ext(name)


def view(tensor: Tensor, rank: int | None = None) -> Tensor:
    """Another look at the same storage."""
    return replace(tensor, rank=rank, optional=False, grown=False, parameter=False)


def as_mask(tensor: Tensor) -> Tensor:
    return replace(tensor, boolean=True)


def attribute(tensor: Tensor, name: str) -> Value:
    """`tensor.name`."""
    if name in ("shape",):
        return Plain("shape")
    if name == "device":
        return Device(tensor.device)
    if name == "is_cuda":
        return Const(tensor.on_device) if tensor.device else Plain("bool")
    if name in PLAIN_ATTRIBUTES:
        return Plain("int" if name == "ndim" else "")
    if name in ("T", "mT", "H", "mH", "data", "real", "imag"):
        return view(tensor, tensor.rank)
    if name == "grad":
        return UNKNOWN
    return Method(tensor, name)


def binary(machine: Machine, node: ast.AST, left: Value, right: Value) -> Value:
    """An operator of two operands, at least one of them a tensor."""
    operands = [v for v in (left, right) if isinstance(v, Tensor)]
    on_device = [t for t in operands if t.on_device]
    others = [v for v in (left, right) if not isinstance(v, Tensor)]
    if on_device:
        for other in others:
            if varies(other):
                scalar(machine, node, other, on_device[0])
        for operand in operands:
            cpu_operand(machine, node, operand)
        machine.used(operands, node)
    device = (on_device or operands)[0].device
    if len(operands) == 2 and not on_device and operands[0].device != operands[1].device:
        device = ""
    ranks = [t.rank for t in operands]
    rank = None if None in ranks or any(not is_plain(o) for o in others) else max(r for r in ranks if r is not None)
    if others and isinstance(others[0], Unknown):
        rank = None
    return machine.tensor(
        device,
        sure=all(t.sure for t in operands),
        boolean=len(operands) == 2 and all(t.boolean for t in operands),
        rank=rank,
        varying=any(t.varying for t in operands if t.on_host) or (not on_device and any(varies(o) for o in others)),
    )


def scalar(machine: Machine, node: ast.AST, value: Value, tensor: Tensor, what: str = "a kernel's argument") -> None:
    """A Python value that changes from step to step reaches a device op. Reading it from the device is the cause."""
    read = read_at(value)
    values = (f"read from the device at {read}",) if read else ()
    machine.report(
        "CG202",
        node,
        f"`{short(node)}` bakes in a Python value that changes from step to step as {what}",
        sure=tensor.sure and not read,
        values=values,
    )


def cpu_operand(machine: Machine, node: ast.AST, operand: Tensor) -> None:
    """A 0-d CPU tensor whose contents change meets a device tensor."""
    if operand.on_host and operand.rank == 0 and (operand.varying or operand.site in machine.step.host_written):
        machine.report("CG203", node, f"`{short(node)}` passes a CPU scalar by value, and the step changes it")


def written(machine: Machine, tensor: Tensor, source: Value, *, accumulates: bool) -> None:
    """An in-place write. On the host it makes contents that a replay does not make."""
    if not tensor.on_host or not machine.at.in_step or not tensor.site:
        return
    if tensor.pinned and tensor.site in machine.step.pinned_copies:
        machine.step.pinned_copies.pop(tensor.site)(
            "CG207", "the pinned source of this copy is written again in the same step"
        )
    moving = varies(source) or any(t.varying for t in tensors(source))
    if moving or (accumulates and not tensor.in_step):
        machine.step.host_written.add(tensor.site)


# ---- indexing


def load_item(machine: Machine, node: ast.Subscript, tensor: Tensor) -> Value:
    """`tensor[...]` as a value."""
    machine.used((tensor,), node)
    rank, basic = _index(machine, node, tensor, store=None)
    if basic:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        cut = any(isinstance(p, ast.Slice) and (p.lower is not None or p.upper is not None) for p in parts)
        return replace(view(tensor, rank), part=cut or tensor.part)
    return machine.tensor(tensor.device, sure=tensor.sure, boolean=tensor.boolean)


def store_item(machine: Machine, node: ast.Subscript, tensor: Tensor, value: Value) -> None:
    """`tensor[...] = value`."""
    machine.worked()
    rank, basic = _index(machine, node, tensor, store=value)
    if tensor.on_device:
        if isinstance(value, Tensor) and value.on_host and value.rank != 0 and not value.pinned:
            machine.report("CG102", node, f"`{short(node)} = ...` copies a CPU tensor to the device", sure=tensor.sure)
        elif is_plain(value) and ((basic and rank == 0) or _gathers(machine, node)):
            text = f"`{short(node)} = ...` sets one element from a Python number: a copy from pageable memory"
            machine.report("CG103", node, text, sure=tensor.sure)
        elif varies(value):
            scalar(machine, node, value, tensor)
    else:
        written(machine, tensor, value, accumulates=False)


def _gathers(machine: Machine, node: ast.Subscript) -> bool:
    """True where the index holds an integer tensor: the number is then copied to the device for index_put_."""
    machine.at.quiet += 1
    parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    values = [machine.evaluate(part) for part in parts if not isinstance(part, ast.Slice)]
    machine.at.quiet -= 1
    return any(isinstance(v, Tensor) and v.on_device and not v.boolean and v.rank != 0 and v.integer for v in values)


def _index(machine: Machine, node: ast.Subscript, tensor: Tensor, store: Value | None) -> tuple[int | None, bool]:
    """Check every part of an index. Returns the rank of the result where known, and whether it is a view."""
    parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    rank, basic = tensor.rank, True
    for part in parts:
        if isinstance(part, ast.Slice):
            _slice(machine, part, tensor)
            continue
        value = machine.evaluate(part)
        match value:
            case Const(value=None):
                rank = None if rank is None else rank + 1
            case Const(value=v) if v is Ellipsis:
                rank = None if rank != len(parts) else rank
            case Const() | Plain():
                rank = None if rank is None else rank - 1
                if isinstance(value, Plain) and value.kind not in ("int", ""):
                    rank = None
                if varies(value) and tensor.on_device:
                    scalar(machine, part, value, tensor, "an offset")
            case Tensor():
                rank, basic = None, False
                _tensor_index(machine, part, tensor, value, store)
            case Seq():
                rank, basic = None, False
                if tensor.on_device and value.kind == "list" and value.items != () and not tensors(value):
                    known = value.items is not None or is_plain(value.element)
                    if known:
                        text = f"`{short(node)}` indexes with a Python list: a copy from pageable memory"
                        machine.report("CG103", part, text, sure=tensor.sure)
                basic = value.kind == "tuple" and value.items is not None and all(is_plain(v) for v in value.items)
            case _:
                rank = None
                basic = basic and isinstance(value, Ext)
    return (rank if basic else None), basic


def _slice(machine: Machine, part: ast.Slice, tensor: Tensor) -> None:
    moving = []
    for bound in (part.lower, part.upper, part.step):
        if bound is None:
            continue
        value = machine.evaluate(bound)
        if isinstance(value, Tensor) and value.on_device:
            text = f"slice bound `{short(bound)}` is a device tensor, read on the host"
            machine.report("CG101", bound, text, sure=value.sure)
        elif varies(value):
            moving.append((bound, value))
    if not moving or not tensor.on_device:
        return
    if len(moving) == 1:
        text = f"slice bound `{short(moving[0][0])}` changes from step to step, and the shape with it"
        machine.report("CG208", moving[0][0], text, sure=tensor.sure and not read_at(moving[0][1]))
    else:
        scalar(machine, moving[0][0], moving[0][1], tensor, "an offset")


def _tensor_index(machine: Machine, part: ast.expr, tensor: Tensor, index: Tensor, store: Value | None) -> None:
    sure = tensor.sure and index.sure
    text = short(part)
    if tensor.on_host and index.on_device and index.rank == 0:
        machine.report("CG101", part, f"a CPU tensor is indexed by device value `{text}`, which is read", sure=sure)
    if not tensor.on_device:
        return
    if index.on_host and index.rank != 0:
        machine.report("CG103", part, f"index `{text}` is a CPU tensor: it is copied to the device", sure=sure)
    elif index.on_device and index.boolean:
        if store is None:
            machine.report("CG104", part, f"the shape of a selection by mask `{text}` depends on data", sure=sure)
        elif isinstance(store, Tensor) and (store.on_device or store.rank != 0):  # a number of the host is filled in
            sure = sure and (store.on_device or store.rank is not None)
            machine.report(
                "CG104", part, f"assigning a tensor under mask `{text}` looks for its true places", sure=sure
            )
    elif index.on_device and index.rank == 0:
        machine.report("CG101", part, f"0-d device tensor `{text}` as index is read on the host", sure=sure)


# ---- contexts


def enter(machine: Machine, node: ast.expr, value: Value) -> bool:
    """`with value:`; True for an explicit capture."""
    if isinstance(value, Device) and value.name:
        machine.at.default_device = value.name
    if isinstance(value, ExtObj) and value.kind == "torch.cuda.graph":
        _capture(machine, node, value)
        return True
    return False


def stream_hazard(at: Position, node: ast.expr, value: Value) -> tuple[str, str] | None:
    """What is wrong with work inside `with torch.cuda.stream(...)`, as (code, message)."""
    if not at.in_step or not isinstance(value, ExtObj) or value.kind not in ("torch.cuda.stream", "torch.cuda.Stream"):
        return None
    if value.note == "default":
        return "CG304", "the step works on the default stream, which cannot be captured"
    if value.note == "current" or not isinstance(node, ast.Call) or not node.args:
        return None
    stream = ast.unparse(node.args[0])
    found = [_waits(function, stream) for call in at.stack if (function := _function_source(call)) is not None]
    if not found:
        return None
    forked, joined = map(any, zip(*found, strict=True))  # a caller may fork and join it by the same name
    if not forked:
        return "CG303", f"`{stream}` has not waited for the captured stream: its work is not part of the capture"
    if not joined and not _joined_elsewhere(at, node.args[0]):
        return "CG305", f"nothing waits for `{stream}`: its work is not joined when capture ends"
    return None


def _waits(function: ast.AST, stream: str) -> tuple[bool, bool]:
    """Whether a function lets this stream wait, and whether it lets another one wait."""
    forked = joined = False
    for inner in ast.walk(function):
        if not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)):
            continue
        if inner.func.attr in ("wait_stream", "wait_event"):
            mine = ast.unparse(inner.func.value) == stream
            forked, joined = forked or mine, joined or not mine
        elif inner.func.attr == "wait":  # event.wait(stream)
            waits = bool(inner.args) and ast.unparse(inner.args[0]) == stream
            forked, joined = forked or waits, joined or not waits
    return forked, joined


def _joined_elsewhere(at: Position, stream: ast.expr) -> bool:
    """Whether another method of the file waits for a stream that an object keeps."""
    if not isinstance(stream, ast.Attribute):
        return False
    calls = (node for node in ast.walk(at.file.tree) if isinstance(node, ast.Call) and node.args)
    waits = (c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "wait_stream")
    return any(isinstance(c.args[0], ast.Attribute) and c.args[0].attr == stream.attr for c in waits)


def _capture(machine: Machine, node: ast.expr, value: ExtObj) -> None:
    """An explicit `torch.cuda.graph(...)`."""
    if machine.at.in_step:
        return
    machine.at.in_step = True
    try:
        if value.note == "default":
            machine.report("CG304", node, "capture on the default stream")
        elif value.note != "stream" and _on_other_device(machine.at):
            text = "capture on another GPU without `stream=`: torch's capture stream may belong to the first one"
            machine.report("CG303", node, text)
    finally:
        machine.at.in_step = False


def _function_source(call: Call) -> ast.AST | None:
    """The function being read in a frame."""
    line = getattr(call.node, "lineno", 0)
    return function_around(call.file.tree, line, line, ast.FunctionDef | ast.AsyncFunctionDef)


def _on_other_device(at: Position) -> bool:
    """True where the function names a GPU other than the first, or goes through several."""
    function = _function_source(at.stack[-1])
    if function is None:
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("cuda:") and node.value != "cuda:0":
                return True
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set_device":
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Constant) and first.value == 0):
                return True
    return False
