"""Arithmetic of bfloat16 and of floats of eight bits for Triton's interpreter, which keeps them as integers.

It computes with those integers as they are and cuts where a GPU rounds. Here they are widened to float32, and what
comes out is rounded by torch.
"""

from collections.abc import Callable
from typing import Any

import torch

_TORCH = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""By the names that Triton's dtypes have."""

_DECIDES = {"unary_op": 0, "binary_op": 0, "ternary_op": 2, "create_fma": 2, "create_dot": 2, "create_dot_scaled": 6,
            "create_erf": 0, "create_rsqrt": 0}  # fmt: skip
"""Methods of the interpreter's builder that compute, by the argument whose dtype the result has."""


def changes(interpreter: Any, language: Any) -> list[tuple[Any, str, Any]]:
    """(builder, name, method) of what is to be replaced while a kernel runs."""
    import numpy

    builder = interpreter.interpreter_builder
    kind = interpreter.TensorHandle

    def scalar(handle: Any) -> Any:
        return getattr(handle.dtype, "scalar", handle.dtype)

    def wide(value: Any) -> Any:
        """The value in float32, if it is of a narrow dtype."""
        if not isinstance(value, kind) or value.data.dtype == bool or str(scalar(value)) not in _TORCH:
            return value
        dtype = _TORCH[str(scalar(value))]
        bits = torch.from_numpy(value.data.copy()).view(dtype)
        return kind(bits.float().numpy(), language.float32)

    def narrow(value: Any, dtype: Any) -> Any:
        made = torch.from_numpy(value.data.astype("float32")).to(_TORCH[str(dtype)])
        bits = made.view(torch.uint16 if made.element_size() == 2 else torch.uint8)
        return kind(bits.numpy(), dtype)

    def computing(method: Callable[..., Any], decides: int) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            given = [wide(a) for a in args]
            if all(a is b for a, b in zip(args, given, strict=True)):
                return method(*args, **kwargs)
            out = method(*given, **kwargs)
            dtype = scalar(args[decides])
            if str(dtype) not in _TORCH:
                return out
            return kind(out.data, dtype) if out.data.dtype == bool else narrow(out, dtype)

        return compute

    def cast(source: Any, target: Any, *_: Any) -> Any:
        given = wide(source)
        if str(target.scalar) in _TORCH:
            return narrow(given, target.scalar)
        return plain_cast(given, target)

    def bf16(value: float) -> Any:
        return narrow(kind(numpy.array([value], dtype=numpy.float32), language.float32), language.bfloat16)

    plain_cast = builder.cast_impl
    found = [
        (builder, name, computing(getattr(builder, name), at))
        for name, at in _DECIDES.items()
        if hasattr(builder, name)
    ]
    found += [(builder, "cast_impl", cast), (builder, "create_fp_to_fp", cast), (builder, "get_bf16", bf16)]
    return found
