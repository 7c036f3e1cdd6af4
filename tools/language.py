"""The style check of `make lint`: `python -m tools.language`. It reads pages, docstrings, help texts and messages.

- Pages: sentences of at most `MOST` words, decimals with a leading zero, and none of `IDIOMS`.
- Docstrings, help and messages of src and tools: none of `IDIOMS`, and help texts are at most `MOST` words.

Code, tables, links and quotations in pages are not prose. docs/log.md and CHANGELOG.md are records and are not read.
Spelling is codespell's (`[tool.codespell]` in pyproject.toml).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST = 30  # words of a sentence
RECORDS = {"docs/log.md"}
# What this project used to say -> what the field says
IDIOMS = {
    r"gives? (the|its|their) (memory|pages?|row|GPU) back": "frees",
    r"who (leave|come|goe|wait|ask|draft|read|write|measure|does not read)s?\b": "name the request, client or thread",
    r"beside one another": "in parallel (tensor parallel)",
    r"behind one another": "one after the other, or pipeline parallel",
    r"as (it|they) stands?\b": "unchanged",
    r"(is|are) told (apart|by)\b": "is recognised by, is distinguished by",
    r"told \d+ .* from": "N true positives, M true negatives",
    r"what crosses\b": "communication",
    r"\binbox(es)?\b": "peer buffer",
    r"\bsoiled\b": "cache contains NaN",
    r"bears? \d bits": "N-bit quantization preserves quality",
    r"right with \.\d a token": "acceptance rate 0.N",
    r"never answers\b": "rank timeout",
    r"at the most\b": "at most",
    r"refused by name": "unsupported: raises an error that names it",
    r"goes stale without": "is frozen into the graph",
    r"(nats|bits|bytes|us|ms|seconds) a (token|weight|layer|step|round|head|row|file)\b": "per",
    r"on no package index": "not published on PyPI",
    r"by whoever\b": "name it",
    r"anybody's\b": "any",
}


class Problem(NamedTuple):
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if str(page.relative_to(ROOT)) not in RECORDS]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items of Markdown: first line, text. Code and links are one word each."""
    code, lines, first = False, list[str](), 0

    def done() -> Iterator[tuple[int, str]]:
        if lines:
            yield first, " ".join(lines)
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            yield from done()
            code = not code
        elif code or not line.strip() or line.lstrip().startswith(("|", "#", "<!--", "![")):
            yield from done()
        else:
            if re.match(r"\s*([-*]|\d+\.) ", line):
                yield from done()
                line = re.sub(r"^\s*([-*]|\d+\.) ", "", line)
            if not lines:
                first = number
            lines.append(line.strip())
    yield from done()


def plain(text: str) -> str:
    """Without markup: a piece of code, a link's target and an emphasis's stars are no words."""
    text = re.sub(r"`[^`]*`(, `[^`]*`)*( (and|or|to) `[^`]*`)?", "Code", text)  # a list of names is one word
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<=\s)[-+]?\d(?:[\d.,]*\d)?(?=\s)", "", text)


def sentences(text: str) -> list[str]:
    """Sentences, and the parts that a colon or a semicolon separates: lists read as such."""
    text = re.sub(r"\b(e\.g|i\.e|vs|al|etc|No)\.", r"\1", text)
    return [
        part
        for part in re.split(r"(?<=[.!?])[)\"]?\s+(?=[A-Z`\"(*0-9]|onegraph|vLLM|torch)|[:;]\s", text)
        if part.strip()
    ]


def idioms(text: str) -> Iterator[str]:
    for pattern, cure in IDIOMS.items():
        for found in re.finditer(pattern, text, re.I):
            yield f"{found[0]!r}: write {cure}"


def of_page(path: Path) -> Iterator[Problem]:
    text = path.read_text()
    where = path.relative_to(ROOT)
    for line, paragraph in prose(text):
        for sentence in sentences(plain(paragraph)):
            if (count := len(sentence.split())) > MOST:
                yield Problem(where, line, f"a sentence of {count} words, at most {MOST}: {sentence[:60]!r} ...")
        bare = re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph)
        for found in re.finditer(r"(?<![\w.)\]])\.\d+", bare):
            yield Problem(where, line, f"{found[0]!r}: write 0{found[0]}")
    code = False
    for number, line_text in enumerate(text.splitlines(), 1):
        code ^= line_text.lstrip().startswith("```")
        if not code:
            for said in idioms(re.sub(r"`[^`]*`", "", line_text)):
                yield Problem(where, number, said)


def texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings, and what people see: text of errors, messages, help and epilogs."""
    for node in ast.walk(tree):
        inside: list[ast.AST] = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [each.value for each in node.body[:1] if isinstance(each, ast.Expr)]
        elif isinstance(node, ast.Raise) and node.exc is not None:
            inside = [node.exc]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in MESSAGES:
            inside = list(node.args)
        elif (isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog")) or (
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("EPILOG", "DESCRIPTION", "COMMANDS")
        ):
            inside = [node.value]
        for part in inside:
            found = (each for each in ast.walk(part) if isinstance(each, ast.Constant))
            yield from (each for each in found if isinstance(each.value, str))


MESSAGES = {"print", "remark", "say", "tell", "warn", "log", "UsageError", "require", "note"}


def of_source(path: Path) -> Iterator[Problem]:
    tree = ast.parse(path.read_text())
    where = path.relative_to(ROOT)
    for text in dict.fromkeys(texts(tree)):  # a call within an error is met twice
        for said in idioms(" ".join(str(text.value).split())):
            yield Problem(where, text.lineno, said)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            words = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            for sentence in sentences("".join(map(str, words))):
                if (count := len(sentence.split())) > MOST:
                    yield Problem(where, node.value.lineno, f"a help text of {count} words, at most {MOST}")


def problems() -> list[Problem]:
    found = [problem for page in pages() for problem in of_page(page)]
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    return found + [p for path in sorted(sources) if path != Path(__file__) for p in of_source(path)]


def main() -> int:
    found = problems()
    for problem in found:
        print(problem)
    print(f"{len(found)} problems of style", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
