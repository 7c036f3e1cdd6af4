"""mkdocs hook: pages that lie outside of docs/, and the rules' pages, one a file, in the navigation."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from onegraph.check.rules import RULES

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RULES_HEAD = """# Rules

CG1xx: capture fails. CG2xx: capture succeeds and the replay is wrong. CG3xx: generators, streams, the process. CG4xx:
what the check says about itself. The last three columns say how well each way of looking sees the pattern.

| code | pattern | severity | hazard | source | simulation | GPU |
|---|---|---|---|---|---|---|
"""


def rule_pages() -> dict[str, str]:
    """Page -> text: the table of the rules, and each rule."""
    rows = [
        f"| [{code}]({code}.md) | {rule.name} | {rule.severity} | {', '.join(map(str, rule.hazards))} "
        f"| {' | '.join(rule.seen.values())} |\n"
        for code, rule in RULES.items()
    ]
    pages = {"README": RULES_HEAD + "".join(rows)} | {code: rule.explain() for code, rule in RULES.items()}
    return {f"reference/rules/{name}.md": text for name, text in pages.items()}


def on_config(config: Any) -> Any:
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"Rules": list(rule_pages())})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        for name, other in PAGES.items():
            text = text.replace(f"]({name}", f"]({other}")
        files.append(File.generated(config, page, content=text))
    for page, text in rule_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The link from docs/ to the rules' folder leads to their table."""
    return markdown.replace("](../../src/onegraph/check/rules)", "](rules/README.md)")
