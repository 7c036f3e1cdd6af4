"""Records what a step does on a real GPU, in the simulation's own words, so that both are compared by the same code."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onegraph.check import compat, tables
from onegraph.check.report import Severity
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.aliases import changed
from onegraph.check.simulate.hazards import NOT_PERMITTED, Hazard
from onegraph.check.simulate.records import (
    UNWRITTEN,
    OpRecord,
    RawFinding,
    Step,
    composed,
    convert_plain,
    eagerly,
    targets,
    written,
)

_SYNCHRONIZING, _PROTOTYPE = "synchronizing CUDA operation", "Synchronization debug mode is a prototype"


def stored(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory of one shape, as sparse and nested ones are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


class Numbers:
    """Numbers storages in the order in which they are met; a number is never used again."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, StorageWeakRef]] = {}
        self.made: dict[int, tuple[str, int]] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0

    def of(self, tensor: Tensor, phase: str, step: int) -> int:
        storage = tensor.untyped_storage()
        found = self.known.get(storage._cdata)
        if found is not None and not found[1].expired():
            return found[0]
        self.count += 1
        self.known[storage._cdata] = (self.count, StorageWeakRef(storage))
        self.made[self.count] = (phase, step)
        self.sizes[self.count] = storage.nbytes()
        return self.count

    def alive(self) -> set[int]:
        return {number for number, reference in self.known.values() if not reference.expired()}


class Recorder(compat.TorchDispatchMode):
    """One step at a time: ops with their scalars, shapes, storages and host contents; syncs with their line."""

    supports_higher_order_operators = True

    def __init__(self, stop: CodeType, roots: frames.Roots, numbers: Numbers) -> None:
        super().__init__()
        self.stop, self.roots, self.numbers = stop, roots, numbers
        self.step: Step | None = None
        self.raw_findings: list[RawFinding] = []
        self.asked_capturing: list[frames.Chain] = []
        self.captured_step = 1
        self.second_order = False  # gradients of gradients: their nodes are numbered by the engine's own threads
        self.first_node = 0  # sequence number of autograd from which on nodes belong to the running step
        self.last: tuple[str, frames.Chain, Hazard | None] | None = None
        self.blamed: dict[frames.Chain, Hazard] = {}
        self.streams: dict[int, tuple[str, frames.Chain]] = {}
        self.capturing = False
        self.broken: tuple[str, frames.Chain, Hazard | None, str] | None = None  # the first op that a capture
        # refused, and its error: the step may have caught that and gone on
        self.outside: dict[int, frames.Chain] = {}  # streams that work was launched on and that are not captured
        self.devices: dict[int, frames.Chain] = {}
        self.written: list[weakref.ref[Tensor]] = []  # what the captured step writes
        self.reshaped: dict[int, tuple[str, frames.Chain]] = {}  # tensors whose shape the step changed in place

    @property
    def sizes(self) -> dict[int, int]:
        return self.numbers.sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, compat.HigherOrderOperator):
            with self:
                return eagerly(func)(*args, **kwargs)
        if self.step is None:
            return func(*args, **kwargs)
        if composed(func):
            with self:
                return func.decompose(*args, **kwargs)
        device: list[Tensor] = []
        hosts: list[Tensor] = []
        scalars: list[Any] = []
        convert_plain((args, kwargs), device, hosts, scalars)
        target = kwargs.get("device")
        on_gpu = bool(device) or (target is not None and torch.device(target).type == "cuda")
        if not on_gpu:
            return func(*args, **kwargs)
        chain = frames.chain(self.stop, 2)
        name = func._schema.name
        kind, hazard = self._judge(func, name, args, kwargs, device, hosts, chain)
        self.last = (name, chain, hazard)
        if hazard is not None:
            self.blamed[chain] = hazard
        shape = device[0].shape if device and torch.Tag.inplace_view in func.tags else None
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if self.capturing and self.broken is None and "captur" in str(error):
                self.broken = (*self.last, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            raise
        if shape is not None and device[0].shape != shape:
            self.reshaped.setdefault(id(device[0]), (name, chain))
        for target in targets(func, args, kwargs):
            self.written.append(weakref.ref(target if target._base is None else target._base))
        outs = [o for o in (out if isinstance(out, list | tuple) else [out]) if isinstance(o, Tensor)]
        self._record(func, name, kind, chain, scalars, device, hosts, outs, hazard)
        if hazard is not None and hazard.code in ("CG101", "CG108") and isinstance(out, bool | int | float):
            self.step.reads.append((chain, out, len(self.step.ops)))
        return out

    def _judge(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        device: list[Tensor],
        hosts: list[Tensor],
        chain: frames.Chain,
    ) -> tuple[str, Hazard | None]:
        """What this op would be blamed for, if it turns out to break the capture."""
        if name in ("aten::copy_", "aten::_to_copy"):
            target = kwargs.get("device")
            return hazards.of_transfer(
                name, args, kwargs, hosts, target=None if target is None else torch.device(target),
                to_device=args[0].is_cuda, on_device=bool(device), is_pinned=Tensor.is_pinned,
                opname=lambda: self.roots.opname(chain),
            )  # fmt: skip
        hazard = hazards.of_op(func, name, args, kwargs, hosts)
        return "op", hazard and hazards.branch(hazard, self.roots.opname(chain))

    def _record(
        self, func: Any, name: str, kind: str, chain: frames.Chain, scalars: list[Any], device: list[Tensor],
        hosts: list[Tensor], outs: list[Tensor], hazard: Hazard | None,
    ) -> None:  # fmt: skip
        step = self.step
        assert step is not None
        index = step.index
        device, outs = [t for t in device if stored(t)], [t for t in outs if stored(t)]
        numbers = [self.numbers.of(t, "outside", -1) for t in device]
        inside = [self.numbers.made[n] == ("step", index) for n in numbers]
        known = set(numbers)
        for out in outs:
            if out.is_cuda:
                known.add(self.numbers.of(out, "step", index))
        if kind == "op":
            scalars = [*scalars, *(("cpu", h.item()) for h in hosts if not h.dim())]
        fresh = bool(set(known) - set(numbers))
        op = OpRecord(
            func=func,
            name=str(func),
            kind="view" if kind == "op" and outs and not fresh and not written(func) else kind,
            chain=chain,
            scalars=tuple(scalars),
            shapes=tuple(tuple(t.shape) for t in device),
            externals=tuple(-1 if made else n for n, made in zip(numbers, inside, strict=True)),
            derived=tuple(t._is_view() for t in device),
            out_shapes=tuple(tuple(o.shape) for o in outs),
            reads=tuple(dict.fromkeys(numbers)),
            allocates=tuple(known - set(numbers)),
            bytes=sum(o.untyped_storage().nbytes() for o in outs if o.is_cuda) if fresh else 0,
            codes=(hazard.code,) if hazard else (),
        )
        if kind == "h2d" and hosts[0].numel() <= 1 << 20:
            op.contents = hosts[0].detach().clone()
        step.ops.append(op)
        for tensor in (*device, *outs):
            if tensor.is_cuda:
                self.devices.setdefault(tensor.device.index, chain)
        stream = torch.cuda.current_stream().cuda_stream
        self.streams[stream] = (name, chain)
        launches = op.kind != "view" and name not in UNWRITTEN
        if self.capturing and launches and (stream == 0 or not compat.capturing()):
            self.outside.setdefault(stream, chain)

    def note(self, code: str, message: str, happens: str, chain: frames.Chain) -> None:
        if self.step is not None:
            self.raw_findings.append(RawFinding(self.step.index, code, Severity.ERROR, chain, message, happens))

    def synced(self) -> None:
        """The host waited for the device: name the op, or the call that asked for it."""
        chain = frames.chain(self.stop, 2)
        if self.step is None:
            return
        if self.last is not None and self.last[1] == chain and self.last[2] is not None:
            hazard = self.last[2]
        elif chain in self.blamed:  # warnings come when the call from Python ends, which may have run more ops by then
            hazard = self.blamed[chain]
        else:
            name = self.last[0] if self.last is not None and self.last[1] == chain else ""
            hazard = of_call(chain, self.roots, name)
        self.note(*hazard, chain)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """torch's sync debug mode, and hooks on the calls that wait by name, which it does not see.

        Not `torch.cuda._gpu_trace`: it cannot be switched off again, and its callback, run while an error unwinds,
        swallows that error (seen with torch 2.11: "cuda trace hook execution failed").
        """
        before = warnings.showwarning
        waits = [
            (torch.cuda, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.accelerator, "synchronize"),
        ]

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if _SYNCHRONIZING in str(message):
                self.synced()
            elif _PROTOTYPE not in str(message):
                before(message, category, filename, lineno, file, line)

        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="always"):
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with changed((owner, name, self._hooked(getattr(owner, name))) for owner, name in waits):
                    yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                warnings.showwarning = before

    def _hooked(self, wait: Any) -> Any:
        @functools.wraps(wait)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            self.synced()
            return wait(*args, **kwargs)

        return hooked


_CALLS = (
    (("elapsed_time", "query"), Hazard("CG107", "an event or stream is queried inside the step", NOT_PERMITTED)),
    (("synchronize",), hazards.WAITED),
    ({*tables.RNG_SETS, "set_state"}, hazards.SEEDED._replace(happens=NOT_PERMITTED)),
    (("backward", "grad"), Hazard("CG306", "the backward pass touches work of another stream", NOT_PERMITTED)),
    (("compile",), Hazard("CG307", "something is compiled inside the step", NOT_PERMITTED)),
    (("print", "tolist", "numpy", "cpu", "item", "int", "float", "bool"), hazards.READ),
    ({*tables.FROM_HOST, "new_tensor", "to", "cuda", "copy_"}, hazards.COPIED),
)


def of_call(chain: frames.Chain, roots: frames.Roots, op: str) -> Hazard:
    """The hazard of what the user's code calls there, by name; a sync inside of an op's own code where it has none."""
    where = roots.where(chain)
    name = frames.called(*where) if where else ""
    operation = frames.opname(*where) if where else ""
    if "SUBSCR" in operation or "SLICE" in operation:
        return hazards.INDEXED
    hazard = next((h for names, h in _CALLS if name in names), Hazard("CG105", hazards.waits(op), NOT_PERMITTED))
    return hazards.branch(hazard, operation)
