"""The processes that look at a GPU: one that crashes, hangs or is spoiled costs no other look."""

import os
import sys
import time

import lanes


def look(number):
    if number == 3:
        os._exit(9)
    if number == 5:
        time.sleep(60)
    return {"number": number, "process": os.getpid(), "handling": repr(sys.exc_info()[1])}


def test_what_one_look_does_to_its_process_stays_with_it():
    tasks = [(number,) for number in range(8)]
    rows = {number: answer for (number,), answer in lanes.answers(look, tasks, workers=2, patience=1.0)}
    assert sorted(rows) == list(range(8))
    assert "status 9" in rows.pop(3)["error"]
    assert "no answer" in rows.pop(5)["error"]
    assert all(answer["number"] == number for number, answer in rows.items())


def test_a_process_that_is_no_longer_fit_is_replaced():
    tasks = [(number,) for number in (0, 1, 2)]
    answers = [answer for _, answer in lanes.answers(look, tasks, workers=1, fit=lambda: False)]
    assert len({answer["process"] for answer in answers}) == 3
    assert {answer["handling"] for answer in answers} == {"None"}
