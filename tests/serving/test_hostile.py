"""Everything a server receives is hostile: 4xx in OpenAI's shape, and nothing begins."""

from __future__ import annotations

import json
import logging
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from mmaccel.serving import bodies
from mmaccel.serving.settings import MAX_BODY, MAX_HEAD
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, Gate, Running, wait_until

RED = CAPTIONS[0]


def assert_error(answer: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert "Traceback" not in answer.text and ".py" not in answer.text
    assert len(answer.content) < 2500 and answer.headers["content-type"] == "application/json"
    message: str = error["message"]
    assert message.count("\n") == 0
    return message


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": None}, "prompt", "invalid_value"),
    "a number": ({"prompt": 7}, "prompt", "invalid_value"),
    "a list": ({"prompt": [RED] * 1000}, "prompt", "invalid_value"),
    "blank": ({"prompt": " \n"}, "prompt", "missing_field"),
    "NUL": ({"prompt": "a\x00red"}, "prompt", "invalid_value"),
    "a surrogate": ({"prompt": "a \ud800"}, "prompt", "invalid_value"),
    "unknown words": ({"prompt": "a dragon"}, "prompt", "invalid_value"),
    "more words than the model takes": ({"prompt": "red " * 30}, "prompt", "invalid_value"),
    "a long prompt": ({"prompt": "red " * 1001}, "prompt", "string_too_long"),
    "a long negative prompt": (
        {"negative_prompt": "red " * 1001}, "negative_prompt", "string_too_long",
    ),
    "an unknown negative prompt": (
        {"negative_prompt": "a dragon"}, "negative_prompt", "invalid_value",
    ),
    "no image": ({"n": 0}, "n", "invalid_value"),
    "10 000 images": ({"n": 10_000}, "n", "invalid_value"),
    "a bool": ({"n": True}, "n", "invalid_value"),
    "half an image": ({"n": 1.5}, "n", "invalid_value"),
    "a number as text": ({"n": "1"}, "n", "invalid_value"),
    "a huge number": ({"n": 10**39}, "n", "invalid_value"),
    "another size": ({"size": "1024x1024"}, "size", "invalid_value"),
    "a huge size": ({"size": "99999x99999"}, "size", "invalid_value"),
    "a size in words": ({"size": "large"}, "size", "invalid_value"),
    "a long seed": ({"seed": 2**64}, "seed", "invalid_value"),
    "a url": ({"response_format": "url"}, "response_format", "invalid_value"),
    "a transparent image": ({"background": "transparent"}, "background", "invalid_value"),
    "a quality": ({"quality": "hd"}, "quality", "invalid_value"),
    "a style": ({"style": "vivid"}, "style", "invalid_value"),
    "several in a stream": ({"stream": True, "n": 2}, "n", "invalid_value"),
    "parts without a stream": ({"partial_images": 1}, "partial_images", "invalid_value"),
    "4 parts": ({"stream": True, "partial_images": 4}, "partial_images", "invalid_value"),
    "an unknown field": ({"steps": 30}, "steps", "unknown_parameter"),
    "a hostile name": ({"\x1b[2J" * 200: 1}, "\x1b[2J" * 25, "unknown_parameter"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(backend: Any) -> Any:
    """One server for all requests that are refused."""
    from mmaccel.serving.service import Service
    from mmaccel.serving.settings import ServerSettings

    running = Running(Service(ServerSettings("tiny", port=0, body_timeout=0.5), images=backend))
    yield running
    running.close()


@pytest.fixture
def idle(shared: Running) -> Any:
    """The same; no pass may begin."""
    with shared.gate() as gate:
        yield shared
        assert gate.passes == 0 and not len(shared.service.queue)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(idle: Running, name: str) -> None:
    fields, param, code = WRONG[name]
    body = json.dumps({"prompt": RED, **fields})
    headers = {"content-type": "application/json"}
    message = assert_error(idle.http.post(IMAGES, content=body, headers=headers), 400, param, code)
    assert (
        message.startswith((param, f"{param!a}", "negative"))
        and "expect" in message.lower()
        or ("should" in message)
    )
    assert "\x1b" not in message


BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_json"),
    "no JSON": (b"{'prompt': 1}", 400, "invalid_json"),
    "half": (b'{"prompt": "a', 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_json"),
    "a number": (b"1e999", 400, "invalid_json"),
    "brackets": (b"[" * 100_000, 400, "invalid_json"),
    "digits": (b'{"n": ' + b"9" * 100_000 + b"}", 400, "invalid_json"),
    "latin": ('{"prompt": "\xe9"}'.encode("latin-1"), 400, "invalid_json"),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "request_too_large"),
    "a little too long": (b" " * (MAX_BODY + 1), 413, "request_too_large"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_wrong_bodies(idle: Running, name: str, is_chunked: bool) -> None:
    body, status, code = BODIES[name]
    parts = iter([body[k : k + 65_536] for k in range(0, len(body), 65_536)])
    headers = {"content-type": "application/json"}
    answer = idle.http.post(IMAGES, content=parts if is_chunked else body, headers=headers)
    assert_error(answer, status, None, code)


def test_a_long_body_is_not_kept(idle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of it is thrown away."""
    seen: list[int] = []

    class Watched(bytearray):
        def __iadd__(self, other: Any) -> Any:
            seen.append(len(self) + len(other))
            return super().__iadd__(other)

    monkeypatch.setattr(bodies, "bytearray", Watched, raising=False)
    chunks = (b"a" * 65_536 for _ in range(100))
    answer = idle.http.post(IMAGES, content=chunks, headers={"content-type": "application/json"})
    assert_error(answer, 413, None, "request_too_large")
    assert 0 < max(seen) <= MAX_BODY


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
        assert_error(idle.post(RED, model=name), 404, "model", "model_not_found")


def say(server: Running, data: bytes, pause: float = 0, parts: int = 1) -> bytes:
    """Send bytes to a server, slowly if asked, and return all that it answers."""
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as connection:
        step = max(1, -(-len(data) // parts))
        try:
            for k in range(0, len(data), step):
                connection.sendall(data[k : k + step])
                time.sleep(pause)
        except OSError:  # it was closed; the answer may still be read
            pass
        received = b""
        try:
            while chunk := connection.recv(65_536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


HEAD = f"POST {IMAGES} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()

CHUNKED = b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % k for k in range(5000)), b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD, b"400"),
        (b"GET /" + b"y" * 2 * MAX_HEAD, b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 of TLS\r\n\r\n", b"400"),
        (HEAD + b"content-length: -5\r\n\r\n", b"400"),
        (HEAD + b"content-length: 99999999999999999999\r\n\r\n", b"4"),
        (HEAD + b"content-length: 5\r\n" + CHUNKED, b"4"),
    ],
    ids=["many headers", "a long header", "a long url", "TLS", "below 0", "huge", "two lengths"],
)
def test_floods_of_headers_and_what_is_no_http(idle: Running, data: bytes, status: bytes) -> None:
    received = say(idle, data)
    if received:  # a flood may be cut off before it is answered
        assert received.startswith(b"HTTP/1.1 " + status)
        assert b'{"error"' in received
    assert idle.http.get("/health").status_code == 200


def test_slow_heads_and_slow_bodies_are_ended(idle: Running) -> None:
    """They have half a second here; a client that sends a byte now and then has no more."""
    began = time.monotonic()
    received = say(idle, HEAD, pause=0.15, parts=12)
    assert received.startswith(b"HTTP/1.1 408") and b"request_timeout" in received
    assert say(idle, b"").startswith(b"HTTP/1.1 408")  # it connects and says nothing
    body = HEAD + b"content-length: 1000\r\n\r\n"
    received = say(idle, body + b"{", pause=0.1)
    assert received.startswith(b"HTTP/1.1 408") and b"body: expected" in received
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


def test_the_log_has_no_prompts_unless_asked(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for log_prompts in (False, True):
        caplog.clear()
        server = start(log_prompts=log_prompts)
        server.post("blue square", seed=1)
        server.post("blue dragon", seed=1)
        server.http.get("/v1/models?prompt=blue")
        text = "\n".join(
            record.getMessage() for record in caplog.records if "mmaccel" in record.name
        )
        assert IMAGES in text and ("blue" in text) == log_prompts
        server.close()


def test_a_fault_is_no_traceback_for_the_client(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def fail(*_: Any) -> Any:
        raise RuntimeError("".join(("sec", "ret")))

    assert server.service.images is not None
    with monkeypatch.context() as patch:
        patch.setattr(server.service.images, "to_bytes", fail)
        assert_error(server.post(RED), 500, None, "internal")
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "forward", fail)
        with server.gate():
            assert_error(server.post(RED), 500, None, "internal")
    assert "secret" not in caplog.text and "RuntimeError" in caplog.text
    assert server.post(RED).status_code == 200
    assert server.metric('mmaccel_rows_total{end="failed"}') == 1


def test_a_row_that_fails_takes_no_other_with_it(start: Start) -> None:
    """The error names it; the others begin again."""
    from mmaccel.errors import NumericsError

    server = start()
    with server.gate() as gate:
        own, rows = gate._forward, []

        def forward(entries: Any) -> Any:
            rows.append(len(entries.tokens))
            if len(entries.tokens) == 6:
                raise NumericsError("logits: secret", (1,))
            return own(entries)

        gate._forward = forward
        gate.close()
        asked = [server.later(RED, seed=0)]
        wait_until(lambda: gate.passes == 1)
        for seed in (1, 2):
            asked.append(server.later(RED, seed=seed))
            wait_until(lambda: len(server.service.queue) == len(asked) - 1)
        gate.open()
        answers = [each.result().status_code for each in asked]
    assert answers == [200, 500, 200] and 6 in rows
