"""mkdocs hook: pages that lie outside of docs/, and the rules' pages, one a file, in the navigation."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: Any) -> Any:
    rules = sorted(path.name for path in (ROOT / "docs/check/rules").glob("CG*.md"))
    check = next(section["Check"] for section in config.nav if "Check" in section)
    check.append({"Rules": [f"check/rules/{name}" for name in rules]})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        for name, other in PAGES.items():
            text = text.replace(f"]({name}", f"]({other}")
        files.append(File.generated(config, page, content=text))
    return files
