"""Tables of names, of data/names.toml: torch's API, and what launches kernels. And what ops did on a GPU.

Standard library only.
"""

import functools
import json
import tomllib
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("data")
_NAMES: dict[str, dict[str, str]] = tomllib.loads((_DATA / "names.toml").read_text(encoding="utf-8"))


def _torch(tag: str) -> frozenset[str]:
    return frozenset(name for tags, names in _NAMES["torch"].items() if tag in tags.split() for name in names.split())


def _owners(*tables: str) -> dict[str, str]:
    """Whole name -> whose it is."""
    return {name: owner for table in tables for owner, names in _NAMES[table].items() for name in names.split()}


FACTORIES = _torch("factory")
FROM_HOST = _torch("from_host")
RANDOM = _torch("random")
NOT_TENSORS = _torch("not_tensor")
GRAD_MODES = _torch("grad_mode")
HOST_READS, READERS = _torch("host_read"), _torch("reader")
DATA_SHAPES = _torch("data_shape")
PAIRS, SPLITS = _torch("pair"), _torch("split")
MASK_OPS = _torch("mask")
VIEWS = _torch("view")
PLAIN_METHODS, PLAIN_ATTRIBUTES = _torch("plain_method"), _torch("plain_attribute")
RNG_STATE, RNG_SETS = _torch("rng_state"), _torch("rng_set")
OBJECT_COLLECTIVES = _torch("object_collective")
METHODS = _torch("method") | VIEWS | HOST_READS | DATA_SHAPES
SHAPE_ARGUMENTS, SIZE_ARGUMENTS, SIZED = _torch("shape_argument"), _torch("size_argument"), _torch("sized")
REDUCTIONS, SAME_RANK, VECTORS = _torch("reduction"), _torch("same_rank"), _torch("vector")
PRODUCTS, CONCATS = _torch("product"), _torch("concat")
TENSOR_METHODS = _torch("tensor_only")
IN_STEPS = TENSOR_METHODS | _torch("tensor_in_step")

TRANSFORMS, CONSTANT_FALSE, VALUE_READS = (
    frozenset(_NAMES["functions"][key].split()) for key in ("transform", "constant_false", "read_value")
)

COLLECTIVES, PAIR_COLLECTIVES, WRITING_COLLECTIVES = (
    frozenset(_NAMES["collectives"][key].split()) for key in ("tensors", "pair", "writes")
)

CALLS = {construct: tuple(names.split()) for construct, names in _NAMES["constructs"].items()}

LAUNCHES = _owners("launch")
MAKERS = _owners("make", "make_read")
PLANNERS = _owners("plan")
SIMULATED_MAKERS = _owners("make", "make_simulated")


@functools.lru_cache(maxsize=1)
def sync_ops() -> dict[str, dict[str, Any]]:
    """What each aten overload did on a GPU: see benchmarks/check_sync_table.py."""
    return dict(_measured()["ops"])


def sync_row(name: str) -> dict[str, Any] | None:
    """The row of an aten overload; one in place that was not measured does what the same one out of place does."""
    return sync_ops().get(name) or sync_ops().get(name.replace("_.", ".", 1))


@functools.lru_cache(maxsize=1)
def _measured() -> dict[str, Any]:
    return dict(json.loads((_DATA / "sync_ops.json").read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=1)
def waiting_functions() -> frozenset[str]:
    """Functions of torch that broke a capture on every sample, by the name that people call them by."""
    rows = _measured()["functions"]
    return frozenset(n.replace("torch.functional.", "torch.") for n, row in rows.items() if row["sync"] == 1)


@functools.lru_cache(maxsize=1)
def waiting_linalg() -> dict[str, bool]:
    """Functions of torch.linalg that wait for the device -> whether they did on every sample."""
    return {
        name: sync_ops()[f"aten.{op}" if "." in op else f"aten.{op}.default"]["sync"] == 1
        for op, names in _NAMES["linalg"].items()
        for name in names.split()
    }
