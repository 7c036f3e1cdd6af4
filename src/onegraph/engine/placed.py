"""The engine for a model whose layers lie on several devices: one graph a device, streams and tokens by peer copies."""

from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from onegraph.engine.generate import Decoder, Engine, _buckets, _Paged
from onegraph.ops.step import begin_step, finish_step
from onegraph.runtime.graph import Runner
from onegraph.runtime.pipeline import Pipeline, Pools, check_links


def engine_for(model: Any, **options: Any) -> Engine:
    """An engine with these options that suits where the model's layers are."""
    return (PlacedEngine if len(getattr(model, "stages", ())) > 1 else Engine)(model, **options)


class PlacedEngine(Engine):
    """`Engine` for a model with `stages`, `devices`, `enter`, `run` and `leave` (`onegraph.models.deepseek_v4`).

    Every device keeps its own positions, limits and block tables and advances them itself; what travels is the streams
    from each stage to the next, and the drawn tokens from the last to all. Raises ValueError where a peer link is
    missing; a device that fails while running comes out as a DeviceError that names it.
    """

    def __init__(self, model: Decoder, **options: Any) -> None:
        self._devices: list[torch.device] = model.devices  # type: ignore[attr-defined]
        check_links(self._devices)
        super().__init__(model, **options)
        if self._pool is not None:
            self._pool = Pools(self._devices)  # type: ignore[assignment]

    def runner(self, kind: Literal["decode", "prefill"], *, sampling: bool = False) -> Any:
        """The Pipeline of a step, built when first asked for."""
        key = (kind, sampling)
        if key not in self._runners:
            started = perf_counter()
            rows, length = (self.max_batch, 1) if kind == "decode" else (1, self.chunk)
            config, stages = self.model.config, []
            for i, device in enumerate(self._devices):
                inputs = {"tokens": torch.zeros(rows, length, dtype=torch.int64, device=device)}
                inputs |= {name: tensor.to(device) for name, tensor in self._row_inputs(rows).items()}
                if kind == "decode":
                    inputs["drawn"] = inputs.pop("tokens").squeeze(1)
                if i:
                    shape = (rows, length, config.streams, config.hidden_size)
                    inputs["streams"] = torch.zeros(shape, dtype=self.model.dtype, device=device)  # type: ignore[attr-defined]
                stages.append(
                    Runner(
                        partial(self._stage_step, stage=i, sampling=sampling),
                        inputs,
                        _buckets(self.max_batch) if kind == "decode" else None,
                        capture=self._pool is not None,
                        pool=None if self._pool is None else self._pool.each[i],  # type: ignore[attr-defined]
                        split="attention" if self.mode == "split" else (),
                    )
                )
            self._runners[key] = Pipeline(stages)  # type: ignore[assignment]
            self.stats.build_seconds += perf_counter() - started
        return self._runners[key]

    def _stage_step(
        self, positions: Tensor, limits: Tensor, table: Tensor, *, stage: int, sampling: bool, **inputs: Tensor
    ) -> dict[str, Tensor]:
        """One device's part of a step; the last returns the tokens for all (`drawn`) and for the host (`report`)."""
        model: Any = self.model
        decoding = "drawn" in inputs
        tokens = inputs["drawn"].unsqueeze(1) if decoding else inputs["tokens"]
        counts, after = begin_step(positions, limits, tokens.shape[1])
        cache = self._cache.parts[stage].view()
        cache.block_table, cache.positions, cache.counts, cache.slots = table, positions, counts, inputs["slots"]
        streams = model.enter(tokens) if stage == 0 else inputs["streams"]
        model.run(stage, streams, tokens, _Paged(cache))
        if stage < len(self._devices) - 1:
            positions.copy_(after)
            return {"streams": streams}
        drawn, logits = self._draw(model.leave(streams), counts, after, inputs, sampling)
        token = torch.empty_like(drawn)
        report = finish_step(drawn, logits, after, token, positions)
        return {"drawn": token, "report": report} if decoding else {"report": report}
