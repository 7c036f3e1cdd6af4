"""What may be captured: read the source, simulate capture and replay on a CPU, or do both for real on a GPU.

Importing this module imports no torch; `check_step(simulate=True)` and `live=True` do.
"""

from onegraph.check.api import check_step
from onegraph.check.declared import declare, declared
from onegraph.check.pytest_plugin import assert_capturable
from onegraph.check.report import CheckError, Event, Finding, Frame, Origin, Report, Severity, Verdict

__all__ = [
    "CheckError",
    "Event",
    "Finding",
    "Frame",
    "Origin",
    "Report",
    "Severity",
    "Verdict",
    "assert_capturable",
    "check_step",
    "declare",
    "declared",
]
