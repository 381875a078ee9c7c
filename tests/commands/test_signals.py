"""Signals: a command ends in words with exit code 130, keeps what is made, leaves nothing half."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from mmaccel.batch.ray_executor import RayExecutor
from mmaccel.batch.worker import Setup
from mmaccel.errors import OptionError
from tests.fixtures.forking import Child, Forker
from tests.fixtures.tiny_model import CAPTIONS

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


def start(forker: Forker, model: Path, out: Path, count: int, **options: str) -> Child:
    fixed = ["--model", str(model), "--out", str(out), "--count", str(count), "--seed", "0"]
    return forker.start("generate", CAPTIONS[0], *fixed, **options)  # type: ignore[arg-type]


def check_whole(out: Path) -> int:
    """Every file is a whole image; returns their number."""
    files = list(out.iterdir())
    for file in files:
        assert file.suffix == ".png" and file.name[0] != ".", file
        with Image.open(file) as image:
            image.load()
    return len(files)


@pytest.mark.parametrize(
    ("during", "after"), [([INT], []), ([TERM], []), ([HUP], []), ([INT], [INT]), ([TERM], [HUP])]
)
def test_a_signal_ends_a_run_in_words(
    forker: Forker, tiny_folder: Path, tmp_path: Path, during: list[int], after: list[int]
) -> None:
    before = SEND.format(during=during, after=after)
    child = start(forker, tiny_folder, tmp_path / "out", 9, before=before)
    assert child.wait() == 130
    out, err = child.printed()
    assert out == "" and "Traceback" not in err
    assert f"mmaccel: stopped; 2 of 9 images are in {tmp_path / 'out'}" in err
    assert check_whole(tmp_path / "out") == 2


def test_the_third_signal_ends_the_process_at_once(
    forker: Forker, tiny_folder: Path, tmp_path: Path
) -> None:
    before = SEND.format(during=[INT], after=[INT, INT]) + "import atexit, time\n"
    child = start(forker, tiny_folder, tmp_path / "out", 9, before=before)
    assert child.wait() == 130
    assert "ended at once" in child.printed()[1] and "Traceback" not in child.printed()[1]


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


def test_under_nohup_a_closed_terminal_stops_nothing(
    forker: Forker, tiny_folder: Path, tmp_path: Path
) -> None:
    before = f"import signal; signal.signal({HUP}, signal.SIG_IGN)\n"
    before += SEND.format(during=[HUP], after=[])
    child = start(forker, tiny_folder, tmp_path / "out", 4, before=before)
    assert child.wait() == 0
    assert check_whole(tmp_path / "out") == 5  # and a sheet


@pytest.mark.parametrize("mode", ["single", "batch"])
def test_ctrl_c_twice_at_any_moment(
    forker: Forker, tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    draw, made = random.Random(mode), 0
    for k in range(4):
        out, prompts = tmp_path / f"out{k}", tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": CAPTIONS[0], "n": 400}))
        if mode == "single":
            child = start(forker, tiny_folder, out, 400)
        else:
            arguments = ["--prompts", str(prompts), "--out", str(out), "--model", str(tiny_folder)]
            child = forker.start("generate", *arguments)
        end = time.monotonic() + 20
        while len(list(out.glob("*.png"))) < 2 and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        child.send(signal.SIGINT)
        time.sleep(draw.choice([0, 0.001, 0.01, 0.05]))
        child.send(signal.SIGINT)
        assert child.wait() == 130
        err = child.printed()[1]
        assert "Traceback" not in err and "Exception ignored" not in err
        assert err.count("mmaccel: stop") <= 2 and "mmaccel: " in err
        (out / "manifest.jsonl").unlink(missing_ok=True)
        made += check_whole(out)
    assert made >= 8


def test_ray_takes_no_signal_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler of SIGTERM ends the driver with exit code 15."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=init,
        cluster_resources=lambda: {"CPU": 1},
        shutdown=lambda: None,
    )
    monkeypatch.setattr("mmaccel.batch.ray_executor._import_ray", lambda: fake)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OptionError, match="--actors"):
        RayExecutor(Setup("scenes", tmp_path), 9)
    assert signal.getsignal(signal.SIGTERM) is before
