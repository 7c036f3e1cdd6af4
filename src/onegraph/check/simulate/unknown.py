"""What nothing here could compute: which storages hold it, what flows from it, and whether a replay may differ in it.

A Triton kernel, an op without a CPU kernel or a raw pointer leaves contents that a simulation has to invent. They are
*unknown*: everything computed from them is unknown too, and no comparison takes two unknown values for equal because
what was invented is. Such an op is a function that nobody can look into: where a replay gives it the same arguments as
eager does, its result is the same, whatever it is; where one argument may differ, the result *may differ*, and whatever
is computed from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onegraph.check.simulate import frames
from onegraph.check.simulate.addresses import point_alike
from onegraph.check.simulate.cpu_fallbacks import Unavailable, perform
from onegraph.check.simulate.device import DeviceTensor, block, flat_bytes, storage_of, weak
from onegraph.check.simulate.records import OpRecord, Step, close, map_tensors, split

ESCAPE = DeviceTensor.data_ptr
"""What stands for the op in the record of an address that was handed out."""


class GivenTensor(NamedTuple):
    """A device tensor that an op with an unknown argument was given.

    Args:
        whose: what the storage is in this step, the same for the same role in every step: see `whose`.
        view: shape, strides and offset within the storage.
        unknown: whether its contents were.
        whole: whether it may be written, so that all of its storage counts.
        value: a copy of what counts, for a replay to compare with; None where unknown, or in the captured step.
    """

    whose: Any
    view: tuple[Any, ...]
    unknown: bool
    whole: bool
    value: Tensor | None


class Unknowns:
    """The storages whose contents are unknown now, and what made them so."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
        self._exposed: set[int] = set()  # of these an address was handed out: nobody knows who writes there, and when
        self.sources: dict[str, frames.Chain] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._storages) and storage_of(tensor) in self._storages

    def among(self, tensors: Iterable[Tensor]) -> bool:
        return bool(self._storages) and any(t in self for t in tensors)

    def mark(self, tensors: Iterable[Tensor], *, exposed: bool = False) -> None:
        for tensor in tensors:
            self._storages[storage_of(tensor)] = weak(tensor)
            if exposed:
                self._exposed.add(storage_of(tensor))

    def begin(self) -> tuple[frozenset[int], frozenset[int]]:
        """(storages that are unknown, those of them that are exposed), without those that are gone: of a new step."""
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        self._exposed &= self._storages.keys()
        return frozenset(self._storages), frozenset(self._exposed)

    def end(self) -> frozenset[int]:
        """The storages that are unknown, those that the step freed among them."""
        return frozenset(self._storages)

    def flow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor]) -> list[Tensor]:
        """One op ran on plain tensors of which some may be unknown: marks what it wrote, and gives what is marked."""
        if not self._storages:
            return []
        targets, rest = split(func, args, kwargs)
        if not self.among((*targets, *rest)) or makes_new(func):
            return []
        kept = [t for t in targets if t in self and (self._is_exposed(t) or not overwrites(func, args, kwargs, t))]
        given = {storage_of(t) for t in (*targets, *rest)}
        if not kept and not self.among(rest):
            for target in targets:
                self._storages.pop(storage_of(target), None)
            return []
        touched = targets + [o for o in outs if storage_of(o) not in given]
        self.mark(touched)
        return touched

    def _is_exposed(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._exposed


def makes_new(func: Any) -> bool:
    """Whether an op takes nothing but shape and dtype from its argument; ATen's names say so (zeros_like, new_full)."""
    name = func._schema.name
    return bool(name.startswith("aten::")) and (name.endswith("_like") or name.startswith("aten::new_"))


_FILLS = (0.0, 1.0, float("nan"))


def overwrites(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> bool:
    """Whether an op leaves nothing of what `target`'s storage held: tried, on copies that held different things."""
    if target.layout is not torch.strided or target.numel() * target.element_size() < _bytes(target):
        return False
    key = storage_of(target)
    state = torch.default_generator.get_state()
    results: list[Tensor] = []
    try:
        for fill in _FILLS:
            held = torch.empty(target.numel(), dtype=target.dtype)
            held.fill_(fill if fill == fill or target.is_floating_point() else 2)

            def copied(tensor: Tensor, held: Tensor = held) -> Tensor:
                if storage_of(tensor) != key:
                    return tensor.clone()
                same = torch.empty(0, dtype=tensor.dtype).set_(held.untyped_storage())
                return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

            torch.default_generator.set_state(state)
            perform(func, map_tensors(args, copied), map_tensors(kwargs, copied))
            results.append(held)
    except (Unavailable, RuntimeError, IndexError):
        return False
    finally:
        torch.default_generator.set_state(state)
    return all(_bits(results[0]).equal(_bits(other)) for other in results[1:])


def _bytes(tensor: Tensor) -> int:
    return block(tensor).untyped_storage().nbytes()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def given_of(
    unknowns: Unknowns, step: Step, tensors: Iterable[DeviceTensor], targets: Iterable[Tensor], made_in: int, keep: bool
) -> tuple[GivenTensor, ...]:
    """What an op is about to be given: device tensors of the step number `made_in`, of which it may write `targets`.
    keep: with copies of what is known, but for what lies outside of the step and was not written by it, which a replay
    finds as it is."""
    found = []
    written_to = {id(t) for t in targets}
    for tensor in tensors:
        inner, record = tensor.inner, tensor.record
        outside = not record.made_in(made_in)
        unknown = inner in unknowns
        still = outside and record.number not in step.inputs and storage_of(inner) not in step.before
        whole = id(inner) in written_to
        value = _counts(inner, whole).clone() if keep and not unknown and not still else None
        found.append(GivenTensor(whose(step, record.number, outside), view_of(inner), unknown, whole, value))
    return tuple(found)


def _counts(tensor: Tensor, whole: bool) -> Tensor:
    """A tensor; or its whole storage, in its own dtype where the bytes allow that."""
    if not whole or tensor.layout is not torch.strided:
        return tensor.detach()
    flat = flat_bytes(tensor)
    return flat.view(tensor.dtype) if flat.numel() % tensor.element_size() == 0 else flat


def whose(step: Step, number: int, outside: bool) -> Any:
    """What a storage is in any step: an input by its path, one from outside by its number, one that the step made by
    where in it that became unknown."""
    if number in step.inputs:
        return step.inputs[number]
    return number if outside else step.marked.get(number, "made")


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


@dataclass(slots=True)
class Doubts:
    """Follows one replay of `captured`: which storages are unknown in it, and in which of them it may differ from
    `eager`. It begins with what was unknown when the eager step began, but for what the graph itself makes (`made`)."""

    captured: Step
    eager: Step
    made: set[int]
    unknown: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    exposed: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unknown, self.exposed = set(self.eager.unknown - self.made), set(self.eager.exposed - self.made)

    def static_input(self, static: Tensor, new: Tensor) -> None:
        """The caller copies an input into its static buffer."""
        self.inputs.update((storage_of(static), storage_of(new)))
        self.exposed.discard(storage_of(static))
        (self.unknown.add if storage_of(new) in self.eager.unknown else self.unknown.discard)(storage_of(static))

    def op(self, position: int, op: OpRecord) -> bool | None:
        """The captured step's op is about to run again: None where what it gives is known, otherwise whether that may
        differ from what eager's gave."""
        if op.kind == "launch":
            targets, rest = list(op.tensors), list[Tensor]()
        else:
            targets, rest = split(op.func, op.args, op.kwargs)
        met = op.opaque or any(storage_of(t) in self.unknown for t in (*targets, *rest))
        blind = op.opaque or op.kind == "launch"  # an interpreted kernel computes from what is unknown
        if not met or (not blind and makes_new(op.func)):
            return None
        kept = [t for t in targets if blind or self._keeps(op, t)]
        unclear = blind or any(storage_of(t) in self.unknown for t in (*rest, *kept))
        differs = unclear and self._differs(position, op, [*rest, *kept])
        given = {storage_of(t) for t in (*targets, *rest)}
        for tensor in (*targets, *(o for o in op.outs if storage_of(o) not in given)):
            key = storage_of(tensor)
            (self.unknown.add if unclear else self.unknown.discard)(key)
            (self.doubtful.add if differs else self.doubtful.discard)(key)
        if op.kind == "launch" and op.func is ESCAPE:
            self.exposed.update(given)
        return differs if unclear else None

    def _keeps(self, op: OpRecord, target: Tensor) -> bool:
        """Whether something of what a target held is left when the op has run."""
        return storage_of(target) in self.exposed or not overwrites(op.func, op.args, op.kwargs, target)

    def _differs(self, position: int, op: OpRecord, given: list[Tensor]) -> bool:
        """Whether one argument may be another one than eager's."""
        if self.eager.parted or position >= len(self.eager.ops) or not op.captured:
            return True
        theirs = self.eager.ops[position]
        if op.scalars != theirs.scalars or len(op.given) != len(theirs.given):
            return True
        read = {id(t) for t in given}
        pairs = zip(op.tensors, op.given, theirs.given, strict=False)
        return any(self._argument(*pair) for pair in pairs if id(pair[0]) in read)

    def _argument(self, tensor: Tensor, mine: GivenTensor, theirs: GivenTensor) -> bool:
        key = storage_of(tensor)
        unknown = key in self.unknown
        if unknown != theirs.unknown or mine.view[0] != theirs.view[0]:
            return True
        if unknown:
            return key in self.doubtful or (mine.whose, mine.view) != (theirs.whose, theirs.view)
        if theirs.value is None:
            return (mine.whose, mine.view) != (theirs.whose, theirs.view)
        now = _counts(tensor, theirs.whole)
        same = close(now, theirs.value)[0]
        return not (same or point_alike(now, self.captured.addresses, theirs.value, self.eager.addresses))

    def result(self, ours: Tensor, theirs: Tensor) -> bool | None:
        """Of an output: None where both are known; otherwise whether the replay's may differ from eager's."""
        mine, other = storage_of(ours) in self.unknown, storage_of(theirs) in self.eager.unknown_after
        if not mine and not other:
            return None
        return mine != other or storage_of(ours) in self.doubtful or view_of(ours) != view_of(theirs)

    def lasting(self) -> list[int]:
        """Storages from outside of the graph in which the replay may differ."""
        inside = self.made | {storage_of(t) for op in self.captured.ops for t in op.outs if op.kind == "d2h"}
        shared = (self.unknown | self.eager.unknown) - self.inputs
        apart = {key for key in shared if (key in self.unknown) != (key in self.eager.unknown_after)}
        return sorted((self.doubtful | apart) - inside)


def told(sources: dict[str, str]) -> str:
    """One line of the verdict: what was unknown and where it came from. sources: name -> place, "" where unknown."""
    if not sources:
        return ""
    named = [f"{name} ({place})" if place else name for name, place in list(sources.items())[:3]]
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return f"unknown to the simulation: what comes from {', '.join(named)}{more}; nothing of it is compared"
