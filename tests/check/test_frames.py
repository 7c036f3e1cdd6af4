"""Whose code a frame is: torch's and this package's are left out, whatever the folders above them are called."""

import sys
from pathlib import Path

import pytest
import torch

from onegraph.check.places import package_of
from onegraph.check.simulate import frames

TORCH = str(Path(torch.__file__).parent)


@pytest.mark.parametrize(
    ("path", "skipped"),
    [
        (TORCH + "/nn/modules/linear.py", True),
        (frames.HERE + "/simulate/world.py", True),
        ("<frozen importlib._bootstrap>", True),
        (TORCH + "_geometric/nn/conv.py", False),
        (frames.HERE + "_list.py", False),
        ("/opt/torch/.venv/lib/python3.12/site-packages/transformers/cache_utils.py", False),  # seen: none was shown
        ("/home/me/torch/site-packages/steps.py", False),
    ],
)
def test_frames_of_torch_and_of_this_package_are_left_out(path, skipped):
    assert frames._skipped(path) == skipped


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/opt/torch/.venv/lib/python3.12/site-packages/transformers/cache_utils.py", "transformers"),
        (TORCH + "/nn/modules/linear.py", "torch"),
        (frames.os.__file__, ""),
        ("/home/me/transformers/cache_utils.py", None),
    ],
)
def test_an_installed_file_belongs_to_the_package_below_site_packages(path, package):
    assert package_of(path) == package


def test_a_question_of_torch_s_own_is_not_the_user_s():
    """An optimizer asks whether the stream is being captured, which is no branch of the step's."""

    def asked():
        return frames.asks_itself()

    assert asked()
    asked.__code__ = asked.__code__.replace(co_filename=TORCH + "/optim/optimizer.py")
    assert not asked()


def test_a_call_is_one_place_however_often_it_ran():
    """Python 3.11 moves a call of a builtin by one instruction once it has run a few times."""
    seen = []

    def values():
        yield seen.append(frames.chain(here)) or 1

    def step():
        return sum(values())

    here = sys._getframe().f_code
    assert sum(step() for _ in range(40)) == 40
    assert len(set(seen)) == 1
    code, at = seen[0][1]
    assert code is step.__code__
    assert frames.called(code, at) == "sum"
