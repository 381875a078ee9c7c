"""`--executor ray`: two actors write the same bytes as one process, also when one is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.manifest import Record
from mmaccel.batch.modalities import Images
from mmaccel.batch.prompts import Item, Row, make_items
from mmaccel.batch.ray_executor import RayExecutor
from mmaccel.batch.worker import ItemsFailed, Worker
from mmaccel.errors import OptionError
from tests.batch.jobs import Jobs, content, lines
from tests.fixtures.tiny_model import CAPTIONS

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
N_ITEMS = 20
ROWS: list[dict[str, Any]] = [
    {"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": 5} for k in range(N_ITEMS // 5)
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Ray on this machine, for all tests of this file."""
    import mmaccel

    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_worker_niceness"] = "0"  # of 15 they would wait for all other tests
    # processes that ray starts ahead serve no `runtime_env`
    os.environ |= {"PYTHONPATH": str(Path(mmaccel.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    sockets = tmp_path_factory.mktemp("r", numbered=False)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(sockets) if len(str(sockets)) < 40 else None,
    )
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def items() -> list[Item]:
    """N_ITEMS of them."""
    return make_items([Row(**row) for row in ROWS], 0)


def actor_processes() -> list[int]:
    """Processes of live actors."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::WorkerActor"):
                found.append(int(folder.name))
    return found


def test_actors_write_the_same_as_one_process(jobs: Jobs, tiny_folder: Path) -> None:
    options = ("--batch-size", "4")
    alone = Jobs(jobs.out.parent / "alone", tiny_folder)
    assert alone.run(*options, rows=ROWS) == 0
    assert jobs.run(*options, "--executor", "ray", "--actors", "2", rows=ROWS) == 0
    assert content(jobs.out) == content(alone.out) and lines(jobs.out) == lines(alone.out)
    assert len(content(jobs.out)) == N_ITEMS


def test_a_killed_actor_loses_nothing_and_repeats_nothing(
    items: list[Item], tiny_folder: Path, tmp_path: Path
) -> None:
    for name in ("one", "ray"):
        (tmp_path / name).mkdir()
    setup = Images(model=str(tiny_folder), out=tmp_path / "ray", rows=2)
    executor = RayExecutor(setup, 2)
    made: list[Record] = []
    written: dict[Path, int] = {}
    killed: list[int] = []

    def on_finish(record: Record) -> None:
        made.append(record)
        done = {(r["id"], r["k"]) for r in made}
        known = set(executor._deaths)  # whose process was killed; a second time they would fail
        if len(made) == 3 or (len(killed) == 1 and known and known <= done):
            for each in made:
                file = setup.out / each["file"]
                written[file] = file.stat().st_mtime_ns
            killed.append(actor_processes()[0])
            os.kill(killed[-1], signal.SIGKILL)

    try:
        executor.check(items)
        executor.run_all(items, on_finish)
    finally:
        executor.close()
    assert len(set(killed)) == 2
    alone: list[Record] = []
    Worker(replace(setup, out=tmp_path / "one")).run_all(items, alone.append)
    by_key = [{(r["id"], r["k"]): r for r in found} for found in (made, alone)]
    assert by_key[0] == by_key[1] and len(made) == len(by_key[0]) == N_ITEMS
    assert all(file.stat().st_mtime_ns == time for file, time in written.items())


def test_an_item_that_kills_its_process_fails(
    items: list[Item], tiny_folder: Path, tmp_path: Path
) -> None:
    items = items[:1]
    executor = RayExecutor(Images(model=str(tiny_folder), out=tmp_path, rows=1), 1)
    start, deaths = executor._start, []

    class Deadly:
        """An actor whose process ends when it is asked for anything."""

        def __init__(self, actor: Any) -> None:
            self.make, self._actor = self, actor

        def options(self, **how: Any) -> Any:
            ray.kill(self._actor)
            deaths.append(self._actor)
            return self._actor.make.options(**how)

    try:
        executor._start = lambda: Deadly(start())
        executor._actors = [Deadly(executor._actors[0])]
        with pytest.raises(ItemsFailed, match="its process died") as caught:
            executor.run_all(items, lambda record: pytest.fail("nothing is made"))
        assert caught.value.items == items and len(deaths) == 2
        executor._actors = [executor._actors[0]._actor]
    finally:
        executor.close()


def test_wrong_options_of_actors_are_refused(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_of_one = ("--executor", "ray", "--actors", "1")
    assert jobs.run(*ray_of_one, rows=[{"prompt": CAPTIONS[0], "policy": "stepwise"}]) == 2
    said = capsys.readouterr().err
    assert "line 1: policy: expected one of" in said and "Traceback" not in said
    assert Jobs(tmp_path, tmp_path / "none").run(*ray_of_one) == 2
    assert "none" in capsys.readouterr().err
    with pytest.raises(OptionError, match=r"--actors: expected 1..2"):
        RayExecutor(Images(model="none", out=tmp_path), 3)
