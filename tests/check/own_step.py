"""onegraph's own decode step as a target of `onegraph check`: the engine's step, greedy and sampling."""

import sys
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from models import save_hf
from onegraph.engine.choice import Choice
from onegraph.engine.draft import ModelDrafter, NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.ranks import Ranks
from tiny_decoder import TinyDecoder


def _factory(*, sampling: bool, draft=None, drafts: int = 0):
    options = {"max_batch": 3, "max_context": 64, "page_size": 8, "draft": draft, "draft_tokens": 3}
    engine = Engine(TinyDecoder(device="cuda"), **options, capture=False)
    return _step_of(engine, Choice(sampling=sampling), drafts=drafts)


def _step_of(engine: Engine, choice: Choice, *, drafts: int = 0):
    steps = engine.executor.ranks[0]
    rows = steps.inputs(0, True, choice)
    rows["drawn"].copy_(torch.tensor([5, 9, 2]))
    rows["limits"].copy_(torch.tensor([60, 40, 3]))  # the last row meets its end on the way
    rows["table"].copy_(torch.arange(1, 1 + rows["table"].numel()).view_as(rows["table"]))
    rows["slots"].copy_(torch.tensor([1, 2, 3]))  # in one slot for all, rows would write over each other's drafts
    rows["temperature"].fill_(0.8)
    rows["top_p"].fill_(0.9)
    rows["seed"].copy_(torch.tensor([1, 2, 3]))
    decode = steps.of(0, True, choice, drafts)

    @torch.no_grad()
    def step():
        return decode(**rows)

    return step, lambda i: ()


def greedy():
    return _factory(sampling=False)


def sampling():
    return _factory(sampling=True)


def ngram():
    return _factory(sampling=False, draft=NgramDrafter, drafts=3)


def drafted():
    return _factory(sampling=True, draft=partial(ModelDrafter, TinyDecoder(device="cuda", seed=1)), drafts=3)


def rank():
    """One of two ranks, which runs alone here: nobody would answer."""
    folder = Path(mkdtemp())
    save_hf("minimax_m2", folder)
    with Checkpoint.open(folder) as checkpoint:
        model = Ranks.load(checkpoint, ["cuda:0", "cuda:1"])
    rmtree(folder)
    return _step_of(Engine(model, max_batch=3, max_context=64, page_size=8, capture=False), Choice(True))
