"""A server in a thread, whose passes a test may count and hold, and what its answers say."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from mmaccel.serving.engine import Engine
from mmaccel.serving.server import Server
from tests.fixtures.tiny_model import CAPTIONS

IMAGES = "/v1/images/generations"
HEAD = f"POST {IMAGES} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()
RED = CAPTIONS[0]


def assert_error(answer: httpx.Response, status: int, param: str | None, code: str) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert "Traceback" not in answer.text and len(answer.content) < 2500
    message: str = error["message"]
    return message


def files(answer: Any) -> list[bytes]:
    """The images of an answer, of httpx or of the openai client."""
    if isinstance(answer, openai.BaseModel):
        return [base64.b64decode(each.b64_json) for each in answer.data]  # type: ignore[attr-defined]
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]


class Gate:
    """Stands before the passes of a token model.

    Attributes:
        rows: of each pass begun so far.
        check: called with the rows of each; may raise.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._open, self._permits = model, threading.Event(), threading.Semaphore(0)
        self._forward = model.forward
        self.rows: list[int] = []
        self.check: Callable[[int], object] = lambda rows: None
        self._open.set()
        model.forward = self.forward

    @property
    def passes(self) -> int:
        """Passes begun so far."""
        return len(self.rows)

    def forward(self, entries: Any) -> Any:
        """The model's pass, once it is allowed."""
        self.rows.append(len(entries.tokens))
        self.check(len(entries.tokens))
        while not self._open.is_set():
            if self._permits.acquire(timeout=0.02):
                break
        return self._forward(entries)

    def close(self) -> None:
        """Hold all passes from now on."""
        self._open.clear()

    def wait_for(self, n: int) -> None:
        """Wait until n passes have begun."""
        wait_until(lambda: self.passes == n)

    def permit(self, n: int) -> None:
        """Let n passes through."""
        for _ in range(n):
            self._permits.release()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Let pass after pass through until a condition holds."""
        while not condition():
            n = self.passes
            self.permit(1)
            wait_until(lambda n=n: self.passes > n or condition())  # type: ignore[misc]

    def open(self) -> None:
        """Let all passes through."""
        self._open.set()


class Running:
    """A server that listens on a port of this machine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.server = engine, Server(engine)
        engine.start()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def close(self) -> None:
        """Drain and wait."""
        self.http.close()
        self.server.drain()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.engine.close()

    def openai(self, key: str = "none") -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, prompt: Any = RED, key: str = "", **fields: Any) -> httpx.Response:
        """Ask for images."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.http.post(IMAGES, json={"prompt": prompt, **fields}, headers=headers)

    def draw(self, prompt: str = RED, **fields: Any) -> list[bytes]:
        """Ask for images, which are made."""
        return files(self.post(prompt, **fields))

    def later(self, prompt: str = RED, key: str = "", **fields: Any) -> Future[Any]:
        """Ask for images in another thread."""
        return later(lambda: self.post(prompt, key, **fields))

    def wait_for(self, n: int) -> None:
        """Wait until n jobs wait."""
        wait_until(lambda: len(self.engine.waiting) == n)

    def connect(self, data: bytes = b"") -> socket.socket:
        """A bare connection on which something was sent."""
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        connection.sendall(data)
        return connection

    def metric(self, name: str) -> float:
        """A value of /metrics; 0 where there is none yet."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    @contextmanager
    def gate(self, is_closed: bool = False) -> Iterator[Gate]:
        """A gate before the passes of the model."""
        model = self.engine.route.pipe.model
        gate = Gate(model)
        if is_closed:
            gate.close()
        try:
            yield gate
        finally:
            gate.open()
            del model.forward


def later(call: Callable[[], Any]) -> Future[Any]:
    """A call in a thread, whose result is waited for half a minute at most."""
    future: Future[Any] = TimedFuture()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class TimedFuture(Future[Any]):
    """A future with a limit of its own."""

    def result(self, timeout: float | None = 30) -> Any:
        """What the call returned."""
        return super().result(timeout)


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    """What a server sends until it closes."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return received
