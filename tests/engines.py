"""Engines of every mode on a CPU; their graphs are recorded ones, which replay ops and no Python (test_graph.py)."""

import torch

from onegraph.engine import executor
from onegraph.engine.choice import PLAIN
from onegraph.engine.engine import Engine
from onegraph.engine.inputs import row_inputs
from onegraph.ops.registry import reference_ops
from onegraph.runtime.graph import Runner
from test_graph import RecordedPool

STEPS = {"prefill": 6, "decode": 5}
"""How many steps of `simulated_step` are simulated: six chunks of 16 tokens meet pages that earlier ones wrote. By
itself the checker would go on to 18, because an engine uploads from two buffers in turn."""

MODES = {"eager": False, "captured": True, "split": "split"}


def maker(mode, model, monkeypatch, **defaults):
    """What makes engines of `mode` for `model`, a fixture's value; `defaults` go over small sizes."""
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())
    monkeypatch.setitem(Runner.__init__.__kwdefaults__, "warmup", 1)  # a second one is for what GPUs compile

    def make(**options):
        sizes = {"max_batch": 4, "max_context": 64, "page_size": 4, "chunk": 8, "capture": MODES[mode]}
        options = sizes | defaults | options
        engine = Engine(options.pop("model", model), **options)
        assert engine.mode == mode
        return engine

    return make


def simulated_step(made, kind, *, limit, exact=False):
    """An engine's step of three rows and what brings its inputs, as `check_step` takes them: the ops as plain torch,
    which it sees into."""
    runner = made.executor.step(kind, exact=exact)
    rows = {
        "positions": torch.tensor([14, 75, 9], dtype=torch.int32),  # soon in another page, soon at the limit, at it
        "limits": torch.tensor([limit, 77, 9], dtype=torch.int32),
        "table": torch.arange(1, 1 + 3 * made.executor.sizes.per_row, dtype=torch.int32).view(3, -1),
        "slots": torch.tensor([2, 3, 1], dtype=torch.int32),
    }
    others = row_inputs(3, made.executor.sizes.per_row, PLAIN, torch.device("cpu"))
    rows |= {name: tensor.cpu()[:3] * 0 for name, tensor in others.items() if name not in rows}
    g = torch.Generator().manual_seed(0)
    if kind == "decode":
        runner.load(drawn=torch.tensor([5, 6, 7]), **rows)

    def inputs(index):
        if kind == "prefill":
            row = {name: tensor[:1].clone() for name, tensor in rows.items()}
            row["positions"][0], row["limits"][0] = 16 * index, 16 * index + 16 - index
            runner.load(tokens=torch.randint(0, 101, (1, 16), generator=g), **row)
        return ()

    def one():
        with reference_ops():
            return runner.replay(3) if kind == "decode" else runner.replay()

    return one, inputs
