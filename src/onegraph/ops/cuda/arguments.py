"""What a kernel is given: the one parameter of every kernel here, as bytes."""

import struct
from operator import itemgetter
from typing import Any, ClassVar

import torch


class Arguments:
    """The one parameter of a kernel, `struct Arguments` of its source: names of its fields, in their order.

    CI compiles every source with `checks` behind it: the struct has these fields at these places, of these types.
    """

    _KINDS: ClassVar = {"maps": ("128s", 128, ""), "pointers": ("Q", 8, ""), "ints": ("i", 4, "int")}
    _KINDS |= {"floats": ("f", 4, "float")}

    def __init__(self, **fields: tuple[str, ...]) -> None:
        """`fields`: of maps, pointers, ints and floats; what is 4 bytes long comes last."""
        named = [(name, *self._KINDS[kind]) for kind, names in fields.items() for name in names]
        self.names = tuple(name for name, *_ in named)
        self._in_order = itemgetter(*self.names)
        self._sizes = [size for _, _, size, _ in named]
        self._scalars = {name: scalar for name, _, _, scalar in named if scalar}
        alignment = 64 if "maps" in fields else 8
        padding = -sum(self._sizes) % alignment
        self._struct = struct.Struct("=" + "".join(letter for _, letter, _, _ in named) + f"{padding}x")

    def pack(self, **values: Any) -> bytes:
        """The parameter's bytes: of every field its value, a map's as `tensor_map` gives it, a pointer's a tensor, None
        or an address."""
        assert len(values) == len(self.names), f"fields are {self.names}, got {tuple(values)}"
        return self._struct.pack(*map(_number, self._in_order(values)))

    @property
    def checks(self) -> str:
        """C++ that compiles where `struct Arguments` is what this is."""
        same = (
            "template <class, class> constexpr bool same = false; template <class T> constexpr bool same<T, T> = true;"
        )
        lines, at = [], 0
        for name, size in zip(self.names, self._sizes, strict=True):
            # NVRTC's own way to say offsetof, which it has no header for.
            lines.append(f"__INTADDR__(&((Arguments*)0)->{name}) == {at} && sizeof(((Arguments*)0)->{name}) == {size}")
            at += size
        lines += [f"same<decltype(Arguments::{name}), {kind}>" for name, kind in self._scalars.items()]
        lines.append(f"sizeof(Arguments) == {self._struct.size}")
        checks = (f'static_assert({line}, "Arguments and its launcher differ");\n' for line in lines)
        return f"{same}\n{''.join(checks)}"


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return 0 if value is None else value
