"""The rules: one Markdown file each, which `onegraph rule` and the site show, and whose head findings and formats need.

CG1xx capture fails. CG2xx capture succeeds and the replay is wrong. CG3xx generators, streams, process. CG4xx the check
about itself. The keys of a head:

- `name`, `severity` (of a certain finding);
- `hazards`: the rows of docs/reference/hazards.md that it stands for, none for CG4xx;
- `happens`: one of `errors`, others, or nothing;
- `seen`: how well each way of looking sees it: yes, partly or no;
- `shown_by`: the ways of looking that must find its Example (and nothing in Use instead).

The section Fix is a sentence, or a table from constructs of the code to what to write instead. `tests/check/advice`
holds, for each, a step that has the hazard and the same step with the text followed, which the check finds clean.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template

from onegraph.check import constructs
from onegraph.check.report import Origin, Severity
from onegraph.check.rules import errors

SECTIONS = ("What it does", "Why is this bad", "Example", "Use instead", "Fix")


@dataclass(frozen=True)
class Rule:
    """One pattern: the head of its file, and `page`, the Markdown below the head."""

    code: str
    name: str
    severity: Severity
    hazards: tuple[int, ...]
    happens: str
    seen: dict[Origin, str]
    shown_by: tuple[Origin, ...]
    page: str

    def section(self, title: str) -> str:
        """Text of one of `SECTIONS`. Raises KeyError where the page lacks it."""
        found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", self.page, re.M | re.S)
        if found is None:
            raise KeyError(f"{self.code} has no section {title!r}")
        return found.group(1).strip()

    def code_of(self, title: str) -> str:
        """The first Python block of a section: a whole target file with a `factory`."""
        found = re.search(r"```python\n(.*?)```", self.section(title), re.S)
        return found.group(1) if found else ""

    def summary(self) -> str:
        """First sentence of What it does."""
        return self.section("What it does").split("\n\n")[0].replace("\n", " ")

    @cached_property
    def fixes(self) -> dict[str, str]:
        """construct -> what to do, in the order in which constructs are looked for; "": any other."""
        text = self.section("Fix").replace(r"\|", "\0")
        rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M)
        if not rows:
            sentence = " ".join(text.splitlines()).removesuffix(".")
            rows = [("otherwise", sentence[:1].lower() + sentence[1:])]
        return {"" if at == "otherwise" else at: text.replace("\0", "|") for at, text in rows}

    def explain(self) -> str:
        """The whole page as Markdown: title, facts, sections."""
        facts = [self.severity.value]
        if self.hazards:
            facts.append(f"hazard {', '.join(map(str, self.hazards))} of the table")
        ways = {Origin.SOURCE: "source", Origin.SIMULATE: "simulation", Origin.LIVE: "GPU"}
        facts.append("seen by " + ", ".join(f"{ways[way]} {how}" for way, how in self.seen.items()))
        happens = f"What happens: {self.happens}.\n\n" if self.happens else ""
        return f"# {self.code} {self.name}\n\n{'; '.join(facts)}.\n\n{happens}{self.page}"


def _read(path: Path) -> Rule:
    """A rule's file. Raises ValueError or KeyError where its head is not one."""
    _, head, page = path.read_text(encoding="utf-8").split("---\n", 2)
    facts = dict(line.split(": ", 1) for line in head.splitlines())

    def several(key: str) -> list[str]:
        return facts[key].split(", ") if key in facts else []

    return Rule(
        code=path.stem,
        name=facts["name"],
        severity=Severity(facts["severity"]),
        hazards=tuple(map(int, several("hazards"))),
        happens=Template(facts.get("happens", "").strip('"')).substitute(vars(errors)),
        seen={Origin(way): how for way, how in map(str.split, several("seen"))},
        shown_by=tuple(map(Origin, several("shown_by"))),
        page=page,
    )


RULES = {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("CG*.md"))}


def find(code: str) -> Rule:
    """The rule of a code or a name. Raises ValueError that lists what is allowed."""
    rule = RULES.get(code.upper()) or next((r for r in RULES.values() if r.name == code.lower()), None)
    if rule is None:
        raise ValueError(f"got {code!r}, allowed {', '.join(RULES)}; or the name of one")
    return rule


def prefix_of(word: str) -> str:
    """What codes begin with that a word means: a code, a prefix (`CG2`) or a name. Raises ValueError as `find`."""
    if word and any(code.startswith(word.upper()) for code in RULES):
        return word.upper()
    return find(word).code


def fix(code: str, path: str = "", line: int = 0, column: int = 1, *, construct: str = "") -> str:
    """What to do about a finding of `code` at a place (line and column from 1); in general where no place is given.

    `construct` is one that is known already.
    """
    fixes = RULES[code].fixes
    if construct:
        return fixes[construct]
    return fixes[constructs.found(tuple(fixes), code, path, line, column)] if path else fixes[""]
