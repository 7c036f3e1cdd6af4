"""Calls that a step makes beside its ops, noted while a recorder listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onegraph.check import compat
from onegraph.check.live.recorder import Recorder
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.aliases import changed
from onegraph.check.simulate.backward import stale
from onegraph.check.simulate.calling import call_step


@contextmanager
def recorded(recorder: Recorder) -> Iterator[list[bool]]:
    """The recorder listens, and what torch would compile runs as it is written: it never compiles again what it once
    met under a mode. Gives a list that is not empty once such a function has run."""
    with torch.compiler.set_stance("force_eager"):
        seen: list[bool] = []

        def hear(callback: Any) -> None:
            if callable(callback):
                seen.append(True)

        with compat.compiled_calls(hear), recorder:
            yield seen


@contextmanager
def calls_noted(recorder: Recorder) -> Iterator[None]:
    """Records calls inside a step that query whether the stream is being captured, set a seed, or run the backward pass
    of another step."""
    real = torch.cuda.is_current_stream_capturing

    def asked() -> bool:
        chain = frames.chain(call_step.__code__, 2) if frames.asks_itself(2) else ()
        if chain and recorder.roots.owns(chain[0][0]) and recorder.step is not None:
            recorder.asked_capturing.append(chain)
        return real()

    def seeding(function: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            chain = frames.chain(call_step.__code__, 2)
            if chain:
                recorder.note(*hazards.SEEDED, chain)
            return function(*args, **kwargs)

        return seed

    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        old = "" if recorder.second_order else stale(outputs, recorder.first_node)
        recorder.second_order |= bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        chain = frames.chain(call_step.__code__, 2)
        if old and chain:
            text = f"the backward pass goes through {old}, whose forward ran before the step"
            recorder.note("CG306", text, hazards.NOT_PERMITTED, chain)
        return engine(outputs, *args, **kwargs)

    def compile(*args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]) and not frames.asks_itself(2):
            return args[0]  # cond and the like, which torch compiles to run them: followed as they are written
        return plainly(*args, **kwargs)

    plainly = torch.compile
    engine = compat.run_backward
    seeds = [(torch, "manual_seed"), *((torch.cuda, n) for n in ("manual_seed", "manual_seed_all", "set_rng_state"))]
    stand_ins = [(owner, name, seeding(getattr(owner, name))) for owner, name in seeds]
    stand_ins += [(module, compat.RUN_BACKWARD, backward) for module in (torch.autograd, torch.autograd.graph)]
    stand_ins.append((torch, "compile", compile))
    stand_ins.append((torch.cuda, "is_current_stream_capturing", asked))
    with changed(stand_ins):
        yield
