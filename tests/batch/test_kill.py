"""kill -9: a resumed job leaves what an undisturbed one leaves, and nothing is made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.forking import Forker
from tests.fixtures.jobs import N_ITEMS, Command, lines, whole_of

pytestmark = pytest.mark.slow

# kills the process at the n-th record: before its file has a name, between both, or amid its line
KILL = """
import os
from mmaccel.batch.manifest import Manifest, to_line
from mmaccel.outputs import whole_files
replace, append, left = os.replace, Manifest.append, [{n}, {n}]
def whole(source, target):
    left[0] -= str(target).endswith({suffix!r})
    if {moment!r} == "mid-item" and not left[0]:
        os.kill(os.getpid(), 9)
    replace(source, target)
def noted(self, record):
    left[1] -= 1
    if {moment!r} != "mid-item" and not left[1]:
        if {moment!r} == "mid-line":
            self._opened.write(to_line(record)[:40])
        os.kill(os.getpid(), 9)
    append(self, record)
os.replace, Manifest.append = whole, noted
"""
MOMENTS = [  # clips and speech have a JSON file beside each item
    ("images", "mid-item"),
    ("images", "between"),
    ("images", "mid-line"),
    ("clips", "mid-item"),
    ("speech", "between"),
]


def noted_in(command: Command) -> list[bytes]:
    """The whole lines of the manifest."""
    data = command.manifest.read_bytes() if command.manifest.exists() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize(("kind", "moment"), MOMENTS)
def test_a_killed_job_and_its_killed_resume_go_on(
    forker: Forker, tmp_path: Path, kind: str, moment: str
) -> None:
    command, whole = Command(kind, tmp_path), whole_of(kind)
    arguments, noted = [*command.arguments(*command.prompts()), "--batch-size", "2"], list[bytes]()
    for n in (3, 2):
        before = KILL.format(n=n, moment=moment, suffix=command.suffix)
        assert forker.start(*arguments, "--resume", before=before).wait() == -9
        now = noted_in(command)
        assert len(now) == len(noted) + n - 1 and now[: len(noted)] == noted
        noted = now
    child = forker.start(*arguments, "--resume")
    assert child.wait() == 0, child.printed()
    assert f"{N_ITEMS - len(noted)} {command.unit}" in child.printed()[1]
    assert command.content == whole.content and lines(command.out) == lines(whole.out)
