"""A capture that broke: which op, at which line, and how to leave torch fit for the next capture."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from onegraph.check.live.recorder import Recorder, of_call
from onegraph.check.simulate import frames, hazards
from onegraph.check.simulate.calling import call_step, line

_GENERATOR = ("CG302", "the generator is read or set in the step")
_TEXTS = (
    ("generator is not registered", *hazards.UNREGISTERED[:2]),
    ("generator needs to be registered", *hazards.UNREGISTERED[:2]),
    ("not in capture mode", *hazards.UNREGISTERED[:2]),
    ("unjoined", *hazards.UNJOINED[:2]),
    ("legacy stream", "CG304", "work is launched on the default stream inside the step"),
    ("current_seed", *_GENERATOR),
    ("get_offset", *_GENERATOR),
    ("capturable is False", "CG202", "the optimizer counts its steps on the host"),
    ("uncaptured free", "CG313", "a tensor made in the capture is freed outside of it"),
    ("during capturing stage", *hazards.OWN_GRAPHS[:2]),
    ("philox", *_GENERATOR),
)


def blame(recorder: Recorder, roots: frames.Roots, error: Exception, first: BaseException, stream: int) -> None:
    """Name the op and the line at which the capture broke, with `first` as its first error."""
    text = str(error)
    happens = f"{type(first).__name__}: {line(first)}"
    chain = frames.chain_of_error(first, call_step.__code__)
    if recorder.broken is not None:
        recorder.last, happens = recorder.broken[:3], recorder.broken[3]
        chain = recorder.broken[1]
    chain = chain or (recorder.last[1] if recorder.last else ())
    hazard = of_call(chain, roots, "")
    if hazard.code == "CG306":
        recorder.note(hazard.code, hazard.message, happens, chain)
        return
    for words, code, message in _TEXTS:
        if words in str(first) or words in text:
            if code == "CG305":
                chain = next((c for s, (_, c) in recorder.streams.items() if s != stream), chain)
            recorder.note(code, message, happens, chain)
            return
    other = [c for s, (_, c) in recorder.streams.items() if s != stream]
    where = roots.where(chain)
    if other and where and frames.called(*where) in ("wait", "wait_event", "wait_stream"):
        recorder.note(*hazards.ASTRAY[:2], happens, other[0])
        return
    here = recorder.broken is not None or (chain and recorder.last and recorder.last[1][: len(chain)] == chain)
    if here and recorder.last is not None and recorder.last[2]:
        hazard = recorder.last[2]
    elif chain:
        hazard = of_call(chain, roots, recorder.last[0] if recorder.last else "")
        if hazard.code == "CG105" and "Cannot copy between CPU and CUDA tensors" in happens:
            # torch makes a tensor of host data where no recorder hears it; eager steps could say no more than CG105
            hazard = hazards.of_copy(to_device=True, pinned=False, non_blocking=False, opname="") or hazard
            recorder.raw_findings = [s for s in recorder.raw_findings if s.code != "CG105" or s.chain[:1] != chain[:1]]
    else:
        chain = other[0] if other else (recorder.last[1] if recorder.last else ())
        hazard = hazards.Hazard("CG305" if other else "CG105", "the capture does not end", happens)
    recorder.note(hazard.code, hazard.message, happens, chain)


def forget(error: BaseException, outer: BaseException | None) -> None:
    """Let go of what the frames of an error hold: torch's printing keeps a guard there that switches functorch off in
    this thread for as long as it lives, and the next step's `vmap` would not be one."""
    cause: BaseException | None = error
    while cause is not None and cause is not outer:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside of a capture: a graph that a collection destroys there voids it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def recover(stream: Any) -> None:
    """A capture that breaks leaves the default generator in capture mode, where the next random number is an error; a
    capture that ends well takes it out again."""
    with suppress(RuntimeError), torch.cuda.stream(stream):
        torch.cuda.synchronize()
        one = torch.ones(1, device="cuda")
        with uncollected(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            one.add_(1)


def first_error(error: BaseException, outer: BaseException | None) -> BaseException:
    """The error that broke the capture: ending a broken capture raises once more, with the cause as its context.

    outer: what the caller of the check was handling already, which is no part of it.
    """
    while error.__context__ is not None and error.__context__ is not outer:
        error = error.__context__
    return error
