"""Everything a server receives is hostile: 4xx in OpenAI's shape, and nothing begins."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from starlette.requests import Request

from mmaccel.errors import NumericsError
from mmaccel.serving.bodies import ImageBody, read_body
from mmaccel.serving.errors import ApiError
from mmaccel.serving.images import ImageBackend
from mmaccel.serving.settings import MAX_BODY, MAX_HEAD
from tests.serving.conftest import Start, run_server
from tests.serving.running import HEAD, IMAGES, RED, Gate, Running, assert_error

LONG = "red " * 1001
WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"prompt": None}, "prompt", "missing_field"),
    ({"prompt": 7}, "prompt", "invalid_value"),
    ({"prompt": [RED] * 1000}, "prompt", "invalid_value"),
    ({"prompt": " \n"}, "prompt", "missing_field"),
    ({"prompt": "a\x00red"}, "prompt", "invalid_value"),
    ({"prompt": "a dragon"}, "prompt", "invalid_value"),
    ({"prompt": "red " * 30}, "prompt", "invalid_value"),  # more than the model takes
    ({"prompt": LONG}, "prompt", "string_too_long"),
    ({"negative_prompt": LONG}, "negative_prompt", "string_too_long"),
    ({"negative_prompt": "a dragon"}, "negative_prompt", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10_000}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"n": "1"}, "n", "invalid_value"),
    ({"n": 10**39}, "n", "invalid_value"),
    ({"size": "1024x1024"}, "size", "invalid_value"),  # no size of this model
    ({"size": "99999x99999"}, "size", "invalid_value"),
    ({"size": "large"}, "size", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": -2}, "seed", "invalid_value"),
    ({"response_format": "url"}, "response_format", "invalid_value"),
    ({"background": "transparent"}, "background", "invalid_value"),
    ({"quality": "hd"}, "quality", "invalid_value"),
    ({"style": "vivid"}, "style", "invalid_value"),
    ({"stream": True, "n": 2}, "n", "invalid_value"),
    ({"partial_images": 1}, "partial_images", "invalid_value"),
    ({"stream": True, "partial_images": 4}, "partial_images", "invalid_value"),
    ({"steps": 30}, "steps", "unknown_parameter"),
    ({"\x1b[2J" * 200: 1}, "\x1b[2J" * 25, "unknown_parameter"),
)
BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_json"),
    "no JSON": (b"{'prompt': 1}", 400, "invalid_json"),
    "a surrogate": (b'{"prompt": "a \\ud800"}', 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_json"),
    "a number": (b"1e999", 400, "invalid_json"),
    "brackets": (b"[" * 100_000, 400, "invalid_json"),
    "brackets in a field": (b'{"n": ' + b"[" * 100_000, 400, "invalid_json"),
    "digits": (b'{"n": ' + b"9" * 100_000 + b"}", 400, "invalid_json"),
    "latin": ('{"prompt": "\xe9"}'.encode("latin-1"), 400, "invalid_json"),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "request_too_large"),
    "a little too long": (b" " * (MAX_BODY + 1), 413, "request_too_large"),
}


@pytest.fixture(scope="module")
def shared(backend: ImageBackend) -> Iterator[Running]:
    """One server for all requests that are refused."""
    with run_server(backend, body_timeout=0.5) as running:
        yield running


@pytest.fixture
def idle(shared: Running) -> Iterator[Running]:
    """The same; no pass may begin."""
    with shared.gate() as gate:
        yield shared
        assert gate.passes == 0 and not len(shared.service.queue)


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=range(len(WRONG)))
def test_wrong_fields(idle: Running, fields: dict[str, Any], param: str, code: str) -> None:
    message = assert_error(idle.post(**{"prompt": RED, **fields}), 400, param, code)
    assert message.startswith((param, f"{param!a}", "negative"))
    assert "expected" in message and "received" in message and ";" in message


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_wrong_bodies(idle: Running, name: str, is_chunked: bool) -> None:
    body, status, code = BODIES[name]
    parts = iter([body[k : k + 65_536] for k in range(0, len(body), 65_536)])
    headers = {"content-type": "application/json"}
    answer = idle.http.post(IMAGES, content=parts if is_chunked else body, headers=headers)
    assert_error(answer, status, None, code)


@pytest.mark.parametrize(("declared", "n_read"), [(None, 5), (10**6, 0)])
def test_no_more_is_read_than_a_body_may_have(declared: int | None, n_read: int) -> None:
    parts = []

    async def receive() -> dict[str, Any]:
        parts.append(b"a" * 65_536)
        return {"type": "http.request", "body": parts[-1], "more_body": True}

    headers = [(b"content-type", b"application/json")]
    if declared is not None:
        headers.append((b"content-length", b"%d" % declared))
    request = Request({"type": "http", "headers": headers}, receive)
    with pytest.raises(ApiError, match="at most 262144 bytes"):
        asyncio.run(read_body(request, ImageBody, 10))
    assert len(parts) == n_read


def test_other_types_urls_and_methods(idle: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = idle.http.post(IMAGES, content=b"{}", headers={"content-type": kind})
        assert_error(answer, 415, None, "unsupported_media_type")
    for method, url, status in (
        ("GET", "/v1/images/edits", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", IMAGES, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/audio/speech", 404),  # this model does not speak
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ):
        message = assert_error(idle.http.request(method, url), status, None, "unknown_url")
        listed = message.partition("; ")[2]
        assert IMAGES in listed and "/v1/models" in listed and "audio" not in listed
    for name in ("dall-e-3", "x" * 3000, "../tiny"):
        assert_error(idle.post(model=name), 404, "model", "model_not_found")


def say(server: Running, data: bytes, pause: float = 0, parts: int = 1) -> bytes:
    """Send bytes to a server, slowly if asked, and return all that it answers until it closes."""
    step = max(1, -(-len(data) // parts))
    received = b""
    with server.connect() as connection:
        with suppress(ConnectionError):  # it was closed; the answer may still be read
            for k in range(0, len(data), step):
                connection.sendall(data[k : k + step])
                time.sleep(pause)
        with suppress(ConnectionError):
            while chunk := connection.recv(65_536):
                received += chunk
    return received


@pytest.mark.parametrize(
    ("line", "head", "status"),
    [
        (f"POST {IMAGES}", "content-type: text/plain", b"415"),
        (f"POST {IMAGES}", "content-type: application/json", b"413"),
        ("POST /v1/none", "accept: */*", b"404"),
        ("DELETE /health", "accept: */*", b"405"),
    ],
)
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_still_writes_reads_the_answer(
    idle: Running, line: str, head: str, status: bytes, connection: str
) -> None:
    """A client that writes all of its body before it reads is refused, and not reset."""
    body = b" " * 20_000_000
    with idle.connect() as client:
        client.sendall(
            f"{line} HTTP/1.1\r\nhost: a\r\nconnection: {connection}\r\n{head}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
        )
        client.sendall(body)
        assert client.recv(65_536).startswith(b"HTTP/1.1 " + status)


GET = b"GET / HTTP/1.1\r\n"
CHUNKED = b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
FLOODS = {
    "many headers": (GET + b"".join(b"x-%d: y\r\n" % k for k in range(5000)), b"400"),
    "a long header": (GET + b"x: " + b"y" * 2 * MAX_HEAD, b"400"),
    "a long url": (b"GET /" + b"y" * 2 * MAX_HEAD, b"400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 of TLS\r\n\r\n", b"400"),
    "below 0": (HEAD + b"content-length: -5\r\n\r\n", b"400"),
    "huge": (HEAD + b"content-length: 99999999999999999999\r\n\r\n", b"413"),
    "two lengths": (HEAD + b"content-length: 5\r\n" + CHUNKED, b"4"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_headers_and_what_is_no_http(idle: Running, name: str) -> None:
    data, status = FLOODS[name]
    received = say(idle, data)
    if received:
        assert received.startswith(b"HTTP/1.1 " + status) and b'{"error"' in received
    assert idle.http.get("/health").status_code == 200


def test_what_is_slow_is_ended(idle: Running) -> None:
    """It has half a second here; a client that sends a byte now and then has no more."""
    began = time.monotonic()
    body = HEAD + b"content-length: 1000\r\n\r\n"
    for data, pause, parts in ((HEAD, 0.15, 12), (b"", 0, 1), (body + b"{", 0.1, 1)):
        received = say(idle, data, pause, parts)
        assert received.startswith(b"HTTP/1.1 408") and b"request_timeout" in received
    with idle.connect() as connection:  # the rest of a body that was answered
        connection.sendall(HEAD + b"content-length: 9999999\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413")
        with pytest.raises(ConnectionError):
            for _ in range(50):
                connection.sendall(b"a")
                time.sleep(0.1)
    assert time.monotonic() - began < 8


def test_keys(start: Start) -> None:
    server = start(api_keys=("first", "zw\u00f6lf"))
    with server.gate() as gate:
        for key in (None, "", "Bearer", "Bearer wrong", "Basic first", "Bearer " + "x" * 5000):
            headers = {} if key is None else {"authorization": key}
            for answer in (
                server.http.get("/v1/models", headers=headers),
                server.http.get("/v1/models/tiny", headers=headers),
                server.http.post(IMAGES, content=b"no JSON", headers=headers),
            ):
                assert_error(answer, 401, None, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert gate.passes == 0
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").images.generate(prompt=RED)
    assert server.openai("first").images.generate(prompt=RED).data
    assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_no_prompts_unless_asked(
    start: Start, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start(log_prompts=log_prompts)
    for prompt in ("blue square", "blue dragon"):
        server.post(prompt, seed=1)
    server.http.get("/v1/models?prompt=blue")
    logged = [each.getMessage() for each in caplog.records if "mmaccel" in each.name]
    text = "\n".join(logged)
    assert IMAGES in text and ("blue" in text) == log_prompts
    assert f"http://127.0.0.1:{server.server.port}/v1" in text  # also where --port 0 took it


def test_a_fault_is_no_traceback_for_the_client(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def fail(*_: Any) -> Any:
        raise RuntimeError("".join(("sec", "ret")))

    for owner, name in ((ImageBackend, "to_bytes"), (Gate, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with server.gate():
                assert_error(server.post(), 500, None, "internal")
    assert "secret" not in caplog.text and "RuntimeError" in caplog.text
    assert server.post().status_code == 200
    assert server.metric('mmaccel_rows_total{end="failed"}') == 1


def test_a_row_that_fails_takes_no_other_with_it(start: Start) -> None:
    """The error names it; the others begin again."""
    server = start()

    def fail(rows: int) -> None:
        if rows == 6:
            raise NumericsError("logits: secret", (1,))

    with server.gate(is_closed=True) as gate:
        gate.check = fail
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        for seed in (1, 2):
            asked.append(server.later(seed=seed))
            server.wait_for(seed)
        gate.open()
        answers = [each.result().status_code for each in asked]
        assert answers == [200, 500, 200] and 6 in gate.rows
