"""What a check imports: no slow module that its step has no use for, and those that come late come as they are."""

import json
import sys
from pathlib import Path

import pytest
from programs import in_copies

from onegraph.check.simulate.imports import when_imported

SLOW = {
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("sympy", "scipy", "triton", "transformers", "networkx", "matplotlib", "pytest", "onegraph.check.live"),
}
"""torch's compiler alone takes as long to import as torch."""

STEP = """
import torch

def decode():
    model = torch.nn.Linear(64, 64, device="cuda")

    @torch.no_grad()
    def step(x):
        y = model(x).relu()
        y[0, 1:3] += 1
        return torch.where(y > 0, y, -y).softmax(-1)

    return step, lambda i: (torch.full((1, 64), float(i + 1), device="cuda"),)
"""

MEASURE = """
import json, sys
import torch
before = set(sys.modules)
from onegraph.cli import main
status = main(["check", sys.argv[1]])
print(json.dumps([status, sorted(set(sys.modules) - before)]))
"""


LATE = """
import torch

def late():
    compiled = []

    def step(x):
        if not compiled:
            import torch._dynamo
            from torch._dynamo.decorators import disable
            compiled.append(torch._dynamo.optimize("inductor")(lambda x: x * 2))  # not through torch.compile
        return compiled[0](x)

    return step, lambda i: (torch.full((4,), float(i + 1), device="cuda"),)

def saved():
    import torch.utils.checkpoint
    model = torch.nn.Linear(4, 4, device="cuda")

    def step(x):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        return model.weight.grad

    return step, lambda i: (torch.full((4, 4), float(i + 1), device="cuda"),)
"""

CHECK_LATE = """
import sys, torch, importlib.util
from onegraph.check import check_step
spec = importlib.util.spec_from_file_location("steps", sys.argv[1])
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
real = torch.cuda.current_stream, torch.compile, print
report = check_step(getattr(steps, sys.argv[2]))
assert "torch._dynamo" in sys.modules
assert (torch.cuda.current_stream, torch.compile, print) == real
kept = [m.__name__ for m in list(sys.modules.values()) if getattr(m, "__name__", "").startswith("torch.")
        for v in list(vars(m).values()) if str(getattr(v, "__module__", "")).startswith("onegraph.check.simulate")]
assert not kept, kept  # a module of torch took a stand-in, and keeps it
assert torch._dynamo.eval_frame._stance.stance == "default", "the stance outlives the simulation"
print(report.verdict.name, [f.code for f in report.findings])
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program prints in a copy of one process that has imported torch and nothing of ours."""
    folder = tmp_path_factory.mktemp("imports")
    for name, text in (("steps", STEP), ("late", LATE)):
        (folder / f"{name}.py").write_text(text)
    programs = [(MEASURE, f"{folder}/steps.py:decode")]
    programs += [(CHECK_LATE, f"{folder}/late.py", name) for name in ("late", "saved")]
    return dict(zip(("measure", "late", "saved"), in_copies(programs), strict=True))


def test_a_check_imports_no_slow_module(printed: dict[str, str]) -> None:
    status, imported = json.loads(printed["measure"].splitlines()[-1])
    assert status == 0, printed["measure"]
    assert SLOW & set(imported) == set()
    assert "onegraph.check.simulate.run" in imported  # it was simulated


@pytest.mark.parametrize("name", ["late", "saved"])
def test_the_compiler_may_be_imported_by_the_step(printed: dict[str, str], name: str) -> None:
    assert printed[name] == "CAPTURABLE []\n"


def test_acts_once_right_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onegraph_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders = list(sys.meta_path)
    with when_imported("onegraph_late", lambda: seen.append(sys.modules["onegraph_late"].value)):
        assert seen == []
        import onegraph_late  # type: ignore[import-not-found]  # noqa: F401

        assert seen == [1]
        __import__("onegraph_late")
        assert seen == [1]
    assert sys.meta_path == finders
    with when_imported("onegraph_late", lambda: seen.append(2)):
        assert seen == [1, 2]
    del sys.modules["onegraph_late"]


def test_a_module_that_is_not_there_stays_so() -> None:
    with when_imported("onegraph_no_such_module", lambda: pytest.fail("called")), pytest.raises(ModuleNotFoundError):
        __import__("onegraph_no_such_module")
