"""The simulated machine: runs every op on the CPU, keeps the books that a GPU and its allocator would keep."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from onegraph.check import compat
from onegraph.check.declared import capturable
from onegraph.check.report import CheckError, Severity
from onegraph.check.simulate import compiled, fake_results, frames, hazards, recording
from onegraph.check.simulate.device import (
    DeviceTensor,
    StorageRecord,
    flat_bytes,
    plain_of,
    refuse,
    storage_of,
)
from onegraph.check.simulate.kernels import Kernels
from onegraph.check.simulate.randomness import Randomness
from onegraph.check.simulate.recording import convert
from onegraph.check.simulate.records import (
    RawFinding,
    Step,
    targets,
    tensors_in,
    written,
)
from onegraph.check.simulate.storages import Storages
from onegraph.check.simulate.streams import Streams
from onegraph.check.simulate.threads import PerThread, Threads
from onegraph.check.simulate.unknown import ESCAPE, GivenTensor, Unknowns, given_of

BUILTIN = {
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "symm_mem",
    "profiler",
    "inductor",
    "rngprims",
    "higher_order",
}


class World:
    """See the module. `stop`: code of the frame that calls the step, where call chains end."""

    device_index = PerThread()
    muted = PerThread()  # how many blocks of the checker's own work the thread is in
    compiled = PerThread()  # how many functions that torch would compile are running
    submitting = PerThread()  # to a pool: a thread that it starts for that does other work later
    builds_at_once = True  # whether work that a pool is given outside of steps is done at once

    def __init__(self, stop: CodeType, roots: frames.Roots, gpus: int = 1) -> None:
        self.local = threading.local()
        self.stop, self.roots, self.gpus = stop, roots, gpus
        self.phase, self.step = "build", -1
        self.captured_step = 1
        self.current: Step | None = None
        self.reference: Step | None = None
        self.storages = Storages()
        self.threads = Threads()
        self.randomness = Randomness()
        self.raw_findings: list[RawFinding] = []
        self.asked_capturing: list[frames.Chain] = []
        self.streams = Streams()
        self.kernels = Kernels()
        self.streams_main: Any = None  # the stream that captures, once there are stand-ins for streams
        self.calls: list[compiled.Call] = []  # of functions that torch compiles with graphs of their own
        self.hosts: list[tuple[str, frames.Chain]] | None = None  # ops on the CPU, while one of them runs
        self.saves = False  # whether tensors of the device may be pickled
        self.first_node = 0  # sequence number of autograd from which on nodes belong to the running step
        self.unknowns = Unknowns()
        self.tried: dict[Any, bool] = {}  # ops with kernels for CUDA and the CPU: whether the former can be run here
        self.reshaped: dict[int, tuple[str, frames.Chain]] = {}  # tensors whose shape the step changed in place

    # steps

    def begin(self, step: Step, stream: int) -> None:
        """From now on what is done is recorded in `step`, which `stream` captures."""
        self.current = step
        self.randomness.begin()
        step.unknown, step.exposed = self.unknowns.begin()
        step.addresses.begin(self.storages.count)
        self.streams.begin(stream)

    def end(self, step: Step) -> None:
        step.unknown_after = self.unknowns.end()
        self.streams.end(self)

    # storages

    @property
    def sizes(self) -> dict[int, int]:
        return self.storages.sizes

    def record_of(self, inner: Tensor) -> StorageRecord:
        known = self.storages.record(inner)
        if known is not None:
            return known
        record = self.storages.add(inner, self.step, self.phase)
        if self.phase == "step" and self.step == self.captured_step and self.current is not None and not self.muted:
            self.current.memory.append((record.number, record.nbytes, len(self.current.ops)))
            weakref.finalize(record, self.current.freed, record.number).atexit = False
        return record

    def adopt(self, tensor: DeviceTensor) -> None:
        """A tensor of an earlier simulation of this process, kept by a cache of the user's (`lru_cache` by device): it
        was there before this one began, and its owner lives on. Without this only its views had an owner here, and a
        replay took the storage for freed memory."""
        record = self.storages.record(tensor.inner) or self.storages.add(tensor.inner, -1, "outside")
        tensor.world, tensor.record, tensor.made = self, record, -1

    def wrap(self, inner: Tensor, index: int | None = None) -> DeviceTensor:
        return DeviceTensor(inner, self, self.device_index if index is None else index)

    def pin(self, tensor: Tensor) -> Tensor:
        if self.phase == "step":
            text = "pinned memory is allocated inside the step (torch before 2.10 cannot while capturing)"
            self.see("CG107", text, hazards.NOT_PERMITTED, severity=Severity.WARNING)
        self.storages.pin(tensor)
        return tensor

    def chain(self, depth: int = 2) -> frames.Chain:
        """The user's calls to here, innermost first; in a thread those that gave it the work, or what the step is at;
        empty outside of steps."""
        if self.phase != "step":
            return ()
        if self.threads.in_main():
            return frames.chain(self.stop, depth + 1)
        errand = self.threads.errand()
        return (errand.chain if errand else ()) or frames.chain_of_thread(self.threads.main, self.stop)

    def see(
        self,
        code: str,
        message: str,
        happens: str,
        *,
        chain: frames.Chain | None = None,
        severity: Severity = Severity.ERROR,
        values: tuple[str, ...] = (),
        note: Any = None,
    ) -> None:
        """Note a hazard at the user's line, if a step is running."""
        if self.phase != "step" or self.muted:
            return
        chain = self.chain() if chain is None else chain
        self.raw_findings.append(RawFinding(self.step, code, severity, chain, message, happens, values, note))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Work of the checker itself: nothing is seen, nothing recorded."""
        self.muted += 1
        try:
            with compat.no_modes():
                yield
        finally:
            self.muted -= 1

    def host_read(self, kind: str, message: str, tensor: DeviceTensor) -> None:
        if self.phase != "step" or self.muted:
            return
        chain = self.chain()
        self.see("CG101", message, hazards.PAGEABLE if kind != "item" else hazards.NOT_PERMITTED, chain=chain)
        self._note_read(tensor, chain)

    def _note_read(self, tensor: DeviceTensor, chain: frames.Chain) -> None:
        """What the host learns of a tensor, for steps to be compared by; of a large one nothing."""
        if self.current is not None and tensor.numel() <= 64:
            for value in tensor.inner.detach().flatten().tolist():
                self.current.reads.append((chain, value, len(self.current.ops)))

    def host_reads(self, tensor: Tensor) -> None:
        """The host reads a tensor of its own, past the dispatcher."""

    def random_state(self, state: Tensor, *, read: bool) -> None:
        """See `Randomness.note`."""
        if self.phase == "step" and not self.muted and self.current is not None:
            self.randomness.note(self.current, state, read=read)

    def unknown(
        self, tensors: Iterable[Tensor], source: str, chain: frames.Chain = (), *, exposed: bool = False
    ) -> None:
        """Nothing here can tell what `tensors` hold from now on, nor anything else in their storages.

        Args:
            tensors: of the simulated device, or the plain ones inside of them: all that was written.
            source: what wrote them, as the verdict names it: "Triton kernel double", "mylib::scale".
            chain: the calls to it; those to here where none are given.
            exposed: they may be written at any time from now on: known contents do not stay known.
        """
        inner = [plain_of(t) for t in tensors]
        self.unknowns.mark(inner, exposed=exposed)
        self._note_unknown(inner)
        self.unknowns.sources.setdefault(source, chain or self.chain())

    def _note_unknown(self, tensors: Iterable[Tensor]) -> None:
        """Where in the running step storages became unknown, which tells what it made from step to step."""
        if self.current is None or self.phase != "step":
            return
        for index, tensor in enumerate(tensors):
            record = self.storages.record(tensor)
            if record is not None:
                self.current.marked.setdefault(record.number, (len(self.current.ops), index))

    def given(self, tensors: Iterable[DeviceTensor], targets: Iterable[Tensor]) -> tuple[GivenTensor, ...]:
        """What an op of the running step is about to be given, for a replay to compare with (`unknown.Doubts`).
        `targets`: the plain tensors of those that it may write."""
        if self.phase != "step" or self.muted or self.current is None:
            return ()
        keep = self.step > self.captured_step
        return given_of(self.unknowns, self.current, tensors, targets, self.step, keep)

    def pointer_escapes(self, tensor: DeviceTensor) -> None:
        """An address was asked for: by the step itself, to hand it to what nothing here sees."""
        record = tensor.record
        if self.current is not None and record.born == self.step and record.phase == self.phase == "step":
            self.current.addresses.told(record.number, flat_bytes(tensor.inner).data_ptr(), record.nbytes)
        chain = self.chain()
        if chain and self.roots.owns(chain[0][0]) and not frames.in_file(torch.cuda.graphs.__file__, 3):
            recording.launched(self, ESCAPE, "data_ptr", chain, [tensor], ())
            self.unknown([tensor], "a pointer that is handed out", chain, exposed=True)
            text = "the address of a device tensor is handed out: whatever uses it (ctypes, a raw kernel) is not seen"
            self.see("CG401", text, "", chain=chain, severity=Severity.UNVERIFIED)

    # running ops

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op: on the host as it is; for the device on the inner tensors, with the result wrapped again."""
        with self.threads.lock, compat.no_torch_function():
            virtual: list[DeviceTensor] = []
            hosts: list[Tensor] = []
            scalars: list[Any] = []
            inner_args = convert(args, virtual, hosts, scalars)
            inner_kwargs = {}
            for key, value in kwargs.items():
                if key == "device":
                    continue
                inner_kwargs[key] = convert(value, virtual, hosts, scalars)
            for tensor in virtual:
                if tensor.world is not self:
                    self.adopt(tensor)
            device = kwargs.get("device")
            if device is not None:
                device = torch.device(device)
                inner_kwargs["device"] = _CPU
            if not virtual and (device is None or device.type == "cpu"):
                return self._host_op(func, inner_args, inner_kwargs, hosts)
            return self._device_op(func, inner_args, inner_kwargs, device, virtual, hosts, scalars)

    def _host_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Tensor]) -> Any:
        name = func._schema.name
        if name == "aten::is_pinned":
            return self.storages.is_pinned(hosts[0])
        if name == "aten::_pin_memory":
            return self.pin(hosts[0].clone())
        pinned = bool(kwargs.pop("pin_memory", False))
        live = self.phase == "step" and not self.muted
        if self.hosts is not None and live and not all(r.alias_info for r in func._schema.returns):
            self.hosts.append((name, self.chain()))
        out = func(*args, **kwargs)
        if self.unknowns:
            self.unknowns.flow(func, args, kwargs, list(tensors_in(out)))
        return self.pin(out) if pinned else out

    def _device_op(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | None,
        virtual: list[DeviceTensor],
        hosts: list[Tensor],
        scalars: list[Any],
    ) -> Any:
        name = func._schema.name
        if name.startswith("aten::_nested_") and name != "aten::_nested_tensor_from_mask_left_aligned":
            raise CheckError(f"nested tensors are not simulated ({name}): pad the rows, or check with --live")
        kwargs.pop("pin_memory", None)
        live = self.phase == "step" and not self.muted
        chain = self.chain(3) if live else ()
        inside = self.threads.in_main()
        kind = "op"
        hazard = None
        if name in ("aten::_to_copy", "aten::copy_"):
            to_device = any(args[0] is t.inner for t in virtual)
            kind, hazard = hazards.of_transfer(
                name, args, kwargs, hosts, target=device, to_device=to_device, on_device=bool(virtual),
                is_pinned=self.storages.is_pinned, opname=lambda: self.roots.opname(chain),
            )  # fmt: skip
            if kind == "d2h" and virtual:
                self._note_read(virtual[0], chain)
        elif virtual:  # without one a tensor of the host lends its shape, as in zeros_like(host, device="cuda")
            for host in hosts:
                own = not name.startswith("aten::")  # an op of somebody's own, who may give it tensors of the host
                if host.dim() and not (own or name in _MIXED or kind != "op" or name.startswith("aten::_foreach")):
                    refuse(
                        "Expected all tensors to be on the same device, but found at least two devices, "
                        f"{virtual[0].device if virtual else device} and cpu! (in {name})"
                    )
                if live and not host.dim():
                    scalars.append(("cpu", host.item()))
                elif live and (name in _PACKED or (own and not self.storages.is_pinned(host))):
                    scalars.append(host.tolist())
        if live and hazard is None:
            hazard = hazards.of_op(func, name, args, kwargs, hosts)
        if live and hazard is not None:
            self.see(*hazards.branch(hazard, self.roots.opname(chain)), chain=chain)
        if live:
            self._trust(func, name, chain)
            if not inside:
                self.see(*hazards.OTHER_THREAD, chain=chain)
        mine = {id(t.inner): t for t in virtual}
        if live and self.current is not None and (self.current.graph or self.step > self.captured_step):
            for target in targets(func, args, kwargs):
                recording.keep(self, target)
        if live and recording.turns(func) and self.current is not None:
            recording.freeze(self.current, virtual[0].inner)
        if torch.Tag.nondeterministic_seeded in func.tags and self.randomness.defaults and "generator" not in kwargs:
            self.randomness.draw(self.randomness.defaults[self.device_index])
        met = live and self.unknowns.among([*(t.inner for t in virtual), *hosts])
        given = self.given(virtual, targets(func, args, kwargs)) if met else ()
        out, opaque = fake_results.result(self, func, args, kwargs, chain)
        if opaque and not met:
            given = self.given(virtual, targets(func, args, kwargs))
        told = hazard is not None and hazard.code == "CG101" and isinstance(out, bool | int | float)
        if told and self.current is not None:  # .item(), torch.equal
            self.current.reads.append((chain, out, len(self.current.ops)))
        to_host = device is not None and device.type == "cpu"
        outs: list[Tensor] = []
        known = {storage_of(t.inner) for t in virtual} if live else set()
        index = device.index if device is not None and device.index is not None else None
        if index is None:
            index = virtual[0].device.index if virtual else self.device_index
        result = out if to_host else self._wrap(out, mine, index, outs)
        if name in _PACKED:
            result = (result[0], out[1])
        if to_host and isinstance(out, Tensor):
            outs = [out]
            if kwargs.get("non_blocking"):
                self.pin(out)
        if opaque:
            self.unknown([*targets(func, args, kwargs), *outs], name, chain)
        elif self.unknowns:
            self._note_unknown(self.unknowns.flow(func, args, kwargs, outs))
        if torch.Tag.inplace_view in func.tags and written(func):
            for tensor in virtual:
                if tensor.shape != tensor.inner.shape and live:
                    self.reshaped.setdefault(id(tensor), (name, chain))
                if tensor.shape != tensor.inner.shape or tensor.stride() != tensor.inner.stride():
                    Tensor.data.__set__(tensor, self.wrap(tensor.inner, tensor.device.index))  # type: ignore[attr-defined]
                tensor.record = self.record_of(tensor.inner)
        if live and inside and self.current is not None:  # what a thread does is no part of the graph
            recording.record(self, func, kind, chain, scalars, args, kwargs, virtual, hosts, outs, known, hazard)
            op = self.current.ops[-1]
            op.opaque, op.given = opaque, given
        return result

    def _trust(self, func: Any, name: str, chain: frames.Chain) -> None:
        namespace = name.split("::")[0]
        if namespace == "_c10d_functional" and not name.endswith("wait_tensor"):
            text = f"collective {name} in the step: every rank has to capture it, in the same order"
            self.see("CG310", text, "hangs where one does not", chain=chain, severity=Severity.WARNING)
        elif _UNSAFE is not None and _UNSAFE in func.tags:
            text = f"{name} is tagged cudagraph_unsafe by its author"
            self.see("CG105", text, hazards.NOT_PERMITTED, chain=chain)
        elif namespace not in BUILTIN:
            self.opaque(name, f"custom op {name}", chain)

    def opaque(self, name: str, what: str, chain: frames.Chain) -> None:
        """Something the simulation cannot look into: unverified unless its author has spoken."""
        word = capturable(name)
        if word is None:
            text = f"{what} is opaque to the simulation"
            self.see("CG401", text, "", chain=chain, severity=Severity.UNVERIFIED, note=name)
        elif not word:
            self.see("CG401", f"{what} is declared not capturable", hazards.NOT_PERMITTED, chain=chain)

    def own_graphs(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that torch compiles with graphs of its own."""
        self.see(*hazards.OWN_GRAPHS)
        return compiled.watched(self, function, args, kwargs)

    def recorded_before(self, node: int) -> bool:
        """Whether autograd recorded the node with this sequence number before the step began."""
        return node < self.first_node

    def first_gradient(self, variable: Tensor) -> None:
        """`variable.grad` is about to be set where there was none: a replay writes that tensor, and adds nothing."""

    def unregistered(self, generator: torch.Generator) -> None:
        """Random numbers are asked of a generator that was made by hand."""
        self.see(*hazards.UNREGISTERED)

    def _wrap(self, out: Any, mine: dict[int, DeviceTensor], index: int, outs: list[Tensor]) -> Any:
        if isinstance(out, Tensor):
            outs.append(out)
            known = mine.get(id(out))
            return known if known is not None else DeviceTensor(out, self, index)
        if isinstance(out, list | tuple):
            return type(out)([self._wrap(o, mine, index, outs) for o in out])
        return out


_CPU = torch.device("cpu")
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_PACKED = {"aten::_pack_padded_sequence", "aten::_pad_packed_sequence"}
"""Ops that want their lengths on the host and give lengths back there."""
_MIXED = (
    hazards._INDEX
    | hazards._COPIES
    | {"aten::set_", "aten::tensor_split", "aten::lift_fresh", "aten::_pin_memory"}
    | _PACKED
)
