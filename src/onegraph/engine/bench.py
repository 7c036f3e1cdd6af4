"""Tokens per second of a model's decode step.

Whole steps are timed by the wall clock, host included; replays alone by CUDA events. A row is a flat dict, one JSON
line.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from onegraph.engine.decoder import Model
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import Row, machine


def bench_step(
    model: Model,
    *,
    batches: Sequence[int] = (1,),
    context: int = 128,
    steps: int = 256,
    modes: Sequence[bool] = (False, True),
    params: SamplingParams | None = None,
    name: str = "onegraph",
) -> Iterator[Row]:
    """Times decoding through the engine, eager and captured, from random prompts of `context` tokens.

    params: how to draw (max_tokens is set here); None is greedy.

    Yields rows: mode, batch, context, steps, tokens_per_second and ms_per_step of the whole loop, the host's part of it
    included, and prefill_tokens_per_second; replay_us where the step is captured, the device's part alone. Raises
    ValueError where the model's context is too short.
    """
    device = model.devices[0]
    about = machine(device)
    params = params or SamplingParams()
    generator = torch.Generator().manual_seed(0)
    reach = context + steps + 1
    if reach > model.max_context:
        raise ValueError(
            f"context {context} and {steps} steps need {reach} positions; the model has {model.max_context}"
        )
    for batch in batches:
        prompts = torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).tolist()
        for capture in modes if device.type == "cuda" else (False,):
            engine = Engine(model, max_batch=batch, max_context=reach, capture=capture)
            engine.generate(prompts, replace(params, max_tokens=4))  # compiles and captures
            counted = steps if capture else min(steps, 32)  # an eager step takes milliseconds
            rates = []
            for _ in range(3):
                engine.generate(prompts, replace(params, max_tokens=counted + 1))
                rates.append(engine.stats.decode_tokens_per_second)
            rate = statistics.median(rates)
            row: Row = {
                "bench": "step",
                "name": name,
                "mode": engine.mode,
                "batch": batch,
                "context": context,
                "steps": counted,
                "temperature": params.temperature or 0.0,
                "tokens_per_second": round(rate, 1),
                "ms_per_step": round(1e3 * batch / rate, 4),
                "prefill_tokens_per_second": round(engine.stats.prefill_tokens_per_second, 1),
            }
            if capture:
                row["replay_us"] = round(step_us(engine, batch, sampling=params.sampling), 1)
            yield row | about


def step_us(engine: Engine, batch: int, *, sampling: bool, drafts: int = 0) -> float:
    """Median microseconds of a replay of the decode step, or of a round that reads so many drafts, one after the other,
    on the state of the last `generate`."""
    runner = engine.executor.step("decode", sampling=sampling, drafts=drafts)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    with runner.running():
        for _ in range(20):
            begin.record()
            for _ in range(10):
                runner.replay(batch)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 100)
    engine.executor.check()
    return statistics.median(times)
