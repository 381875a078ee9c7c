"""A fair share of the queue: clients take turns, and none can fill the queue before another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from mmaccel.serving.jobs import Job, JobQueue, QueueFull, Ticket
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, RED, Running, assert_error, later

Fill = Callable[..., None]


@pytest.fixture
def fill() -> Iterator[Fill]:
    """Put a job for each name into a queue: "a1" is the first of client a."""
    loop = asyncio.new_event_loop()

    async def put(queue: JobQueue, names: str, group: str) -> None:
        for name in names.split():
            queue.put([Job(name, group, 1, Ticket(name[0]))])

    yield lambda queue, names, group="": loop.run_until_complete(put(queue, names, group))
    loop.close()


def name(jobs: Sequence[Job]) -> str:
    return " ".join(job.item for job in jobs)


def take(queue: JobQueue, most: int = 99) -> str:
    return name(queue.take(most, lambda job: True))


@pytest.mark.parametrize(
    ("came", "n_each", "taken", "came_later", "left"),
    [
        ("a1 a2 a3 a4 b1 b2 c1", 2, ["a1 b1"], "d1 b3", "c1 a2 b2 d1 a3 b3 a4"),
        ("a1 a2 a3 b1", 1, ["a1", "b1"], "b2 a4", "a2 b2 a3 a4"),  # one at a time
    ],
)
def test_clients_take_turns(
    fill: Fill, came: str, n_each: int, taken: list[str], came_later: str, left: str
) -> None:
    """A client that came with many is not first again."""
    queue = JobQueue(20)
    fill(queue, came)
    assert [take(queue, n_each) for _ in taken] == taken
    fill(queue, came_later)
    assert take(queue) == left
    assert len(queue) == 0 and take(queue, 1) == ""


def test_jobs_that_were_begun_are_next_again_and_cancelled_ones_are_not(fill: Fill) -> None:
    """Cancelled jobs take no room either."""
    queue = JobQueue(4)
    fill(queue, "a1 a2 a3 b1")
    jobs = queue.take(2, lambda job: True)
    queue.put_back(jobs)
    assert name(jobs) == "a1 b1" and take(queue, 2) == "a1 b1"
    queue.put_back(jobs)
    jobs[0].is_cancelled = True
    fill(queue, "a4")
    assert take(queue) == "a2 b1 a3 a4"


def test_a_group_that_does_not_fit_keeps_its_turn(fill: Fill) -> None:
    """A run begins with as many of its group as there are; then those passed over are next."""
    queue = JobQueue(20)
    for names, group in (("a1 a2 a3", "wide"), ("b1 b2", "tall"), ("c1", "wide")):
        fill(queue, names, group)
    assert queue.take(9, lambda job: job.group == "tall") == []
    first = queue.wait()
    assert first is not None and first.item == "a1"
    begun = queue.take(3, lambda job: job.group == "wide", passes_over=True)
    assert name(begun) == "a1 c1 a2"
    assert queue.take(9, lambda job: job.group == "wide") == []
    assert take(queue) == "b1 a3 b2"


def test_no_client_fills_the_queue_before_another(fill: Fill) -> None:
    queue = JobQueue(4)
    fill(queue, "a1 a2 a3 a4")
    for count, client, most in ((1, "a", 4), (2, "b", 5)):
        with pytest.raises(QueueFull, match=f"at most {most} that wait"):
            queue.check(count, client)
    fill(queue, "b1")
    for client in "abc":
        with pytest.raises(QueueFull):
            queue.check(1, client)
    assert take(queue) == "a1 b1 a2 a3 a4"


def ask(server: Running, key: str, **fields: Any) -> Future[Any]:
    """Ask for images with a key."""
    body, headers = {"prompt": RED, **fields}, {"authorization": f"Bearer {key}"}
    return later(lambda: server.http.post(IMAGES, json=body, headers=headers))


@pytest.mark.parametrize("keys", [("many", "one"), ()])
def test_a_key_or_an_address_is_a_client(
    start: Start, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """One image does not wait for the ten of another key; without keys, no header makes another
    client.
    """
    finished: list[Any] = []
    put = Ticket.put

    def put_noted(ticket: Ticket, event: Any) -> None:
        finished.append(ticket.client)
        put(ticket, event)

    monkeypatch.setattr(Ticket, "put", put_noted)
    server = start(rows=1, queue=10, api_keys=keys)
    with server.gate(is_closed=True) as gate:
        asked = [ask(server, "many")]
        gate.wait_for(1)
        asked.append(ask(server, "many", n=10))
        server.wait_for(10)
        assert_error(ask(server, "many").result(), 429, None, "queue_full")
        one = ask(server, "one")
        if keys:
            server.wait_for(11)
            asked.append(one)
        else:
            assert_error(one.result(), 429, None, "queue_full")
        gate.open()
        assert [len(each.result().json()["data"]) for each in asked] == [1, 10, 1][: len(asked)]
    if keys:
        assert finished == ["many", "many", "one"] + ["many"] * 9
    else:
        assert finished == ["127.0.0.1"] * 11
