"""Engines of every mode on a CPU; their graphs are recorded ones, which replay ops and no Python (test_graph.py)."""

from onegraph.engine import generate
from onegraph.engine.generate import Engine
from test_graph import RecordedPool

MODES = {"eager": False, "captured": True, "split": "split"}


def maker(mode, model, monkeypatch, **defaults):
    """What makes engines of `mode` for `model`, a fixture's value; `defaults` go over small sizes."""
    monkeypatch.setattr(generate, "GraphPool", lambda device: RecordedPool())

    def make(**options):
        sizes = {"max_batch": 4, "max_context": 64, "page_size": 4, "chunk": 8, "capture": MODES[mode]}
        options = sizes | defaults | options
        engine = Engine(options.pop("model", model), **options)
        assert engine.mode == mode
        return engine

    return make
