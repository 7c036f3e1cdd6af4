"""Source reading held to the corpus: how many planted hazards it sees at the right line, how often it cries wolf."""

import ast
import copy
import random
from pathlib import Path

import corpus_tools
import pytest

from onegraph.check.source import check_source
from onegraph.check.source.files import Project, parse
from onegraph.check.source.roots import Interpreter, read_factory

# Not visible without running: autograd nodes made earlier, hooks that add themselves, lists whose elements got mixed.
RECALL, PRECISION = 0.9, 0.98


def test_precision_and_recall(repo: Path) -> None:
    hits, missed, false = 0, [], []
    for case in corpus_tools.cases():
        report = check_source(str(case.path), case.name.split(":")[1])
        found = {(f.line, f.code) for f in report.findings if f.path == str(case.path)}
        explained = set()
        for expected in case.expected:
            matching = {(line, code) for line, code in found if line == expected.line and code in expected.codes}
            explained |= matching
            if matching and not expected.optional:
                hits += 1
            elif not matching and not expected.optional:
                missed.append((case.name, expected.line, sorted(expected.codes)))
        false += [(case.name, *place) for place in sorted(found - explained)]
    assert f"| {hits + len(missed)} | {hits} | {len(false)} |" in (repo / "docs/benchmarks/checker.md").read_text()
    assert hits > 100
    assert hits / (hits + len(missed)) >= RECALL, missed
    assert hits / (hits + len(false)) >= PRECISION, false


class Damage(ast.NodeTransformer):
    """Takes a tree apart: drops statements, swaps expressions for others of the same file."""

    def __init__(self, text: str, dice: random.Random) -> None:
        self.dice = dice
        found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.expr) and not _stores(n)]
        self.spare = [n for n in found if sum(1 for _ in ast.walk(n)) < 20]  # small: a tree must not outgrow itself

    def visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        if isinstance(node, ast.expr) and not _stores(node) and self.dice.random() < 0.03:
            return copy.deepcopy(self.dice.choice(self.spare))
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and self.dice.random() < 0.2:
            body.pop(self.dice.randrange(len(body)))
        return node


def _stores(node: ast.AST) -> bool:
    return any(isinstance(getattr(n, "ctx", None), ast.Store | ast.Del) for n in ast.walk(node)) or isinstance(
        node, ast.JoinedStr | ast.FormattedValue | ast.Starred
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_damaged_program_makes_the_reader_fail(seed: int) -> None:
    """Reading is total: whatever stands where, it ends without an exception of its own."""
    read = 0
    for path in sorted((corpus_tools.HERE / "corpus").glob("h*.py")):
        text = path.read_text()
        damaged = Damage(text, random.Random(f"{seed}{path.name}")).visit(ast.parse(text))
        try:
            text = ast.unparse(ast.fix_missing_locations(damaged))
            file = parse(str(path), path.stem, text)
        except (ValueError, RecursionError):
            continue  # no longer Python
        for name in [n for n in file.names if n.startswith("factory_")]:
            problem = read_factory(Interpreter(Project()), file, name)
            assert "internal error" not in problem, f"{path.name}:{name}: {problem}"
            read += 1
    assert read > 50
