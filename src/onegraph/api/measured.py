"""What the layers of a checkpoint cost, measured once and kept beside the unfinished work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import torch

from onegraph.api import Progress
from onegraph.api.choices import Choices
from onegraph.api.plan import budget_layers
from onegraph.formats.checkpoint import Checkpoint
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.resumable import SPILLED, ResumableWork, key_of
from onegraph.quant.sensitivity import Costs, measure, quick


def measured(
    checkpoint: Checkpoint,
    choices: Choices,
    model: QuantizableModel,
    rows: torch.Tensor,
    outer: Callable[[str], torch.Tensor],
    partial: ResumableWork,
    say: Progress,
) -> Costs:
    """KL of each part whose rate the budget of `choices` leaves open, alone at the lowest rate; rows: int [N, T] of
    calibration text. From `partial` where an earlier job measured the same."""
    free, probed = budget_layers(checkpoint, choices).free, max(1, choices.probed // rows.shape[1])
    recipe = quick(choices.recipe_options)
    key = key_of(rows, probed, sorted(free.items()), recipe.to_dict())
    kept = partial.load("costs", key)
    if kept is not None:
        return {tuple(names.split(" ")): cost.item() for names, cost in kept.items()}
    say("measuring", 0, model.num_blocks)
    costs = measure(
        model,
        rows,
        recipe,
        free,
        probed=probed,
        outer=outer,
        progress=lambda done, total: say("measuring", done, total),
        spill=ActivationOffload(partial.path / SPILLED, choices.held),
    )
    partial.save("costs", key, {" ".join(names): torch.tensor(cost).double() for names, cost in costs.items()})
    return costs


def identity(checkpoint: Checkpoint) -> str:
    """Names a checkpoint for resuming: its config and tensor table, and size and time of its files. Reading hundreds
    of GB to hash them would take longer than the blocks it saves."""
    infos = {name: checkpoint.info(name) for name in checkpoint.names}
    files = {str(info.file.resolve()): info.file.stat() for info in infos.values()}
    parts = [
        checkpoint.config,
        {name: (info.shape, str(info.dtype), info.nbytes) for name, info in infos.items()},
        {name: (stat.st_size, stat.st_mtime_ns) for name, stat in sorted(files.items())},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
