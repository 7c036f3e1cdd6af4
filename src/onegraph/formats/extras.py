"""How a part of onegraph that is left out by default is installed, in the words of every message.

onegraph is not published on PyPI: an extra comes from a checkout, as onegraph itself does.
"""

from __future__ import annotations


def command(*extras: str) -> str:
    """What installs onegraph with `extras` of pyproject.toml, in a checkout."""
    return f'pip install -e ".[{",".join(extras)}]"'


def install(*extras: str) -> str:
    """What to do for `extras`, to stand at the end of a line."""
    return f"in a checkout of onegraph: {command(*extras)}"
