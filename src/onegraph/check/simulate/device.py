"""A tensor on a device that does not exist: it says "cuda:0", its values live on the CPU.

`DeviceTensor` is a wrapper: torch's C++ code sees a CUDA tensor and takes exactly the path that it would take on a GPU
(an assignment `x[0] = 5` becomes the same copy from a CPU scalar), and every op ends in `World.dispatch`, which runs it
on `inner`. Views share `inner`'s storage, so aliasing is right by construction.
"""

from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onegraph.check import compat
from onegraph.check.simulate.records import tensors_in


class StorageRecord:
    """A storage of the virtual device. It lives exactly as long as some tensor of the user refers to the storage.

    Args:
        number: its name in a report; never used again.
        born: step in which it was made; -1 while building.
        phase: "build", "inputs" or "step": who made it.
    """

    __slots__ = ("__weakref__", "born", "nbytes", "number", "phase", "place")

    def __init__(self, number: int, nbytes: int, born: int, phase: str, place: Any) -> None:
        self.number, self.nbytes, self.born, self.phase, self.place = number, nbytes, born, phase, place

    def made_in(self, step: int) -> bool:
        """Whether the step itself made it, not the inputs that it was given."""
        return self.born == step and self.phase == "step"


class Owner(Protocol):
    """What a tensor asks of the machine that it is on."""

    phase: str
    step: int
    saves: bool

    def off(self) -> AbstractContextManager[None]: ...

    def wrap(self, inner: Tensor, index: int | None = None) -> "DeviceTensor": ...

    def record_of(self, inner: Tensor) -> StorageRecord: ...

    def host_read(self, kind: str, message: str, tensor: "DeviceTensor") -> None: ...

    def pointer_escapes(self, tensor: "DeviceTensor") -> None: ...

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class DeviceTensor(Tensor):
    """See the module.

    `inner`: the values, a plain CPU tensor; `record`: its storage's record; `made`: the step in which this view of the
    storage was made, -1 outside of steps.
    """

    inner: Tensor  # type: ignore[assignment]  # torch's stubs have a method of this name
    record: StorageRecord
    world: "Owner"
    made: int
    __torch_function__ = compat.no_torch_function_of_its_own

    @staticmethod
    def __new__(cls, inner: Tensor, world: "Owner", index: int) -> "DeviceTensor":
        # Never a tensor of inference mode: torch cannot make one a view of a tensor that was made outside of it, which
        # on a GPU it need not, because there its own kernels make the view.
        with torch.inference_mode(False):
            made = compat.make_wrapper(
                cls,
                inner.shape,
                strides=inner.stride() if inner.layout is torch.strided else None,
                storage_offset=inner.storage_offset() if inner.layout is torch.strided else None,
                dtype=inner.dtype,
                layout=inner.layout,
                device=DEVICES[index],
                requires_grad=False,
            )
        made.inner, made.world = inner, world
        made.made = world.step if world.phase == "step" else -1
        made.record = world.record_of(inner)
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives these by keyword and by place
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        world = next(t for t in tensors_in((args, kwargs)) if isinstance(t, DeviceTensor)).world
        return world.dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        self.world.host_read("tolist", ".tolist() copies a device tensor to the host", self)
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        self.world.host_read("numpy", ".numpy() reads a device tensor on the host", self)
        return self.inner.detach().numpy().copy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.world.host_read("numpy", "a device tensor is turned into a numpy array", self)
        return self.inner.detach().numpy().astype(dtype) if dtype else self.inner.detach().numpy().copy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch has it
        self.world.host_read("repr", "printing a device tensor copies it to the host", self)
        with compat.no_torch_function(), self.world.off():
            text = repr(self.inner.detach())
        return f"{text[:-1]}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        """torch formats the number in a 0-d tensor, but not that of a subclass."""
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def data_ptr(self) -> int:
        self.world.pointer_escapes(self)
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        """Tells the allocator about a second stream; nothing to simulate."""

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made = self.clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.world.saves:  # a checkpoint holds the values
            return self.inner.detach().__reduce_ex__(protocol)
        raise TypeError("a tensor of the simulated device cannot be pickled; build it inside the factory instead")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DeviceTensor):  # as `module.to("cpu")` does
            made = value.detach().requires_grad_(self.requires_grad)
            swap(self, torch.nn.Parameter(made, self.requires_grad) if getattr(self, "_is_param", False) else made)
            return
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a C descriptor, to stubs a tensor
        self.inner, self.record = value.inner, value.record


_OURS = ("inner", "record", "world", "made", "_is_param")


def swap(target: Tensor, made: Tensor) -> None:
    """Make `target`, which everyone refers to, the tensor `made`; what the user wrote on it stays."""
    made.__dict__.update({key: value for key, value in target.__dict__.items() if key not in _OURS})
    torch.utils.swap_tensors(target, made)


def refuse(text: str) -> NoReturn:
    """Raise what torch would raise here: an error of the step, as all that are raised in this file."""
    raise RuntimeError(text)


DEVICES = [torch.device("cuda", i) for i in range(64)]


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def block(inner: Tensor) -> Tensor:
    """What the books are kept of: a tensor itself; of a sparse one, which has no storage, its values."""
    if inner.layout not in _SPARSE:
        return inner
    return inner._values() if inner.layout is torch.sparse_coo else inner.values()


def plain_of(tensor: Tensor) -> Tensor:
    """The CPU tensor inside of one of the simulated device; any other one as it is."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


def storage_of(inner: Tensor) -> int:
    """Address of the StorageImpl: the identity of a storage while it lives."""
    return block(inner).untyped_storage()._cdata


def weak(inner: Tensor) -> StorageWeakRef:
    return StorageWeakRef(block(inner).untyped_storage())


def flat_bytes(inner: Tensor) -> Tensor:
    """The whole storage as uint8 [bytes], sharing memory."""
    return torch.empty(0, dtype=torch.uint8).set_(block(inner).untyped_storage())
