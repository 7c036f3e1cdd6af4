"""References of onegraph's ops, which a GPU runs where no kernel fits, obey the contract that onegraph checks.

The ops themselves are vouched for (`onegraph.ops.__capturable__`), so that checking a model says nothing of what is
inside of them."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import onegraph.ops
from onegraph.check import Verdict, check_step
from onegraph.ops.registry import OPS, Case, Op, reference_ops

for _module in pkgutil.iter_modules(onegraph.ops.__path__):
    if not _module.ispkg:
        importlib.import_module(f"onegraph.ops.{_module.name}")

CASES = [
    pytest.param(op, case, id=f"{name}-{case.name}")
    for name, op in sorted(OPS.items())
    if not op.sole
    for case in dict.fromkeys((op.cases[0], op.cases[-1]))
]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_reference_is_capturable(op: Op, case: Case) -> None:
    def factory() -> Any:
        dtype = torch.bfloat16 if torch.bfloat16 in op.tolerance else next(iter(op.tolerance), torch.float32)
        args = case.make(torch.device("cuda"), dtype, torch.Generator().manual_seed(0))

        @torch.no_grad()
        def step() -> Any:
            return op.reference(*args)

        return step, lambda i: ()

    with reference_ops():
        report = check_step(factory, steps=3)
    found = [(f.code, f.path, f.line, f.message) for f in report.findings]
    assert report.verdict is Verdict.CAPTURABLE, found


def test_every_op_but_those_of_other_memory_is_among_them() -> None:
    """Of other GPUs, and of the host."""
    assert {name for name, op in OPS.items() if op.sole} == {
        "all_gather", "all_reduce", "e8p_all_reduce", "expert_cache", "hyper_all_reduce",
    }  # fmt: skip
    assert len(CASES) > 60
