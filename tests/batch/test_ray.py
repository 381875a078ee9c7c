"""`--executor ray`: two actors write the same bytes as one process, also when one is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.batch.manifest import Record
from mmaccel.batch.modalities import Images
from mmaccel.batch.prompts import Row, make_items
from mmaccel.batch.ray_executor import RayExecutor
from mmaccel.batch.worker import ItemsFailed
from tests.fixtures.jobs import Command, folders, lines, whole_of
from tests.fixtures.tiny_model import CAPTIONS

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
ACTORS = ("--executor", "ray", "--actors", 2, "--batch-size", 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Ray on this machine, for all tests of this file."""
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


def actor_processes() -> list[int]:
    """Processes of live actors."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::WorkerActor"):
                found.append(int(folder.name))
    return found


def test_actors_write_the_same_as_one_process(tmp_path: Path) -> None:
    """Clips here, and images below."""
    command, whole = Command("clips", tmp_path), whole_of("clips")
    assert command.job(*ACTORS) == 0
    assert command.content == whole.content and lines(command.out) == lines(whole.out)


def test_a_killed_actor_loses_nothing_and_repeats_nothing(
    images: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": 5} for k in range(4)]
    whole = Command("images", tmp_path / "whole")
    assert whole.job(rows=rows) == 0
    run_all, killed, written = RayExecutor.run_all, list[int](), dict[Path, int]()

    def run(self: RayExecutor, items: Any, on_finish: Any, rows: int | None = None) -> None:
        made: list[Record] = []

        def finish(record: Record) -> None:
            on_finish(record)
            made.append(record)
            done = {(r["id"], r["k"]) for r in made}
            known = set(self._deaths)  # whose process was killed; a second time they would fail
            if len(made) == 3 or (len(killed) == 1 and known and known <= done):
                # of arrived records; the other actor may be writing a file now
                files = [images.out / r["file"] for r in made]
                written.update({file: file.stat().st_mtime_ns for file in files})
                killed.append(actor_processes()[0])
                os.kill(killed[-1], signal.SIGKILL)

        run_all(self, items, finish, rows)

    monkeypatch.setattr(RayExecutor, "run_all", run)
    assert images.job(*ACTORS, rows=rows) == 0 and len(set(killed)) == 2
    assert images.content == whole.content and lines(images.out) == lines(whole.out)
    assert all(file.stat().st_mtime_ns == time for file, time in written.items())


class Deadly(Images):
    """Ends its process when it makes anything."""

    def serve(self, *_: Any, **__: Any) -> Any:
        os._exit(1)


def test_an_item_that_kills_its_process_fails(tmp_path: Path) -> None:
    (item,) = make_items([Row("a", CAPTIONS[0])], 0)
    executor = RayExecutor(Deadly(model=str(folders("images")[0]), out=tmp_path, rows=1), 1)
    try:
        with pytest.raises(ItemsFailed, match="its process died") as caught:
            executor.run_all([item], lambda record: pytest.fail("nothing is made"))
    finally:
        executor.close()
    assert caught.value.items == [item]
