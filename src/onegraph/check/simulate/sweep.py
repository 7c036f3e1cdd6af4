"""Variations of what a step is given: lengths, positions, slots and masks that `inputs` never gives, and a server will.

A graph that was captured with one batch is replayed with others. Integers whose names, or whose parameters' names, say
that they are such metadata are varied one at a time, the smallest first. `inputs.sweep = {"lengths": range(2048)}` says
what values occur: what differs then is an error, else it is a warning, since nobody said that the value occurs.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.check import containers
from onegraph.check.report import CheckError
from onegraph.check.simulate.device import DeviceTensor, plain_of

EDGES = (0, 1, 2, 15, 16, 17, 127, 128, 129)
"""Nothing, one, and what lies around pages of 16 and 128."""

MOST_VALUES = 12
"""Values of one leaf that are tried."""

_METADATA = re.compile(
    r"(^|_|\b)(len|length|pos|position|slot|seq|seqlen|token|block|page|offset|count|num|ctx|context|mask|draft|accept|"
    r"adapter|lora|prefix|window|batch|row|request|step)(s|_|\b|$)|lens\b|max_|cu_|num_|_len|_ids?$"
)


class Variation(NamedTuple):
    """`value` at a path of what a step is given, as `text` says it; said: whether the factory gave that value."""

    path: str
    name: str
    text: str
    value: Any
    said: bool

    @property
    def trivial(self) -> bool:
        """A Python number that nobody says changes: that a graph holds it is no news, what is chosen by it may be."""
        return not self.said and not isinstance(self.value, Tensor)


def variations(step: Callable[..., Any], inputs: Callable[[int], Any], given: Any) -> Iterator[list[Variation]]:
    """For each leaf that looks like metadata, what to put in its place. `given`: (arguments, keywords).

    Raises CheckError where `inputs.sweep` names nothing that the step is given.
    """
    hints = getattr(inputs, "sweep", None) or {}
    names = {path: _name(step, path) for path in containers.leaves(given)}
    if not isinstance(hints, Mapping):
        raise CheckError(f"inputs.sweep: got {type(hints).__name__}, allowed a dict of names and their values")
    for hint in hints:
        if hint not in names.values():
            allowed = ", ".join(sorted(set(names.values()))) or "none"
            raise CheckError(f"inputs.sweep: got {hint!r}, allowed a name of what the step is given: {allowed}")
    for path, leaf in containers.leaves(given).items():
        name = names[path]
        if not (_whole(leaf) and (name in hints or _METADATA.search(name.lower()))):
            continue
        found = [Variation(path, name, *made, name in hints) for made in _others(leaf, _values(hints.get(name), leaf))]
        if found:
            yield found[:MOST_VALUES]


def _name(step: Callable[..., Any], path: str) -> str:
    """What the leaf is called: its attribute or key, else its parameter."""
    last = re.findall(r"\.(\w+)|\['(\w+)'\]", path)
    if last:
        return next(filter(None, last[-1]))
    try:
        parameters = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return ""
    position = re.match(r"\[0\]\[(\d+)\]", path)
    at = int(position.group(1)) if position else len(parameters)
    return parameters[at] if at < len(parameters) else ""


def _whole(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dtype in (torch.int32, torch.int64, torch.bool) and 0 < leaf.numel() <= 4096
    return isinstance(leaf, int)


def _values(hint: Iterable[int] | None, leaf: Any) -> list[int]:
    """The numbers to try: of a hint its ends and the edges inside of it."""
    if hint is None:
        known = _plain(leaf)
        most = int(known.max()) if known is not None else int(leaf)
        return [*EDGES, most + 1] if known is None else [n for n in EDGES if n <= most]
    values = list(hint)
    if len(values) <= MOST_VALUES:
        return values
    inside = set(values)
    return list(dict.fromkeys([values[0], values[1], *(n for n in EDGES if n in inside), values[-1]]))


def _plain(leaf: Any) -> Tensor | None:
    return plain_of(leaf).detach() if isinstance(leaf, Tensor) else None


def _others(leaf: Any, values: list[int]) -> Iterator[tuple[str, Any]]:
    """(in words, value) that differ from a leaf: numbers, and of a vector the same in another order, and padded."""
    known = _plain(leaf)
    if known is None:
        others = [not leaf] if isinstance(leaf, bool) else values
        yield from ((f"is {value}", value) for value in others if value != leaf)
        return
    made: list[tuple[str, Tensor]] = [(f"holds {value} alone", torch.full_like(known, value)) for value in values]
    made.append(("is in reverse order", known.flip(0) if known.dim() else known))
    if known.dim():
        padded = known.clone()
        padded[-1] = 0
        made += [("ends in padding", padded), ("is as full as its largest", torch.full_like(known, int(known.max())))]
    for text, value in made:
        if not torch.equal(value, known):
            yield text, value.to(leaf.device) if isinstance(leaf, DeviceTensor) else value
