"""kill -9 at random moments: what a resumed job leaves is what an undisturbed one leaves."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.batch.jobs import Jobs, content, lines
from tests.fixtures.forking import Child, Forker
from tests.fixtures.tiny_model import CAPTIONS

N_FOLDERS, N_KILLS = 3, 3  # of generate
N_PAGES = 3  # killed runs of gallery, and of evaluate
N_IMAGES = 40


def run_whole(child: Child) -> float:
    """Seconds of a run that nothing disturbs."""
    began = time.perf_counter()
    assert child.wait() == 0, child.printed()
    return time.perf_counter() - began


def kill_after(child: Child, seconds: float) -> bool:
    """Kill a run; whether it was still running."""
    time.sleep(seconds)
    child.send(9)
    code = child.wait()
    assert code in (-9, 0), child.printed()
    return code == -9


@pytest.mark.slow
def test_killed_jobs_of_images_resume_to_the_same_files(
    forker: Forker, tiny_folder: Path, tmp_path: Path
) -> None:
    """What was noted is not made again."""
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": N_IMAGES // 10} for k in range(10)]

    def start(jobs: Jobs) -> Child:
        return forker.start(*jobs.arguments("--batch-size", "4", "--resume", rows=rows))

    whole = Jobs(tmp_path / "whole", tiny_folder)
    seconds, draw, killed = run_whole(start(whole)), random.Random(23), []
    for k in range(N_FOLDERS):
        jobs, noted = Jobs(tmp_path / f"{k}", tiny_folder), []
        for _ in range(N_KILLS):
            rest = 1 - len(noted) / N_IMAGES  # of the job: moments lie within it
            killed.append(kill_after(start(jobs), seconds * rest * draw.random()))
            data = jobs.manifest.read_bytes() if jobs.manifest.exists() else b""
            now = data.splitlines(keepends=True)
            assert now[: len(noted)] == noted
            noted = [line for line in now if line.endswith(b"\n")]
        run_whole(start(jobs))
        assert content(jobs.out) == content(whole.out) and len(content(jobs.out)) == N_IMAGES
        assert lines(jobs.out) == lines(whole.out)
        assert jobs.manifest.read_bytes().splitlines(keepends=True)[: len(noted)] == noted
    assert sum(killed) >= len(killed) // 2, "the kills came too late"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gallery", "evaluate"])
def test_killed_reports_are_whole_or_those_of_before(
    forker: Forker, whole: Path, tmp_path: Path, command: str
) -> None:
    names = {"gallery": ["page.html"], "evaluate": ["report.json", "items.jsonl"]}[command]
    files = [tmp_path / name for name in names]

    def start() -> Child:
        if command == "gallery":
            return forker.start("gallery", str(whole), "--out", str(files[0]))
        options = ["--json", str(files[0]), "--items", str(files[1])]
        return forker.start("evaluate", "pictures", str(whole), *options)

    seconds, draw = run_whole(start()), random.Random(command)
    made = [file.read_bytes() for file in files]
    for k in range(N_PAGES):
        before = [b"of before"] * len(files) if k % 2 else [None] * len(files)
        for file, old in zip(files, before):
            file.unlink()
            if old is not None:
                file.write_bytes(old)
        kill_after(start(), seconds * draw.uniform(0.2, 1.1))
        for file, old, new in zip(files, before, made):
            assert (file.read_bytes() if file.exists() else None) in (old, new)
        run_whole(start())
        assert [file.read_bytes() for file in files] == made
