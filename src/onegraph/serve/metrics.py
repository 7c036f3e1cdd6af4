"""What /metrics tells, in Prometheus's text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onegraph.serve.models import Models
from onegraph.serve.text import Piece
from onegraph.serve.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The registry of one server: what happens to requests is counted here, the rest is asked of the models."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfModels(models))
        own = self.registry
        self.responses = PrometheusCounter(
            "onegraph_responses", "Responses, by endpoint and status.", ["endpoint", "status"], registry=own
        )
        self._first = Histogram(
            "onegraph_first_token_seconds", "From the request to its first token.", buckets=SECONDS, registry=own
        )
        self._whole = Histogram(
            "onegraph_request_seconds", "From the request to its last token.", buckets=SECONDS, registry=own
        )

    async def timed(self, pieces: AsyncIterator[Piece], started: float) -> AsyncIterator[Piece]:
        first = True
        async for piece in pieces:
            if first and piece.tokens:
                self._first.observe(time.perf_counter() - started)
                first = False
            yield piece
        self._whole.observe(time.perf_counter() - started)


class _OfModels(Collector):
    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        workers = list(self._models.workers.values())
        pages, host = [worker.pages for worker in workers], [worker.host_pages for worker in workers]
        for name, what, value in (
            ("running", "Sequences that are running.", sum(worker.running for worker in workers)),
            ("waiting", "Sequences that wait to be admitted, for pages or for a model.", self._waiting(workers)),
            ("pages_used", "Pages of the KV cache that running sequences use.", sum(used for used, _ in pages)),
            ("pages", "Pages of the KV cache.", sum(count for _, count in pages)),
            ("host_pages_used", "Pages of the prefix cache in host memory.", sum(used for used, _ in host)),
            ("host_pages", "Capacity of the prefix cache in host memory, in pages.", sum(count for _, count in host)),
        ):
            yield GaugeMetricFamily(f"onegraph_{name}", what, value=value)
        totals = sum((model.totals for model in self._models.all), Counter())
        for name, what in (
            ("prompt_tokens", "Tokens of prompts that were computed."),
            ("shared_tokens", "Tokens of prompts that were found in the prefix cache."),
            ("restored_tokens", "Of these, tokens whose pages were copied back from host memory."),
            ("offloaded_tokens", "Tokens whose pages were copied to host memory."),
            ("generated_tokens", "Tokens that were generated."),
            ("decode_steps", "Decode steps."),
            ("preemptions", "Preemptions: a sequence lost its pages and is resumed later."),
        ):
            yield CounterMetricFamily(f"onegraph_{name}", what, value=totals[name])
        answers = CounterMetricFamily("onegraph_answers", "Answers, by how they ended.", labels=["end"])
        for end in ("finished", "cancelled", "failed"):
            answers.add_metric([end], totals[end])
        yield answers
        loaded = GaugeMetricFamily("onegraph_model_loaded", "1 for a model that is loaded.", labels=["model"])
        loads = CounterMetricFamily("onegraph_model_loads", "Times that a model was loaded.", labels=["model"])
        for model in self._models.all:
            loaded.add_metric([model.name], model.loaded is not None)
            loads.add_metric([model.name], model.loads)
        yield loaded
        yield loads

    def _waiting(self, workers: Sequence[Worker]) -> int:
        to_load = sum(waiter.count for model in self._models.all for waiter in model.waiting)
        return to_load + sum(worker.waiting for worker in workers)
