"""What an op gives where nothing here can compute it: zeros of the shapes that its fake tells."""

from functools import partial
from typing import Any

import torch

from onegraph.check import compat
from onegraph.check.declared import capturable
from onegraph.check.report import CheckError, Severity
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.cpu_fallbacks import Unavailable, perform
from onegraph.check.simulate.machine import Machine
from onegraph.check.simulate.records import UNWRITTEN, map_tensors, results_said


def result(
    world: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], chain: frames.Chain
) -> tuple[Any, bool]:
    """(what an op gives on plain CPU tensors, whether that had to be invented).

    Raises CheckError where nothing tells the shapes of what it gives, and whatever the op itself raises.
    """
    name = func._schema.name
    try:
        out = perform(func, args, kwargs)
    except Unavailable:
        pass
    else:
        if name in UNWRITTEN:
            out.zero_()  # the same contents in every run: opaque kernels that would write them do not
        return out, False
    if capturable(name) is None:
        text = f"{name} has no CPU implementation: what it gives is unknown"
        world.see("CG401", text, "", chain=chain, severity=Severity.UNVERIFIED, note=name)
    known, out = results_said(func, args, kwargs)
    return (out if known else _zeros(_faked(world, func, args, kwargs, chain))), True


def _faked(world: Machine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], chain: frames.Chain) -> Any:
    """Shapes and dtypes of the op's results, from its fake. Raises CheckError where it has none."""
    name = func._schema.name

    def run(env: Any) -> Any:
        with compat.fake_mode(env) as fake:
            plain = partial(fake.from_tensor, static_shapes=True)
            return func(*map_tensors(args, plain), **map_tensors(kwargs, plain))

    try:
        return run(None)
    except compat.size_depends_on_values():
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        text = f"the size of what {name} gives depends on device values, says its fake"
        world.see("CG104", text, hazards.NOT_PERMITTED, chain=chain)
        return run(ShapeEnv())
    except Exception as error:
        raise CheckError(
            f"{name} has neither a CPU implementation nor a fake one: the step cannot be simulated "
            f"({type(error).__name__}: {error}); register one with register_fake, or check with --live"
        ) from error


def _zeros(tree: Any) -> Any:
    return map_tensors(tree, lambda t: torch.zeros([_size(s) for s in t.shape], dtype=t.dtype))


def _size(size: Any) -> int:
    """A size that a fake gives; 1 where only the op's values would tell."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 1
