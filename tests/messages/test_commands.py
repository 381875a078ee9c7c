"""Command lines that are refused in one line, before a model is loaded; the mended line loads one.

A row is a line, words of what is said, the line instead, and the code if it is not 2.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

import mmaccel
from mmaccel import loading
from mmaccel.cli import main
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.media import image
from tests.fixtures.tiny_model import CAPTIONS, build_tiny_clips, masked_beside_plain

LONG = "9" * 5000
FILE = "generate --prompts p.txt"
ASK = "answer a.png 'what colour is the star?'"
SPEAK = "speak fox --model x --codec y"
ANIMATE = "animate a.png --model x --codec y"
LINES: tuple[tuple[Any, ...], ...] = (
    # words of the command line
    ("generate --xyzzy", "No such option: --xyzzy; see mmaccel generate --help", None),
    ("generate x --num_images 2", "Possible options: --num-images", "generate x --num-images 2"),
    ("comfy", "see mmaccel comfy --help", None),
    ("generate x --policy jacoby", "did you mean jacobi?", "generate x --policy jacobi"),
    ("generate x --policy autoregressive --window 3", "'window'", "generate x --window 3"),
    ("generate x --kv-cache snapkv:bugdet=4", "did you mean budget?", None),
    ("speak x --kv-cache snapkv:budget", "kv_cache: expected name=value", None),
    ("animate x --drafts ''", "drafts: expected one of auto, coarse, ", None),
    # what goes with what
    (f"{FILE} caption", "--prompts: expected no prompt with it", FILE),
    ("generate x --shard 1/2", "--shard: expected --prompts FILE", f"{FILE} --shard 1/2"),
    ("speak x --json", "--json: expected --prompts FILE with it", "speak --prompts p.txt --json"),
    (f"{FILE} --shard 0/2", "--shard: expected i/n", f"{FILE} --shard 1/2"),
    ("generate --prompts empty.txt", "at least one prompt, received none", FILE),
    ("speak", "TEXT: expected a text to say, received none", SPEAK),
    (f"{SPEAK} --max-seconds nan", "max_seconds: expected a number", f"{SPEAK} --max-seconds 1"),
    (f"{SPEAK} --stdout --batch-size 2", "none with --stdout", f"{SPEAK} --batch-size 2"),
    ("animate none.png --model x --codec y", "start: expected a file", ANIMATE),
    ("animate words.txt --model x --codec y", "which PyAV does not read", ANIMATE),
    (f"{ANIMATE} --format avi", "one of mp4, webp, gif", f"{ANIMATE} --format gif"),
    (f"{ANIMATE} --start a.png", "--start: expected none", ANIMATE),
    ("animate a.png", "such as --model nvidia/Cosmos-Predict1-4B", ANIMATE),
    ("answer 'what colour?'", "image: expected at least one file before the question", ASK),
    ("answer a.png", "question: expected it after the images, received the file", ASK),
    ("answer a.png a.png 'is <image> red?'", "images: expected 1, one for each <image>", ASK),
    (f"{ASK} --visual-tokens dart", "DART: expected one of keep and n_keep",
     f"{ASK} --visual-tokens dart --keep 1"),
    (f"{ASK} --keep 0.5", "--keep: expected --visual-tokens with it", ASK),
    (f"{ASK} --json .", "--json: expected a file name", ASK),
    # too many, too deep, too long
    ("generate x --count 1000000000", "--num-images", None),
    (f"generate x --policy jacobi --set window={'[' * 2000}", "at most 16 brackets", None),
    ("generate x --device \x1b[31mcuda", r"received '\x1b[31mcuda'", None),
    # folders
    *((f"{command} x --out {out}", f": expected a {says}", None, code)
      for command in ("generate", "speak")
      for out, code, says in (
          ("words.txt", 1, "folder that can be written, received 'words.txt' (Not a directory)"),
          ("lost", 1, "folder that can be written, received 'lost'"),
          (f"new/{LONG}", 2, "name that this system takes"))),
    ("generate x --out ''", "expected a path, received ''", "generate x --out new"),
    # measuring
    ("bench --guidance one", "guidance_scale … a finite number … 'one'", "bench --guidance 1"),
    ("bench --policies jacobi,mc-sjd --windows adaptive", "a fixed width for mc-sjd", None),
    ("bench --policies autoregressive --drafts left", "--drafts: expected none", None),
    ("evaluate pictures none --against many", "received none in", None),
    ("evaluate pictures many --against many", "6x6 (0.png) … 8x8 (1.png)", None, 1),
    ("evaluate export many --suite genevall --prompts p.txt --out o", "one of geneval, dpg", None),
    ("evaluate speed --runs 19 --out o", "--runs … 20 … p90", "evaluate speed --runs 20 --out o"),
    ("evaluate exactness --generate mine:none", "--generate … 'mine:none'", None),
)  # fmt: skip
LOADED = (  # lines whose words only the model knows: it is opened
    ("generate 'a green dog' --model scenes --out o", "received 'dog'; it knows: a", 2),
    ("generate x --model scenes --size 64x --out o", "--size: expected pixels such as 768", 2),
    ("generate --prompts full/p.txt --model scenes --out full", "without a manifest … --resume", 2),
    ("generate 'a red fox' --model {masked} --policy jacobi --out o", "decodes a window, not", 2),
    ("generate x --model {masked} --policy entropy-bounded --set gama=1", "'gama'", 2),
    ("generate x --model {masked} --cuda-graphs on --out o", "cuda_graphs=True", 1),
    ("animate 'a rad circle' --model {clips} --out o", "received 'rad' (nearest: 'red')", 2),
    ("animate a.png --model {clips} --out o", "give a prompt and --start a.png", 2),
)
_ID = "id: expected 1 to 100 letters"
ROWS = (  # lines of a prompt file, and what is said of them
    ('{"prompt": "x", "seeds": 1}', "line 1:  … 'seeds' … id, prompt … leave it out"),
    ('{"prompt": "x", "n": 0}', "line 1: n: expected an integer in 1..100000, received 0"),
    ('{"prompt": "x", "size": "16385x8"}', "size: expected pixels … up to 16384"),
    ('{"prompt": "x", "params": 3}', "params: expected names and values"),
    ('{"prompt": "x", "id": "../../etc/x"}', f"{_ID} … part of a file name"),
    ('{"prompt": "x", "id": "\\u001b[2J"}', rf"{_ID} … '\x1b[2J'"),
    ('{"prompt": "x", "prompt": "y"}', "a name occurs twice"),
    ('{"prompt": "x", "n": 1, "num_images": 2}', "'num_images': expected n once"),
    ('{"n": 1}', "line 1: prompt: expected text … write a prompt"),
    ('{"prompt": "\\ud800"}', "prompt: expected text … surrogates"),
    ("[" * 100_000, "line 1: expected JSON"),
    ('{"prompt": "x"}\n{"n": 1}\nno', "received 2 that … line 2: … line 3:"),
    ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "A"}', "line 2 … 'A'"),
    ("\n".join(['{"prompt": "x", "n": 100000}'] * 21), "at most 2000000"),
    (json.dumps({"prompt": "x" * 900_000}), "20000 characters … 900000"),
)
TABLES = (
    ("prompt;top_p\nx;0,5\n", "line 2: top_p: expected … a point as in 0.5"),
    ("text\nx\n", "line 1: expected a heading … 'text'"),
    ("prompt;n\nx;1;2\n", "line 2: expected 2 cells … 3 … ';'"),
    ("prompt,n\nx,1\ny\n", "line 3: expected 2 cells … an empty one takes"),
    ('prompt\n"x\n', "expected CSV"),
)
LOADERS = ("open_pipeline", "open_with_parts")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lines name."""
    monkeypatch.chdir(tmp_path)
    image().save("a.png")
    Path("words.txt").write_text("no image")
    Path("p.txt").write_text("a red circle\n")
    Path("empty.txt").write_text("\n")
    Path("lost").symlink_to("nowhere")
    for name in ("none", "many", "full"):
        Path(name).mkdir()
    Path("full/p.txt").write_text("a red circle\n")
    Path("full/manifest.jsonl").write_text("x")
    for k, side in enumerate((6, 8)):
        Image.new("RGB", (side, side)).save(f"many/{k}.png")
    Path("mine.py").touch()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for every loader."""
    found = Mock(side_effect=UnsupportedModelError("a model: expected none, received one; stop"))
    for name in LOADERS:
        monkeypatch.setattr(loading, name, found)
    for pipeline in (
        mmaccel.TextToImage, mmaccel.TextToVideo, mmaccel.TextToSpeech, mmaccel.ImageToVideo,
        mmaccel.ImageToText,
    ):  # fmt: skip
        monkeypatch.setattr(pipeline, "from_pretrained", found)
    return found


def refuse(line: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed by a line that is refused; the error is on one line."""
    found = main(line)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert found == code, (found, lines)
    missing = [part for part in says.split(" … ") if part not in lines[-1]]
    assert not missing and len(lines[-1]) < 1000, lines[-1]
    assert "\x1b" not in said.out + said.err and "Traceback" not in said.err
    assert len(lines) == 1
    return said.out


@pytest.mark.parametrize("row", LINES, ids=lambda row: row[0][:60])
def test_a_line_is_refused_before_anything_is_loaded_and_the_mended_one_loads(
    row: Any, opened: Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, says, mended, code = row if len(row) == 4 else (*row, 2)
    before = set(tmp_path.rglob("*"))
    printed = refuse(shlex.split(line), says, code, capsys)
    assert ('"ok": false' in printed) == ("--json" in line and "--json " not in line)
    assert set(tmp_path.rglob("*")) == before and not opened.called
    if mended is not None:
        main(shlex.split(mended))
        assert opened.called, capsys.readouterr().err


@pytest.mark.parametrize(("line", "says", "code"), LOADED)
def test_a_line_that_a_model_refuses(
    line: str, says: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    if "{clips}" in line:
        line = line.replace("{clips}", str(build_tiny_clips(models)))
    if "{masked}" in line:
        line = line.replace("{masked}", str(masked_beside_plain(models)[0]))
    assert refuse(shlex.split(line.replace("x ", f"'{CAPTIONS[0]}' ")), says, code, capsys) == ""
    assert not list(tmp_path.glob("o/*.png"))


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *(("p.jsonl", *row) for row in ROWS),
        *(("p.csv", *row) for row in TABLES),
        ("p.txt", b"fine\n\xff\xfe\n", "expected UTF-8 … the byte 0xff in line 2"),
    ],
)
def test_a_prompt_file_is_refused(
    name: str, content: str | bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(data)
    refuse(["generate", "--prompts", name], says, 2, capsys)
