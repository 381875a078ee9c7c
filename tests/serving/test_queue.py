"""Where a server listens, its bounded queue, turns, time-outs, clients that go, and its end."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mmaccel.cli import main
from mmaccel.serving.engine import Engine, Job
from mmaccel.serving.errors import ApiError
from mmaccel.serving.settings import ServerSettings
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
    read_all,
    wait_until,
)


def fill(engine: Engine, names: str, group: str = "") -> None:
    """Let a job for each name wait: "a1" is the first of client a."""
    for name in names.split():
        engine.put([Job(name, None, group, 1, name)], name[0], print)


def take(engine: Engine, most: int = 99, **options: Any) -> str:
    return " ".join(engine._admit(most, **options))


def open_queue(limit: int) -> Engine:
    """An engine that decodes nothing."""
    engine = Engine(None, ServerSettings(queue=limit))
    engine._group, engine.width = "", 1
    return engine


@pytest.mark.parametrize(
    ("came", "n_each", "taken", "came_later", "left"),
    [
        ("a1 a2 a3 a4 b1 b2 c1", 2, ["a1 b1"], "d1 b3", "c1 a2 b2 d1 a3 b3 a4"),
        ("a1 a2 a3 b1", 1, ["a1", "b1"], "b2 a4", "a2 b2 a3 a4"),  # one at a time
    ],
)
def test_clients_take_turns(
    came: str, n_each: int, taken: list[str], came_later: str, left: str
) -> None:
    """A client that came with many is not first again, and jobs that begin again are next."""
    engine = open_queue(20)
    fill(engine, came)
    assert [take(engine, n_each) for _ in taken] == taken
    fill(engine, came_later)
    first = engine.waiting[0]
    begun = take(engine, 1)
    engine._wait([first])
    assert begun == first.item and take(engine) == left


@pytest.mark.parametrize("lack", ["group", "width"])
def test_what_does_not_fit_keeps_its_turn(lack: str) -> None:
    """A run begins with as many of its group as there are; then those passed over are next."""
    engine = open_queue(20)
    for names, group in (("a1 a2", ""), ("b1 b2", "tall" if lack == "group" else ""), ("c1", "")):
        fill(engine, names, group)
    for job in engine.waiting:
        job.width += job.client == "b" and lack == "width"
    assert take(engine, 1) == "a1"
    assert take(engine) == ""  # the turn is that of b
    assert take(engine, passes_over=True) == "c1 a2"
    assert [job.item for job in engine.waiting] == ["b1", "b2"]


def test_no_client_fills_the_queue_before_another() -> None:
    engine = open_queue(4)
    fill(engine, "a1 a2 a3 a4")
    with pytest.raises(ApiError, match="429"):
        fill(engine, "a5")
    fill(engine, "b1")
    for name in ("a5", "b2", "c1"):
        with pytest.raises(ApiError, match="429"):
            fill(engine, name)
    engine.cancel(engine.waiting[:1])
    fill(engine, "c1")
    assert take(engine) == "b1 c1 a2 a3 a4"


def test_a_key_or_an_address_is_a_client(start: Start) -> None:
    """One image does not wait for the ten of another key; without keys, no header makes another
    client.
    """
    for keys, clients in ((("many", "one"), ["many", "one", "many"]), ((), ["127.0.0.1"] * 3)):
        server = start(rows=1, api_keys=keys)
        with server.gate(is_closed=True) as gate:
            first = server.later(key="many")
            gate.wait_for(1)
            many = server.later(key="many", n=10)
            server.wait_for(10)
            one = server.later(key="one")
            server.wait_for(11)
            assert [job.client for job in server.engine.waiting][:3] == clients
            gate.open()
            assert [len(files(each.result())) for each in (first, many, one)] == [1, 10, 1]


def test_a_taken_port_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", "not-there"]) == 2
        assert f"received 127.0.0.1 and {port} (" in capsys.readouterr().err
    assert main(["serve", "--port", port, "--model", "not-there"]) == 2
    assert "model: expected" in capsys.readouterr().err  # it is free now


def connect(server: Running, **fields: Any) -> socket.socket:
    """A connection that asks for an image, and that the test closes when it likes."""
    body = json.dumps({"prompt": RED, **fields}).encode()
    return server.connect(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)


def test_a_full_queue_answers_429_and_takes_requests_again(start: Start) -> None:
    server = start(rows=1, queue=3)
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        asked.append(server.later(seed=1, n=2))
        server.wait_for(2)
        answer = server.post(n=2)  # one has room, two have not
        assert_error(answer, 429, None, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        asked.append(server.later(seed=3))
        server.wait_for(3)
        with pytest.raises(openai.RateLimitError):
            server.openai().images.generate(prompt=RED)
        gate.open()
        assert [len(files(each.result())) for each in asked] == [1, 2, 1]
    assert_error(server.post(n=4), 400, "n", "invalid_value")  # never fits


@pytest.mark.slow
def test_a_client_that_goes_frees_its_row(start: Start) -> None:
    """Of a plain request, of a stream, and of one that still waits."""
    server = start(rows=2)
    alone = server.draw(CAPTIONS[1], seed=5)
    gone = f'mmaccel_requests_total{{route="{IMAGES}",status="499"}}'
    with server.gate(is_closed=True) as gate:
        clients = []
        for k, fields in enumerate(({}, {"stream": True, "partial_images": 2}, {})):
            clients.append(connect(server, seed=1, **fields))
            wait_until(lambda k=k: gate.passes == 1 and len(server.engine.waiting) == k)  # type: ignore[misc]
        gate.permit(1)
        wait_until(lambda: gate.passes == 2 and len(server.engine.waiting) == 1)
        kept = server.later(CAPTIONS[1], seed=5)
        server.wait_for(2)
        for client in clients:
            client.close()
        wait_until(lambda: server.metric(gone) == len(clients))
        gate.open()
        assert files(kept.result()) == alone
        assert gate.rows[2:] == [2] * (gate.passes - 2)  # its own row alone
    assert server.metric('mmaccel_rows_total{end="cancelled"}') == 2
    assert server.metric("mmaccel_running_rows") == len(server.engine.waiting) == 0


@pytest.mark.slow
def test_time_is_over(start: Start) -> None:
    """Before an answer has begun, of a row that runs and one that waits, and after that."""
    server = start(rows=1, timeout=0.3)
    with server.gate(is_closed=True) as gate:
        for each in (server.later(), server.later(stream=True)):
            assert_error(each.result(), 504, None, "timeout")
        server.engine.settings = replace(server.engine.settings, timeout=3.0)
        gate.permit(1)
        wait_until(lambda: not server.engine.running)
        begun = server.later(stream=True, partial_images=3)
        gate.step_until(lambda: gate.passes > 8)
        text = begun.result().text
        assert "partial_image" in text and "event: error" in text and '"code": "timeout"' in text
        gate.open()
        wait_until(lambda: server.metric("mmaccel_running_rows") == 0)


def test_draining_answers_what_was_accepted_and_refuses_the_rest(start: Start) -> None:
    server = start(rows=1)
    wanted = [server.draw(seed=seed) for seed in (1, 2)]
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=1)]
        gate.wait_for(1)
        asked.append(server.later(seed=2))
        server.wait_for(1)
        server.engine.drain()
        answer = server.post()
        assert_error(answer, 503, None, "shutting_down")
        assert answer.headers["retry-after"] and server.http.get("/health").status_code == 503
        server.server.drain()
        gate.open()
        assert [files(each.result()) for each in asked] == wanted
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.slow
def test_what_was_accepted_is_answered_when_a_server_ends_at_once(start: Start) -> None:
    """A row that runs, one that waits, a stream, and a body that has not arrived."""
    server = start(rows=1)
    with server.gate(is_closed=True) as gate:
        asked = [server.later()]
        gate.wait_for(1)
        asked += [server.later(), server.later(stream=True)]
        server.wait_for(2)
        with server.connect(HEAD + b"content-length: 1000\r\n\r\n{") as slow:
            wait_until(lambda: len(server.server.server_state.tasks) == 4)
            for _ in range(2):
                server.server.handle_exit(signal.SIGTERM, None)
            for each in asked:
                assert_error(each.result(), 503, None, "shutting_down")
            assert read_all(slow).startswith(b"HTTP/1.1 503")
        gate.open()
        server.close()
    assert gate.passes == 1


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
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
forward = CausalLMWindow.forward
def slowly(self, entries):
    time.sleep(0.1)
    return forward(self, entries)
CausalLMWindow.forward = slowly
"""


@pytest.mark.slow
def test_a_signal_drains_the_process(forker: Forker, tiny_folder: Path) -> None:
    with command(forker, tiny_folder, SLOW) as (child, url):
        call = later(lambda: httpx.post(url + IMAGES, json={"prompt": RED, "seed": 1}, timeout=30))
        wait_until(lambda: "mmaccel_running_rows 1.0" in httpx.get(f"{url}/metrics").text)
        child.send(signal.SIGTERM)
        assert len(files(call.result())) == 1
        assert child.wait() == 0
        assert "Traceback" not in child.printed()[1]
