"""What the release workflow runs on a tag: `python -m tools.release v0.2.0 [--repository URL]`. Needs no dependency.

It checks that the tag is that of the version and that CHANGELOG.md has its dated section and nothing unreleased. With
`--repository` it writes into the tree that is built: `[project.urls]` in pyproject.toml, and absolute links in the
README, since a package index resolves no relative ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)]+)\)")  # Markdown's, to a file of the repository


def check(tag: str, root: Path = ROOT) -> None:
    """Raises ValueError where the tree is not the release that a tag names."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "src/onegraph/__init__.py").read_text(), re.M)
    if tag != f"v{version}":
        raise ValueError(f"tag {tag}: the version is {version}; tag v{version}, or change __version__")
    unreleased, _, rest = (root / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")[2].partition("\n## ")
    if unreleased.strip():
        raise ValueError(f"CHANGELOG.md: 'Unreleased' has entries; move them to the section of {version}")
    if not re.match(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d\n", rest):
        raise ValueError(f"CHANGELOG.md: below 'Unreleased' there must be a section '{version} - YYYY-MM-DD'")


def absolute(text: str, repository: str, tag: str) -> str:
    """Markdown whose links and pictures of the repository have full addresses."""
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({repository}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", text)


def publish(repository: str, tag: str, root: Path = ROOT) -> None:
    """Writes the addresses of a repository into the README and pyproject.toml."""
    readme, project = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), repository, tag))
    pages = {"Repository": "", "Documentation": f"/blob/{tag}/docs/get-started.md"}
    pages |= {"Changelog": f"/blob/{tag}/CHANGELOG.md", "Issues": "/issues"}
    table = "".join(f'{name} = "{repository}{path}"\n' for name, path in pages.items())
    head, mark, rest = project.read_text().partition("[project.scripts]\n")
    project.write_text(f"{head}[project.urls]\n{table}\n{mark}{rest}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Checks and prepares a release.")
    parser.add_argument("tag", help="tag of the release, v and the version")
    parser.add_argument("--repository", metavar="URL", help="address of the repository, to write into this tree")
    args = parser.parse_args(argv)
    try:
        check(args.tag)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.repository:
        publish(args.repository.rstrip("/"), args.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
