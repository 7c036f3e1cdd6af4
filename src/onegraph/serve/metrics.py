"""What /metrics tells, in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onegraph.serve.text import Piece
from onegraph.serve.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The registry of one server: what happens to requests is counted here, the rest is asked of the worker."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfWorker(worker))
        own = self.registry
        self.responses = Counter(
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


class _OfWorker(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        worker, stats = self._worker, self._worker.stats
        used, pages = worker.pages
        for name, what, value in (
            ("running", "Answers that have a row in the engine.", worker.running),
            ("waiting", "Answers that wait for a row or for pages.", worker.waiting),
            ("pages_used", "Pages of the KV cache that answers hold.", used),
            ("pages", "Pages of the KV cache.", pages),
        ):
            yield GaugeMetricFamily(f"onegraph_{name}", what, value=value)
        for name, what, count in (
            ("prompt_tokens", "Tokens of prompts that were computed.", stats.prefill_tokens),
            ("shared_tokens", "Tokens of prompts that were found in pages of earlier ones.", stats.shared_tokens),
            ("generated_tokens", "Tokens that were generated.", worker.counts["tokens"]),
            ("decode_steps", "Decode steps.", stats.decode_steps),
            ("preemptions", "Times that an answer gave up its pages, to be resumed.", stats.preemptions),
        ):
            yield CounterMetricFamily(f"onegraph_{name}", what, value=count)
        answers = CounterMetricFamily("onegraph_answers", "Answers, by how they ended.", labels=["end"])
        for end in ("finished", "cancelled", "failed"):
            answers.add_metric([end], worker.counts[end])
        yield answers
