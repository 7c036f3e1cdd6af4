"""The interpreter: the machine's state with the three entries of its recursion filled in.

Code is read by a recursion through expressions, calls and statements. The modules below import one way only; whatever
must go back up (a call that runs a body, an index that is an expression) goes through the machine that all are given.
"""

from onegraph.check.source import calls, expressions, statements
from onegraph.check.source.machine import Machine


class Interpreter(Machine):
    """A machine that reads. The entries are those modules' functions themselves, so that no frame lies in between."""

    evaluate = expressions.evaluate
    block = statements.block
    call_function = calls.call_function
