"""The rules: one explicit table from code to rule.

CG1xx capture fails. CG2xx capture succeeds and the replay is wrong. CG3xx generators, streams, process. CG4xx the check
about itself.
"""

from onegraph.check.advice import ADVICE
from onegraph.check.rules.base import SECTIONS, Rule
from onegraph.check.rules.copies import HostIndex, PageableCopyInStep
from onegraph.check.rules.host_state import (
    CaptureDependentPath,
    ChangingHostContents,
    ChangingScalar,
    CpuScalarOperand,
    HostStateBranch,
    PythonSideEffect,
    ReplayDiffersFromEager,
)
from onegraph.check.rules.host_values import BranchOnDeviceValue, DeviceValueReadOnHost
from onegraph.check.rules.meta import AllowanceWithoutReason, UnusedAllowance, UnverifiedLaunch
from onegraph.check.rules.process import (
    AutocastOrModeFlip,
    CollectiveInCapture,
    LazyInitialisation,
    RawAllocation,
    SkippedGraph,
    StaleAutogradNode,
)
from onegraph.check.rules.rng import RngStateInStep, UnregisteredGenerator
from onegraph.check.rules.shapes import ChangingShape, DataDependentShape
from onegraph.check.rules.storages import (
    FreedExternalTensor,
    FreedOutsideCapture,
    FreedPinnedSource,
    OutputReadLate,
    ReboundStorage,
    SharedPoolOrder,
)
from onegraph.check.rules.streams import DefaultStreamCapture, OtherThreadCall, UnjoinedFork, WrongStreamOrDevice
from onegraph.check.rules.syncs import ExplicitSynchronize, OpThatSyncs, QueryOrPinnedAllocation

RULES: dict[str, type[Rule]] = {
    "CG101": DeviceValueReadOnHost,
    "CG102": PageableCopyInStep,
    "CG103": HostIndex,
    "CG104": DataDependentShape,
    "CG105": OpThatSyncs,
    "CG106": ExplicitSynchronize,
    "CG107": QueryOrPinnedAllocation,
    "CG108": BranchOnDeviceValue,
    "CG201": HostStateBranch,
    "CG202": ChangingScalar,
    "CG203": CpuScalarOperand,
    "CG204": ChangingHostContents,
    "CG205": ReboundStorage,
    "CG206": FreedExternalTensor,
    "CG207": FreedPinnedSource,
    "CG208": ChangingShape,
    "CG209": OutputReadLate,
    "CG210": PythonSideEffect,
    "CG211": CaptureDependentPath,
    "CG212": ReplayDiffersFromEager,
    "CG301": UnregisteredGenerator,
    "CG302": RngStateInStep,
    "CG303": WrongStreamOrDevice,
    "CG304": DefaultStreamCapture,
    "CG305": UnjoinedFork,
    "CG306": StaleAutogradNode,
    "CG307": LazyInitialisation,
    "CG308": RawAllocation,
    "CG309": OtherThreadCall,
    "CG310": CollectiveInCapture,
    "CG311": AutocastOrModeFlip,
    "CG312": SharedPoolOrder,
    "CG313": FreedOutsideCapture,
    "CG314": SkippedGraph,
    "CG401": UnverifiedLaunch,
    "CG402": AllowanceWithoutReason,
    "CG403": UnusedAllowance,
}

__all__ = ["RULES", "SECTIONS", "Rule", "explain", "find", "prefix_of"]


def find(code: str) -> type[Rule]:
    """The rule of a code or a name. Raises ValueError that lists what is allowed."""
    rule = RULES.get(code.upper())
    if rule is None:
        rule = next((r for r in RULES.values() if r.name() == code.lower()), None)
    if rule is None:
        raise ValueError(f"rule: got {code!r}, allowed {', '.join(RULES)}; or the name of one")
    return rule


def prefix_of(word: str) -> str:
    """What codes begin with that a word means: a code, a prefix (`CG2`) or a name. Raises ValueError as `find`."""
    if word and any(code.startswith(word.upper()) for code in RULES):
        return word.upper()
    return code_of(find(word))


def code_of(rule: type[Rule]) -> str:
    """The code of a rule class."""
    return next(code for code, other in RULES.items() if other is rule)


def explain(code: str) -> str:
    """A rule's page as Markdown: title, facts, the four sections."""
    rule = find(code)
    sight = ", ".join(f"{'GPU' if way == 'live' else way.value} {how}" for way, how in rule.seen.items())
    facts = [f"{rule.severity.value}"]
    if rule.hazards:
        facts.append("hazard " + ", ".join(map(str, rule.hazards)) + " of the table")
    if sight:
        facts.append("seen by " + sight.replace("simulate", "simulation"))
    head = f"# {code_of(rule)} {rule.name()}\n\n{'; '.join(facts)}.\n"
    if rule.happens:
        head += f"\nWhat happens: {rule.happens}.\n"
    return f"{head}\n{rule.page()}\n\n## Fix\n{_fixes(ADVICE[code_of(rule)])}\n"


def _fixes(table: dict[str, str]) -> str:
    """Advice as Markdown: a sentence, or a row a construct of the code."""
    general = f"{table[''][:1].upper()}{table[''][1:]}."
    rows = [f"| {construct} | {text.replace('|', chr(92) + '|')} |" for construct, text in table.items() if construct]
    return "\n".join(["| at | |", "|---|---|", *rows, f"| otherwise | {table['']} |"]) if rows else general
