"""What publishes a release: the check of a tag, what it writes for PyPI, the workflow and the container's recipe."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onegraph import __version__
from tools.release import LINK, ROOT, absolute, check, publish

TAG = f"v{__version__}"
FILES = ("README.md", "CHANGELOG.md", "pyproject.toml", "src/onegraph/__init__.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that a release is about, with a changelog that is ready."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n## {__version__} - 2026-11-29\n\n- New.\n")
    return tmp_path


def test_a_tag_is_that_of_the_version_and_has_a_section(tree: Path) -> None:
    check(TAG, tree)
    for tag in (__version__, f"{TAG}.post1", "v9.9.9"):
        with pytest.raises(ValueError, match=rf"^tag {tag}: the version is {__version__}; tag {TAG}, or"):
            check(tag, tree)
    log = tree / "CHANGELOG.md"
    text = log.read_text()
    log.write_text(text.replace("## Unreleased\n", "## Unreleased\n\n- Later.\n"))
    with pytest.raises(ValueError, match="'Unreleased' has entries"):
        check(TAG, tree)
    for other in ("9.9.9 - 2026-11-29", __version__):
        log.write_text(text.replace(f"{__version__} - 2026-11-29", other))
        with pytest.raises(ValueError, match=f"there must be a section '{__version__} - YYYY-MM-DD'"):
            check(TAG, tree)


def test_the_changelog_has_the_section_of_this_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_links_of_the_readme_lead_to_the_repository(tree: Path) -> None:
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://e.example) [f](#g)"
    base = "https://host.example/o/r"
    assert absolute(text, base, "v1") == (
        f"![a]({base}/raw/v1/docs/a.svg) [b]({base}/blob/v1/docs/b.md#c) [d](https://e.example) [f](#g)"
    )
    before = (tree / "README.md").read_text()
    local = [match[3] for match in LINK.finditer(before)]
    assert len(local) > 20
    assert [path for path in local if not (ROOT / path.partition("#")[0]).exists()] == []
    publish(base, TAG, tree)
    assert LINK.search((tree / "README.md").read_text()) is None
    project: dict[str, Any] = tomllib.loads((tree / "pyproject.toml").read_text())
    urls = project["project"].pop("urls")
    assert urls["Repository"] == base
    assert all(url.startswith(base) for url in urls.values())
    assert project == tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_workflow_pins_its_actions_and_gives_one_job_one_permission() -> None:
    path = ROOT / ".github/workflows/release.yml"
    if not path.exists():
        pytest.skip("no checkout: the sdist has no workflow")
    text = path.read_text()
    used = re.findall(r"uses: (\S+)", text)
    pinned = [each for each in used if re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", each)]
    assert used == [*pinned, "pypa/gh-action-pypi-publish@release/v1"]
    assert re.findall(r"^permissions: (.*)$", text, re.M) == ["{}"]
    assert re.findall(r"([a-z-]+): write", text) == ["id-token"]
    assert 'run: python -m tools.release "$GITHUB_REF_NAME"' in text
    tests = re.findall(r"tests/\S+\.py", text)
    assert tests
    assert all((ROOT / each).exists() for each in tests)


def test_the_container_copies_what_its_context_has_and_names_extras_that_exist() -> None:
    recipe = (ROOT / "containers/Dockerfile").read_text()
    allowed = re.findall(r"^!(.+)$", (ROOT / "containers/Dockerfile.dockerignore").read_text(), re.M)
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", recipe, re.M) for name in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    extras = re.search(r'"\.\[([a-z,]+)', recipe)
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*extras[1].split(","), "cuda"} == {*known}
