"""Plans of FlashInfer: made on the host, from lengths, before a graph is replayed."""

from pathlib import Path

import pytest

from onegraph.check.source import check_source

TEXT = """
import flashinfer
import torch

def factory():
    space = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, use_cuda_graph=True)
    cache = torch.zeros(8, 2, 16, 1, 64, device="cuda")
    def step(q, indptr, indices, last):
        {plan}return wrapper.run(q, cache)
    def inputs(i):
        return q(i), lengths(i), lengths(i), lengths(i)
    return step, inputs
"""
PLAN = "wrapper.plan(indptr, indices, last, 1, 1, 64, 16)\n        "


@pytest.mark.parametrize(("plan", "codes"), [(PLAN, {"CG101", "CG401"}), ("", {"CG401"})])
def test_a_plan_in_the_step_is_told(plan: str, codes: set[str], tmp_path: Path) -> None:
    path = tmp_path / "serving.py"
    path.write_text(TEXT.format(plan=plan))
    found = check_source(str(path), "factory").findings
    assert {f.code for f in found} == codes
    assert all(".plan(" in f.source for f in found if f.code == "CG101")
