"""What the layers of a checkpoint cost, measured once and kept beside the unfinished work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch

from onegraph.api import Progress
from onegraph.api.choices import Choices
from onegraph.api.plan import budget_layers
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.rotated import KEEP
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.resumable import SPILLED, ResumableWork, key_of
from onegraph.quant.sensitivity import LOWEST, Cost, Costs, base_rate, measure, quick


def measured(
    checkpoint: Checkpoint,
    choices: Choices,
    model: QuantizableModel,
    rows: torch.Tensor,
    outer: Callable[[str], torch.Tensor],
    partial: ResumableWork,
    say: Progress,
    rates: Mapping[str, int],
) -> Costs:
    """The cost of each part whose rate the budget of `choices` leaves open; rows: int [N, T] of calibration text;
    rates: those that the budget buys where all weights matter alike. From `partial` where an earlier job measured the
    same."""
    layers, probed = budget_layers(checkpoint, choices), max(1, choices.probed // rows.shape[1])
    free = layers.free
    average = layers.budget.bits or layers.common(
        {name: rates[name] for name in layers.found.shapes if rates.get(name, KEEP) != KEEP}
    )
    recipe = quick(choices.recipe_options, base_rate(average or LOWEST, choices.format))
    key = key_of(rows, probed, sorted(free.items()), recipe.to_dict(), layers.budget.per_linear)
    kept = partial.load("costs", key)
    if kept is not None:
        found = {tuple(names.split(" ")): cost.tolist() for names, cost in kept.items()}
        return {parts: Cost(error, (near, far)) for parts, (error, near, far) in found.items()}
    say("measuring", 0, 2 * model.num_blocks)
    costs = measure(
        model,
        rows,
        recipe,
        free,
        probed=probed,
        outer=outer,
        per_linear=layers.budget.per_linear,
        progress=lambda done, total: say("measuring", done, total),
        spill=ActivationOffload(partial.path / SPILLED, choices.held),
    )
    partial.save("costs", key, {" ".join(names): cost.numbers for names, cost in costs.items()})
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
