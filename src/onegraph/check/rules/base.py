"""What a rule is: a class whose docstring is its page, and a few facts that findings and formats need."""

import inspect
import re
from typing import ClassVar

from onegraph.check.report import SILENT, Origin, Severity

SECTIONS = ("What it does", "Why is this bad", "Example", "Use instead")

NOT_PERMITTED = "operation not permitted when stream is capturing"
PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned "
    "(or: operation not permitted when stream is capturing)"
)

__all__ = ["NOT_PERMITTED", "PAGEABLE", "SECTIONS", "SILENT", "Origin", "Rule", "Severity"]


class Rule:
    """One pattern. The class name is its name; the table in `onegraph.check.rules` gives the code.

    Attributes:
        hazards: rows of the hazard table (docs/check/hazards.md) that it stands for; empty for CG4xx.
        severity: what a certain finding of it is.
        happens: CUDA's error, `SILENT`, or "".
        seen: how well each way of looking sees it: "yes", "partly" or "no".
        shown_by: the ways of looking that must find the docstring's Example (and nothing in Use instead).
    """

    hazards: ClassVar[tuple[int, ...]] = ()
    severity: ClassVar[Severity] = Severity.ERROR
    happens: ClassVar[str] = NOT_PERMITTED
    seen: ClassVar[dict[Origin, str]] = {}
    shown_by: ClassVar[tuple[Origin, ...]] = ()

    @classmethod
    def name(cls) -> str:
        """kebab-case of the class name: DeviceValueReadOnHost -> device-value-read-on-host."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    def page(cls) -> str:
        """The docstring, unindented: Markdown with the four sections."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def section(cls, title: str) -> str:
        """Text of one of `SECTIONS`. Raises KeyError where the docstring lacks it."""
        found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", cls.page(), re.M | re.S)
        if found is None:
            raise KeyError(f"{cls.__name__} has no section {title!r}")
        return found.group(1).strip()

    @classmethod
    def code_of(cls, title: str) -> str:
        """The first Python block of a section: a whole target file with a `factory`."""
        found = re.search(r"```python\n(.*?)```", cls.section(title), re.S)
        return found.group(1) if found else ""

    @classmethod
    def summary(cls) -> str:
        """First sentence of What it does."""
        return cls.section("What it does").split("\n\n")[0].replace("\n", " ")


def ways(source: str, simulate: str, live: str) -> dict[Origin, str]:
    """The three columns of the hazard table."""
    return {Origin.SOURCE: source, Origin.SIMULATE: simulate, Origin.LIVE: live}
