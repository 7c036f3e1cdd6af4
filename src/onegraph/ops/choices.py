"""Which family of kernels each op runs on a GPU, and why: what `onegraph env` prints."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

import onegraph.ops
from onegraph.ops import cuda, family
from onegraph.ops.cuda import build
from onegraph.ops.family import Family
from onegraph.ops.registry import OPS, Op

KERNELS = "cuda", "triton", "cpu"  # rooms of kernels, which register no op


@dataclass(frozen=True)
class Choice:
    """What an op runs.

    Attributes:
        family: of what it runs first; where that takes some calls alone, others may run another's. "none": it has one
            kernel, and this GPU cannot have that.
        sources: CUDA sources that run.
        refused: why others, which stand before these or beside them, do not: reason by source.
        sole: no other kernel computes it on a GPU, nor does the reference.
    """

    op: str
    family: Family | Literal["none"]
    sources: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    sole: bool = False

    @property
    def only(self) -> bool:
        """Whether there is nothing that it could run instead."""
        return not self.refused and (self.sole or not self.sources)


@cache
def registered() -> dict[str, Op]:
    """Every op, by name."""
    for module in pkgutil.iter_modules(onegraph.ops.__path__):
        if module.name not in KERNELS:
            importlib.import_module(f"onegraph.ops.{module.name}")
    return dict(sorted(OPS.items()))


def choices(device: int) -> list[Choice]:
    """Of every op, on this GPU. Looks at what sources are written for and whether NVRTC is there; builds none."""
    return [_choice(op, device) for op in registered().values()]


def sources() -> "list[build.Source]":
    """Every `cuda.build.Source` by name; they are declared where their launchers are imported."""
    for module in pkgutil.iter_modules(cuda.__path__):
        importlib.import_module(f"onegraph.ops.cuda.{module.name}")
    return sorted(build.Source.every, key=lambda source: source.path.name)


def _choice(op: Op, device: int) -> Choice:
    if op.kernel is None or (family.FORCED == "reference" and not op.sole):
        return Choice(op.name, "reference")
    # What a module of CUDA kernels cannot have, Triton's run; elsewhere the op itself goes on in torch.
    mine = [source for source in sources() if op.name in source.ops]
    rest: Family | Literal["none"] = "triton" if not mine or op.kernel.startswith("onegraph.ops.cuda.") else "reference"
    if op.sole:
        rest = "none"
    refused = {source.path.name: why for source in mine if (why := source.unavailable_reason(device))}
    first = [source for source in mine if "hopper" in source.families]
    capability = torch.cuda.get_device_capability(device)
    if first and not any(source.path.name in refused or source.form(capability).portable for source in first):
        return Choice(op.name, "hopper", tuple(source.path.name for source in first), sole=op.sole)
    runs = [source for source in mine if source.path.name not in refused]
    if runs:
        rest = "portable" if all(source.form(capability).portable for source in runs) else "hopper"
    return Choice(op.name, rest, tuple(source.path.name for source in runs), refused, op.sole)
