"""Counters that reading alone sees, wherever a step keeps them: on a class, in an iterator, in a random generator."""

from pathlib import Path

import pytest

from onegraph.check.source import check_source

HEAD = """
import itertools, random
import torch

def X(i):
    return torch.ones(4, device="cuda") * i

class Base:
    n = 0

class S(Base):
    def __call__(self, x):
        BODY

def factory():
    count, few, same = itertools.count(), iter([1, 2, 3, 4]), iter([2, 2, 2])
    def step(x):
        return CLOSURE
    return STEP, lambda i: (X(i),)
"""

CASES = {
    "class": ("S.n += 1\n        return x * S.n", "", {"CG202", "CG210"}),
    "base": ("Base.n = Base.n + 1\n        return x * self.n", "", {"CG202", "CG210"}),
    "type": ("type(self).n += 1\n        return x * self.n", "", {"CG202", "CG210"}),
    "constant": ("return x * S.n * self.n", "", set()),
    "count": ("", "x * next(count)", {"CG202"}),
    "iterator": ("", "x * next(few)", {"CG202"}),
    "equal items": ("", "x * next(same)", set()),
    "own iterator": ("", "x * next(itertools.count(3))", set()),
    "bits": ("", "x * random.getrandbits(3)", {"CG202"}),
}


@pytest.mark.parametrize("name", CASES)
def test_counter(name: str, tmp_path: Path) -> None:
    body, closure, wanted = CASES[name]
    text = HEAD.replace("BODY", body or "return x").replace("CLOSURE", closure or "x")
    path = tmp_path / "counter.py"
    path.write_text(text.replace("STEP", "S()" if body else "step"))
    assert {f.code for f in check_source(str(path), "factory").findings} == wanted
