"""Host values that nobody can know before they are asked for: clocks and random numbers, by the module that gives them.

They change from step to step where the step or its inputs ask; what the factory drew once is a constant of the graph.
"""

from dataclasses import replace

from onegraph.check import entropy
from onegraph.check.source.state import Position
from onegraph.check.source.values import UNKNOWN, Const, ExtObj, Keywords, Plain, Seq, Tensor, Value, is_plain

DRAWN = "drawn"
"""Kind of a value that was drawn: what is asked of it (`uuid4().int`, `now().second`) is as new as it is."""

GENERATOR = "host.generator"
"""Kind of a generator of one's own: `random.Random()`, `numpy.random.default_rng()`."""

_BY_SHAPE = frozenset(["rand", "randn", "random_sample", "random", "bytes"])
"""Functions of numpy that make an array of the sizes that are their arguments; others have `size`."""

_SEVERAL = frozenset(["sample", "choices", "permutation"])


def call(at: Position, name: str, args: list[Value], keywords: Keywords) -> Value | None:
    """What a call of a name outside of the user's code draws; None where it draws nothing."""
    if not entropy.draws(name):
        return None
    module, _, last = name.rpartition(".")
    if last in entropy.GENERATORS:
        fixed = bool(args or keywords) and all(isinstance(v, Const) for v in (*args, *keywords.values()))
        return ExtObj(GENERATOR, "fixed" if fixed else "", at.in_step)
    arrays = "size" in keywords or (module == "numpy.random" and last in _BY_SHAPE and bool(args))
    return _drawn(at, last, args, arrays)


def method(at: Position, generator: ExtObj, name: str, args: list[Value], keywords: Keywords) -> Value:
    """A method of a generator. One that the step makes anew from a constant seed gives the same in every step."""
    if name in entropy.COMPUTED:
        return Const(None)
    if generator.in_step and generator.note == "fixed":
        return Plain()
    return _drawn(at, name, args, "size" in keywords)


def _drawn(at: Position, name: str, args: list[Value], arrays: bool) -> Value:
    moving = at.in_step or at.between
    first = args[0] if args else UNKNOWN
    if isinstance(first, Seq) and not is_plain(first.any):  # one of several tensors, or of who knows what
        chosen = first.any
        if isinstance(chosen, Tensor):
            chosen = replace(chosen, moving=moving)
        return Seq("list", None, chosen, at.in_step) if name in _SEVERAL else chosen
    number = Plain(DRAWN, varying=moving)
    return Seq("list", None, number, at.in_step) if arrays or name in _SEVERAL else number
