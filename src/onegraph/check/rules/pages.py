"""Writes the rules' pages: `python -m onegraph.check.rules.pages docs/check/rules`.

One Markdown file a rule and an index, from the docstrings that `onegraph rule` prints. A test holds them current.
"""

import sys
from pathlib import Path

from onegraph.check.rules import RULES, explain

HEAD = """# Rules

Written by `python -m onegraph.check.rules.pages docs/check/rules` from the docstrings; change them there.

CG1xx: capture fails. CG2xx: capture succeeds and the replay is wrong. CG3xx: generators, streams, the process. CG4xx:
what the check says about itself. The last three columns say how well each way of looking sees the pattern.

| code | pattern | severity | hazard | source | simulation | GPU |
|---|---|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """File name -> text."""
    made = {f"{code}.md": explain(code) for code in RULES}
    rows = []
    for code, rule in RULES.items():
        seen = list(rule.seen.values()) or ["", "", ""]
        hazards = ", ".join(map(str, rule.hazards))
        rows.append(f"| [{code}]({code}.md) | {rule.name()} | {rule.severity} | {hazards} | {' | '.join(seen)} |")
    made["README.md"] = HEAD + "\n".join(rows) + "\n"
    return made


def main(folder: str) -> None:
    """Write every page below `folder`, and remove pages of rules that are gone."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in target.glob("CG*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m onegraph.check.rules.pages FOLDER")
    main(sys.argv[1])
