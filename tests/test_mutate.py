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


def close(x):
    if (
        x):
        x += 1
    elif (x ==
        2):
        return (1,
                x)
"""


def test_a_mutant_is_what_differs_between_two_sources():
    new = SOURCE.replace("lid() < 2", "lid() <= 2")
    mutant = mutate.between("box.py", SOURCE, new)
    assert mutant.apply(SOURCE) == new
    assert mutant.text == "="
    assert mutant.line(SOURCE) == 14
    assert mutant.diff(SOURCE) == ("return lid() < 2", "return lid() <= 2")


@pytest.mark.parametrize(
    ("line", "lines", "called"),
    [
        *((1, [1], False), (4, [4, 5], False), (6, [6], True), (9, [9], False), (11, [11], True), (12, [12], True)),
        *((14, [14], True), (18, [18, 19], True), (20, [20], True), (21, [21, 22], True), (23, [23, 24], True)),
    ],
)
def test_the_lines_that_run_with_a_line(line, lines, called):
    found, by_call = mutate.statement_at(SOURCE, line)
    assert (list(found), by_call) == (lines, called)


def test_every_module_has_tests():
    for file in mutate.files_of(list(mutate.MODULES)):
        assert mutate.tests_of(file), file


def test_the_score_counts_no_equal_mutant_and_survivors_are_shown():
    known = {"file": "quant/ldlq.py", "was": "better = now < before", "is": "better = now <= before"}
    line = {"file": "quant/ldlq.py", "line": 7, "was": "a", "is": "b"}
    outcomes = ("killed", "timeout", "survived", "unreached")
    lines = [line | known | {"outcome": "survived"}, *(line | {"outcome": outcome} for outcome in outcomes)]
    told = mutate.summary(lines, show=True).splitlines()
    assert told[:3] == ["quant/ldlq.py:7 survived", "  - a", "  + b"]
    assert told[-1].split() == ["all", "2", "1", "1", "1", "66.7%"]
