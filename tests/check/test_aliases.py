"""Names that modules took from torch are stood in for while a simulation lasts, and are what they were afterwards."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from onegraph.check.simulate.aliases import holders, rebound


def module(monkeypatch: pytest.MonkeyPatch, name: str, path: str, **values: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(values, __file__=path)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_modules_get_back_what_they_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the simulated code imported, which could only take the stand-in."""
    real, stand_in = object(), object()
    path = str(tmp_path / "steps.py")
    early = module(monkeypatch, "onegraph_early", path, wait=real, other=real, kept=3)
    torchs = module(monkeypatch, "onegraph_torchs", os.path.join(os.path.dirname(torch.__file__), "x.py"), wait=real)
    standard = module(monkeypatch, "onegraph_standard", os.__file__, wait=real)
    with rebound([(real, stand_in)]):
        assert [early.wait, early.other, early.kept] == [stand_in, stand_in, 3]
        assert torchs.wait is standard.wait is real
        early.other = "bound by the step"
        late = module(monkeypatch, "onegraph_late", path, taken=early.wait)
    assert [early.wait, early.other, late.taken] == [real, "bound by the step", real]


def test_the_first_name_that_a_stand_in_stood_for_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, stand_in = object(), object(), object()
    early = module(monkeypatch, "onegraph_early", str(tmp_path / "steps.py"), one=first, two=second)
    with rebound([(first, stand_in), (second, stand_in)]):
        late = module(monkeypatch, "onegraph_late", str(tmp_path / "late.py"), taken=early.two)
    assert [early.one, early.two, late.taken] == [first, second, first]


def test_holders_go_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [1]
    made = module(monkeypatch, "onegraph_held", "steps.py", equal=[1], same=wanted)
    assert holders({id(wanted)}, [made]) == [(made, "same", wanted)]
