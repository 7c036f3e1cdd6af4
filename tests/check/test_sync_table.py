"""The table of what waits for the device: measured on a GPU, complete, and used by reading and simulation alike."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onegraph.check import tables
from onegraph.check.simulate.run import simulate_step
from onegraph.check.source import check_source

NEWER = {"Tensor.const_data_ptr", "nn.functional.linear_cross_entropy"}
"""What torch has had since the version that was measured."""


def table() -> dict[str, Any]:
    return json.loads((Path(tables.__file__).parent / "data/sync_ops.json").read_text())


def public(repo: Path) -> set[str]:
    spec = importlib.util.spec_from_file_location("check_sync_table", repo / "benchmarks/check_sync_table.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return {name.removeprefix("torch.") for name in made._public()}


def test_every_public_function_is_measured_or_said_not_to_be(repo: Path) -> None:
    rows = table()
    waits = {name.removeprefix("torch.") for name in rows["functions"]}
    assert public(repo) - waits - {*rows["clean functions"], *rows["functions not run"]} <= NEWER
    assert not waits & set(rows["clean functions"])
    assert len(rows["clean functions"]) > 3 * len(rows["functions not run"])


WAITS = {
    "istft": "torch.istft(torch.stft(x.flatten().repeat(8), 16, window=w, return_complex=True), 16, window=w)",
    "cov": "torch.cov(x)",
    "cond": "torch.linalg.cond(x)",
    "tensorinv": "torch.linalg.tensorinv(x, ind=1)",
    "gaussian_nll_loss": "torch.nn.functional.gaussian_nll_loss(x, x, x.abs())",
    "unravel_index": "torch.unravel_index(x.argmax(), (4, 4))[0]",
}
FILLS = {
    "masked_fill_": ("x.masked_fill_(x > 1, {})", "CG105"),
    "index_fill": ("x.index_fill(0, rows, {})", "CG105"),
    "index_fill_": ("x.index_fill_(0, rows, {})", "CG105"),
}
HEAD = """import torch

def factory():
    w = torch.hann_window(16, device="cuda")
    rows = torch.zeros(1, dtype=torch.int64, device="cuda")
    one, two = torch.ones((), device="cuda"), torch.ones(())

    def step(x):
        return {}

    def inputs(i):
        return (torch.eye(4, device="cuda") * (i + 2) + torch.arange(16.0, device="cuda").view(4, 4) / 16,)

    return step, inputs
"""


def factory(path: Path, expression: str) -> Any:
    path.write_text(HEAD.format(expression))
    spec = importlib.util.spec_from_file_location("waiting", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.factory


@pytest.mark.parametrize("name", WAITS)
def test_a_function_that_waits_is_found_by_reading_and_by_running(name: str, tmp_path: Path) -> None:
    path = tmp_path / "waiting.py"
    made = factory(path, WAITS[name])
    assert {f.line for f in simulate_step(made).errors} == {9}
    code = "CG105" if name in ("cond", "tensorinv") else "CG101"  # the others read a value in Python
    assert [(f.code, f.line) for f in check_source(str(path), "factory").findings] == [(code, 9)]


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_waits_for_a_value_of_the_device_and_not_for_one_of_the_host(name: str, tmp_path: Path) -> None:
    expression, code = FILLS[name]
    assert [f.code for f in simulate_step(factory(tmp_path / "a.py", expression.format("one"))).errors] == [code]
    assert simulate_step(factory(tmp_path / "b.py", expression.format("two"))).errors == ()


def test_anomaly_mode_reads_gradients_on_the_host() -> None:
    def made(check_nan: bool) -> Any:
        model = torch.nn.Linear(4, 4, device="cuda")

        def step(x: torch.Tensor) -> Any:
            with torch.autograd.detect_anomaly(check_nan=check_nan):
                model.zero_grad(set_to_none=False)
                model(x).sum().backward()
            return model.weight.grad

        return step, lambda i: (torch.full((2, 4), float(i + 1), device="cuda"),)

    (read,) = simulate_step(lambda: made(check_nan=True)).errors
    assert (read.code, read.source.strip()) == ("CG101", "model(x).sum().backward()")
    assert simulate_step(lambda: made(check_nan=False)).errors == ()
