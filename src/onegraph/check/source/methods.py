"""Methods of values that are not of the user's code: streams, events, graphs, generators, modules, lists, dicts."""

import ast
from dataclasses import replace

from onegraph.check import tables
from onegraph.check.source import entropy, launches, tensor_methods
from onegraph.check.source.machine import Machine, short
from onegraph.check.source.tensor_methods import device_argument
from onegraph.check.source.tensors import scalar
from onegraph.check.source.values import (
    UNKNOWN,
    Const,
    Dict,
    Ext,
    ExtObj,
    Keywords,
    Obj,
    Plain,
    Seq,
    Tensor,
    Value,
    read_at,
    tensors,
    varies,
)


def method(machine: Machine, receiver: Value, name: str, args: list[Value], keywords: Keywords, node: ast.AST) -> Value:
    """A method of a value that is not of the user's code."""
    match receiver:
        case Tensor():
            return tensor_methods.method(machine, receiver, name, args, keywords, node)
        case ExtObj(kind="torch.cuda.Stream" | "torch.cuda.Event"):
            if name == "synchronize":
                machine.report("CG106", node, f"`{short(node)}` waits for the device")
            elif name == "query":
                machine.report("CG107", node, f"`{short(node)}` asks captured work whether it is done")
                return Plain("bool")
            elif name == "record_event":
                return ExtObj("torch.cuda.Event")
            elif name == "elapsed_time":
                machine.report("CG107", node, f"`{short(node)}` asks captured work for its time")
            return UNKNOWN
        case ExtObj(kind="torch.cuda.CUDAGraph") if name in ("capture_begin", "capture_end"):
            machine.capture(node, begins=name == "capture_begin")
            return Const(None)
        case ExtObj(kind="contextlib.ExitStack") if name == "enter_context" and args:
            if isinstance(args[0], ExtObj) and args[0].kind == "torch.cuda.graph":
                if not machine.at.in_step:
                    machine.at.stacked = receiver.note
                machine.capture(node, begins=True)
            return args[0]
        case ExtObj(kind="contextlib.ExitStack") if name == "pop_all":
            return receiver  # whoever closes that one ends what was entered here
        case ExtObj(kind="contextlib.ExitStack") if name in ("close", "__exit__"):
            if machine.at.stacked == receiver.note:
                machine.at.stacked = ""
                machine.capture(node, begins=False)
            return Const(None)
        case ExtObj() if launches.is_kernel(receiver) and name in ("get_function", "get_kernel"):
            return receiver
        case ExtObj() if receiver.kind.startswith(launches.PLANNER):
            if name in ("plan", "begin_forward"):
                whose = receiver.kind.removeprefix(launches.PLANNER)
                text = f"plan() of {whose} reads lengths on the host and fills its buffers: once, at capture"
                machine.report("CG101", node, text)
                return Const(None)
            return launches.launch(machine, receiver, (*args, *keywords.values()), node)
        case ExtObj(kind=entropy.GENERATOR):
            return entropy.method(machine.at, receiver, name, args, keywords)
        case ExtObj(kind="torch.Generator"):
            if name in tables.RNG_STATE:
                machine.touches_generator(node)  # it may be one that no captured op draws from
            return receiver if name == "manual_seed" else UNKNOWN
        case ExtObj() if receiver.kind.startswith("torch.nn."):
            if name in ("to", "cuda", "eval", "train", "half", "requires_grad_", "bfloat16", "float"):
                device = device_argument(args, keywords) if name == "to" else "cuda" if name == "cuda" else ""
                if name in ("eval", "train"):
                    machine.report("CG311", node, f"`.{name}()` in the step changes the mode of modules")
                return replace(receiver, note=device or receiver.note)
            return UNKNOWN
        case Ext() | ExtObj() if name.startswith("launch") or (name == "run" and launches.is_kernel(receiver)):
            given = (*args, *keywords.values())
            machine.used(given, node)
            moving = name == "launch-moving" or any(varies(a) for a in given)
            on_device = [t for a in given for t in tensors(a) if t.on_device]
            machine.worked()
            if moving and on_device:
                scalar(machine, node, Plain(read=read_at(*given)), on_device[0], "a kernel's argument or grid")
            return Const(None)
        case Dict():
            return _dict_method(receiver, name, args)
        case Seq():
            return receiver if name == "copy" else Plain("int") if name in ("index", "count") else UNKNOWN
        case Plain() | Const():
            return Plain(varying=varies(receiver) or any(varies(a) for a in args))
        case Obj():
            return UNKNOWN
    return UNKNOWN


def _dict_method(receiver: Dict, name: str, args: list[Value]) -> Value:
    match name:
        case "get" if args and isinstance(args[0], Const):
            found = receiver.get(args[0].value)
            if found is not None:
                return found
            return (args[1] if len(args) > 1 else Const(None)) if receiver.entries is not None else UNKNOWN
        case "values":
            entries = receiver.entries
            return Seq("iterator", tuple(v for _, v in entries) if entries is not None else None, receiver.any)
        case "items":
            if receiver.entries is not None:
                pairs = tuple(Seq("tuple", (Const(k), v), in_step=True) for k, v in receiver.entries)
                return Seq("iterator", pairs, in_step=True)
            return Seq("iterator", None, Seq("tuple", (Plain("str"), receiver.any), in_step=True))
        case "keys":
            return Seq("iterator", None, Plain("str"))
        case "copy":
            return receiver
    return UNKNOWN
