"""Source reading: abstract interpretation of the user's code from the step on. Standard library only; runs nothing."""

import os
from collections.abc import Iterable

from onegraph.check.report import CheckError, Finding, Origin, Report, ordered
from onegraph.check.source.files import Project
from onegraph.check.source.roots import Interpreter, read_factory
from onegraph.check.source.tree import check_tree, deep_recursion

__all__ = ["check_source", "check_tree"]


def check_source(path: str, factory_name: str) -> Report:
    """Read what is reachable from the step of `factory_name` in the file `path`.

    The factory is followed to `(step, inputs)`, its tensors and modules become typed values, and the step is read as
    three successive steps would run it. Only code of the user's project is entered. What cannot be known is not
    reported; `facts["source"]` says where reading had to stop.

    Raises:
        CheckError: no such file, not Python, no such factory.
    """
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise CheckError(f"{path}: no such file")
    if not path.endswith(".py"):
        raise CheckError(f"{path}: not a Python file")
    project = Project()
    machine = Interpreter(project)
    with deep_recursion():
        problem = read_factory(machine, project.keep(project.file(path)), factory_name)
    facts: dict[str, object] = {"read": sorted(machine.found.read)}
    if problem:
        facts["source"] = problem
    return Report(
        target=f"{path}:{factory_name}",
        findings=ordered(_causes(machine.found.findings.values())),
        origins=(Origin.SOURCE,),
        facts=facts,
    )


def _causes(findings: Iterable[Finding]) -> list[Finding]:
    """Without what only follows, on the line of a host read, from the value that was read there."""
    findings = list(findings)
    reads = {(f.path, f.line) for f in findings if f.code in ("CG101", "CG104", "CG108")}
    return [f for f in findings if f.code not in ("CG201", "CG202", "CG208") or (f.path, f.line) not in reads]
