"""The server process: uvicorn with stricter limits, and signals that let it finish its work.

SIGTERM, SIGINT and SIGHUP drain: the socket is closed, requests that were accepted are answered,
and the process ends with 0. A second signal ends it at once.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmaccel.serving.app import create_app
from mmaccel.serving.errors import ApiError
from mmaccel.serving.service import Service
from mmaccel.serving.settings import MAX_HEAD, ServerSettings

logger = logging.getLogger("mmaccel.serving")

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not on Windows


def make_protocol(settings: ServerSettings) -> type[H11Protocol]:
    """uvicorn's protocol, in which a request's head may take some seconds only, and whose answer to
    what is no HTTP has OpenAI's shape.

    Source: `uvicorn.protocols.http.h11_impl.H11Protocol`, uvicorn 0.54.
    """

    class LimitedProtocol(H11Protocol):
        _head_timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            waits = self.cycle is None or self.cycle.response_complete
            if not waits and self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            elif waits and self._head_timer is None:
                self._head_timer = self.loop.call_later(settings.body_timeout, self._end_slow_head)

        def _end_slow_head(self) -> None:
            if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
                self._refuse(
                    ApiError(408, "head: expected it sooner; send it faster", "request_timeout")
                )

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._refuse(
                    ApiError(
                        400, f"head: expected HTTP/1.1 with at most {MAX_HEAD} bytes of headers; "
                        "send fewer", "invalid_http",
                    )  # fmt: skip
                )
            else:
                self.transport.close()

        def _refuse(self, error: ApiError) -> None:
            body = json.dumps(error.body()).encode()
            headers = [
                (b"content-type", b"application/json"), (b"connection", b"close"),
                (b"content-length", str(len(body)).encode()),
            ]  # fmt: skip
            parts = (
                h11.Response(status_code=error.status, headers=headers), h11.Data(data=body),
                h11.EndOfMessage(),
            )  # fmt: skip
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
            self.transport.close()

    return LimitedProtocol


class Server(uvicorn.Server):
    """uvicorn's server for a service; a signal drains it.

    Args:
        service: started by the caller.
    """

    def __init__(self, service: Service) -> None:
        settings = service.settings
        config = uvicorn.Config(
            create_app(service), settings.host, settings.port, http=make_protocol(settings),
            ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, limit_concurrency=settings.max_connections,
            h11_max_incomplete_event_size=MAX_HEAD,
        )  # fmt: skip
        super().__init__(config)
        self._service = service

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

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain; at the second signal, end."""
        if self.should_exit:
            self.force_exit = True
        self.drain()

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
