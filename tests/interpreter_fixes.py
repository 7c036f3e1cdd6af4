"""Three faults of Triton 3.6's interpreter mended for the tests: it is the judge here, not the judged.

It multiplies bfloat16 matrices as the uint16 that it keeps them in; converts integers to that uint16 by value, and
float32 to it by truncation; and turns a loop bound of shape (1,) into an int as numpy no longer does.

And most of its time. It patches the language anew for each call of a function inside of a kernel; computes for each
integer operation, in some eight others, whether it overflowed, and drops that unless it debugs; and writes the name of
each type, wraps each shape and lists all dtypes anew for each value.
"""

from functools import cache, cached_property
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

_builder = interpreter.InterpreterBuilder
_create_dot = _builder.create_dot
_cast = _builder.cast_impl
_patch_lang_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_broadcast = interpreter.TritonSemantic.broadcast_impl_value
_np_dtype_of_scalar = cache(interpreter._get_np_dtype)
_NP_ADDRESS, _NO_SHAPE, _ONE = np.dtype(np.uint64), tl.tuple([]), tl.constexpr(1)
_of_kernel, _patched = interpreter._LangPatchScope(), set[int]()


def _to_float(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _create_dot(self, _to_float(a), _to_float(b), *rest)


def cast(self: Any, source: Any, dtype: Any, *_: Any) -> Any:
    if dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_to_bfloat16(_to_float(source).data), tl.bfloat16)
    return _cast(self, _to_float(source), dtype)


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def patch_lang(fn: Any) -> Any:
    """What a kernel calls while it runs (its scope holds what to restore then) patches what is not patched yet."""
    global _of_kernel
    modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
    if not _of_kernel._changes:
        _patched.clear()
        _of_kernel = _patch_lang(fn)
    elif not modules <= _patched:
        _of_kernel._changes += _patch_lang(fn)._changes
    _patched.update(modules)
    return _of_kernel


@cache
def _shape_of(sizes: tuple[Any, ...]) -> tuple[Any, int, Any, Any]:
    """The shape and size of a type, and both as its tensors have them, of constants."""
    shape = tl.tuple(tl.core._unwrap_shape(sizes))
    numel = validate_block_shape(shape)
    return shape, numel, tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(numel)


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if not len(shape):
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, self.tensor_shape, self.tensor_numel = _shape_of(tuple(shape))


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Most operands have one shape, which `_shape_of` made: nothing is to be done then."""
    if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
        return left, right
    pair: tuple[Any, Any] = _broadcast(self, left, right)
    return pair


def name_of_block(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if type.is_block() else (_NO_SHAPE, _ONE)


def np_dtype(of: Any) -> np.dtype:
    """Blocks cannot be hashed; all pointers are numbers."""
    of = of.scalar
    return _NP_ADDRESS if of.is_ptr() else _np_dtype_of_scalar(of)


_builder.create_dot = create_dot
for _name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext"):
    setattr(_builder, _name, cast)
_builder.create_fp_trunc = cast
_builder.create_fp_to_fp = cast
interpreter._patch_lang_tensor = patch_lang_tensor
interpreter._patch_lang = patch_lang
interpreter._get_np_dtype = np_dtype
interpreter.TritonSemantic.broadcast_impl_value = broadcast
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
tl.block_type.name = cached_property(name_of_block)
tl.block_type.name.__set_name__(tl.block_type, "name")
