"""Sampling defaults: the model's generation_config.json first, then one default for all commands."""

from __future__ import annotations

import dataclasses
from typing import Any

from onegraph.engine.params import OFF, SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import parse_json

FIELDS = tuple(OFF)
LEAST_TEMPERATURE = 1e-3  # below, sampling is greedy
# Where the model says nothing: greedy text of small models in few bits easily loops until the context is full
DEFAULT = {"temperature": 0.7, "top_p": 0.95}


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields of SamplingParams that are None. model: of generation_config.json; added: of `DEFAULT`, if the
    model says neither whether to sample nor how."""

    model: dict[str, float]
    added: dict[str, float]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SamplingDefaults:
        """Raises CheckpointError for a file that is not JSON."""
        data = checkpoint.sidecar("generation_config.json")
        config = {} if data is None else parse_json(data, "generation_config.json")
        if config.get("do_sample") is False:
            penalty = config.get("repetition_penalty")
            return cls({"temperature": 0.0} | ({} if penalty is None else {"repetition_penalty": penalty}), {})
        model = {name: config[name] for name in FIELDS if config.get(name) is not None}
        temperature, top_k = model.get("temperature"), model.get("top_k")
        if isinstance(temperature, float) and 0 < temperature < LEAST_TEMPERATURE:
            model["temperature"] = 0.0  # some models publish 1e-6 for greedy
        if top_k == -1:
            model["top_k"] = 0
        elif isinstance(top_k, float) and top_k.is_integer():
            model["top_k"] = int(top_k)
        if config.get("do_sample") is True:
            model = {"temperature": 1.0} | model
        if "temperature" in model:
            return cls(model, {})
        return cls(model, {name: value for name, value in DEFAULT.items() if name not in model})

    def fill(self, params: SamplingParams) -> SamplingParams:
        """The params with a value for each of `FIELDS`; greedy ones keep the penalty alone. Raises ValueError for a
        value of the model's that is not allowed."""
        values = {**OFF, **self.model, **self.added}
        missing = [name for name in FIELDS if getattr(params, name) is None]
        if (values["temperature"] if params.temperature is None else params.temperature) == 0:
            values = {**OFF, "repetition_penalty": values["repetition_penalty"]}
        for name in missing:
            try:
                params = dataclasses.replace(params, **dict[str, Any]({name: values[name]}))
            except ValueError as error:
                raise ValueError(f"generation_config.json: {error}; give a {name} of your own") from None
        return params
