"""The two modes that route torch through the simulated world: one below its functions' arguments, one at its ops."""

import builtins
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onegraph.check import compat
from onegraph.check.declared import capturable
from onegraph.check.report import CheckError
from onegraph.check.simulate import frames, hazards, kernels
from onegraph.check.simulate.copies import in_a_copy
from onegraph.check.simulate.device import DeviceTensor, refuse, swap
from onegraph.check.simulate.records import body_of, composed, eagerly, for_cuda, has_another
from onegraph.check.simulate.world import BUILTIN, World


@contextmanager
def modes(world: World) -> Iterator[None]:
    """The machine for the running thread."""
    with _Functions(world), _Dispatch(world):
        yield


class _Dispatch(compat.PlainDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.world.threads.closed:
            return func(*args, **(kwargs or {}))
        if isinstance(func, compat.HigherOrderOperator):
            kept = len(self.world.raw_findings)
            with self:
                out = eagerly(func)(*args, **(kwargs or {}))
            if func.name().startswith("flex_attention") and (self.world.compiled or frames.compiled()):
                del self.world.raw_findings[kept:]  # once compiled it is one kernel
            return out
        if composed(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        body = body_of(func)
        if body is not None and (not has_another(func) or self._followed(func, body, args, kwargs or {})):
            done, out = self._inside(func, body, args, kwargs or {})
            if done:
                return out
        return self.world.dispatch(func, args, kwargs or {})

    def _followed(self, func: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether a function for CUDA is looked into although the op has a kernel for the CPU: where nobody vouches
        for the op, torch neither, and it can be run. That is tried once, in a copy of the process: its first half may
        write."""
        name = func._schema.name
        if name.split("::")[0] in BUILTIN or capturable(name) is not None or not hasattr(os, "fork"):
            return False
        tried = self.world.tried
        if func not in tried:
            tried[func] = in_a_copy(lambda: self._try(body, args, kwargs)) is True
        return tried[func]

    def _try(self, body: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """In the copy: raises where the function does, or comes to what nothing can look into."""
        torch.set_num_threads(1)  # the threads of the pool are not in the copy
        world = self.world
        world.threads.lock = threading.RLock()

        def unseen(*_: Any, **__: Any) -> None:
            raise _Unseen

        vars(world).update(dict.fromkeys(("opaque", "unknown", "pointer_escapes"), unseen))
        vars(kernels)["foreign"] = unseen
        with self:
            body(*args, **kwargs)
        return True

    def _inside(self, func: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(whether a custom op's Python could be run, its result): Python as any other, it is looked into. One for CUDA
        may want a driver or a compiler; then a kernel for the CPU computes what it gives, or nothing does."""
        world, name = self.world, func._schema.name
        kept, out, done = len(world.raw_findings), None, True
        try:
            with self:
                out = body(*args, **kwargs)
        except CheckError:
            raise
        except Exception:
            if not for_cuda(func):
                raise
            done = False
        if capturable(name) is not None:  # its author's word counts for more
            del world.raw_findings[kept:]
            if done:
                world.opaque(name, f"custom op {name}", world.chain())
        return done, out


class _Unseen(BaseException):
    """Something that the simulation cannot look into; no `except Exception` of the user's takes it."""


class _Functions(TorchFunctionMode):
    """Gives "cuda" its index (torch asks a real guard for it), and stands in for what needs a real driver."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.generator = torch.Generator
        self.special: dict[Any, Callable[..., Any]] = {
            Tensor.to: self.to,
            Tensor.cuda: self.cuda,
            Tensor.pin_memory: self.pin_memory,
            Tensor.is_pinned: self.is_pinned,
            Tensor.data.__set__: self.set_data,  # type: ignore[attr-defined]  # a C descriptor, to stubs a tensor
            Tensor.type: self.type,
            Tensor.new_tensor: self.new_tensor,
            Tensor.tolist: self.reads,
            Tensor.numpy: self.reads,
            torch.tensor: self.tensor,
            torch.as_tensor: self.array,
            torch.asarray: self.array,
            torch.manual_seed: self.seed,
            torch.random.manual_seed: self.seed,
            torch.seed: self.seed,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.world.threads.closed:
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device(kwargs["device"])}
        if isinstance(given := kwargs.get("generator"), self.generator):
            self.draws(given, args, kwargs)
            if any(given is known for known in self.world.randomness.defaults):  # what draws where none is named
                kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        pinned = kwargs.get("pin_memory") is True
        if pinned:  # some ask the driver for the memory themselves, past the dispatcher
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        special = self.special.get(func)
        out = func(*args, **kwargs) if special is None else special(func, args, kwargs)
        host = pinned and isinstance(out, Tensor) and not isinstance(out, DeviceTensor)
        return self.world.pin(out) if host else out

    def draws(self, generator: torch.Generator, args: Any, kwargs: Any) -> None:
        """A generator of the device is one that a graph must know; what one of the host draws is a number like any."""
        if any(generator is known for known in self.world.randomness.defaults):
            return
        if any(generator is known for known in self.world.randomness.generators):
            self.world.randomness.draw(generator)
            self.world.unregistered(generator)
            return
        device = kwargs.get("device")
        if getattr(device, "type", "") == "cuda" or (device is None and any(isinstance(a, DeviceTensor) for a in args)):
            refuse("Expected a 'cuda' device type for generator but found 'cpu'")

    def device(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return torch.device("cuda", value)
        if isinstance(value, str) and value.startswith("cuda"):
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
            return torch.device("cuda", self.world.device_index)
        return value

    def to(self, func: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(self.device(a) if isinstance(a, str | torch.device) else a for a in args)
        return func(*args, **kwargs)

    def cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return args[0].to(self.device("cuda" if device is None else device), non_blocking=non_blocking)

    def reads(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(args[0], DeviceTensor):
            self.world.host_reads(args[0])
        return func(*args, **kwargs)

    def pin_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.world.storages.is_pinned(args[0]):
            return args[0]
        return self.world.pin(args[0].clone())

    def is_pinned(self, func: Any, args: Any, kwargs: Any) -> bool:
        return not isinstance(args[0], DeviceTensor) and self.world.storages.is_pinned(args[0])

    def set_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, value = args
        if torch.nn.parameter.is_lazy(target):
            text = "a lazy module (nn.Lazy...) cannot be simulated before it has its shapes"
            raise CheckError(f"{text}; call it once on the CPU in the factory, or check with --live")
        if isinstance(value, DeviceTensor) and not isinstance(target, DeviceTensor):
            made = value.detach().requires_grad_(target.requires_grad)
            if isinstance(target, torch.nn.Parameter):
                made._is_param = True
            return swap(target, made)
        return func(*args, **kwargs)

    def type(self, func: Any, args: Any, kwargs: Any) -> Any:
        wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
        if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
            dtype = getattr(torch, wanted.rsplit(".", 1)[1].removesuffix("Tensor").lower())
            return args[0].to(self.device("cuda"), dtype)
        return func(*args, **kwargs)

    def new_tensor(self, func: Any, args: Any, kwargs: Any) -> Any:
        like, data = args
        if not isinstance(like, DeviceTensor):
            return func(*args, **kwargs)
        made = torch.tensor(data, dtype=kwargs.get("dtype") or like.dtype)
        return made.to(kwargs.get("device") or like.device).requires_grad_(kwargs.get("requires_grad", False))

    def tensor(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch.tensor of a list of device tensors asks each for its number, past the dispatcher."""

        def numbers(data: Any) -> Any:
            if isinstance(data, list | tuple):
                return [numbers(item) for item in data]
            return data.item() if isinstance(data, DeviceTensor) and not data.dim() else data

        if args and isinstance(args[0], list | tuple):
            args = numbers(args[0]), *args[1:]
        step, kept = self.world.current, len(self.world.raw_findings)
        begin = len(step.ops) if step is not None else 0
        out = func(*args, **kwargs)
        if step is not None and isinstance(out, DeviceTensor) and (self.world.compiled or frames.compiled()):
            del self.world.raw_findings[kept:]  # compiled code holds its constants on the device, and copies them
            with compat.no_torch_function(), self.world.off():
                value = out.inner.clone()
            for op in step.ops[begin:]:
                op.func, op.kind, op.args, op.kwargs = torch.ops.aten.clone.default, "op", (value,), {}
                op.name, op.scalars, op.codes, op.source, op.contents = str(op.func), (), (), None, None
        return out

    def array(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view of what an object with `__cuda_array_interface__` points to, where that is memory of this machine."""
        told = None if not args or isinstance(args[0], Tensor) else getattr(args[0], "__cuda_array_interface__", None)
        if not isinstance(told, dict):
            return func(*args, **kwargs)
        import numpy

        address, kind = told["data"][0], torch.from_numpy(numpy.empty(0, told["typestr"])).dtype
        whole = kernels._owner(self.world, address)
        if whole is None:
            text = f"{builtins.type(args[0]).__name__}.__cuda_array_interface__ points to memory that no tensor holds"
            raise CheckError(f"{text}: it cannot be simulated; check with --live")
        steps = told.get("strides")
        offset = (address - whole.data_ptr()) // kind.itemsize
        flat: Tensor = torch.empty(0, dtype=kind).set_(whole.untyped_storage())
        shape = tuple(told["shape"])
        strides = torch.empty(shape, device="meta").stride() if steps is None else [s // kind.itemsize for s in steps]
        view = self.world.wrap(flat.as_strided(shape, strides, offset))
        view.record = self.world.storages.weakly(view.inner) or view.record
        return view

    def seed(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.world.see(*hazards.SEEDED)
        return func(*args, **kwargs)
