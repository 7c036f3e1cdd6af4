"""What is checked, and how: `path/to/file.py:factory` or `package.module:factory`, and the options of a check."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from onegraph.check.deadline import Overdue
from onegraph.check.report import CheckError

FORM = "path/to/file.py:factory or package.module:factory"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How targets are checked: which readers besides the source's, `steps` of a step (3 or more), GPUs of the simulated
    machine, seconds that a target may take."""

    simulate: bool = True
    live: bool = False
    steps: int = 4
    gpus: int = 1
    timeout_s: float = 600


DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded target. `path` is the file that defines `factory`."""

    spec: str
    path: str
    name: str
    factory: Callable[[], Any]


def has_factory(spec: str) -> bool:
    """Whether a factory is named, not a file or folder alone."""
    return ":" in os.path.basename(spec)


def is_tree(spec: str) -> bool:
    """Whether a target is a file or folder whose sources are read, and nothing is run."""
    return not has_factory(spec) and (os.path.exists(spec) or spec.endswith(".py") or os.sep in spec)


def split(spec: str) -> tuple[str, str]:
    """(path of the file, name of the factory), without importing anything of the target's own module.

    Raises CheckError where the form is wrong or no such file or module exists.
    """
    where, colon, name = spec.rpartition(":")
    if not colon and not os.path.exists(spec):
        raise CheckError(f"target {spec!r}: no such file or folder; allowed {FORM}, or a file or folder to be read")
    if not colon or not where or not name.isidentifier():
        raise CheckError(f"target {spec!r}: allowed {FORM}; name the function that builds the step")
    if where.endswith(".py") or os.sep in where:
        path = os.path.abspath(where)
        if not os.path.isfile(path):
            what = "not a regular file" if os.path.exists(path) else "no such file"
            raise CheckError(f"target {spec!r}: {what}: {where}")
        if not path.endswith(".py"):
            raise CheckError(f"target {spec!r}: {where} is not a Python file (.py)")
        return path, name
    if os.path.isfile(where):
        raise CheckError(f"target {spec!r}: {where} is not a Python file (.py)")
    with _cwd_first():
        try:
            found = importlib.util.find_spec(where)
        except (ImportError, ValueError) as error:
            raise CheckError(f"target {spec!r}: no module {where!r} ({error})") from error
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise CheckError(f"target {spec!r}: no Python module {where!r} on the path; allowed {FORM}")
    return os.path.abspath(found.origin), name


def _asks_for_a_gpu(error: BaseException) -> bool:
    """Whether the line that raised, or what it raised, speaks of CUDA."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("cuda" in text.lower() for text in (str(error), *(frame.line or "" for frame in frames[-3:])))


def load(spec: str, *, live: bool = False) -> Target:
    """Import the target's module and find its factory, which is not called. Raises CheckError with one line.

    live: it will run on this machine's GPU; otherwise Triton's driver stands for the simulated one.
    """
    from onegraph.check.simulate.calling import NO_GPU_YET, line, where
    from onegraph.check.simulate.cuda import importing

    path, name = split(spec)
    named = spec.rpartition(":")[0]
    try:
        with nullcontext() if live else importing():
            module = _from_file(path) if named.endswith(".py") or os.sep in named else _from_name(named)
    except CheckError:
        raise
    except SyntaxError as error:
        raise CheckError(f"target {spec!r}: {path}:{error.lineno or 1}: syntax error: {error.msg}") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Overdue):
            raise
        told = f"{type(error).__name__}: {line(error)}{where(error)}"
        if not live and _asks_for_a_gpu(error):
            told += f". {NO_GPU_YET[0].upper()}{NO_GPU_YET[1:]}: ask for it there, or check the program (--run)"
        raise CheckError(f"target {spec!r}: importing it raised {told}") from error
    factory = getattr(module, name, None)
    if factory is None:
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise CheckError(f"target {spec!r}: no function {name!r} in {path}; it defines {', '.join(known) or 'none'}")
    if not callable(factory):
        raise CheckError(
            f"target {spec!r}: {name!r} is of type {type(factory).__name__}, allowed a function without arguments"
        )
    return Target(spec=spec, path=path, name=name, factory=factory)


def _from_file(path: str) -> Any:
    """The module of a file, imported under a name of its own, with its folder on the path as `python file.py` would
    have it. A file that is imported already, under whatever name, and has not changed since, is not run again: it may
    define what can be defined only once (a `torch.library.Library`)."""
    real = os.path.realpath(path)
    with open(path, "rb") as handle:
        text = handle.read()
    known = _LOADED.get(real)
    if known is not None and known[0] == text:
        return known[1]
    module = None if known is not None else _imported(real)
    if module is None:
        module = _run_file(path)
    _LOADED[real] = (text, module)
    return module


def _run_file(path: str) -> Any:
    stem = "onegraph_target_" + "".join(c if c.isalnum() else "_" for c in os.path.splitext(os.path.basename(path))[0])
    name, count = stem, 1
    while (taken := sys.modules.get(name)) is not None and getattr(taken, "__file__", None) != path:
        count += 1
        name = f"{stem}_{count}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CheckError(f"target {path!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


_LOADED: dict[str, tuple[bytes, Any]] = {}
"""Files that were imported as targets, by their real path: what they held then, and the module."""


def _imported(path: str) -> Any:
    """The module that an ordinary import made of this file, None where there is none that is complete."""
    wanted = os.stat(path)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or not _is(file, wanted):
            continue
        if not getattr(getattr(module, "__spec__", None), "_initializing", False):
            return module
    return None


def _is(file: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(file), wanted)  # one question to the system; a real path takes one a folder
    except OSError:
        return False


def _from_name(name: str) -> Any:
    with _cwd_first():
        found = importlib.util.find_spec(name) if name not in sys.modules else None
        known = _LOADED.get(os.path.realpath(found.origin)) if found is not None and found.origin else None
        if known is not None:  # the same file was named by its path before
            return known[1]
        return importlib.import_module(name)


class _cwd_first:
    """The working directory on the import path, as `python -m` has it and an installed script has not."""

    def __enter__(self) -> None:
        self.added = os.getcwd() not in sys.path
        if self.added:
            sys.path.insert(0, os.getcwd())

    def __exit__(self, *_: object) -> None:
        if self.added and os.getcwd() in sys.path:
            sys.path.remove(os.getcwd())
