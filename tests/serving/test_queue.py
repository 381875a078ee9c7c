"""The bounded queue, time-outs, clients that go, and the end of a server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fixtures.forking import Child, Forker
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, Later, Running, wait_until
from tests.serving.test_hostile import HEAD, assert_error
from tests.serving.test_images import draw, files

RED = CAPTIONS[0]


def connect(server: Running, **fields: Any) -> socket.socket:
    """A connection that asks for an image, and that the test closes when it likes."""
    body = json.dumps({"prompt": RED, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.server.port), timeout=30)
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_a_full_queue_answers_429_and_takes_requests_again(start: Start) -> None:
    server = start(rows=1, queue=3)
    with server.gate() as gate:
        gate.close()
        asked = [server.later(RED, seed=0)]
        wait_until(lambda: gate.passes == 1)
        asked.append(server.later(RED, seed=1, n=2))
        wait_until(lambda: len(server.service.queue) == 2)
        answer = server.post(RED, n=2)  # one has room, two have not
        message = assert_error(answer, 429, None, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1 and "ask again" in message
        asked.append(server.later(RED, seed=3))
        wait_until(lambda: len(server.service.queue) == 3)
        assert_error(server.http.post(IMAGES, content=b"no JSON"), 429, None, "queue_full")
        assert_error(server.openai().with_options(max_retries=0)._client.post(
            f"{server.url}{IMAGES}", json={"prompt": RED}), 429, None, "queue_full")  # fmt: skip
        gate.open()
        assert [len(files(each.result())) for each in asked] == [1, 2, 1]
    assert len(draw(server, n=3)) == 3
    assert_error(server.post(RED, n=4), 400, "n", "invalid_value")  # never fits


def test_a_client_that_goes_frees_its_row(start: Start) -> None:
    """Of a plain request, of a stream, and of one that still waits."""
    server = start(rows=2)
    alone = draw(server, CAPTIONS[1], seed=5)
    answers = f'mmaccel_requests_total{{route="{IMAGES}"'
    with server.gate() as gate:
        gate.close()
        clients = []
        for k, fields in enumerate(({}, {"stream": True, "partial_images": 2}, {})):
            clients.append(connect(server, seed=1, **fields))
            wait_until(lambda k=k: gate.passes == 1 and len(server.service.queue) == k)  # type: ignore[misc]
        gate.permit(1)
        wait_until(lambda: gate.passes == 2 and len(server.service.queue) == 1)
        kept = server.later(CAPTIONS[1], seed=5)
        wait_until(lambda: len(server.service.queue) == 2)
        for client in clients:
            client.close()
        wait_until(lambda: server.metric(answers) == 1 + len(clients))
        gate.open()
        assert files(kept.result()) == alone
        assert gate.rows[2:] == [2] * (gate.passes - 2)  # its own row alone
    assert server.metric('mmaccel_rows_total{end="cancelled"}') == 2
    assert server.metric("mmaccel_running_rows") == len(server.service.queue) == 0


def test_time_is_over(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(rows=1, timeout=0.001)
    put = server.service.put
    with server.gate() as gate:
        gate.close()

        def put_and_begin(jobs: Any) -> None:
            put(jobs)
            wait_until(lambda: gate.passes == 1)

        monkeypatch.setattr(server.service, "put", put_and_begin)
        assert_error(server.post(RED), 504, None, "timeout")  # its row runs
        streamed = server.post(RED, stream=True)  # it waits, and its answer has begun
        assert '"code": "timeout"' in streamed.text and "event: error" in streamed.text
        gate.open()
        wait_until(lambda: server.metric("mmaccel_running_rows") == 0)
    server.service.settings = replace(server.service.settings, timeout=60.0)
    assert draw(server)


def test_draining_answers_what_was_accepted_and_refuses_the_rest(start: Start) -> None:
    server = start(rows=1)
    wanted = [draw(server, seed=seed) for seed in (1, 2)]
    with server.gate() as gate:
        gate.close()
        asked = [server.later(RED, seed=1)]
        wait_until(lambda: gate.passes == 1)
        asked.append(server.later(RED, seed=2))
        wait_until(lambda: len(server.service.queue) == 1)
        server.service.drain()
        answer = server.post(RED)
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
    """`mmaccel serve` in a process of its own, and its address."""
    options = ["--model", str(model), "--port", "0"]
    child = forker.start("serve", *options, before=_TELL_PORT + before)
    try:
        wait_until(child.stdout.exists)
        wait_until(lambda: "\n" in child.printed()[0] or "mmaccel:" in child.printed()[1], 60)
        found = re.search(r"PORT (\d+)\n", child.printed()[0])
        assert found, child.printed()
        yield child, f"http://127.0.0.1:{found[1]}"
    finally:
        with suppress(ProcessLookupError):
            child.send(signal.SIGKILL)


_TELL_PORT = """
from mmaccel.serving import server
startup = server.Server.startup
async def tell(self, sockets=None):
    await startup(self, sockets)
    print("PORT", self.port, flush=True)
server.Server.startup = tell
"""
SLOW = """
import time
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
forward = CausalLMWindow.forward
def slowly(self, entries):
    time.sleep(0.1)
    return forward(self, entries)
CausalLMWindow.forward = slowly
"""


def test_sigterm_drains_the_process(forker: Forker, tiny_folder: Path) -> None:
    with command(forker, tiny_folder, SLOW) as (child, url):
        call = Later(lambda: httpx.post(url + IMAGES, json={"prompt": RED, "seed": 1}, timeout=30))
        wait_until(lambda: "mmaccel_running_rows 1.0" in httpx.get(f"{url}/metrics").text)
        child.send(signal.SIGTERM)
        assert len(files(call.result())) == 1
        assert child.wait() == 0
        assert "Traceback" not in child.printed()[1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def has_closed(url: str) -> bool:
    """Whether a server takes no connections any more."""
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_a_second_signal_answers_and_ends_the_process(forker: Forker, tiny_folder: Path) -> None:
    with command(forker, tiny_folder, SLOW.replace("0.1", "1.0")) as (child, url):
        call = Later(lambda: httpx.post(url + IMAGES, json={"prompt": RED, "seed": 1}, timeout=30))
        wait_until(lambda: "mmaccel_running_rows 1.0" in httpx.get(f"{url}/metrics").text)
        child.send(signal.SIGTERM)
        wait_until(lambda: has_closed(url))
        child.send(signal.SIGTERM)
        assert_error(call.result(), 503, None, "shutting_down")
        assert child.wait() == 0
        assert "Traceback" not in child.printed()[1]


def test_what_was_accepted_is_answered_when_a_server_ends_at_once(start: Start) -> None:
    """A row that runs, one that waits, a stream, and a body that has not arrived."""
    server = start(rows=1)
    with server.gate() as gate:
        gate.close()
        runs = server.later(RED)
        wait_until(lambda: gate.passes == 1)
        waits, streams = server.later(RED), server.later(RED, stream=True)
        wait_until(lambda: len(server.service.queue) == 2)
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=30) as slow:
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
    wanted = {seed: draw(server, seed=seed) for seed in range(20)}
    client, sizes = server.openai(), []
    for _ in range(5):
        answers: list[tuple[int, bytes | None]] = []
        barrier = threading.Barrier(200)

        def ask(seed: int, barrier: Any = barrier, answers: Any = answers) -> None:
            barrier.wait()
            try:
                made = client.images.generate(prompt=RED, extra_body={"seed": seed})
                answers.append((seed, files(made)))
            except openai.RateLimitError:
                answers.append((seed, None))

        threads = [threading.Thread(target=ask, args=(k % 20,)) for k in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(answers) == 200
        done = [(seed, image) for seed, image in answers if image is not None]
        assert 32 <= len(done) and all(image == wanted[seed] for seed, image in done)
        sizes.append(count_memory())
    client.close()
    assert server.metric("mmaccel_running_rows") == len(server.service.queue) == 0
    assert max(sizes[2:]) < sizes[1] + 32 * 1024**2
