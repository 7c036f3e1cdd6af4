"""What the reader knows about a value: the lattice of the abstract interpreter.

`UNKNOWN` is the top; nothing is ever reported about it. A value is immutable, except `Obj` (an instance of a class of
the user's code), which has an identity and attributes.
"""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from onegraph.check.source.files import SourceFile


class Value:
    """Base of all abstract values."""

    __slots__ = ()


Keywords = dict[str, Value]
"""Arguments of a call by their names."""


@dataclass(frozen=True, slots=True)
class Unknown(Value):
    pass


UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class Const(Value):
    """A Python constant that is known: None, bool, int, float, str."""

    value: Any


@dataclass(frozen=True, slots=True)
class Plain(Value):
    """A Python value that is no tensor. `varying`: it may change from step to step. `read`: where the host read it.
    `least`: of a number that only grows, what it is when the warm-up is over."""

    kind: str = ""
    varying: bool = False
    read: str = ""
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Device(Value):
    name: str  # "cuda", "cuda:1", "cpu", or "" where unknown


@dataclass(frozen=True, slots=True)
class Tensor(Value):
    """A tensor.

    Attributes:
        device: "cuda", "cuda:1", "cpu"; "" where unknown.
        sure: False where the device is presumed (a parameter of some `forward`).
        in_step: made inside the step.
        pinned: page-locked CPU memory.
        boolean: known to be a mask.
        rank: number of dimensions where known.
        site: number of the storage; views share it; 0 where unknown.
        varying: CPU contents that the host changes from step to step.
        optional: may be None instead.
        grown: concatenated from what the last step left and more.
        parameter: registered with a module.
        integer: known to hold integers that are no mask.
        moving: another storage in every step, though the caller copies nothing: taken from a list, or out of an object.
        part: a slice that may be shorter than what it is a view of.
        ragged: an input whose shape changes from step to step.
    """

    device: str = ""
    sure: bool = True
    in_step: bool = False
    pinned: bool = False
    boolean: bool = False
    rank: int | None = None
    site: int = 0
    varying: bool = False
    optional: bool = False
    grown: bool = False
    parameter: bool = False
    part: bool = False
    ragged: bool = False
    moving: bool = False
    integer: bool = False

    @property
    def on_device(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Seq(Value):
    """list, tuple, set or iterator. `items` where each is known, else `element` stands for all."""

    kind: str = "list"
    items: tuple[Value, ...] | None = None
    element: Value = UNKNOWN
    in_step: bool = False

    @property
    def any(self) -> Value:
        """One value that stands for every element."""
        return self.element if self.items is None else join_all(self.items)


@dataclass(frozen=True, slots=True)
class Dict(Value):
    """A dict with constant keys; `element` stands for all values where keys are not known."""

    entries: tuple[tuple[Any, Value], ...] | None = None
    element: Value = UNKNOWN
    in_step: bool = False

    def get(self, key: Any) -> Value | None:
        for known, value in reversed(self.entries or ()):
            if type(known) is type(key) and known == key:
                return value
        return None

    def put(self, key: Any, value: Value) -> "Dict":
        kept = tuple((k, v) for k, v in self.entries or () if not (type(k) is type(key) and k == key))
        return replace(self, entries=(*kept, (key, value)))

    @property
    def any(self) -> Value:
        return self.element if self.entries is None else join_all(tuple(v for _, v in self.entries))


@dataclass(slots=True, eq=False)
class Scope:
    """Variables of one function call, class body or module."""

    file: SourceFile
    variables: dict[str, Value] = field(default_factory=dict)
    parent: "Scope | None" = None
    in_step: bool = False
    rebinds: dict[str, "Scope"] = field(default_factory=dict)  # names declared global or nonlocal


@dataclass(frozen=True, slots=True)
class Class(Value):
    node: ast.ClassDef
    file: SourceFile
    scope: Scope


@dataclass(frozen=True, slots=True)
class Func(Value):
    """A function of the user's code, bound to `receiver` where it is a method; `owner` is the class that defines it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    file: SourceFile
    scope: Scope
    receiver: Value | None = None
    owner: Class | None = None


@dataclass(slots=True, eq=False)
class Obj(Value):
    """An instance of a class of the user's code."""

    cls: Class
    attributes: dict[str, Value] = field(default_factory=dict)
    in_step: bool = False
    presumed: bool = False  # built without knowing the constructor's arguments


@dataclass(frozen=True, slots=True)
class Ext(Value):
    """A name outside the user's code: "torch.zeros"."""

    name: str


@dataclass(frozen=True, slots=True)
class ExtObj(Value):
    """An instance of a class outside the user's code: kind "torch.cuda.Event". `note`: e.g. "default" stream.

    `serial` tells the modules of torch.nn apart, 0 for anything else.
    """

    kind: str
    note: str = ""
    in_step: bool = False
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Module(Value):
    file: SourceFile


@dataclass(frozen=True, slots=True)
class Method(Value):
    """A method of a value that is not of the user's code: `tensor.item`, `list.append`."""

    receiver: Value
    name: str


@dataclass(frozen=True, slots=True)
class Partial(Value):
    func: Value
    args: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Super(Value):
    receiver: Value
    owner: Class


def join(a: Value, b: Value) -> Value:
    """The least value that covers both."""
    if a is b or a == b:
        return a
    match a, b:
        case (Const(value=None), Tensor()):
            return replace(b, optional=True)
        case (Tensor(), Const(value=None)):
            return replace(a, optional=True)
        case (Tensor(), Tensor()):
            return Tensor(
                device=a.device if a.device == b.device else "",
                sure=a.sure and b.sure,
                in_step=a.in_step or b.in_step,
                pinned=a.pinned and b.pinned,
                boolean=a.boolean and b.boolean,
                rank=a.rank if a.rank == b.rank else None,
                site=a.site if a.site == b.site else 0,
                varying=a.varying or b.varying,
                optional=a.optional or b.optional,
                grown=a.grown or b.grown,
            )
        case (Const() | Plain(), Const() | Plain()):
            kinds = {kind_of(a), kind_of(b)}
            if "capturing" in kinds:  # a guarded question whether the stream is captured is still that question
                return Plain("capturing")
            moving = (isinstance(a, Plain) and a.varying) or (isinstance(b, Plain) and b.varying)
            return Plain(kinds.pop() if len(kinds) == 1 else "", varying=moving, read=read_at(a) or read_at(b))
        case (Seq(), Seq()) if a.kind == b.kind:
            inside = a.in_step and b.in_step
            if a.items is not None and b.items is not None and len(a.items) == len(b.items):
                items = tuple(join(x, y) for x, y in zip(a.items, b.items, strict=True))
                return Seq(a.kind, items, in_step=inside)
            if a.items == ():
                return Seq(a.kind, None, b.any, inside)
            if b.items == ():
                return Seq(a.kind, None, a.any, inside)
            return Seq(a.kind, None, join(a.any, b.any), inside)
        case (Dict(), Dict()):
            if (
                a.entries is not None
                and b.entries is not None
                and [k for k, _ in a.entries] == [k for k, _ in b.entries]
            ):
                pairs = zip(a.entries, b.entries, strict=True)
                return Dict(tuple((k, join(v, w)) for (k, v), (_, w) in pairs), in_step=a.in_step and b.in_step)
            return Dict(None, join(a.any, b.any), in_step=a.in_step and b.in_step)
        case (Device(), Device()):
            return Device("")
        case (Obj(), Obj()) if a.cls.node is b.cls.node:
            return a  # layers of a list: one stands for all
    return UNKNOWN


def join_all(values: tuple[Value, ...]) -> Value:
    """`join` of any number; UNKNOWN of none."""
    if not values:
        return UNKNOWN
    result = values[0]
    for value in values[1:]:
        result = join(result, value)
        if result is UNKNOWN:
            break
    return result


def kind_of(value: Value) -> str:
    """The type of a Python value, "" where it is not known."""
    return type(value.value).__name__ if isinstance(value, Const) else value.kind if isinstance(value, Plain) else ""


def varies(value: Value, depth: int = 3) -> bool:
    """True where a Python value, or one inside a list or tuple, changes from step to step."""
    match value:
        case Plain():
            return value.varying
        case Seq() if depth:
            return any(varies(v, depth - 1) for v in (value.items if value.items is not None else (value.element,)))
        case Dict() if depth and value.entries is not None:
            return any(varies(v, depth - 1) for _, v in value.entries)
    return False


def read_at(*values: Value) -> str:
    """Where the host read the first of these values, or of those in it, from the device; "" for none."""
    for value in values:
        inner = value.items or (value.element,) if isinstance(value, Seq) else ()
        found = value.read if isinstance(value, Plain) else read_at(*inner)
        if found:
            return found
    return ""


def tensors(value: Value, depth: int = 3) -> list[Tensor]:
    """Tensors in a value, looking into lists, tuples and dicts."""
    match value:
        case Tensor():
            return [value]
        case Seq() if depth:
            inner = value.items if value.items is not None else (value.element,)
            return [t for v in inner for t in tensors(v, depth - 1)]
        case Dict() if depth:
            entries = [v for _, v in value.entries] if value.entries is not None else [value.element]
            return [t for v in entries for t in tensors(v, depth - 1)]
    return []


def sites(value: Value) -> frozenset[int]:
    """Storages in a value."""
    return frozenset(t.site for t in tensors(value) if t.site)


def is_plain(value: Value) -> bool:
    """A Python value that is certainly no tensor."""
    return isinstance(value, Plain | Const | Device)


def truth(value: Value) -> bool | None:
    """Truth of a value where it is known."""
    match value:
        case Const():
            return bool(value.value)
        case Seq() if value.items is not None:
            return bool(value.items)
        case Func() | Class() | Module() | Ext():
            return True
    return None
