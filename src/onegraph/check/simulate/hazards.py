"""What a single op, looked at by itself, would do to a capture."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.check.rules import errors
from onegraph.check.rules.errors import NOT_PERMITTED, PAGEABLE, SILENT
from onegraph.check.tables import sync_row


class Hazard(NamedTuple):
    code: str
    message: str
    happens: str


# What a simulation and a GPU tell in the same words.
READ = Hazard("CG101", "a device value is read on the host", NOT_PERMITTED)
COPIED = Hazard("CG102", "host data is copied to the device from pageable memory", PAGEABLE)
INDEXED = Hazard("CG103", "a Python value is indexed with or assigned by index, which copies it over", PAGEABLE)
WAITED = Hazard("CG106", "the host waits for the device inside the step", NOT_PERMITTED)
UNREGISTERED = Hazard("CG301", "random numbers are drawn from a generator that no graph knows", errors.NO_CAPTURE_MODE)
SEEDED = Hazard("CG302", "the random seed is set inside the step, once, at capture", SILENT)
ASTRAY = Hazard(
    "CG303", "work is launched on a stream that did not wait for the capturing one", f"{errors.UNCAPTURED}, or {SILENT}"
)
UNJOINED = Hazard("CG305", "a side stream is not joined before the step ends", errors.UNJOINED)
OWN_GRAPHS = Hazard(
    "CG307",
    "what is compiled with mode='reduce-overhead' or 'max-autotune' captures graphs of its own, which cannot be inside "
    "of another",
    errors.IN_CAPTURE,
)
OTHER_THREAD = Hazard("CG309", "work is launched by another thread, whose stream is not captured", SILENT)


def branch(hazard: Hazard, opname: str) -> Hazard:
    """A host read whose value decides a jump is a branch on a device value; any other hazard is what it is. opname: the
    bytecode that asked for it."""
    if hazard.code == "CG101" and ("JUMP" in opname or opname in ("TO_BOOL", "UNARY_NOT")):
        return Hazard("CG108", "a Python branch is taken on a device value", hazard.happens)
    return hazard


_INDEX = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::copy"}
_OFTEN = 0.5
"""Share of measured sample inputs on which an op broke the capture from which on it is said to (the others are empty
matrices and the like)."""
_FILLS = {f"aten::{name}" for name in ("masked_fill", "masked_fill_", "index_fill", "index_fill_")}
_SPACED = {"aten::linspace", "aten::logspace"}
_PRODUCTS = {"aten::_sparse_addmm", "aten::addmm", "aten::bmm", "aten::mm", "aten::mv"}
_METADATA = {"aten::is_same_size", "aten::is_pinned", "aten::_has_compatible_shallow_copy_type", "prim::device"}
_NAMED_SHAPES = {
    "aten::nonzero": "nonzero (also one-argument where and argwhere)",
    "aten::masked_select": "masked_select",
    "aten::repeat_interleave": "repeat_interleave without output_size",
    "aten::bincount": "bincount",
}


def waits(name: str) -> str:
    """What is said of an op that waits."""
    return f"{name.split('::')[-1] or 'an op'} waits for the device inside its host code"


@functools.cache
def _tags(func: Any) -> tuple[bool, bool]:
    tags = getattr(func, "tags", ())
    return torch.Tag.dynamic_output_shape in tags, torch.Tag.data_dependent_output in tags


def of_op(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Tensor]) -> Hazard | None:
    """The hazard of an op on device tensors; copies between host and device are judged by `of_copy`.

    `args`: the op's arguments as plain CPU tensors; `hosts`: those that are on the host for the user too.
    """
    if name in _COPIES or name in _METADATA:
        return None
    if name in _INDEX:
        return _index(name, args, hosts)
    dynamic, dependent = _tags(func)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        dynamic = False
    if dynamic or name == "aten::bincount":
        what = _NAMED_SHAPES.get(name, name.split("::")[1])
        return Hazard("CG104", f"{what}: the shape of the result depends on device values", NOT_PERMITTED)
    if name == "aten::_local_scalar_dense":
        return READ
    if dependent:
        return Hazard("CG101", f"{name.split('::')[1]} gives a host value computed from device data", NOT_PERMITTED)
    if name == "aten::where" and any(not h.dim() for h in hosts):
        return Hazard("CG102", "where copies a 0-d tensor of the host to the device, from pageable memory", PAGEABLE)
    if name in _SPACED:
        if not any(isinstance(a, Tensor) and not any(a is h for h in hosts) for a in args):
            return None
        text = f"{name.split('::')[1]} reads a bound, which is a device value, on the host"
        return Hazard("CG101", text, NOT_PERMITTED)
    if name == "aten::histc" and len(args) > 3 and args[2] != args[3]:
        return None  # with its range given it has nothing to read
    if name == "aten::isin" and len(args) > 1 and all(isinstance(a, Tensor) for a in args[:2]):
        elements, wanted = args[0].numel(), args[1].numel()
        if wanted < 10 * elements**0.145:  # ATen's own rule: few are compared one by one, many are sorted and counted
            return None
    if name == "aten::segment_reduce" and kwargs.get("unsafe"):
        return None  # told not to look whether the lengths add up
    if name == "aten::_grouped_mm":
        if all(isinstance(a, Tensor) and a.dtype is torch.bfloat16 for a in args[:2]):
            return None
        text = "_grouped_mm of another type than bfloat16 reads its offsets on the host"
        return Hazard("CG105", text, PAGEABLE)
    if name in _PRODUCTS and any(isinstance(a, Tensor) and _unordered(a) for a in args):
        text = "a product with an uncoalesced sparse matrix sorts and counts its entries first"
        return Hazard("CG105", text, NOT_PERMITTED)
    if name in _FILLS and any(value is h for h in hosts for value in args[2:]):
        return None  # the value is a number of the host's, which no one waits for
    row = sync_row(str(func))
    if row and row["sync"] >= _OFTEN:
        return Hazard("CG105", waits(name), NOT_PERMITTED)
    return None


def _unordered(matrix: Tensor) -> bool:
    return matrix.layout is torch.sparse_coo and not matrix.is_coalesced()


def _index(name: str, args: tuple[Any, ...], hosts: list[Tensor]) -> Hazard | None:
    indices = [i for i in args[1] if i is not None]
    host = any(any(i is h for h in hosts) for i in indices)
    put = "put" in name
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    if host:
        return Hazard("CG103", "a device tensor is indexed by a host tensor or list, which is copied over", PAGEABLE)
    if masks:
        value = args[2] if put and len(args) > 2 else None
        accumulate = bool(args[3]) if len(args) > 3 else False
        number = value is not None and value.numel() == 1 and any(value is h for h in hosts)
        if number and len(indices) == len(masks) == 1 and not accumulate:
            return None  # torch turns it into masked_fill_, which has a fixed shape
        return Hazard(
            "CG104", "indexing by a boolean mask: the number of elements depends on device values", NOT_PERMITTED
        )
    if put and len(args) > 2 and any(args[2] is h for h in hosts):
        return Hazard("CG103", "a host scalar is assigned through an index tensor, which copies it over", PAGEABLE)
    return None


def of_transfer(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Tensor], *, target: torch.device | None,
    to_device: bool, on_device: bool, is_pinned: Callable[[Tensor], bool], opname: Callable[[], str],
) -> tuple[str, Hazard | None]:  # fmt: skip
    """(kind, hazard) of `copy_` and `_to_copy`. `to_device`: whether the first argument is on the device; `on_device`:
    whether any is; `hosts`: those on the host. `target`: the device that is asked for."""
    if not args[0].numel():
        return "op", None  # of nothing, nothing is copied
    non_blocking = bool(kwargs.get("non_blocking"))
    if name == "aten::copy_":
        if not hosts:
            return "op", None
        non_blocking = non_blocking or (len(args) > 2 and bool(args[2]))
        pinned = is_pinned(hosts[0])
    else:
        if on_device and (target is None or target.type == "cuda"):
            return "op", None
        to_device = not on_device
        pinned = is_pinned(hosts[0]) if to_device else non_blocking
    hazard = of_copy(to_device=to_device, pinned=pinned, non_blocking=non_blocking, opname=opname())
    return ("h2d" if to_device else "d2h"), hazard


def of_copy(*, to_device: bool, pinned: bool, non_blocking: bool, opname: str) -> Hazard | None:
    """A copy between host and device. `opname`: the user's bytecode, which tells `x[0] = 1` from `torch.tensor`."""
    if pinned and non_blocking:
        return None
    if to_device:
        if "SUBSCR" in opname or "SLICE" in opname:
            return INDEXED
        if pinned:
            return Hazard("CG102", "a blocking copy from pinned memory waits for the stream", NOT_PERMITTED)
        return COPIED
    if pinned:
        return Hazard("CG101", "a blocking copy to the host waits for the stream", NOT_PERMITTED)
    return Hazard("CG101", "a device tensor is copied to the host", PAGEABLE)
