"""A service: model, queue, decoding thread and metrics, and the checks of every request."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Hashable
from typing import Any

from starlette.requests import Request

from mmaccel.checks import show
from mmaccel.serving.engine import Backend, Engine
from mmaccel.serving.errors import ApiError, invalid, shutting_down
from mmaccel.serving.jobs import Job, JobQueue, QueueClosed, QueueFull
from mmaccel.serving.metrics import Metrics
from mmaccel.serving.settings import ServerSettings

_MOST_SECONDS = 60  # of Retry-After


class Service:
    """What the routes of a server share.

    Args:
        settings: of the server.
        backend: the model.

    Attributes:
        queue, engine, metrics: see there.
        routes: paths that are served.
        aborted: set when requests that were accepted are not answered any more.
    """

    def __init__(self, settings: ServerSettings, backend: Backend) -> None:
        self.settings = settings
        self.backend: Any = backend
        self.queue = JobQueue(settings.queue)
        self.metrics = Metrics(lambda: len(self.queue))
        self.engine = Engine(
            self.backend, self.queue, self.metrics, settings.rows, settings.log_prompts
        )
        self.routes = (backend.route, "/v1/models", "/health", "/metrics")
        self.aborted = asyncio.Event()
        self._is_ending = False
        self._keys = [key.encode() for key in settings.api_keys]

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken."""
        return not self._is_ending and not self.engine.has_stopped.is_set()

    def drain(self) -> None:
        """Take no new requests; those that wait or run are finished."""
        self._is_ending = True
        self.queue.close()

    def identify(self, request: Request) -> str:
        """Who asks: the bearer key where the server has keys, else the address.

        Raises:
            ApiError: none of the keys.
        """
        if not self._keys:
            return request.client.host if request.client is not None else ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        own = key.strip().encode()
        is_known = [secrets.compare_digest(own, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(is_known):
            raise ApiError(
                401,
                "authorization: expected a bearer key of this server, received none of them; send "
                "the header Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key.strip()

    def admit(self, request: Request) -> str:
        """Check, before its body is read, that a request has a key and finds room; see `identify`.

        Raises:
            ApiError: none of the keys, or no room.
        """
        client = self.identify(request)
        self.check_room(1, client)
        return client

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names, if it does.

        Raises:
            ApiError: another model.
        """
        if name is not None and name != self.settings.name:
            raise ApiError(
                404,
                f"model: expected {show(self.settings.name)}, received {show(name)}; see "
                "/v1/models",
                "model_not_found",
                "model",
            )

    def check_room(self, count: int, client: Hashable) -> None:
        """Check that the rows of a client's request fit into the queue.

        Raises:
            ApiError: they do not, now or ever.
        """
        if count > self.settings.queue:
            most = self.settings.queue
            raise invalid("n", f"n: expected at most {most} here, received {count}; ask for fewer")
        try:
            self.queue.check(count, client)
        except (QueueFull, QueueClosed) as error:
            raise self._busy(error) from None

    def put(self, jobs: list[Job]) -> None:
        """Let jobs wait.

        Raises:
            ApiError: they do not fit.
        """
        try:
            self.queue.put(jobs)
        except (QueueFull, QueueClosed) as error:
            raise self._busy(error) from None

    def _busy(self, error: QueueFull | QueueClosed) -> ApiError:
        if isinstance(error, QueueClosed):
            return shutting_down(str(error))
        seconds = self.engine.seconds_per_row * len(self.queue)
        wait = min(max(1, math.ceil(seconds)), _MOST_SECONDS)
        headers = {"retry-after": str(wait)}
        return ApiError(429, f"{error}; ask again in {wait} s", "queue_full", headers=headers)
