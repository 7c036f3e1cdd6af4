"""Names of clocks and of random numbers of the host, by the modules that give them. Standard library only."""

import ast
from collections.abc import Iterable

MODULES = frozenset(["random", "secrets", "uuid", "time", "numpy.random"])
FUNCTIONS = frozenset(["os.urandom", "os.getrandom"])
NOW = frozenset(["now", "utcnow", "today"])
"""Of the classes of `datetime`."""

GENERATORS = frozenset(["default_rng", "Random", "SystemRandom", "RandomState", "Generator"])
"""Makers of a generator of one's own."""

COMPUTED = frozenset(
    ["seed", "setstate", "set_state", "sleep", "strptime", "mktime", "shuffle", "uuid3", "uuid5", "UUID", "SafeUUID"]
)
"""What these modules make of their arguments, or only do."""


def draws(name: str) -> bool:
    """Whether a call of this dotted name ("numpy.random.rand") gives what nobody knows before, or a generator of it."""
    module, _, last = name.rpartition(".")
    return (module in MODULES or name in FUNCTIONS or reads_clock(name)) and last not in COMPUTED


def reads_clock(name: str) -> bool:
    """Whether a call of this dotted name ("time.monotonic") gives the time."""
    module, _, last = name.rpartition(".")
    return module == "time" or (module.startswith("datetime.") and last in NOW)


def imported(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Dotted names by the names that the imports among a file's nodes give them."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {root: root}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found
