"""The engine for a model whose layers lie on several devices: one graph a device, streams and tokens by peer copies."""

from functools import partial
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from onegraph.engine.generate import Decoder, Engine, _buckets, _Paged
from onegraph.ops.step import begin_step, finish_step
from onegraph.runtime.graph import Runner
from onegraph.runtime.pipeline import Pipeline, Pools, check_links
from onegraph.runtime.transfer import Download


def engine_for(model: Any, **options: Any) -> Engine:
    """An engine with these options that suits where the model's layers are."""
    return (PlacedEngine if len(getattr(model, "stages", ())) > 1 else Engine)(model, **options)


class Placed(Decoder, Protocol):
    """What it asks of a model besides; `onegraph.models.deepseek_v4.DeepseekV4` is one."""

    @property
    def devices(self) -> list[torch.device]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def enter(self, tokens: Tensor) -> Tensor: ...
    def run(self, stage: int, streams: Tensor, tokens: Tensor, cache: Any) -> None: ...
    def leave(self, streams: Tensor) -> Tensor: ...


class PlacedEngine(Engine):
    """`Engine` for a model whose layers are placed.

    Every device keeps its own positions, limits and block tables and advances them itself; what travels is the streams
    from each stage to the next, and the drawn tokens from the last to all. Raises ValueError where a peer link is
    missing; a device that fails while running comes out as a DeviceError that names it.
    """

    model: Placed

    def __init__(self, model: Placed, **options: Any) -> None:
        self._devices = model.devices
        check_links(self._devices)
        super().__init__(model, **options)
        self._pools = None if self._pool is None else Pools(self._devices)
        self._pool = self._pools  # type: ignore[assignment]  # Engine only enters it
        drawn = self._decode_inputs["drawn"].to(self._devices[-1])  # where the host's tokens come from
        self._download = Download(drawn, depth=self._ahead + 1)

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
                    inputs["streams"] = torch.zeros(shape, dtype=self.model.dtype, device=device)
                stages.append(
                    Runner(
                        partial(self._stage_step, stage=i, sampling=sampling),
                        inputs,
                        _buckets(self.max_batch) if kind == "decode" else None,
                        capture=self._pools is not None,
                        pool=None if self._pools is None else self._pools.each[i],
                        split="attention" if self.mode == "split" else (),
                    )
                )
            self._runners[key] = Pipeline(stages)  # type: ignore[assignment]  # it looks like one
            self.stats.build_seconds += perf_counter() - started
        return self._runners[key]

    def _stage_step(
        self, positions: Tensor, limits: Tensor, table: Tensor, *, stage: int, sampling: bool, **inputs: Tensor
    ) -> dict[str, Tensor]:
        """One device's part of a step; the last returns the tokens for all (`drawn`) and for the host (`report`)."""
        model = self.model
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
