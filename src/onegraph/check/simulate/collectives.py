"""`torch.distributed` on the simulated machine: groups of which one rank runs and whose peers do nothing.

Groups of NCCL need GPUs and peers, and gloo's wait for theirs. Here every group is torch's own "fake" one, known under
the name that was asked for: a collective gives what this rank brought. What may be captured is recognised by how NCCL
works (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): a communicator is made at the first use and not in a capture;
`async_op=True` runs on a stream of the group, which joins when `wait()` is called; barriers, objects and gloo need the
host.
"""

import ast
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onegraph.check import compat
from onegraph.check.constructs import last_name
from onegraph.check.report import Severity
from onegraph.check.rules.errors import NOT_PERMITTED, SILENT
from onegraph.check.simulate import frames
from onegraph.check.simulate.world import World
from onegraph.check.tables import COLLECTIVES, OBJECT_COLLECTIVES, PAIR_COLLECTIVES

_HOST = "the host waits in it, or the ranks hang"
_HANGS = "no error: the ranks hang, in the capture or at the first replay"


def stand_ins(world: World) -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in) of what `torch.distributed` has; nothing where torch is built without it."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed import distributed_c10d as c10d

    groups = _Groups(world)
    made: dict[str, Any] = {
        "init_process_group": groups.init(c10d.init_process_group),
        "new_group": groups.new(c10d.new_group),
        "get_backend": groups.backend(c10d.get_backend),
        "is_nccl_available": lambda: True,
    }
    made |= {n: groups.collective(n, getattr(c10d, n)) for n in COLLECTIVES if hasattr(c10d, n)}
    made |= {n: groups.on_host(n, getattr(c10d, n)) for n in OBJECT_COLLECTIVES if hasattr(c10d, n)}
    owners = (torch.distributed, c10d)
    return [(owner, name, value) for name, value in made.items() for owner in owners if hasattr(owner, name)]


@contextmanager
def ended() -> Iterator[None]:
    """Groups that were made meanwhile end with the simulation."""
    before = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not before:
            torch.distributed.destroy_process_group()


class Pending:
    """What `async_op=True` gives: work on the group's stream, which `wait()` joins to the current one."""

    def __init__(self, work: Any, event: Any) -> None:
        self._work, self._event = work, event

    def wait(self, *_: Any, **__: Any) -> bool:
        current: Any = torch.cuda.current_stream()
        current.wait_event(self._event)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Groups:
    """asked: the backend of each group as the code named it; used: what has a communicator; streams: of groups."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: dict[str, str] = {}
        self.used: set[tuple[str, str]] = set()
        self.streams: dict[str, Any] = {}
        self.inside = False

    def init(self, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def init_process_group(
            backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
            store: Any = None, group_name: str = "", pg_options: Any = None, device_id: Any = None, **_: Any,
        ) -> None:  # fmt: skip
            size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
            here = rank if rank >= 0 else int(os.environ.get("RANK", 0))
            compat.register_fake_groups()
            real("fake", store=torch.distributed.HashStore(), rank=here, world_size=size)  # type: ignore[attr-defined]
            name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]  # it was just made
            self.asked[name] = str(backend or "nccl").lower()
            if device_id is not None:  # communicators are made at once
                self.used.update({(name, "all"), (name, "pair")})

        return init_process_group

    def new(self, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **__: Any) -> Any:
            made = real(ranks, backend="fake", use_local_synchronization=True)
            self.asked[_name(made)] = str(backend).lower() if backend else self.asked.get(_name(None), "nccl")
            return made

        return new_group

    def backend(self, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def get_backend(group: Any = None) -> str:
            return self.asked.get(_name(group)) or str(real(group))

        return get_backend

    def on_host(self, name: str, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def on_host(*args: Any, **kwargs: Any) -> Any:
            self.world.see("CG310", f"{name} needs the host", f"{NOT_PERMITTED}; {_HOST}")
            self.world.muted += 1  # what torch does for it is no hazard of its own
            try:
                return real(*args, **kwargs)
            finally:
                self.world.muted -= 1

        return on_host

    def collective(self, name: str, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self.inside:  # torch calls it once more, past the mode that listens to functions
                return real(*args, **kwargs)
            group = kwargs.get("group")
            if group is None:
                group = next((a for a in args if isinstance(a, torch.distributed.ProcessGroup)), None)
            self._judge(name, group, (*args, *kwargs.values()))
            alone = kwargs.get("async_op") or name in ("isend", "irecv", "batch_isend_irecv")
            if not alone or self.world.phase != "step":
                return self._run(real, args, kwargs)
            side = self.streams.setdefault(_name(group), torch.cuda.Stream())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work = self._run(real, args, kwargs)
            event = side.record_event()
            return [Pending(w, event) for w in work] if isinstance(work, list) else Pending(work, event)

        return collective

    def _run(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return real(*args, **kwargs)
        finally:
            self.inside = False

    def _judge(self, name: str, group: Any, given: tuple[Any, ...]) -> None:
        """What is wrong with this collective in a capture, before it runs."""
        world = self.world
        asked = self.asked.get(_name(group), "nccl")
        kind = (_name(group), "pair" if name in PAIR_COLLECTIVES else "all")
        first = kind not in self.used
        self.used.add(kind)
        if world.phase != "step":
            return
        if "nccl" not in asked:
            world.see("CG310", f"{name} of {asked} goes through the host", f"{NOT_PERMITTED}; {_HOST}")
        elif first and world.step == world.captured_step:
            text = f"{name} is the first use of its group: the communicator is made inside of the capture"
            world.see("CG310", text, NOT_PERMITTED)
        elif torch.distributed.get_world_size(group) > 1 and group is None and _of_some_ranks(name, world.chain()):
            world.see("CG310", f"{name} stands behind a condition on the rank: the other ranks do not run it", _HANGS)
        elif torch.distributed.get_world_size(group) > 1:
            text = f"{name} in the step: every rank has to capture it, in the same order, and replay as often"
            world.see("CG310", text, f"hangs, or {SILENT}, where one does not", severity=Severity.WARNING)


def _of_some_ranks(name: str, chain: frames.Chain) -> bool:
    """Whether an `if` around the call asks for the rank, and does not run the same collective for the others."""
    for node in frames.branches_around(chain) if name not in PAIR_COLLECTIVES else ():
        asks = any("rank" in last_name(n) for n in ast.walk(node.test))
        arms = [{last_name(c.func) for s in arm for c in ast.walk(s) if isinstance(c, ast.Call)}
                for arm in (node.body, node.orelse)]  # fmt: skip
        if asks and not all(name in arm for arm in arms):
            return True
    return False


def _name(group: Any) -> str:
    known = group if group is not None else torch.distributed.group.WORLD
    return str(getattr(known, "group_name", ""))
