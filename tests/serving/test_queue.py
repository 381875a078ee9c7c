"""Where a server listens, its bounded queue, time-outs, clients that go, and its end."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mmaccel.cli import main
from tests.fixtures.forking import Child, Forker
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start
from tests.serving.running import (
    HEAD,
    IMAGES,
    RED,
    Running,
    assert_error,
    files,
    later,
    wait_until,
)


def test_a_taken_port_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", "not-there"]) == 2
        said = capsys.readouterr().err
        assert f"received 127.0.0.1 and {port} (" in said and "--port 0 takes a free one" in said
    for more, said in (
        (["--host", "no such host"], "received no such host and 8000"),
        (["--port", port], "model: expected"),  # it is free now
    ):
        assert main(["serve", *more, "--model", "not-there"]) == 2
        assert said in capsys.readouterr().err


def connect(server: Running, **fields: Any) -> socket.socket:
    """A connection that asks for an image, and that the test closes when it likes."""
    body = json.dumps({"prompt": RED, **fields}).encode()
    connection = server.connect()
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_a_full_queue_answers_429_and_takes_requests_again(start: Start) -> None:
    server = start(rows=1, queue=3)
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        asked.append(server.later(seed=1, n=2))
        server.wait_for(2)
        answer = server.post(n=2)  # one has room, two have not
        message = assert_error(answer, 429, None, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1 and "ask again" in message
        asked.append(server.later(seed=3))
        server.wait_for(3)
        assert_error(server.http.post(IMAGES, content=b"no JSON"), 429, None, "queue_full")
        with pytest.raises(openai.RateLimitError):
            server.openai().images.generate(prompt=RED)
        gate.open()
        assert [len(files(each.result())) for each in asked] == [1, 2, 1]
    assert len(server.draw(n=3)) == 3
    assert_error(server.post(n=4), 400, "n", "invalid_value")  # never fits


def test_a_client_that_goes_frees_its_row(start: Start) -> None:
    """Of a plain request, of a stream, and of one that still waits."""
    server = start(rows=2)
    alone = server.draw(CAPTIONS[1], seed=5)
    answers = f'mmaccel_requests_total{{route="{IMAGES}"'
    with server.gate(is_closed=True) as gate:
        clients = []
        for k, fields in enumerate(({}, {"stream": True, "partial_images": 2}, {})):
            clients.append(connect(server, seed=1, **fields))
            wait_until(lambda k=k: gate.passes == 1 and len(server.service.queue) == k)  # type: ignore[misc]
        gate.permit(1)
        wait_until(lambda: gate.passes == 2 and len(server.service.queue) == 1)
        kept = server.later(CAPTIONS[1], seed=5)
        server.wait_for(2)
        for client in clients:
            client.close()
        wait_until(lambda: server.metric(answers) == 1 + len(clients))
        gate.open()
        assert files(kept.result()) == alone
        assert gate.rows[2:] == [2] * (gate.passes - 2)  # its own row alone
    assert server.metric('mmaccel_rows_total{end="cancelled"}') == 2
    assert server.metric("mmaccel_running_rows") == len(server.service.queue) == 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_that_sends_no_more_is_answered(start: Start, fields: dict[str, Any]) -> None:
    """It has closed its sending side alone, as `nc -N` does."""
    server = start()
    wanted = base64.b64encode(server.draw(seed=5)[0])
    with server.gate(is_closed=True) as gate, connect(server, seed=5, **fields) as client:
        client.shutdown(socket.SHUT_WR)
        gate.wait_for(1)
        time.sleep(0.6)  # both interim answers
        gate.open()
        received = b""
        while chunk := client.recv(65_536):
            received += chunk
    assert b"HTTP/1.1 200" in received and wanted in received


def test_time_is_over(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(rows=1, timeout=0.001)
    put = server.service.put
    with server.gate(is_closed=True) as gate:

        def put_and_begin(jobs: Any) -> None:
            put(jobs)
            gate.wait_for(1)

        monkeypatch.setattr(server.service, "put", put_and_begin)
        assert_error(server.post(), 504, None, "timeout")  # its row runs
        streamed = server.post(stream=True)  # it waits, and its answer has begun
        assert '"code": "timeout"' in streamed.text and "event: error" in streamed.text
        gate.open()
        wait_until(lambda: server.metric("mmaccel_running_rows") == 0)
    server.service.settings = replace(server.service.settings, timeout=60.0)
    assert server.draw()


def test_draining_answers_what_was_accepted_and_refuses_the_rest(start: Start) -> None:
    server = start(rows=1)
    wanted = [server.draw(seed=seed) for seed in (1, 2)]
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=1)]
        gate.wait_for(1)
        asked.append(server.later(seed=2))
        server.wait_for(1)
        server.service.drain()
        answer = server.post()
        assert_error(answer, 503, None, "shutting_down")
        assert answer.headers["retry-after"] and server.http.get("/health").status_code == 503
        server.server.drain()
        gate.open()
        assert [files(each.result()) for each in asked] == wanted
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@contextmanager
def command(forker: Forker, model: Path, before: str) -> Iterator[tuple[Child, str]]:
    """`mmaccel serve` in a process of its own, and its address, which its log says."""
    child = forker.start("serve", "--model", str(model), "--port", "0", before=before)
    try:
        wait_until(child.stderr.exists)
        wait_until(lambda: re.search("/v1|mmaccel:", child.printed()[1]), 60)
        found = re.search(r"at (http://\S+)/v1", child.printed()[1])
        assert found, child.printed()
        yield child, found[1]
    finally:
        with suppress(ProcessLookupError):
            child.send(signal.SIGKILL)


SLOW = """
import time
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
forward = CausalLMWindow.forward
def slowly(self, entries):
    time.sleep(0.1)
    return forward(self, entries)
CausalLMWindow.forward = slowly
"""


@pytest.mark.parametrize("n_signals", [1, 2])
def test_sigterm_drains_the_process_and_a_second_one_ends_it(
    forker: Forker, tiny_folder: Path, n_signals: int
) -> None:
    slow = SLOW if n_signals == 1 else SLOW.replace("0.1", "1.0")
    with command(forker, tiny_folder, slow) as (child, url):
        call = later(lambda: httpx.post(url + IMAGES, json={"prompt": RED, "seed": 1}, timeout=30))
        wait_until(lambda: "mmaccel_running_rows 1.0" in httpx.get(f"{url}/metrics").text)
        child.send(signal.SIGTERM)
        wait_until(lambda: has_closed(url))
        if n_signals == 2:
            child.send(signal.SIGTERM)
            assert_error(call.result(), 503, None, "shutting_down")
        else:
            assert len(files(call.result())) == 1
        assert child.wait() == 0
        assert "Traceback" not in child.printed()[1] and has_closed(url)


def has_closed(url: str) -> bool:
    """Whether a server takes no connections any more."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_what_was_accepted_is_answered_when_a_server_ends_at_once(start: Start) -> None:
    """A row that runs, one that waits, a stream, and a body that has not arrived."""
    server = start(rows=1)
    with server.gate(is_closed=True) as gate:
        runs = server.later()
        gate.wait_for(1)
        waits, streams = server.later(), server.later(stream=True)
        server.wait_for(2)
        with server.connect() as slow:
            slow.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
            wait_until(lambda: len(server.server.server_state.tasks) == 4)
            server.server.drain()
            server.server.abort()
            for each in (runs, waits):
                answer = each.result()
                message = assert_error(answer, 503, None, "shutting_down")
                assert "ask another one" in message and answer.headers["retry-after"]
            events = streams.result()
            assert events.status_code == 200 and "event: error" in events.text
            assert '"code": "shutting_down"' in events.text
            received = b""
            while part := slow.recv(65_536):
                received += part
            assert received.startswith(b"HTTP/1.1 503") and b'"code":"shutting_down"' in received
        gate.open()
        server.close()
    assert gate.passes == 1


def count_memory() -> int:
    """Bytes that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_two_hundred_clients_at_once(start: Start) -> None:
    """Every request is answered with its image or with 429, and memory stays."""
    server = start(rows=8, queue=32)
    wanted = {seed: server.draw(seed=seed) for seed in range(8)}
    client, sizes = server.openai(), []

    def ask(seed: int, barrier: threading.Barrier) -> bytes | None:
        barrier.wait()
        try:
            (image,) = files(client.images.generate(prompt=RED, extra_body={"seed": seed}))
            return image
        except openai.RateLimitError:
            return None

    for _ in range(3):
        barrier = threading.Barrier(200)
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, [k % 8 for k in range(200)], [barrier] * 200))
        done = [(k % 8, image) for k, image in enumerate(answers) if image is not None]
        assert 32 <= len(done) and all([image] == wanted[seed] for seed, image in done)
        sizes.append(count_memory())
    client.close()
    assert server.metric("mmaccel_running_rows") == len(server.service.queue) == 0
    assert sizes[2] < sizes[1] + 32 * 1024**2
