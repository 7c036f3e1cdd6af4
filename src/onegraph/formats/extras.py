"""How a part of onegraph that is left out by default is installed, in the words of every message.

onegraph is not published on PyPI: an extra comes from a checkout, as onegraph itself does.
"""

from __future__ import annotations

import importlib.metadata
import re

EXTRAS = ("gguf", "hub", "serve", "constraints", "cuda")


def packages(extra: str) -> list[str]:
    """The packages that an extra installs, as onegraph's own metadata names them."""
    try:
        required = importlib.metadata.requires("onegraph") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        required = []
    marked = [line.partition(";") for line in required]
    found = [name for name, _, marker in marked if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return [re.split(r"[^A-Za-z0-9._-]", name.strip())[0] for name in found]


def command(*extras: str) -> str:
    """What installs onegraph with `extras` of pyproject.toml, in a checkout."""
    return f'pip install -e ".[{",".join(extras)}]"'


def install(*extras: str) -> str:
    """What to do for `extras`, to stand at the end of a line."""
    return f"in a checkout of onegraph: {command(*extras)}"
