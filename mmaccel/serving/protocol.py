"""uvicorn's HTTP protocol with a time limit for heads, and errors in OpenAI's shape.

Source: `uvicorn.protocols.http.h11_impl.H11Protocol`, uvicorn 0.54.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmaccel.serving.errors import ApiError
from mmaccel.serving.settings import MAX_HEAD

_PROBE_SECONDS = 0.5  # a slow way to a client and back


class LingeringTransport:
    """A transport whose first `close` lets a client that still writes go on until it has read the
    answer: a connection that is closed with bytes unread is reset, and the answer with it.

    Source: RFC 9112, 2022: "HTTP/1.1", section 9.6.

    Args:
        transport: of a connection.
        writes: whether its client still writes.

    Attributes:
        lingers: whether nothing but the client's end is waited for.
    """

    def __init__(self, transport: Any, writes: Callable[[], bool]) -> None:
        self._transport = transport
        self._writes = writes
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """See above."""
        if self.lingers or self.is_closing() or not self._writes():
            self._transport.close()
            return
        self.lingers = True
        self.write_eof()
        self.resume_reading()


class LimitedProtocol(H11Protocol):
    """The protocol of one connection.

    Attributes:
        head_timeout: seconds that a request's line and headers may take to arrive.
    """

    head_timeout: ClassVar[float] = 10.0
    transport: Any
    _timer: Any = None
    _has_ended = False  # what the client sends

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head."""
        lingering: Any = LingeringTransport(transport, self._client_writes)
        super().connection_made(lingering)
        self._watch_head()

    def _client_writes(self) -> bool:
        """Whether a request is not whole yet, or none at all."""
        return not self._has_ended and self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        """Go on reading."""
        if self.transport.lingers:
            return
        super().data_received(data)
        self._watch_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it is gone, or it waits for the answer to a whole request. It
        is sent an interim answer, which a client that is gone does not take, and another one, at
        which the system reports this.

        Returns:
            Whether the connection is kept until the answer.
        """
        self._has_ended = True
        waits = self.cycle is not None and not self.cycle.response_complete
        if not waits or self.cycle.more_body:
            return False
        for seconds in (0.0, _PROBE_SECONDS):
            self.loop.call_later(seconds, self._probe)
        return True

    def _probe(self) -> None:
        waits = self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing()
        if waits and self.conn.their_http_version != b"1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(interim) or b"")

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for the rest of a body that was answered early."""
        super().on_response_complete()
        if self._has_ended and self.cycle.response_complete:
            self.transport.close()
        if not self.transport.is_closing():
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """Limit the time of a head that has begun, of a connection that says nothing, and of a body
        that goes on after its answer.
        """
        waits = self.cycle is None or self.cycle.response_complete
        is_late = waits and self.conn.their_state is h11.SEND_BODY
        has_begun = self.cycle is None or is_late or bool(self.conn.trailing_data[0])
        if waits and has_begun:
            if self._timer is None:
                self._timer = self.loop.call_later(self.head_timeout, self._end_slow_head)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waits and self.timeout_keep_alive_task is None:  # a body came after its answer
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _end_slow_head(self) -> None:
        if self.conn.our_state is not h11.IDLE:  # its request was answered
            self.transport.abort()
        elif not self.transport.is_closing():
            message = f"head: expected it within {self.head_timeout:g} s, received a part of it"
            self._refuse(ApiError(408, f"{message}; send it faster", "request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too long."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        message = f"head: expected HTTP/1.1 with at most {MAX_HEAD} bytes of headers, received more"
        self._refuse(ApiError(400, f"{message}, or no HTTP; send fewer", "invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
            (b"content-length", str(len(body)).encode()),
        ]
        response = h11.Response(status_code=error.status, headers=headers)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
