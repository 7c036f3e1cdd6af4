"""The engine's own steps under `onegraph check`: captured, replayed and compared on a simulated GPU, every commit."""

import pytest
import torch

from onegraph.check.api import check_step
from onegraph.engine.engine import Engine
from onegraph.ops.registry import reference_ops
from tiny_decoder import TinyDecoder

ROWS = {
    "positions": torch.tensor([3, 5, 9], dtype=torch.int32),
    "limits": torch.tensor([40, 7, 9], dtype=torch.int32),  # one runs on, one stops on the way, one stands still
    "table": torch.arange(1, 37, dtype=torch.int32).view(3, 12),
    "slots": torch.tensor([1, 2, 3], dtype=torch.int32),
    "temperature": torch.tensor([0.7, 0.0, 1.5]),
    "top_k": torch.tensor([5, 0, 0], dtype=torch.int32),
    "top_p": torch.tensor([0.9, 1.0, 0.5]),
    "seed": torch.tensor([1, 2, 3]),
}


def engine():
    return Engine(TinyDecoder(device="cuda"), max_batch=4, max_context=48, page_size=4, chunk=8, capture=False)


def decode(sampling, spoil=lambda e: None, rows=ROWS, before=lambda e: None, **parts):
    """Steps that chain through the device's own state; the host loads the rows once, before the first.

    before: what the host does on the engine in front of each step.
    """

    def factory():
        e = engine()
        spoil(e)
        runner = e.executor.step("decode", sampling=sampling, **parts)
        runner.load(drawn=torch.tensor([5, 6, 7]), **rows)

        def inputs(index):
            before(e)
            return ()

        def step():
            with reference_ops():  # the ops as plain torch, which the simulation sees into
                return runner.replay(4)

        return step, inputs

    return factory


def prefill(sampling, rows=ROWS, **parts):
    """One chunk after the other: new tokens, position and limit in the same buffers."""

    def factory():
        runner = engine().executor.step("prefill", sampling=sampling, **parts)
        names = ("tokens", "following") if parts.get("prompt") else ("tokens",)
        g = torch.Generator().manual_seed(0)

        def inputs(index):
            row = {name: tensor[:1].clone() for name, tensor in rows.items()}
            row["positions"][0], row["limits"][0] = 8 * index, 8 * index + 8 - index
            drawn = {name: torch.randint(0, 101, (1, 8), generator=g) for name in names}
            runner.load(**drawn, **row)
            return ()

        def step():
            with reference_ops():
                return runner.replay()

        return step, inputs

    return factory


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", [decode, prefill])
def test_the_step_may_be_captured(kind, sampling):
    report = check_step(kind(sampling))
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


def spoil_run(e, change):
    """The model's pass, with `change(positions)` for the positions that its cache is given."""
    run = e.model.run

    def spoiled(stage, stream, tokens, attend):
        attend.cache.positions = change(attend.cache.positions)
        return run(stage, stream, tokens, attend)

    e.model.run = spoiled


def host_branch(e):
    spoil_run(e, lambda positions: positions if positions.max().item() < 6 else positions + 1)


def host_position(e):
    calls = []

    def count(positions):
        calls.append(0)
        return positions * 0 + len(calls)

    spoil_run(e, count)


def new_storage(e):
    def rebind(positions):
        e.executor.cache.keys[0] = e.executor.cache.keys[0] + 1
        return positions

    spoil_run(e, rebind)


@pytest.mark.parametrize("spoil", [host_branch, host_position, new_storage])
def test_a_step_that_breaks_the_contract_is_found(spoil):
    """What the test above would say if the engine read a length on the host, counted there, or rebound a buffer."""
    assert check_step(decode(False, spoil)).findings
