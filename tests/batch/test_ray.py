"""`--executor ray`: two actors write the same bytes as one process, also when one is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.manifest import Record
from mmaccel.batch.prompts import make_items, read_prompts
from mmaccel.batch.worker import Setup, Worker
from mmaccel.cli import main
from mmaccel.errors import OptionError
from tests.fixtures.tiny_model import CAPTIONS

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
N_ITEMS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Ray on this machine, for all tests of this file."""
    import mmaccel

    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    sockets = tmp_path_factory.mktemp("r", numbered=False)
    root = str(Path(mmaccel.__file__).parents[1])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}},
        _temp_dir=str(sockets) if len(str(sockets)) < 40 else None,
    )
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of N_ITEMS items."""
    file = tmp_path / "p.jsonl"
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": 5} for k in range(N_ITEMS // 5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def actor_processes() -> list[int]:
    """Processes of live actors."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::WorkerActor"):
            found.append(int(folder.name))
    return found


def whole(prompts: Path, setup: Setup) -> dict[tuple[str, int], Record]:
    """The records of one worker in this process."""
    worker, records = Worker(setup), []
    worker.run_all(make_items(read_prompts(str(prompts)), 0), records.append)
    return {(r["id"], r["k"]): r for r in records}


def test_actors_write_the_same_as_one_process(
    prompts: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "ray"):
        (tmp_path / name).mkdir()
    expected = whole(prompts, Setup(str(tiny_folder), tmp_path / "one", rows=4))
    arguments = ["generate", "--prompts", str(prompts), "--model", str(tiny_folder), "--out",
                 str(tmp_path / "ray"), "--executor", "ray", "--actors", "2",
                 "--batch-size", "4", "--seed", "0", "--json"]  # fmt: skip
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["data"]["made"] == N_ITEMS
    made = map(json.loads, (tmp_path / "ray" / "manifest.jsonl").read_text().splitlines())
    assert {(r["id"], r["k"]): r for r in made} == {
        key: record | {"job_seed": 0} for key, record in expected.items()
    }
    for record in expected.values():
        one, two = (tmp_path / name / record["file"] for name in ("one", "ray"))
        assert one.read_bytes() == two.read_bytes()


def test_a_killed_actor_loses_nothing_and_repeats_nothing(
    prompts: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    from mmaccel.batch.ray_executor import RayExecutor

    for name in ("one", "ray"):
        (tmp_path / name).mkdir()
    setup = Setup(str(tiny_folder), tmp_path / "ray", rows=2)
    items = make_items(read_prompts(str(prompts)), 0)
    executor = RayExecutor(setup, 2)
    records: list[Record] = []
    recorded: dict[str, int] = {}
    killed: list[int] = []

    def on_finish(record: Record) -> None:
        records.append(record)
        if len(records) in (3, 10):
            for file in [r["file"] for r in records]:
                recorded[file] = (tmp_path / "ray" / file).stat().st_mtime_ns
            killed.append(actor_processes()[0])
            os.kill(killed[-1], signal.SIGKILL)

    try:
        executor.check(items)
        executor.run_all(items, on_finish)
    finally:
        executor.close()
    assert len(set(killed)) == 2
    keys = [(r["id"], r["k"]) for r in records]
    assert len(keys) == len(set(keys)) == N_ITEMS
    expected = whole(prompts, Setup(str(tiny_folder), tmp_path / "one", rows=2))
    assert {(r["id"], r["k"]): r for r in records} == expected
    for file, written in recorded.items():
        assert (tmp_path / "ray" / file).stat().st_mtime_ns == written


def test_an_item_that_kills_its_process_fails(
    prompts: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    from mmaccel.batch.job import ItemsFailed
    from mmaccel.batch.ray_executor import RayExecutor

    items = make_items(read_prompts(str(prompts)), 0)[:1]
    executor = RayExecutor(Setup(str(tiny_folder), tmp_path, rows=1), 1)
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
    prompts: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmaccel.batch.ray_executor import RayExecutor

    arguments = ["generate", "--prompts", str(prompts), "--model", str(tiny_folder), "--out",
                 str(tmp_path / "ray"), "--executor", "ray", "--actors", "1"]  # fmt: skip
    assert main([*arguments, "--temperature", "0.5", "--policy", "stepwise"]) == 2
    said = capsys.readouterr().err
    assert "policy: expected one of" in said and "Traceback" not in said
    none = [str(tmp_path / "none") if word == str(tiny_folder) else word for word in arguments]
    assert main(none) == 2 and "none" in capsys.readouterr().err
    with pytest.raises(OptionError, match=r"--actors: expected 1..2"):
        RayExecutor(Setup(str(tiny_folder), tmp_path), 3)
