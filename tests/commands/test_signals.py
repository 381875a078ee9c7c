"""Signals: a command ends in words with exit code 130, keeps what is made, leaves nothing half."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fixtures.forking import Forker
from tests.fixtures.jobs import Command
from tests.fixtures.tiny_model import CAPTIONS

pytestmark = pytest.mark.slow

# sends the signals of `during` while the third image is written, and those of `after` while the
# command ends
SEND = """
import os, mmaccel.cli as cli
from mmaccel.outputs import image_files
write, report, count = image_files.write_whole, cli._report, [0]
def send(numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
def whole(file, save):
    count[0] += 1
    write(file, lambda path: (save(path), count[0] == 3 and send({during})))
def told(*arguments):
    send({after})
    return report(*arguments)
image_files.write_whole, cli._report = whole, told
"""
INT, TERM, HUP = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command("images", tmp_path)


@pytest.mark.parametrize(
    ("during", "after"),
    [([INT], []), ([TERM], []), ([HUP], []), ([TERM], [HUP]), ([INT], [INT] * 2)],
)
def test_a_signal_ends_a_run_in_words(
    forker: Forker, command: Command, during: list[int], after: list[int]
) -> None:
    """The image that is being written is kept."""
    before = SEND.format(during=during, after=after)
    child = forker.start(*command.arguments(CAPTIONS[0], "--count", 9), before=before)
    assert child.wait() == 130
    out, err = child.printed()
    assert out == "" and "Traceback" not in err
    third = "ended at once"  # at the third signal
    assert (third if len(after) == 2 else f"stopped; 3 of 9 images are in {command.out}") in err
    assert len(command.files) == 3


def test_a_signal_at_the_very_end_changes_nothing(forker: Forker) -> None:
    """Python resets handlers before it frees modules, which takes about a second with torch."""
    before = f"""
import os, sys, types
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {TERM})
sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].late = Late()
"""
    child = forker.start("--version", before=before)
    assert child.wait() == 0 and child.printed()[1] == ""


def test_under_nohup_a_closed_terminal_stops_nothing(forker: Forker, command: Command) -> None:
    before = f"import signal; signal.signal({HUP}, signal.SIG_IGN)\n"
    before += SEND.format(during=[HUP], after=[])
    child = forker.start(*command.arguments(CAPTIONS[0], "--count", 4), before=before)
    assert child.wait() == 0 and len(command.files) == 4
