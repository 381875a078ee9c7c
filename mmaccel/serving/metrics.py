"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Metrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self, engine: Any) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        waiting = gauge("mmaccel_queue_rows", "rows that wait")
        waiting.set_function(lambda: len(engine.waiting))
        running = gauge("mmaccel_running_rows", "rows that are decoded now")
        running.set_function(lambda: len(engine.running))
        self.requests = counter("mmaccel_requests", "answers", ["route", "status"])
        self.request_seconds = histogram(
            "mmaccel_request_seconds", "from a request to the end of its answer", ["route"]
        )
        self.queue_seconds = histogram("mmaccel_queue_seconds", "how long a row waited")
        self.row_seconds = histogram("mmaccel_row_seconds", "from a row's arrival to its end")
        self.first_audio_seconds = histogram(
            "mmaccel_first_audio_seconds", "from a row's arrival to its first chunk of sound"
        )
        self.passes = counter("mmaccel_passes", "forward passes of the batch")
        self.row_passes = counter("mmaccel_row_passes", "forward passes, summed over rows")
        self.tokens = counter("mmaccel_tokens", "tokens of finished rows")
        self.tokens_per_pass = histogram(
            "mmaccel_tokens_per_pass", "tokens a finished row gained in a pass", buckets=_TOKENS
        )
        self.rows = counter("mmaccel_rows", "rows by how they ended", ["end"])
        self.prefix_tokens = counter(
            "mmaccel_prefix_tokens", "tokens of prompts that were kept from earlier ones"
        )
