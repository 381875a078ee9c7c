"""Everything a server receives is hostile: 4xx in OpenAI's shape, and nothing begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mmaccel.errors import NumericsError
from mmaccel.serving.routes import ImageRoute
from mmaccel.serving.settings import MAX_BODY
from tests.serving.conftest import Start, run_server
from tests.serving.running import HEAD, IMAGES, RED, Gate, Running, assert_error, read_all

LONG = "red " * 1001
WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"prompt": None}, "prompt", "missing_field"),
    ({"prompt": " \n"}, "prompt", "invalid_value"),
    ({"prompt": "a\x00red"}, "prompt", "invalid_value"),
    ({"prompt": LONG}, "prompt", "string_too_long"),
    ({"negative_prompt": LONG}, "negative_prompt", "string_too_long"),
    ({"negative_prompt": "a dragon"}, "negative_prompt", "invalid_value"),
    ({"size": "1024x1024"}, "size", "invalid_value"),  # no size of this model
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"stream": True, "n": 2}, "n", "invalid_value"),
    ({"partial_images": 1}, "partial_images", "invalid_value"),
    ({"\x1b[2J" * 200: 1}, "\x1b[2J" * 25, "unknown_parameter"),
)
BODIES = (
    (b"", 400, "invalid_json"),
    (b'{"prompt": "a \\ud800"}', 400, "invalid_json"),
    (b'{"n": ' + b"[" * 100_000, 400, "invalid_json"),
    (b" " * (MAX_BODY + 1), 413, "request_too_large"),
)


@pytest.fixture(scope="module")
def shared(route: ImageRoute) -> Iterator[Running]:
    """One server for all requests that are refused."""
    with run_server(route, body_timeout=0.5) as running:
        yield running


@pytest.fixture
def idle(shared: Running) -> Iterator[Running]:
    """The same; no pass may begin."""
    with shared.gate() as gate:
        yield shared
        assert gate.passes == 0 and not shared.engine.waiting


def test_wrong_fields(idle: Running) -> None:
    for fields, param, code in WRONG:
        message = assert_error(idle.post(**{"prompt": RED, **fields}), 400, param, code)
        assert message.startswith((f"{param}: ", "negative"))


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_wrong_bodies(idle: Running, is_chunked: bool) -> None:
    headers = {"content-type": "application/json"}
    for body, status, code in BODIES:
        content = iter([body[:9], body[9:]]) if is_chunked else body
        assert_error(idle.http.post(IMAGES, content=content, headers=headers), status, None, code)


def test_other_types_urls_and_methods(idle: Running) -> None:
    answer = idle.http.post(IMAGES, content=b"{}", headers={"content-type": "text/plain"})
    assert_error(answer, 415, None, "unsupported_media_type")
    for method, url, status in (
        ("GET", IMAGES, 405),
        ("POST", "/v1/audio/speech", 404),  # this model does not speak
        ("GET", "/openapi.json", 404),
    ):
        message = assert_error(idle.http.request(method, url), status, None, "unknown_url")
        assert IMAGES in message.partition(", received")[0]
    assert_error(idle.post(model="dall-e-3"), 404, "model", "model_not_found")


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_still_writes_reads_the_answer(idle: Running, connection: str) -> None:
    """A client that writes all of its body before it reads is refused, and not reset."""
    body = b" " * 20_000_000
    head = f"connection: {connection}\r\ncontent-length: {len(body)}\r\n\r\n"
    with idle.connect(HEAD + head.encode()) as client:
        client.sendall(body)
        assert client.recv(65_536).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_what_is_slow_is_ended(idle: Running) -> None:
    """It has half a second here; a client that sends a byte now and then has no more."""
    began = time.monotonic()
    with idle.connect(HEAD + b"content-length: 1000\r\n\r\n{") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 408")
    late = b"POST /v1/none HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999\r\n\r\n"
    for data in (b"", b"GET ", late):
        with idle.connect(data) as connection, pytest.raises(ConnectionError):
            for _ in range(50):
                connection.sendall(b"a")
                time.sleep(0.1)
    assert time.monotonic() - began < 12


def test_keys(start: Start) -> None:
    server = start(api_keys=("first", "zw\u00f6lf"))
    with server.gate() as gate:
        for key in ("", "Bearer wrong", "Basic first"):
            headers = {"authorization": key}
            for answer in (
                server.http.get("/v1/models", headers=headers),
                server.http.get("/v1/models/tiny", headers=headers),
                server.http.post(IMAGES, content=b"no JSON", headers=headers),
            ):
                assert_error(answer, 401, None, "invalid_api_key")
        assert gate.passes == 0
    assert server.openai("first").images.generate(prompt=RED).data
    assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_no_prompts_unless_asked(
    start: Start, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start(log_prompts=log_prompts)
    for prompt in ("blue square", "blue dragon"):
        server.post(prompt, seed=1)
    text = "\n".join(each.getMessage() for each in caplog.records if "mmaccel" in each.name)
    assert IMAGES in text and ("blue" in text) == log_prompts
    assert f"http://127.0.0.1:{server.server.port}/v1" in text  # also where --port 0 took it


def test_a_fault_is_no_traceback_for_the_client(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def fail(*_: Any) -> Any:
        raise RuntimeError("".join(("sec", "ret")))

    for owner, name in ((ImageRoute, "encode"), (Gate, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with server.gate():
                assert_error(server.post(), 500, None, "internal")
    assert "secret" not in caplog.text and "RuntimeError" in caplog.text
    assert server.post().status_code == 200
    assert server.metric('mmaccel_rows_total{end="failed"}') == 1


@pytest.mark.parametrize(
    ("error", "codes", "rows"),
    [(NumericsError("logits: secret", (1,)), [200, 500, 200], 16), (MemoryError(), [200] * 3, 8)],
)
def test_a_row_that_fails_takes_no_other_with_it(
    start: Start, error: Exception, codes: list[int], rows: int
) -> None:
    """An error names it, and the others begin again; with too little memory all do, in halves."""
    server, left = start(), [error]

    def fail(rows: int) -> None:
        if rows == 6 and left:
            raise left.pop()

    with server.gate(is_closed=True) as gate:
        gate.check = fail
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        for seed in (1, 2):
            asked.append(server.later(seed=seed))
            server.wait_for(seed)
        gate.open()
        assert [each.result().status_code for each in asked] == codes
    assert server.engine.rows == rows and not left
