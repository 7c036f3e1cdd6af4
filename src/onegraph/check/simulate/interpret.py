"""Runs a Triton kernel on the CPU, program by program, in Triton's own interpreter.

Triton interprets what was decorated while TRITON_INTERPRET was set. A checker comes later: user code, and Triton's own
library of device functions, are decorated already. So calls of `JITFunction` are interpreted here while a kernel runs,
and `triton.language` is put back as it was after it. Nothing of the user's modules is changed.
"""

import ast
import importlib
import inspect
import textwrap
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from onegraph.check.simulate import low_precision
from onegraph.check.simulate.aliases import ABSENT, changed, put_back
from onegraph.check.simulate.device import flat_bytes
from onegraph.check.simulate.libdevice import Libdevice, is_libdevice

_LOCK = threading.RLock()
"""The interpreter keeps the running program's place in one object for the process."""


class Cannot(Exception):
    """The kernel cannot be interpreted; the text says why."""


class NoTime(Cannot):
    """It does not fit into the seconds that are left for it."""


class Memory:
    """The interpreter's way to memory: what it touches is known, and nothing else can be touched.

    Args:
        tensors: plain CPU tensors that the kernel was given; all of their storages may be used.
        owner: gives a tensor of the storage that an address lies in, of a pointer that came from memory; or None.
        first_write: called with a storage's bytes before the kernel first writes it.
        limit: seconds of this thread that the kernel may take.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        owner: Callable[[int], Tensor | None],
        first_write: Callable[[Tensor], None],
        limit: float,
    ) -> None:
        self.owner, self.first_write, self.limit = owner, first_write, limit
        self.began = time.thread_time()
        self.real: Any = None  # the interpreter's own module, while it runs
        self.starts: list[int] = []
        self.spans: list[tuple[int, int, Tensor]] = []
        self.read: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.kept: list[tuple[Tensor, Tensor]] = []  # storages and what they held, for who wants to go back
        self.followed: list[Tensor] = []  # reached by an address that no argument holds
        for tensor in tensors:
            self._add(flat_bytes(tensor))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._touch(pointers, mask, dtype.itemsize, self.read)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._touch(pointers, mask, value.dtype.itemsize, self.written)
        return self.real.store(pointers, value, mask)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        for kind in (self.read, self.written):
            self._touch(pointers, None, value.dtype.itemsize, kind)
        return self.real.atomic_cas(pointers, expected, value, order)

    def atomic_rmw(self, what: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        for kind in (self.read, self.written):
            self._touch(pointers, mask, value.dtype.itemsize, kind)
        return self.real.atomic_rmw(what, pointers, value, mask, order)

    def seconds(self) -> float:
        return time.thread_time() - self.began

    def check_time(self) -> None:
        if self.seconds() > self.limit:
            left = f"{max(self.limit, 0.0):.1f} s that are left to interpret it"
            raise NoTime(f"it takes more than the {left}: give the step smaller tensors, or check with --live")

    def _add(self, whole: Tensor) -> None:
        start = whole.data_ptr()
        if whole.numel() and all(known[0] != start for known in self.spans):
            at = bisect_right(self.starts, start)
            self.starts.insert(at, start)
            self.spans.insert(at, (start, start + whole.numel(), whole))

    def _touch(self, pointers: Any, mask: Any, size: int, kind: dict[int, Tensor]) -> None:
        self.check_time()
        used = pointers.reshape(-1) if mask is None else pointers[_like(mask, pointers)]
        if not used.size:
            return
        low, high = int(used.min()), int(used.max()) + size
        span = self._span(low, high)
        if span is not None:
            self._note(span, kind)
            return
        for address in sorted({int(a) for a in used}):
            span = self._span(address, address + size) or self._follow(address, size)
            self._note(span, kind)

    def _span(self, low: int, high: int) -> tuple[int, int, Tensor] | None:
        at = bisect_right(self.starts, low) - 1
        return self.spans[at] if at >= 0 and high <= self.spans[at][1] else None

    def _follow(self, address: int, size: int) -> tuple[int, int, Tensor]:
        tensor = self.owner(address)
        if tensor is not None:
            whole = flat_bytes(tensor)
            self._add(whole)
            self.followed.append(whole)
            span = self._span(address, address + size)
            if span is not None:
                return span
        raise Cannot("it uses memory outside of every tensor: a mask is missing, or an address is of freed memory")

    def _note(self, span: tuple[int, int, Tensor], kind: dict[int, Tensor]) -> None:
        start, _, whole = span
        if start not in kind:
            if kind is self.written:
                self.first_write(whole)
            kind[start] = whole


def _like(mask: Any, pointers: Any) -> Any:
    import numpy

    return numpy.broadcast_to(mask, pointers.shape).astype(bool)


def run(function: FunctionType, arguments: dict[str, Any], grid: tuple[int, ...], memory: Memory) -> None:
    """Run every program of a launch on plain CPU tensors, one after the other.

    Args:
        function: what `triton.jit` decorated. arguments: by parameter, all of them; tensors are of the CPU.

    Raises Cannot where the interpreter has no way to run it.
    """
    with _LOCK:
        try:
            session = _Session(memory)
        except Exception as error:  # an interpreter of another Triton than the ones that are known here
            raise Cannot(f"Triton's interpreter cannot be used ({type(error).__name__}: {error})") from error
        with session.active():
            session.run(function, arguments, grid)


class _Session:
    """One launch: Triton's modules changed so that device functions run as Python."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.interpreter = importlib.import_module("triton.runtime.interpreter")
        self.jit = importlib.import_module("triton.runtime.jit")
        self.language = importlib.import_module("triton.language")
        self.patches = _language_patches(self.interpreter, self.language)
        self.replaced = {id(old): new for _, _, old, new in self.patches if callable(old)}
        self.functions: dict[Any, Callable[..., Any]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        interpreter, jit = self.interpreter, self.jit
        self.memory.real = interpreter._interpreter
        session = self

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return session.function(function.fn)(*args, **kwargs)

        def bound(function: Any, owner: Any, kind: Any = None) -> Any:
            """`x.sum()`: device functions that are attributes of tensors get the tensor, as methods do."""
            return partial(function, owner) if isinstance(owner, session.language.tensor) else function

        changes = [
            (interpreter, "_interpreter", self.memory),
            (jit.JITFunction, "__call__", call),
            (jit.JITFunction, "__get__", bound),
            (interpreter.InterpretedFunction, "__call__", call),
            (interpreter.interpreter_builder, "create_print", _quiet),
            *low_precision.changes(interpreter, self.language),
            *((owner, name, new) for owner, name, _, new in self.patches),
        ]
        import numpy

        with changed(changes), numpy.errstate(all="ignore"):
            yield

    def run(self, function: FunctionType, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        builder = self.interpreter.interpreter_builder
        constants = constexprs(function)
        try:
            given = {n: _constant(v) if n in constants else self._device(v) for n, v in arguments.items()}
            program = self.function(function)
            sizes = grid + (1,) * (3 - len(grid))
            builder.set_grid_dim(*sizes)
            for x in range(sizes[0]):
                for y in range(sizes[1]):
                    for z in range(sizes[2]):
                        self.memory.check_time()
                        builder.set_grid_idx(x, y, z)
                        program(**given)
        except Cannot:
            raise
        except Exception as error:
            raise Cannot(_reason(error)) from error

    def function(self, function: Any) -> Callable[..., Any]:
        """A device function as the interpreter runs it: assignments make tensors, names are those of its module."""
        made = self.functions.get(function)
        if made is None:
            made = self.functions[function] = self._rewritten(function)
        return made

    def _rewritten(self, function: Any) -> Callable[..., Any]:
        names = self._names(function)
        code = _compiled(function, self.interpreter.ASTTransformer)
        if code is None:
            return FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        scope: dict[str, Any] = {}
        exec(code, names, scope)
        made: Callable[..., Any] = scope[function.__name__]
        made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return made

    def _names(self, function: Any) -> dict[str, Any]:
        names = dict(function.__globals__)
        names.update(inspect.getclosurevars(function).nonlocals)
        for name, value in names.items():
            if is_libdevice(value):
                names[name] = Libdevice(self.language, self.interpreter, value)
            elif callable(value) and id(value) in self.replaced:  # `from triton.language import load`
                names[name] = self.replaced[id(value)]
        names["interpreter_semantic"] = self.interpreter.interpreter_semantic
        names["print"] = lambda *_, **__: None
        names[_LOOK] = self.memory.check_time
        return names

    def _device(self, value: Any) -> Any:
        """A launch's argument as a kernel sees it. Triton's own conversion leaves numbers that are no integers out."""
        import numpy

        interpreter, language = self.interpreter, self.language
        value = _constant(value)
        if isinstance(value, bool):
            handle = interpreter.TensorHandle(numpy.array([value], dtype=bool), language.int1)
            return language.tensor(handle, language.int1)
        if isinstance(value, float):
            handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), language.float32)
            return language.tensor(handle, language.float32)
        if isinstance(value, tuple):
            return tuple(self._device(v) for v in value)
        return interpreter._implicit_cvt(value)


def constexprs(function: Any) -> frozenset[str]:
    """Names of the parameters that are compiled in."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if "constexpr" in getattr(p.annotation, "__name__", str(p.annotation)))


def plain(value: Any, change: Callable[[Any], Any]) -> Any:
    """A launch's argument with `change` done to each tensor in it: in tuples and host-side TMA descriptors too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [plain(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    base = getattr(value, "base", None) if is_dataclass(value) else None
    return replace(value, base=change(base)) if isinstance(base, Tensor) else value


def _constant(value: Any) -> Any:
    return value.value if type(value).__name__ == "constexpr" else value


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


_PATCHES: list[tuple[Any, str, Any, Any]] = []


def _language_patches(interpreter: Any, language: Any) -> list[tuple[Any, str, Any, Any]]:
    """(owner, name, value, value while interpreting) of all that Triton's interpreter changes in its language. It
    takes ten milliseconds to make, so it is made once and seen as a difference, which no version keeps a list of."""
    if _PATCHES:
        return _PATCHES
    core = language.core
    owners: list[Any] = [language, core, language.math, core.tensor, core.dtype]
    owners += [getattr(core, name) for name in ("tensor_descriptor", "tensor_descriptor_base") if hasattr(core, name)]
    before = [dict(vars(owner)) for owner in owners]

    scope = None
    try:
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    finally:
        found = [
            (owner, name, old.get(name, ABSENT), value)
            for owner, old in zip(owners, before, strict=True)
            for name, value in vars(owner).items()
            if old.get(name, ABSENT) is not value
        ]
        if scope is not None:
            scope.restore()
        for owner, name, value, _ in found:  # one that raises halfway leaves a language that compiles no more
            if vars(owner).get(name, ABSENT) is not value:
                put_back(owner, name, value)
    ours = {"static_print": _quiet, "__index__": _index}
    found = [(o, n, old, ours.get(n, new)) for o, n, old, new in found]
    for owner in _extras(language):
        old = vars(owner)["libdevice"]
        found.append((owner, "libdevice", old, Libdevice(language, interpreter, old)))
    _PATCHES.extend(found)
    return _PATCHES


def _quiet(*_: Any, **__: Any) -> None:
    """A kernel's prints: it runs many times here."""


def _index(tensor: Any) -> int:
    """A scalar where Python wants a number, as `range` does: an array of one, which numpy 2.4 does not convert."""
    return int(tensor.handle.data.item())


def _extras(language: Any) -> Iterator[ModuleType]:
    """`tl.extra` and `tl.extra.cuda`, which have libdevice."""
    extra = getattr(language, "extra", None)
    for module in (extra, getattr(extra, "cuda", None)):
        if isinstance(module, ModuleType) and "libdevice" in vars(module):
            yield module


_LOOK = "__onegraph_check_time"
"""What each round of a kernel's loops calls."""

_CODES: "weakref.WeakKeyDictionary[Any, CodeType | None]" = weakref.WeakKeyDictionary()


def _compiled(function: Any, transformer: type[ast.NodeTransformer]) -> CodeType | None:
    """The function's definition, rewritten; None where there is no source to read."""
    if function not in _CODES:
        _CODES[function] = _rewrite(function, transformer)
    return _CODES[function]


def _rewrite(function: Any, transformer: type[ast.NodeTransformer]) -> CodeType | None:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list, definition.returns = [], None
    given = definition.args
    given.defaults, given.kw_defaults = [], [None] * len(given.kwonlyargs)  # evaluated already, maybe from local names
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        argument.annotation = None
    tree = transformer().visit(tree)
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.While):  # one that touches no memory may never end either
            loop.body.insert(0, ast.Expr(ast.Call(ast.Name(_LOOK, ast.Load()), [], [])))
    ast.increment_lineno(tree, first - 1)
    return compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
