"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        count_waiting: returns the number of jobs that wait.

    Attributes:
        requests: answers by route and status.
        request_seconds: from a request to the end of its answer, by route.
        running: rows that are decoded now.
        queue_seconds: how long a row waited.
        row_seconds: from a row's arrival to its end.
        first_audio_seconds: the same to its first chunk of sound, where it is sent in chunks.
        passes: forward passes of the batch.
        row_passes: forward passes summed over the rows that took part.
        tokens: of finished rows.
        tokens_per_pass: of each finished row.
        rows: rows by how they ended: done, cancelled, failed.
        prefix_tokens: tokens of prompts that were kept from earlier ones.
    """

    def __init__(self, count_waiting: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        waiting = Gauge("mmaccel_queue_rows", "rows that wait", registry=registry)
        waiting.set_function(count_waiting)
        self.running = Gauge("mmaccel_running_rows", "rows that are decoded now", registry=registry)
        self.requests = Counter(
            "mmaccel_requests", "answers", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "mmaccel_request_seconds",
            "from a request to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "mmaccel_queue_seconds", "how long a row waited", buckets=_SECONDS, registry=registry
        )
        self.row_seconds = Histogram(
            "mmaccel_row_seconds",
            "from a row's arrival to its end",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_audio_seconds = Histogram(
            "mmaccel_first_audio_seconds",
            "from a row's arrival to its first chunk of sound",
            buckets=_SECONDS,
            registry=registry,
        )
        self.passes = Counter("mmaccel_passes", "forward passes of the batch", registry=registry)
        self.row_passes = Counter(
            "mmaccel_row_passes", "forward passes, summed over rows", registry=registry
        )
        self.tokens = Counter("mmaccel_tokens", "tokens of finished rows", registry=registry)
        self.tokens_per_pass = Histogram(
            "mmaccel_tokens_per_pass",
            "tokens a finished row gained in a pass",
            buckets=_TOKENS,
            registry=registry,
        )
        self.rows = Counter("mmaccel_rows", "rows by how they ended", ["end"], registry=registry)
        self.prefix_tokens = Counter(
            "mmaccel_prefix_tokens",
            "tokens of prompts that were kept from earlier ones",
            registry=registry,
        )

    def finish_row(self, tokens: int, passes: int, seconds: float) -> None:
        """Count a row that is done."""
        self.rows.labels("done").inc()
        self.tokens.inc(tokens)
        self.row_passes.inc(passes)
        self.tokens_per_pass.observe(tokens / max(1, passes))
        self.row_seconds.observe(seconds)

    def to_text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)
