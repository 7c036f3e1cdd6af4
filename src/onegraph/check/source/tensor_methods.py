"""Methods of a tensor, and the functions of the same name in `torch`."""

import ast
from dataclasses import replace

from onegraph.check import tables
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.state import Position
from onegraph.check.source.tensors import as_mask, cpu_operand, scalar, view, written
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Device,
    Ext,
    ExtObj,
    Keywords,
    Plain,
    Seq,
    Tensor,
    Value,
    is_plain,
    read_at,
    tensors,
    varies,
)

_SPLITS = {"split", "tensor_split", "split_with_sizes"}
_WAITING = {"inverse", "cholesky", "to_sparse"}


def device_of(value: Value | None) -> str:
    """The device that a value names, "" where it names none or is not known."""
    match value:
        case Device():
            return value.name
        case Const(value=str() as name) if name.split(":")[0] in ("cuda", "cpu"):
            return name
        case Const(value=bool()):
            return ""
        case Const(value=int() as index):
            return f"cuda:{index}"
        case Tensor():
            return value.device
    return ""


def device_argument(args: list[Value], keywords: Keywords) -> str:
    """The device among the arguments of `.to(...)`, "" where there is none or it is not known."""
    if "device" in keywords:
        return device_of(keywords["device"])
    return device_of(args[0]) if args else ""


def rank_of(last: str, args: list[Value]) -> int | None:
    """Number of dimensions of what a factory makes."""
    first = args[0] if args else UNKNOWN
    if last == "tensor":
        rank = 0
        while isinstance(first, Seq):
            rank += 1
            first = first.items[0] if first.items else UNKNOWN
        return rank if rank and (is_plain(first) or rank == 1) else None
    if last in tables.VECTORS:
        return 1
    if last == "scalar_tensor":
        return 0
    if last == "eye":
        return 2
    if isinstance(first, Seq):
        return len(first.items) if first.items is not None else None
    if last in ("full", "randint", "normal"):
        return None
    if args and all(isinstance(a, Const | Plain) and getattr(a, "kind", "") != "shape" for a in args):
        return len(args)
    return None


def split_result(at: Position, tensor: Tensor, args: list[Value]) -> Value:
    part = view(tensor)
    if args and isinstance(args[0], Seq) and args[0].items is not None:
        return Seq("tuple", (part,) * len(args[0].items), in_step=at.in_step)
    return Seq("tuple", None, part, at.in_step)


def moving(at: Position, tensor: Tensor) -> bool:
    """True where the contents change from step to step: an input, or made in the step from something."""
    return tensor.varying or (tensor.in_step and tensor.on_device and not at.presume)


def _flag(value: Value | None) -> bool:
    return isinstance(value, Const) and value.value is True


def move(machine: Machine, tensor: Tensor, device: str, node: ast.AST, *, non_blocking: bool) -> Tensor:
    """`tensor.to(device)` where the device is another one."""
    if tensor.on_host and device.startswith("cuda"):
        if not tensor.pinned:
            text = f"`{short(node)}` copies from pageable host memory"
            machine.report("CG102", node, text, sure=tensor.sure and not machine.at.presume)
        elif not non_blocking:
            text = f"`{short(node)}` waits for the copy: pinned memory needs non_blocking=True"
            machine.report("CG102", node, text, sure=tensor.sure)
        if tensor.pinned:
            _pinned(machine, tensor, node)
            if non_blocking and tensor.site and machine.at.in_step:
                machine.step.pinned_copies[tensor.site] = machine.remember(node)
        return machine.tensor(device, sure=tensor.sure, boolean=tensor.boolean, rank=tensor.rank)
    if tensor.on_device and device == "cpu":
        machine.report("CG101", node, f"`{short(node)}` copies a device tensor to the host", sure=tensor.sure)
    return machine.tensor(device, sure=tensor.sure, boolean=tensor.boolean, rank=tensor.rank)


def _pinned(machine: Machine, source: Tensor, node: ast.AST) -> None:
    if source.in_step:
        text = f"the pinned source of `{short(node)}` is gone, or used again, when the graph is replayed"
        machine.report("CG207", node, text, sure=False)  # torch 2.11 was seen to keep it for the graph (H200)
    # An input's contents are the caller's to copy before each replay.
    if (source.varying and source.in_step) or source.site in machine.step.host_written:
        machine.report("CG204", node, f"`{short(node)}` copies host memory that the step fills anew each time")


def method(machine: Machine, tensor: Tensor, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """`tensor.name(*args)`."""
    handled = _host(machine, tensor, name, node)
    if handled is not None:
        return handled
    if name in tables.PLAIN_METHODS:
        kind = "shape" if name in ("size", "stride") and not args else "int"
        return Plain(kind)
    machine.used((tensor, *args), node)
    handled = _moves(machine, tensor, name, args, keywords, node)
    if handled is not None:
        return handled
    if tensor.on_device:
        _arguments(machine, tensor, name, args, keywords, node)
        handled = _shapes(machine, tensor, name, args, keywords, node)
        if handled is not None:
            return handled
    return _result(machine, tensor, name, args, keywords)


def _host(machine: Machine, tensor: Tensor, name: str, node: ast.AST) -> Value | None:
    """Methods that bring values to the host."""
    if name in tables.READERS or name in tables.HOST_READS:
        if tensor.on_device:
            machine.report("CG101", node, f"`{short(node)}` reads a device tensor on the host", sure=tensor.sure)
        where = f"{machine.at.file.path}:{getattr(node, 'lineno', 1)}" if tensor.on_device else ""
        if name == "numpy" and not tensor.on_device:
            return ExtObj("numpy.ndarray", str(tensor.site))
        return Plain("bool" if name in tables.HOST_READS else "", varying=moving(machine.at, tensor), read=where)
    if name == "cpu":
        return move(machine, tensor, "cpu", node, non_blocking=False) if not tensor.on_host else tensor
    return None


def _moves(
    machine: Machine, tensor: Tensor, name: str, args: list[Value], keywords: Keywords, node: ast.AST
) -> Value | None:
    """Copies between devices."""
    non_blocking = _flag(keywords.get("non_blocking"))
    if name == "cuda":
        device = device_of(args[0]) if args else "cuda"
        return tensor if tensor.on_device else move(machine, tensor, device or "cuda", node, non_blocking=non_blocking)
    if name == "to":
        device = device_argument(args, keywords)
        named = "device" in keywords or (args and not isinstance(args[0], Ext))
        if not device:
            if named and args and not isinstance(args[0], Plain | Device | Const | Tensor):
                return Tensor("", sure=False, in_step=machine.at.in_step, rank=tensor.rank)
            return replace(tensor, optional=False, device=tensor.device if not named else "")
        if device == tensor.device or (tensor.on_device and device == "cuda"):
            return replace(tensor, optional=False)
        non_blocking = non_blocking or (len(args) > 1 and _flag(args[-1]))
        return move(machine, tensor, device, node, non_blocking=non_blocking)
    if name == "copy_" and args:
        source = args[0]
        non_blocking = non_blocking or (len(args) > 1 and _flag(args[1]))
        if isinstance(source, Tensor):
            machine.worked()
            if tensor.on_device and source.on_host:
                move(machine, source, tensor.device, node, non_blocking=non_blocking)
            elif tensor.on_host and source.on_device and not (tensor.pinned and non_blocking):
                machine.report("CG101", node, f"`{short(node)}` copies a device tensor to the host", sure=source.sure)
        written(machine, tensor, source, accumulates=False)
        return tensor
    if name == "pin_memory":
        machine.report("CG107", node, f"`{short(node)}` allocates pinned memory in the step", sure=False)
        return replace(tensor, pinned=True, in_step=machine.at.in_step)
    if name in ("set_", "resize_", "swap_tensors") and machine.at.in_step and not tensor.in_step and tensor.site:
        machine.report("CG205", node, f"`{short(node)}` gives a tensor that the graph reads another storage")
        return tensor
    if name in ("new_tensor",):
        if tensor.on_device:
            text = f"`{short(node)}` builds a device tensor from host data in the step"
            machine.report("CG102", node, text, sure=tensor.sure)
        return machine.tensor(tensor.device, sure=tensor.sure)
    return None


def _arguments(
    machine: Machine, tensor: Tensor, name: str, args: list[Value], keywords: Keywords, node: ast.AST
) -> None:
    """Host values among the arguments of an op on the device."""
    for value in (*args, *keywords.values()):
        if isinstance(value, Tensor):
            cpu_operand(machine, node, value)
        elif varies(value):
            if name in tables.SHAPE_ARGUMENTS:
                text = f"the shape of `{short(node)}` changes from step to step"
                machine.report("CG208", node, text, sure=tensor.sure and not read_at(value))
            else:
                scalar(machine, node, value, tensor)
        elif name in tables.SIZE_ARGUMENTS:
            inner = [t for t in tensors(value) if t.on_device]
            if inner:
                text = f"`{short(node)}` reads a device tensor for a size"
                machine.report("CG101", node, text, sure=inner[0].sure)
    drawn(machine, name, keywords, node)


def drawn(machine: Machine, name: str, keywords: Keywords, node: ast.AST) -> None:
    """An op that draws random numbers, if it does, may name a generator."""
    generator = keywords.get("generator")
    if name in tables.RANDOM and isinstance(generator, ExtObj) and generator.note != "cpu":
        machine.report("CG301", node, f"`{short(node)}` draws from a generator that the graph must be told of")


def _shapes(
    machine: Machine, tensor: Tensor, name: str, args: list[Value], keywords: Keywords, node: ast.AST
) -> Value | None:
    """Results whose shape depends on data, and ops that wait."""
    sure = tensor.sure
    if name not in tables.DATA_SHAPES | _SPLITS | _WAITING | {"where", "repeat_interleave"}:
        return None
    text = short(node)
    if name in tables.DATA_SHAPES:
        machine.report("CG104", node, f"the shape of `{text}` depends on data", sure=sure)
        several = name.startswith("unique") and any(k.startswith("return_") for k in keywords)
        rank = 1 if name in ("bincount", "masked_select") else 2
        made = machine.tensor(tensor.device, sure=sure, rank=rank)
        made = replace(made, integer=name not in ("unique", "unique_consecutive", "masked_select"))
        return Seq("tuple", None, made, machine.at.in_step) if several or "as_tuple" in keywords else made
    if name == "where" and not args:
        machine.report("CG104", node, f"the shape of `{text}` depends on data", sure=sure)
    if name == "repeat_interleave" and "output_size" not in keywords:
        repeats = args[0] if args else keywords.get("repeats", UNKNOWN)
        if isinstance(repeats, Tensor):
            machine.report("CG104", node, f"the length of `{text}` is the sum of a tensor", sure=sure and repeats.sure)
    if name in _SPLITS:
        sizes = args[0] if args else UNKNOWN
        if any(t.on_device for t in tensors(sizes)):
            machine.report("CG101", node, f"`{text}` reads its sizes from a device tensor", sure=sure)
    if name in _WAITING:
        machine.report("CG105", node, f"`{text}` waits for the device in its host code", sure=sure)
    return None


def _result(machine: Machine, tensor: Tensor, name: str, args: list[Value], keywords: Keywords) -> Value:
    inplace = name.endswith("_") and not name.startswith("_")
    if inplace and name != "requires_grad_":
        machine.worked()
        written(machine, tensor, args[-1] if args else UNKNOWN, accumulates=name not in ("fill_", "copy_", "zero_"))
        return replace(tensor, optional=False)
    if name in _SPLITS | {"chunk", "unbind"}:
        return split_result(machine.at, tensor, args)
    if name in tables.PAIRS or (name in ("max", "min", "median") and _has_dim(args, keywords)):
        return Seq("result", None, machine.tensor(tensor.device, sure=tensor.sure), machine.at.in_step)
    if name in tables.VIEWS:
        rank: int | None = None
        if name in tables.SAME_RANK:
            rank = tensor.rank
        elif name in ("view", "reshape", "permute", "expand"):
            rank = rank_of("view", args)
        elif name == "unsqueeze" and tensor.rank is not None:
            rank = tensor.rank + 1
        return view(tensor, rank)
    if name.startswith("new_"):
        return machine.tensor(device_of(keywords.get("device")) or tensor.device, sure=tensor.sure)
    rank = (
        0
        if name in tables.REDUCTIONS and not args and not keywords
        else tensor.rank
        if name in ("clone", "abs", "neg")
        else None
    )
    result = machine.tensor(tensor.device, sure=tensor.sure, rank=rank, varying=tensor.on_host and tensor.varying)
    if name in tables.MASK_OPS or (name in ("any", "all")):
        return as_mask(result)
    return replace(result, integer=name in ("argmax", "argmin", "argsort", "long", "int"))


def _has_dim(args: list[Value], keywords: Keywords) -> bool:
    if "dim" in keywords:
        return True
    return bool(args) and is_plain(args[0])
