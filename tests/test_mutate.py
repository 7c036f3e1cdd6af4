"""The parts of `make mutate` that need no mutmut: where a mutant stands, what it changes, which tests it meets."""

import pytest

import mutate

SOURCE = """import functools


@functools.cache
def twice(x):
    return 2 * x


class Box:
    def open(self):
        def lid():
            return 1

        return lid() < 2
"""


def test_a_mutant_is_what_differs_between_two_sources():
    new = SOURCE.replace("lid() < 2", "lid() <= 2")
    mutant = mutate.between("box.py", SOURCE, new)
    assert mutant.apply(SOURCE) == new
    assert mutant.text == "="
    assert mutant.line(SOURCE) == 14
    assert mutant.diff(SOURCE) == ("return lid() < 2", "return lid() <= 2")


@pytest.mark.parametrize(("line", "first"), [(1, ""), (4, "4"), (6, "4"), (10, "10"), (12, "11"), (14, "10")])
def test_the_function_that_holds_a_line_begins_at_its_decorator(line, first):
    assert mutate.function_at(SOURCE, line) == first


def test_every_module_has_tests():
    for file in mutate.files_of(list(mutate.MODULES)):
        assert mutate.tests_of(file), file


def test_the_score_counts_no_equal_mutant_and_survivors_are_shown():
    known = {"file": "quant/ldlq.py", "was": "better = now < before", "is": "better = now <= before"}
    line = {"file": "quant/ldlq.py", "line": 7, "was": "a", "is": "b", "called": True}
    lines = [
        line | known | {"outcome": "survived"},
        *(line | {"outcome": o} for o in ("killed", "timeout", "survived")),
    ]
    told = mutate.summary(lines, show=True).splitlines()
    assert told[:3] == ["quant/ldlq.py:7", "  - a", "  + b"]
    assert told[-1].split() == ["all", "2", "1", "1", "66.7%"]
