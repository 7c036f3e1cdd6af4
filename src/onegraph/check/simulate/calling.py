"""The user's part of a check, called: factory, inputs and step, with what they raise or give told in one line."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor

from onegraph.check import containers
from onegraph.check.places import package_of
from onegraph.check.report import CheckError
from onegraph.check.simulate import frames
from onegraph.check.simulate.aliases import changed

_LONGEST = 200

NOTHING = 'nothing of the step ran on device "cuda": there is nothing to capture; build model, buffers and inputs there'
NO_GPU_YET = "there is a simulated GPU inside of the factory; while a file is imported there is none yet"


_STAND_INS = ("device.py", "cuda.py", "modes.py", "backward.py")
"""Files of this package through whose frames torch's own code raises."""


def call_step(step: Callable[..., Any], given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call chains end at this frame."""
    return step(*given, **keywords)


def build(factory: Callable[[], Any]) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    """(step, inputs) of a factory. Raises CheckError where it gives something else."""
    name = _name(factory) or "factory"
    try:
        built = guarded(f"{name}()", factory)
    except CheckError as error:
        if needed := _needed(factory, error.__cause__):
            raise CheckError(_step_named(factory, needed)) from error.__cause__
        raise
    if isinstance(built, Coroutine):
        built.close()
    if not (isinstance(built, tuple) and len(built) == 2 and all(callable(b) for b in built)):
        raise CheckError(
            f"{name}(): got {kind(built)}, allowed a tuple (step, inputs) of two callables; "
            "inputs(i) gives the arguments of the i-th step"
        )
    return built


def _name(factory: Callable[..., Any]) -> str:
    """What the user calls a factory, "" for a lambda or an object."""
    name = getattr(factory, "__name__", "")
    return name if name.isidentifier() else ""


def _needed(factory: Callable[..., Any], error: BaseException | None) -> list[str]:
    """The arguments for want of which a call without any raised `error`, before a line of the user's had run."""
    if not isinstance(error, TypeError) or isinstance(factory, type) or theirs(error):
        return []
    try:
        parameters = inspect.signature(getattr(factory, "forward", factory)).parameters.values()
    except (TypeError, ValueError):  # nothing that Python could look into
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _step_named(factory: Callable[..., Any], needed: list[str]) -> str:
    """What to write where a step was named in place of its factory."""
    name = _name(factory)
    return (
        f"{name or kind(factory)}({', '.join(needed)}) looks like a step, allowed a factory: a function that "
        "returns (step, inputs) and is called without arguments. If it is a factory, give its arguments defaults; if "
        f"it is a step, write def {'make' if name == 'factory' else 'factory'}(): return {name or 'step'}, inputs, "
        "where inputs(i) gives the arguments of the i-th step as a tuple or a dict"
    )


def guarded(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the user's function. Raises CheckError for what it raises, but not for a fault of this package."""
    try:
        with _no_way_out():
            return function(*args)
    except CheckError:
        raise
    except SystemExit as error:
        raise CheckError(f"{what} called sys.exit({error.code!r})") from error
    except Exception as error:
        if internal(error):
            raise  # not to be read as one of the step
        raise CheckError(f"{what} {raised(error, where(error))}") from error


_NO_CUDA = re.compile(
    r"Could not run 'aten|not compiled with CUDA|compiled without CUDA|dummy base class|NVIDIA driver|libcuda|libnvrtc|"
    r"has no attribute '_(cuda|CUDA)|CUDA_HOME"
)
"""What torch and others say where a build without CUDA has not got what a GPU would have: no error of the user's."""


def raised(error: BaseException, at: str = "") -> str:
    """How an error of the user's code reads, or a limit of the simulator that it ran into. `at`: where."""
    told = f"{type(error).__name__}: {line(error)}"
    if _NO_CUDA.search(str(error)):
        return f"needs what the simulator does not have{at}; check with --live ({told[:_LONGEST]})"
    return f"raised {told}{at}"


@contextmanager
def _no_way_out() -> Iterator[None]:
    """`os._exit` of this process is `sys.exit`: a check that it ends would look passed. Forked ones keep theirs."""
    leave, process = os._exit, os.getpid()

    def instead(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        sys.exit(status)

    with changed([(os, "_exit", instead)]):
        yield


def given_by(inputs: Callable[[int], Any], index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, keywords) that the user's `inputs` makes for step `index`. Raises CheckError."""
    return given_of(index, guarded(f"inputs({index})", inputs, index))


def given_of(index: int, made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, keywords) of step `index`. Raises CheckError."""
    given = containers.arguments(made)
    if given is None:
        raise CheckError(
            f"inputs({index}): got {kind(made)}, allowed a tuple or a dict: the arguments or keywords of step"
        )
    return given


def kind(value: Any) -> str:
    """What a value is, for a message: "a tuple of 2 (int, str)"."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(v).__name__ for v in value[:4])})"
    if isinstance(value, Tensor):
        return "a tensor"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip().splitlines()
    return text[0] if text else "(no message)"


def internal(error: BaseException) -> bool:
    """Whether the checker itself raised it: innermost in this package, but not where that stands in for torch and its
    C++ code raises through a frame of ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_name in ("call_step", "guarded"):
        return False  # the call itself: wrong arguments
    path = trace.tb_frame.f_code.co_filename
    return path.startswith(frames.HERE) and os.path.basename(path) not in _STAND_INS


def theirs(error: BaseException) -> list[TracebackType]:
    """The calls that led to an error, outermost first, outside of torch and this package."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        if not frames._skipped(trace.tb_frame.f_code.co_filename):
            found.append(trace)
        trace = trace.tb_next
    return found


def where(error: BaseException) -> str:
    """The innermost line of the user's own; of an installed package where none of theirs is on the way."""
    found = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in theirs(error)]
    own = [place for place in found if package_of(place[0]) is None]
    return "".join(f" ({path}:{number})" for path, number in (own or found)[-1:])
