"""A fair share of the queue: clients take turns, and none can fill the queue before another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from mmaccel.serving.images import ImageBackend
from mmaccel.serving.jobs import Job, JobQueue, QueueFull, Ticket
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, Later, Running, wait_until
from tests.serving.test_hostile import assert_error

RED = CAPTIONS[0]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in which tickets are made."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


def fill(queue: JobQueue, loop: asyncio.AbstractEventLoop, names: str, group: str = "") -> None:
    """Put a job for each name: "a1" is the first of client a. Names are separated by blanks."""

    async def put() -> None:
        for name in names.split():
            queue.put([Job(name, group, 1, Ticket(name[0]))])

    loop.run_until_complete(put())


def name(jobs: Sequence[Job]) -> str:
    return " ".join(job.item for job in jobs)


def take_all(queue: JobQueue) -> str:
    return name(queue.take(99, lambda job: True))


def test_clients_take_turns(loop: asyncio.AbstractEventLoop) -> None:
    queue = JobQueue(20)
    fill(queue, loop, "a1 a2 a3 a4 b1 b2 c1")
    assert name(queue.take(2, lambda job: True)) == "a1 b1"
    fill(queue, loop, "d1 b3")
    assert take_all(queue) == "c1 a2 b2 d1 a3 b3 a4"
    assert len(queue) == 0 and not queue.take(1, lambda job: True)


def test_a_client_that_came_with_many_is_not_first_again(loop: asyncio.AbstractEventLoop) -> None:
    """Also where jobs are taken one at a time."""
    queue = JobQueue(20)
    fill(queue, loop, "a1 a2 a3 b1")
    taken = [name(queue.take(1, lambda job: True)) for _ in range(2)]
    fill(queue, loop, "b2 a4")
    assert taken == ["a1", "b1"] and take_all(queue) == "a2 b2 a3 a4"


def test_jobs_that_were_begun_are_next_again(loop: asyncio.AbstractEventLoop) -> None:
    queue = JobQueue(20)
    fill(queue, loop, "a1 a2 a3 b1 c1")
    queue.put_back(queue.take(2, lambda job: True))
    assert take_all(queue) == "a1 b1 c1 a2 a3"


def test_cancelled_jobs_have_no_turn_and_no_room(loop: asyncio.AbstractEventLoop) -> None:
    queue = JobQueue(4)
    fill(queue, loop, "a1 a2 a3 b1")
    jobs = queue.take(2, lambda job: True)
    queue.put_back(jobs)
    jobs[0].is_cancelled = True
    fill(queue, loop, "a4")
    assert take_all(queue) == "a2 b1 a3 a4"


def test_a_group_that_does_not_fit_keeps_its_turn(loop: asyncio.AbstractEventLoop) -> None:
    """A run begins with as many of its group as there are; then those passed over are next."""
    queue = JobQueue(20)
    fill(queue, loop, "a1 a2 a3", "wide")
    fill(queue, loop, "b1 b2", "tall")
    fill(queue, loop, "c1", "wide")
    assert queue.take(9, lambda job: job.group == "tall") == []
    first = queue.wait()
    assert first is not None and first.item == "a1"
    begun = queue.take(3, lambda job: job.group == "wide", passes_over=True)
    assert name(begun) == "a1 c1 a2"
    assert queue.take(9, lambda job: job.group == "wide") == []
    assert take_all(queue) == "b1 a3 b2"


def test_no_client_fills_the_queue_before_another(loop: asyncio.AbstractEventLoop) -> None:
    queue = JobQueue(4)
    fill(queue, loop, "a1 a2 a3 a4")
    for client in ("a", "a"):
        with pytest.raises(QueueFull, match="at most 4 that wait"):
            queue.check(1, client)
    with pytest.raises(QueueFull, match="at most 5 that wait"):
        queue.check(2, "b")
    fill(queue, loop, "b1")
    for client in "abc":
        with pytest.raises(QueueFull):
            queue.check(1, client)
    assert take_all(queue) == "a1 b1 a2 a3 a4"


def ask(server: Running, key: str, **fields: Any) -> Later:
    """Ask for images with a key."""
    body, headers = {"prompt": RED, **fields}, {"authorization": f"Bearer {key}"}
    return Later(lambda: server.http.post(IMAGES, json=body, headers=headers))


def test_one_image_does_not_wait_for_the_ten_of_another_key(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[Any] = []
    put = Ticket.put

    def put_noted(ticket: Ticket, event: Any) -> None:
        finished.append(ticket.client)
        put(ticket, event)

    monkeypatch.setattr(Ticket, "put", put_noted)
    server = start(rows=1, queue=10, api_keys=("many", "one"))
    with server.gate() as gate:
        gate.close()
        asked = [ask(server, "many")]
        wait_until(lambda: gate.passes == 1)
        asked.append(ask(server, "many", n=10))
        wait_until(lambda: len(server.service.queue) == 10)
        assert_error(ask(server, "many").result(), 429, None, "queue_full")
        asked.append(ask(server, "one"))
        wait_until(lambda: len(server.service.queue) == 11)
        gate.open()
        assert [len(each.result().json()["data"]) for each in asked] == [1, 10, 1]
    assert finished == ["many", "many", "one"] + ["many"] * 9


def test_without_keys_an_address_is_a_client(backend: ImageBackend) -> None:
    def request(address: str, key: str) -> Request:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return Request({"type": "http", "client": (address, 1), "headers": headers})

    settings = ServerSettings("tiny")
    without = Service(settings, images=backend)
    assert without.identify(request("10.0.0.1", "x")) == "10.0.0.1"  # no header makes another one
    with_keys = Service(ServerSettings("tiny", api_keys=("x", "y")), images=backend)
    assert with_keys.identify(request("10.0.0.1", "x")) == "x"
    assert with_keys.identify(request("10.0.0.2", "x")) == "x"
