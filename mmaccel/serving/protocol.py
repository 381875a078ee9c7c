"""uvicorn's HTTP protocol with a time limit for heads, and errors in OpenAI's shape.

Source: `uvicorn.protocols.http.h11_impl.H11Protocol`, uvicorn 0.54.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmaccel.serving.errors import ApiError
from mmaccel.serving.settings import MAX_HEAD


class LimitedProtocol(H11Protocol):
    """The protocol of one connection.

    Attributes:
        head_timeout: seconds that a request's line and headers may take to arrive.
    """

    head_timeout: ClassVar[float] = 10.0
    _timer: Any = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Go on reading."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for the rest of a body that was answered early."""
        super().on_response_complete()
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
            self.transport.close()
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
