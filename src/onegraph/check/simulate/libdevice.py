"""`libdevice` for the interpreter: NVIDIA's device functions, computed by torch's functions of that name."""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

_OTHER_NAMES = {
    "fabs": "abs", "rint": "round", "nearbyint": "round", "rcp": "reciprocal", "fmin": "fmin", "fmax": "fmax",
    "isnan": "isnan", "isinf": "isinf", "finitef": "isfinite", "isfinited": "isfinite", "tgamma": "tgamma",
    "cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1", "j0": "bessel_j0", "j1": "bessel_j1", "y0": "bessel_y0",
    "y1": "bessel_y1", "normcdf": "ndtr", "normcdfinv": "ndtri", "ilogb": "ilogb",
}  # fmt: skip


def is_libdevice(value: Any) -> bool:
    """Whether this is the module, or a function imported out of it."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(name, str) or not name.startswith("triton.") or not name.endswith("libdevice"):
        return False
    return isinstance(value, ModuleType | FunctionType) or callable(value)


class Libdevice:
    """Stands for `original`, the module or one of its functions."""

    def __init__(self, language: Any, interpreter: Any, original: Any) -> None:
        self._language, self._interpreter, self._original = language, interpreter, original

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _torch_function(name)

        def run(*args: Any, **_: Any) -> Any:
            return self._through_torch(function, args)

        return run

    def __call__(self, *args: Any, **_: Any) -> Any:
        return self._through_torch(_torch_function(self._original.__name__), args)

    def _through_torch(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        language, interpreter = self._language, self._interpreter
        given = [interpreter.interpreter_semantic.to_tensor(a) for a in args]
        dtype = next((t.dtype for t in given if t.dtype.is_floating()), given[0].dtype)
        if dtype.primitive_bitwidth < 32 and dtype.is_floating():
            raise NotImplementedError(f"libdevice has no functions of {dtype}")
        found: Tensor = function(*(torch.from_numpy(t.handle.data.copy()) for t in given))
        kept = language.int1 if found.dtype is torch.bool else dtype
        shape = next((t.type for t in given if t.type.is_block()), None)
        kind = language.block_type(kept, shape.shape) if shape is not None else kept
        return language.tensor(interpreter.TensorHandle(found.numpy(), kept), kind)


def _torch_function(name: str) -> Callable[..., Any]:
    """The torch function of libdevice's `name`. Raises NotImplementedError."""
    for plain in (name, name.removeprefix("fast_").removesuffix("f"), name.removeprefix("fast_")):
        wanted = _OTHER_NAMES.get(plain, plain)
        for module in (torch, torch.special):
            function = getattr(module, wanted, None)
            if callable(function):
                found: Callable[..., Any] = function
                return found
    raise NotImplementedError(f"libdevice.{name} is not known to the interpreter")
