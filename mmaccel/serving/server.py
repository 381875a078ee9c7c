"""The server process: uvicorn with stricter limits, and signals that let it finish its work.

SIGTERM, SIGINT and SIGHUP drain: the socket is closed, requests that were accepted are answered,
and the process ends with 0. At a second signal they are answered 503, and the process ends after
the pass that runs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mmaccel.serving.app import create_app
from mmaccel.serving.protocol import LimitedProtocol
from mmaccel.serving.service import Service
from mmaccel.serving.settings import MAX_HEAD

logger = logging.getLogger(__package__)

# seconds, as nginx: a client may lose a request on a connection that is just closed
_KEEP_ALIVE = 75
_LAST_SECONDS = 1.0  # after a second signal, for answers to be read and bodies to arrive
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not on Windows


class Server(uvicorn.Server):
    """uvicorn's server for a service; a signal drains it.

    Args:
        service: started by the caller.
    """

    def __init__(self, service: Service) -> None:
        settings = service.settings
        protocol = type("Protocol", (LimitedProtocol,), {"head_timeout": settings.body_timeout})
        config = uvicorn.Config(
            create_app(service),
            settings.host,
            settings.port,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: the process ends with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        taken = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # as under nohup
        before = {number: signal.signal(number, self.handle_exit) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then the log says where it listens."""
        await super().startup(sockets)
        settings = self._service.settings
        if self.started:
            logger.info(
                "serving %s at http://%s:%s/v1 (%s rows, %s may wait, %s)",
                settings.name,
                settings.host,
                self.port,
                settings.rows,
                settings.queue,
                "with keys" if settings.api_keys else "without keys",
            )

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain; at the second signal, abort."""
        if self.should_exit:
            self.abort()
        self.drain()

    def abort(self) -> None:
        """Refuse what was accepted, then end. Called in any thread while the server runs."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._service.aborted.set)
        self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_SECONDS, self._cancel)

    def _cancel(self) -> None:
        """End the requests whose body has not arrived, or whose answer is not read."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

    def drain(self) -> None:
        """Answer what was accepted, then end."""
        self.should_exit = True
        self._service.drain()

    @property
    def port(self) -> int:
        """The port on which it listens, once `started` is set."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def serve(service: Service) -> None:
    """Serve until a signal has drained the server."""
    service.engine.start()
    try:
        Server(service).run()
    finally:
        service.engine.close()
