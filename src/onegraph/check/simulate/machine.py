"""What the parts of the simulated machine need of the whole, which is `world.World`."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from onegraph.check.report import Severity
from onegraph.check.simulate import frames
from onegraph.check.simulate.device import DeviceTensor, Owner
from onegraph.check.simulate.records import RawFinding, Step
from onegraph.check.simulate.storages import Storages
from onegraph.check.simulate.unknown import GivenTensor, Unknowns


class Machine(Owner, Protocol):
    """current: the running step; reference: the captured one; muted: how deep in the checker's own work a thread is."""

    captured_step: int
    current: Step | None
    reference: Step | None
    roots: frames.Roots
    storages: Storages
    unknowns: Unknowns
    streams: Any
    kernels: Any
    threads: Any
    local: Any
    device_index: int
    muted: int
    submitting: int
    builds_at_once: bool
    raw_findings: list[RawFinding]
    calls: list[Any]
    hosts: list[tuple[str, frames.Chain]] | None

    def chain(self, depth: int = 2) -> frames.Chain: ...

    def see(
        self, code: str, message: str, happens: str, *, chain: frames.Chain | None = None,
        severity: Severity = Severity.ERROR, values: tuple[str, ...] = (), note: Any = None,
    ) -> None: ...  # fmt: skip

    def opaque(self, name: str, what: str, chain: frames.Chain) -> None: ...

    def adopt(self, tensor: DeviceTensor) -> None: ...

    def given(self, tensors: Iterable[DeviceTensor], targets: Iterable[Tensor]) -> tuple[GivenTensor, ...]: ...

    def unknown(
        self, tensors: Iterable[Tensor], source: str, chain: frames.Chain = (), *, exposed: bool = False
    ) -> None: ...
