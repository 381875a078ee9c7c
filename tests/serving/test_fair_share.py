"""A fair share of the queue: clients take turns, and none can fill the queue before another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mmaccel.serving.jobs import Job, JobQueue, QueueFull, Ticket
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, RED, Later, Running, assert_error

Fill = Callable[..., None]


@pytest.fixture
def queue() -> JobQueue:
    """An empty one with room."""
    return JobQueue(20)


@pytest.fixture
def fill(queue: JobQueue) -> Iterator[Fill]:
    """Put a job for each name: "a1" is the first of client a. Names are separated by blanks."""
    loop = asyncio.new_event_loop()

    async def put(names: str, group: str, queue: JobQueue) -> None:
        for name in names.split():
            queue.put([Job(name, group, 1, Ticket(name[0]))])

    yield lambda names, group="", into=queue: loop.run_until_complete(put(names, group, into))
    loop.close()


def name(jobs: Sequence[Job]) -> str:
    return " ".join(job.item for job in jobs)


def take(queue: JobQueue, most: int = 99) -> str:
    return name(queue.take(most, lambda job: True))


def test_clients_take_turns(queue: JobQueue, fill: Fill) -> None:
    fill("a1 a2 a3 a4 b1 b2 c1")
    assert take(queue, 2) == "a1 b1"
    fill("d1 b3")
    assert take(queue) == "c1 a2 b2 d1 a3 b3 a4"
    assert len(queue) == 0 and take(queue, 1) == ""


def test_a_client_that_came_with_many_is_not_first_again(queue: JobQueue, fill: Fill) -> None:
    """Also where jobs are taken one at a time."""
    fill("a1 a2 a3 b1")
    taken = [take(queue, 1) for _ in range(2)]
    fill("b2 a4")
    assert taken == ["a1", "b1"] and take(queue) == "a2 b2 a3 a4"


def test_jobs_that_were_begun_are_next_again(queue: JobQueue, fill: Fill) -> None:
    fill("a1 a2 a3 b1 c1")
    queue.put_back(queue.take(2, lambda job: True))
    assert take(queue) == "a1 b1 c1 a2 a3"


def test_cancelled_jobs_have_no_turn_and_no_room(fill: Fill) -> None:
    queue = JobQueue(4)
    fill("a1 a2 a3 b1", into=queue)
    jobs = queue.take(2, lambda job: True)
    queue.put_back(jobs)
    jobs[0].is_cancelled = True
    fill("a4", into=queue)
    assert take(queue) == "a2 b1 a3 a4"


def test_a_group_that_does_not_fit_keeps_its_turn(queue: JobQueue, fill: Fill) -> None:
    """A run begins with as many of its group as there are; then those passed over are next."""
    fill("a1 a2 a3", "wide")
    fill("b1 b2", "tall")
    fill("c1", "wide")
    assert queue.take(9, lambda job: job.group == "tall") == []
    first = queue.wait()
    assert first is not None and first.item == "a1"
    begun = queue.take(3, lambda job: job.group == "wide", passes_over=True)
    assert name(begun) == "a1 c1 a2"
    assert queue.take(9, lambda job: job.group == "wide") == []
    assert take(queue) == "b1 a3 b2"


def test_no_client_fills_the_queue_before_another(fill: Fill) -> None:
    queue = JobQueue(4)
    fill("a1 a2 a3 a4", into=queue)
    for count, client, most in ((1, "a", 4), (2, "b", 5)):
        with pytest.raises(QueueFull, match=f"at most {most} that wait"):
            queue.check(count, client)
    fill("b1", into=queue)
    for client in "abc":
        with pytest.raises(QueueFull):
            queue.check(1, client)
    assert take(queue) == "a1 b1 a2 a3 a4"


def ask(server: Running, key: str, **fields: Any) -> Later:
    """Ask for images with a key."""
    body, headers = {"prompt": RED, **fields}, {"authorization": f"Bearer {key}"}
    return Later(lambda: server.http.post(IMAGES, json=body, headers=headers))


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
