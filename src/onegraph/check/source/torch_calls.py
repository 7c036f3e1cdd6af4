"""Calls of names outside of the user's code: torch's functions, and what of others is known."""

import ast
from dataclasses import replace

from onegraph.check import tables
from onegraph.check.source import entropy, launches, tensor_methods
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.state import place
from onegraph.check.source.tensor_methods import device_of, drawn, rank_of, split_result
from onegraph.check.source.tensors import cpu_operand, scalar
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Device,
    Dict,
    Ext,
    ExtObj,
    Keywords,
    Obj,
    Plain,
    Seq,
    Tensor,
    Value,
    is_plain,
    read_at,
    tensors,
    varies,
)


def call(machine: Machine, func: Ext | ExtObj, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """Call a name outside the user's code."""
    if launches.is_kernel(func):
        return launches.launch(machine, func, (*args, *keywords.values()), node)
    if isinstance(func, Ext) and (kernel := launches.made(func.name)) is not None:
        return kernel
    if isinstance(func, ExtObj):
        return _call_object(machine, func, args, keywords, node)
    name = func.name
    if name.startswith("torch.Tensor."):
        if args and isinstance(args[0], Tensor):
            return tensor_methods.method(machine, args[0], name.rsplit(".", 1)[1], args[1:], keywords, node)
        return UNKNOWN
    if name.startswith("torch.nn.") and not name.startswith("torch.nn.functional."):
        return _module(machine, name, args, keywords)
    if name.startswith(("torch.cuda.", "torch.accelerator.")) or name in ("torch.Event", "torch.Stream"):
        return _cuda(machine, name, args, keywords, node)
    if name.startswith("torch.distributed."):
        if name.rsplit(".", 1)[1] in tables.OBJECT_COLLECTIVES:
            machine.report("CG310", node, f"`{short(node)}` needs the host")
        return args[0] if args and isinstance(args[0], Tensor) else UNKNOWN
    if name.startswith("torch."):
        return _torch(machine, name, args, keywords, node)
    return _other(machine, name, args, keywords, node)


def _other(machine: Machine, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    first = args[0] if args else UNKNOWN
    drawn = entropy.call(machine.at, name, args, keywords)
    if drawn is not None:
        return drawn
    if name in ("triton.autotune", "triton.heuristics"):
        return ExtObj("triton.decorator")
    if name == "triton.jit":
        return ExtObj(launches.TRITON) if args else ExtObj("triton.decorator")
    if name.startswith(("math.", "numpy.")) and isinstance(first, Tensor) and first.on_device:
        machine.report("CG101", node, f"`{short(node)}` reads a device tensor on the host", sure=first.sure)
        return Plain("float")
    if name.startswith("numpy."):
        return ExtObj("numpy.ndarray")
    if name.startswith("math."):
        return Plain("float", varying=any(varies(a) for a in args))
    if name == "threading.Thread":
        machine.report("CG309", node, "the step starts a thread", sure=True)
        return ExtObj(name)
    if name in ("collections.OrderedDict", "collections.defaultdict"):
        return Dict(None, in_step=machine.at.in_step)
    if name == "contextlib.ExitStack":
        line, column = place(node)
        return ExtObj(name, f"{machine.at.file.path}:{line}:{column}", machine.at.in_step)
    if name == "itertools.count":
        return ExtObj(name, in_step=machine.at.in_step)
    if name == "collections.deque":
        return Seq("list", None, UNKNOWN, machine.at.in_step)
    if name in ("copy.copy", "copy.deepcopy", "typing.cast") and args:
        return args[-1]
    return UNKNOWN


def _call_object(machine: Machine, func: ExtObj, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    if func.kind == "triton.decorator" and args:
        return ExtObj(launches.TRITON)
    if func.kind.startswith("torch.nn."):
        given = [t for a in (*args, *keywords.values()) for t in tensors(a)]
        if not given and not machine.at.presume:
            return UNKNOWN
        if func.serial in machine.step.swapped:
            text = f"`{short(node)}` reads a parameter that the caller binds anew between steps"
            machine.report("CG205", node, text)
        device = next((t for t in given if t.on_device), given[0] if given else Tensor("cuda", sure=False))
        return machine.tensor(device.device or func.note, sure=device.sure)
    return UNKNOWN


def _module(machine: Machine, name: str, args: list[Value], keywords: Keywords) -> Value:
    first = args[0] if args else UNKNOWN
    if name in ("torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.Buffer", "torch.nn.parameter.Buffer"):
        if isinstance(first, Tensor):
            moved = machine.at.presume and not first.on_device
            return replace(
                first, parameter=True, device="cuda" if moved else first.device, sure=first.sure and not moved
            )
        return Tensor("cuda" if machine.at.presume else "", sure=False, parameter=True)
    if name in ("torch.nn.ModuleList", "torch.nn.ParameterList"):
        if isinstance(first, Seq):
            return replace(first, kind="modules")
        return Seq("modules", (), in_step=machine.at.in_step) if not args else Seq("modules", None, UNKNOWN)
    if name == "torch.nn.Sequential" and any(isinstance(a, Obj) for a in args):
        return Seq("modules", tuple(args))
    if name == "torch.nn.Module":
        return ExtObj(name)
    device = keywords.get("device")
    return ExtObj(name, device_of(device), serial=machine.step.site(machine.at.in_step))


def _torch(machine: Machine, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    last = name.rsplit(".", 1)[1]
    first = args[0] if args else keywords.get("input", UNKNOWN)
    if name in tables.CONSTANT_FALSE:
        return Const(False)
    if name == "torch.device":
        return Device(device_of(first) or "")
    if name in ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast"):
        return ExtObj("torch.autocast")
    if name == "torch.Generator":
        device = first if args else keywords.get("device")
        return ExtObj(name, "cpu" if device is None else device_of(device), machine.at.in_step)
    if last in tables.RNG_STATE and (name.count(".") == 1 or name.startswith("torch.random.")):
        machine.touches_generator(node, sure=last in tables.RNG_SETS)
        return UNKNOWN
    if name == "torch.compile":
        machine.report("CG307", node, "`torch.compile` is called in the step")
        return first if args else UNKNOWN
    if name.rsplit(".", 1)[-1] in ("wrap_triton", "capture_triton") and args:
        return first
    if name in tables.TRANSFORMS and args:
        return first  # runs it, on tensors of other shapes
    if name == "torch.cond" and isinstance(first, Tensor) and first.on_device:
        text = f"`{short(node)}` chooses on the host by a device value"
        machine.report("CG101", node, text, sure=first.sure)
        return machine.tensor("cuda", sure=first.sure)
    if name.startswith(("torch.ops.", "torch.jit.", "torch.library.", "torch.utils.", "torch.autograd.", "torch._")):
        return UNKNOWN
    if name in ("torch.is_tensor",) and args:
        return Const(isinstance(first, Tensor)) if isinstance(first, Tensor) or is_plain(first) else Plain("bool")
    if name == "torch.set_default_device" and args:
        machine.at.default_device = device_of(first)
        return Const(None)
    if last in tables.GRAD_MODES:
        return ExtObj(name)
    if last in tables.NOT_TENSORS:
        return Plain(varying=False) if tensors(first) or is_plain(first) else UNKNOWN
    if last in tables.FROM_HOST and name.count(".") == 1:
        return _from_host(machine, last, args, keywords, node)
    combines = last in ("normal", "complex", "polar") and isinstance(first, Tensor)
    if last in tables.FACTORIES and name.count(".") == 1 and not combines:
        return _factory(machine, last, args, keywords, node)
    return _op(machine, name, last, args, keywords, node)


def _factory(machine: Machine, last: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    device = device_of(keywords.get("device")) if "device" in keywords else machine.at.default_device or "cpu"
    read = [t for a in args for t in tensors(a) if t.on_device]
    if read:
        machine.report("CG101", node, f"`{short(node)}` reads a device tensor for a size or value", sure=read[0].sure)
    if device.startswith("cuda") and machine.at.in_step:
        if last in ("full", "scalar_tensor") and len(args) > 1 and varies(args[1]):
            scalar(machine, node, args[1], Tensor(device))
        elif last == "arange" and any(varies(a) for a in args):
            scalar(machine, node, next(a for a in args if varies(a)), Tensor(device), "a bound")
        elif any(varies(a) for a in args):
            text = f"the shape of `{short(node)}` changes from step to step"
            machine.report("CG208", node, text, sure=not read_at(*args))
    is_pinned = keywords.get("pin_memory") == Const(True)
    if is_pinned:
        machine.report("CG107", node, f"`{short(node)}` allocates pinned memory in the step", sure=False)
    drawn(machine, last, keywords, node)
    sure = all(t.sure for t in read) and not (isinstance(keywords.get("device"), Device) and machine.at.presume)
    shape = args[:1] if last == "full" else args if last in ("zeros", "ones", "empty", "rand", "randn") else []
    return machine.tensor(
        device,
        sure=sure,
        pinned=is_pinned,
        rank=rank_of(last, args),
        varying=device == "cpu" and (any(varies(a) for a in args) or (last in tables.RANDOM and machine.at.in_step)),
        ragged=not machine.at.in_step and any(varies(a) for a in shape),
        integer=last in ("arange", "randint", "randperm"),
    )


def _from_host(machine: Machine, last: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    data = args[0] if args else keywords.get("data", UNKNOWN)
    asked = keywords.get("device")
    device = device_of(asked) if asked is not None and asked != Const(None) else machine.at.default_device or "cpu"
    inner = tensors(data)
    if isinstance(data, Tensor):
        if asked is None or asked == Const(None) or device == data.device:
            return replace(data, optional=False)
        return tensor_methods.move(machine, data, device, node, non_blocking=False)
    if any(t.on_device for t in inner):
        sure = all(t.sure for t in inner)
        machine.report("CG101", node, f"`{short(node)}` reads device tensors to build another", sure=sure)
    empty = isinstance(data, Seq) and data.items == ()
    presumed = machine.at.presume and not isinstance(asked, Const)
    if device.startswith("cuda") and not empty:
        text = f"`{short(node)}` builds a device tensor from host data in the step"
        machine.report("CG102", node, text, sure=not presumed)
    if is_plain(data):  # of numpy it is an array, or numpy's own function would refuse it
        rank = None if last in ("from_numpy", "frombuffer") else 0
    else:
        rank = rank_of("tensor", [data])
    moving = device == "cpu" and varies(data)
    whole = isinstance(data, Seq) and bool(data.items) and all(_is_int(v) for v in data.items or ())
    integer, pinned = whole or _is_int(data), keywords.get("pin_memory") == Const(True)
    return machine.tensor(device, sure=not presumed, pinned=pinned, rank=rank, varying=moving, integer=integer)


def _is_int(value: Value) -> bool:
    match value:
        case Const():
            return isinstance(value.value, int) and not isinstance(value.value, bool)
        case Plain():
            return value.kind == "int"
        case Seq():
            return bool(value.items) and all(_is_int(v) for v in value.items or ())
    return False


def _op(machine: Machine, name: str, last: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """Any other function of torch: an op on tensors."""
    first = args[0] if args else keywords.get("input", UNKNOWN)
    given = [t for a in (*args, *keywords.values()) for t in tensors(a)]
    if not given:
        return UNKNOWN
    if isinstance(first, Tensor) and last in tables.METHODS:
        return tensor_methods.method(machine, first, last, args[1:], keywords, node)
    on_device = [t for t in given if t.on_device]
    result_device = on_device[0].device if on_device else given[0].device
    sure = all(t.sure for t in given)
    if on_device:
        for value in (*args, *keywords.values()):
            if varies(value) and not tensors(value):
                scalar(machine, node, value, on_device[0])
        for operand in given:
            cpu_operand(machine, node, operand)
        if last == "one_hot" and len(args) < 2 and "num_classes" not in keywords:
            machine.report("CG104", node, "`one_hot` without `num_classes` reads the largest value", sure=sure)
        if last == "where" and len(args) == 1:
            machine.report("CG104", node, "one-argument `where` has a shape that depends on data", sure=sure)
        _waits(machine, name, last, args, keywords, node, sure)
    machine.used(args, node)
    drawn(machine, last, keywords, node)
    if last == "where" and len(args) == 1:
        return Seq("tuple", None, machine.tensor(result_device, sure=sure, rank=1, integer=True), machine.at.in_step)
    if last in tables.SPLITS:
        return split_result(machine.at, given[0], args[1:])
    if last in tables.PAIRS:
        return Seq("result", None, machine.tensor(result_device, sure=sure), machine.at.in_step)
    if last in tables.CONCATS or last == "stack":
        rank = given[0].rank if last != "stack" or given[0].rank is None else given[0].rank + 1
        made = machine.tensor(result_device, sure=sure, rank=rank)
        if machine.at.in_step and len(given) > 1 and any(machine.step.carried_over(t) and not t.part for t in given):
            made = replace(made, grown=True)
            machine.step.cats[made.site] = machine.remember(node)
        return made
    if last.endswith("_like"):
        device = device_of(keywords["device"]) if "device" in keywords else given[0].device
        return machine.tensor(device, sure=sure, rank=given[0].rank)
    return machine.tensor(result_device, sure=sure, boolean=last in tables.MASK_OPS)


def _waits(
    machine: Machine, name: str, last: str, args: list[Value], keywords: Keywords, node: ast.AST, sure: bool
) -> None:
    """Ops whose own host code waits for the device."""
    always = tables.waiting_linalg().get(last) if name.startswith("torch.linalg.") else None
    found = bool(always) or (name.count(".") == 1 and last in ("inverse", "cholesky"))
    others = tables.HOST_READS | tables.READERS | tables.DATA_SHAPES  # told by what they read, or by their shapes
    found = found or (name in tables.waiting_functions() and last not in others and always is None)
    found = found or (last == "histc" and not (len(args) > 3 or {"min", "max"} & set(keywords)))
    found = found or (last == "normal" and len([a for a in args[:2] if isinstance(a, Tensor)]) == 2)
    if found or always is not None:
        code = "CG101" if last in tables.VALUE_READS else "CG105"
        machine.report(code, node, f"`{short(node)}` waits for the device in its host code", sure=sure and found)


def _cuda(machine: Machine, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    last = name.rsplit(".", 1)[1]
    first = args[0] if args else UNKNOWN
    match last:
        case "synchronize":
            machine.report("CG106", node, f"`{short(node)}` waits for the device")
        case "is_current_stream_capturing":
            return Plain("capturing")
        case "is_available":
            return Const(True)
        case "Stream" | "ExternalStream":
            return ExtObj("torch.cuda.Stream")
        case "Event":
            return ExtObj("torch.cuda.Event")
        case "CUDAGraph":
            return ExtObj("torch.cuda.CUDAGraph")
        case "current_stream":
            return ExtObj("torch.cuda.Stream", "current")
        case "default_stream":
            return ExtObj("torch.cuda.Stream", "default")
        case "stream" | "StreamContext":
            return ExtObj("torch.cuda.stream", first.note if isinstance(first, ExtObj) else "current")
        case "graph":
            stream = keywords.get("stream", args[2] if len(args) > 2 else None)
            note = "" if stream is None or stream == Const(None) else "stream"
            return ExtObj(
                "torch.cuda.graph", "default" if isinstance(stream, ExtObj) and stream.note == "default" else note
            )
        case "set_device":
            machine.report("CG303", node, f"`{short(node)}` changes the device in the middle of the step")
        case "device":
            return ExtObj("torch.cuda.device")
        case _ if last in tables.RNG_STATE:
            machine.touches_generator(node, sure=last in tables.RNG_SETS)
        case "FloatTensor" | "LongTensor" | "HalfTensor" | "IntTensor" | "BoolTensor":
            machine.report("CG102", node, f"`{short(node)}` builds a device tensor from host data in the step")
            return machine.tensor("cuda")
        case "current_device" | "device_count" | "get_device_capability" | "get_device_properties":
            return Plain("int")
    return UNKNOWN
