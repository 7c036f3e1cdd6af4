"""What messages and pages say to install is what can be installed: extras of pyproject.toml, from a checkout."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from onegraph.formats.extras import command, install

INSTALLS = re.compile(r"""pip install -e "\.\[([a-z,]+)\]\"|\b(?:command|install)\(((?:"[a-z]+"|'[a-z]+'|, )+)\)""")


def test_one_line_names_the_checkout() -> None:
    assert command("gguf") == 'pip install -e ".[gguf]"'
    assert install("serve", "hub") == 'in a checkout of onegraph: pip install -e ".[serve,hub]"'


def test_every_extra_that_is_named_exists_and_none_is_said_to_be_on_an_index(repo: Path) -> None:
    known = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [repo / "README.md", *(repo / "docs").rglob("*.md"), *(repo / "src").rglob("*.py")]
    named: set[str] = set()
    for page in pages:
        text = page.read_text()
        assert "onegraph[" not in text, page
        for found in INSTALLS.finditer(text):
            named.update(re.findall("[a-z]+", found[1] or found[2]))
    assert named <= set(known)
    assert named >= {"constraints", "gguf", "hub", "serve"}, "what is missing at run time is told"
