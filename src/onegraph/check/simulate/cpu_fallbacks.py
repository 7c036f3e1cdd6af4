"""Runs an op on a CPU that torch has for a GPU alone: in wider dtypes, or written out in others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.simulate.records import map_tensors, targets


class Unavailable(NotImplementedError):
    """There is no way to compute the op here."""


def perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` on plain CPU tensors. Raises Unavailable, and whatever the op itself raises."""
    if func is compat.EFFICIENT_ZERO:  # has no memory, which only its own kernels know
        func = torch.ops.aten.zeros.default
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:
        if "not implemented for '" in str(error):
            return _wider(func, args, kwargs)
        other = _BY_HAND.get(str(func)) or compat.decomposition(func)
        if other is None:
            raise Unavailable(str(error)) from error
    return other(*args, **kwargs)


def _wider(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that a CPU has not got for these dtypes in float32, or float64 for integers.

    Results come back in the dtype that was widened; what the op writes is written back.
    """
    originals: dict[int, Tensor] = {}
    narrow: dict[torch.dtype, torch.dtype] = {}

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.float32, torch.float64, torch.bool, torch.int64) or tensor.is_complex():
            return tensor
        made = tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)
        originals[id(made)] = tensor
        narrow[made.dtype] = tensor.dtype
        return made

    wide_args, wide_kwargs = map_tensors(args, widen), map_tensors(kwargs, widen)
    out = func(*wide_args, **wide_kwargs)
    for target in targets(func, wide_args, wide_kwargs):
        if id(target) in originals:
            originals[id(target)].copy_(target)
    return map_tensors(out, lambda t: originals.get(id(t), t.to(narrow.get(t.dtype, t.dtype))))


def _gru_cell(
    given: Tensor, hidden: Tensor, state: Tensor, given_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gates [rows, 3 x width] of input and state, state [rows, width] -> (new state, workspace [rows, 5 x width])."""
    reset, update, new = (given if given_bias is None else given + given_bias).chunk(3, 1)
    from_reset, from_update, from_new = (hidden if hidden_bias is None else hidden + hidden_bias).chunk(3, 1)
    new = torch.tanh(new + torch.sigmoid(reset + from_reset) * from_new)
    after = (state - new) * torch.sigmoid(update + from_update) + new
    return after, state.new_zeros(state.shape[0], 5 * state.shape[1])


def _lstm_cell(
    given: Tensor, hidden: Tensor, cell: Tensor, given_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [rows, 4 x width] of input and state, cell [rows, width] -> (state, cell, workspace [rows, 4 x width])."""
    gates = given + hidden
    for bias in (given_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    enter, forget, new, leave = gates.chunk(4, 1)
    after = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(after), after, torch.zeros_like(gates)


def _product(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A product with `out_dtype`, its last positional argument: of matrices converted to that dtype first."""
    *matrices, dtype = args
    return plain(*(matrix.to(dtype) for matrix in matrices), **kwargs)


# By overload: a product without `out_dtype` has a CPU kernel.
_BY_HAND: dict[str, Callable[..., Any]] = {
    "aten._thnn_fused_gru_cell.default": _gru_cell,
    "aten._thnn_fused_lstm_cell.default": _lstm_cell,
    **{
        f"aten.{name}.{overload}": partial(_product, getattr(torch, name))
        for name in ("mm", "bmm", "addmm", "baddbmm")
        for overload in ("dtype", "dtype_out")
    },
}
