"""What is refused in one line before a model is loaded and before anything is written.

What each option takes is in tests/messages/commands.py, and what rows take in tests/messages.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import mmaccel
from mmaccel.cli import main
from tests.fixtures.media import image

LONG = "9" * 5000
FILE = "generate --prompts p.txt"
REFUSED = (
    # a prompt file beside options of the command line, and the other way round
    (f"{FILE} caption", 2, "--prompts: expected no prompt with it"),
    (f"{FILE} --kv-cache snapkv", 2, "--prompts: expected no --kv-cache with it"),
    ("generate x --shard 1/2", 2, "--shard: expected --prompts FILE with it"),
    ("speak x --json", 2, "--json: expected --prompts FILE with it"),
    (f"{FILE} --shard 0/2", 2, "--shard: expected i/n"),
    (f"{FILE} --actors 2", 2, "--actors: expected --executor ray"),
    (f"{FILE} --executor slurm", 2, "--executor"),
    ("generate --prompts empty.txt", 2, "expected at least one prompt, received none"),
    # methods of layers, drafts and trees
    ("generate x --kv-cache streaming", 2, "did you mean streaming-llm?"),
    ("generate x --kv-cache snapkv:bugdet=4", 2, "did you mean budget?"),
    ("speak x --kv-cache snapkv:budget", 2, "kv_cache: expected name=value"),
    ("animate x --drafts ''", 2, "drafts: expected one of auto, coarse, "),
    # too many, too deep, too long
    ("generate x --count 1000000000", 2, "--num-images"),
    (f"generate x --policy jacobi --window {LONG}", 2, "window: expected an integer in 1..4096"),
    (
        f"generate x --policy jacobi --set window={'[' * 2000}",
        2,
        "window: expected at most 16 brackets",
    ),
    ("generate x --device \x1b[31mcuda", 2, r"received '\x1b[31mcuda'"),
    # folders
    *(
        (f"{command} x --out {out}", code, f": expected a {said}")
        for command in ("generate", "speak")
        for out, code, said in (
            ("a.png", 1, "folder that can be written, received 'a.png' (Not a directory)"),
            ("lost", 1, "folder that can be written, received 'lost'"),
            (f"new/{LONG}", 2, "name that this system takes"),
        )
    ),
    ("generate x --out ''", 2, "expected a path, received ''"),
)


@pytest.mark.parametrize(("line", "code", "says"), REFUSED, ids=lambda v: str(v)[:50])
def test_it_is_refused_in_one_line(
    line: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    image().save("a.png")
    Path("p.txt").write_text("a red circle\n")
    Path("empty.txt").write_text("\n")
    Path("lost").symlink_to("nowhere")
    for pipeline in (mmaccel.TextToImage, mmaccel.TextToVideo, mmaccel.TextToSpeech):
        monkeypatch.setattr(pipeline, "from_pretrained", None)  # would not be callable
    before = set(tmp_path.rglob("*"))
    assert main(shlex.split(line)) == code
    said = capsys.readouterr()
    (error,) = said.err.splitlines()
    assert says in error and len(error) < 1000 and "\x1b" not in said.out + said.err
    assert ('"ok": false' in said.out) == ("--json" in line)
    assert set(tmp_path.rglob("*")) == before
