"""Sparse tensors in the simulation: their books are kept by their values' storage."""

import dis

import pytest
import torch

from onegraph.check import Report, check_step
from onegraph.check.live.recorder import of_call, stored
from onegraph.check.simulate.frames import Roots
from onegraph.check.simulate.state import Snapshot

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def checked(make) -> Report:
    return check_step(lambda: (make(), lambda i: (torch.arange(16.0).view(4, 4).add(i).to("cuda"),)))


def coalesced():
    return torch.sparse_coo_tensor(RING, torch.arange(1.0, 5.0), (4, 4)).coalesce()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_product_with_a_sparse_matrix_is_clean_and_right(compressed):
    got = []

    def make():
        matrix = (coalesced().to_sparse_csr() if compressed else coalesced()).to("cuda")

        def step(x):
            y = matrix @ x
            got.append((x.inner.clone(), y.inner.clone()))
            return y

        return step

    assert not checked(make).errors
    assert all(torch.equal(y, coalesced().to_dense() @ x) for x, y in got)


def test_values_written_in_place_are_state_of_the_matrix():
    def make():
        matrix = coalesced().to_sparse_csr().to("cuda")

        def step(x):
            matrix.values().mul_(2).add_(x.diagonal())
            return matrix @ x

        return step

    report = checked(make)
    assert not report.findings
    assert report.facts["replay equals eager"]


def test_a_matrix_that_is_bound_anew_is_read_stale():
    def make():
        held = {"matrix": coalesced().to("cuda")}

        def step(x):
            y = held["matrix"] @ x
            held["matrix"] = held["matrix"] * 2
            return y

        return step

    assert checked(make).codes & {"CG205", "CG206"}


def test_a_matrix_made_of_a_dense_one_counts_on_the_host():
    assert checked(lambda: lambda x: torch.sparse.mm(x.to_sparse(), x)).codes == {"CG105"}


def test_a_sparse_matrix_copied_in_the_step_is_a_pageable_copy():
    assert checked(lambda: lambda x: coalesced().to("cuda") @ x).codes == {"CG102"}


def test_what_a_step_holds_is_seen_by_its_values():
    matrix, rows = coalesced(), torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    held = Snapshot(lambda: (matrix, rows), Roots()).tensors
    assert list(held) == ["matrix"]
    assert held["matrix"].data_ptr() == matrix.values().data_ptr()


def test_live_numbers_no_storage_of_what_has_none():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    assert [stored(t) for t in (torch.ones(2), coalesced(), coalesced().to_sparse_csr(), rows)] == [True] + 3 * [False]


@pytest.mark.parametrize(
    ("line", "calls", "code"),
    [
        ("y = torch.sparse_coo_tensor(ring, x[0], (4, 4)) @ x", 0, "CG105"),
        ("y = x + torch.as_tensor([1.0])", 0, "CG102"),
        ("y = x + x.new_tensor([1.0])", 0, "CG102"),
        ("y = solve(x.relu(), '.item(')", 1, "CG105"),  # what a line says elsewhere is no call
        ("y = solve(x.item(), 1)", 0, "CG101"),
        ("y = solve(x.item(), 1)", 1, "CG105"),
        ("y = solve(\n    x,\n    x.cpu(),\n)", 0, "CG101"),
    ],
)
def test_live_names_a_hazard_by_what_is_called(tmp_path, line, calls, code):
    path = tmp_path / "step.py"
    path.write_text(line + "\n")
    compiled = compile(line + "\n", str(path), "exec")
    at = [
        i.offset for i in dis.get_instructions(compiled) if i.opname.startswith("CALL") and i.opname != "CALL_KW_NAMES"
    ]
    assert of_call(((compiled, at[calls]),), Roots(), "aten::op").code == code
