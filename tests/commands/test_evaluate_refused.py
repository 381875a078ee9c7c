"""`mmaccel evaluate`: bad input is told before work, in one line; nothing is left half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.image_folder import list_items, read_lines, read_list, read_pixels

CODE = """
import torch
calls = []
def means(images):
    calls.append(len(images))
    with open("worked", "a") as file:
        file.write("x")
    return pictures.float().mean((2, 3))
def text(images):
    return "no numbers"
def one(images, texts):
    return torch.ones(len(texts), 2)
def turned(images):
    return torch.ones(len(images), 2) * 1j
def names(images, texts):
    return texts, texts
def largest(images, texts):
    with open("largest", "a") as file:
        file.write(f"{len(images)} ")
    e = torch.ones(len(texts), 2)
    return e, e
"""


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def save(folder: Path, count: int, captions: bool = False) -> Path:
    folder.mkdir()
    for k in range(count):
        Image.new("RGB", (6, 6), (9 * k, 0, 0)).save(folder / f"{k}.png")
    lines = [{"file": f"{k}.png", "prompt": f"image {k}"} for k in range(count)]
    if captions:
        (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, and callables of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_callables", raising=False)
    (tmp_path / "own_callables.py").write_text(CODE)
    (tmp_path / "not_python.py").write_text("def means(:\n")
    save(tmp_path / "five", 5)
    save(tmp_path / "told", 5, captions=True)
    save(tmp_path / "single", 1)
    return tmp_path


OWN = ("--features", "own_callables:means")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--against", "none", *OWN), 2, "expected a folder, received 'none'"),
        (("--against", "single", *OWN), 2, "on both sides, received 5 and 1"),
        (("--against", "five", *OWN, "--clip", "no_module:f"), 2, "no_module"),
        (("--against", "five", *OWN, "--clip", "own_callables:one"), 2, "images with captions"),
        (("--against", "five", *OWN, "--count", 9), 2, "--against scenes with it"),
        (("--against", "scenes", *OWN, "--count", 1), 2, "on both sides, received 5 and 1"),
        (("--against", "five", "--features", "not_python:means"), 2, "not_python"),
        (("--against", "five", "--features", ".own_callables:means"), 2, "name a callable"),
        (("--against", "five", "--features", "own_callables:calls"), 2, "name a callable"),
        (OWN, 2, "--against with them"),
        (("--weights", "w.pth"), 2, "--against with them"),
        (("--against", "five", *OWN, "--items", "five"), 2, "expected a file name"),
    ],
    ids=str,
)
def test_images_are_not_extracted_before_the_options_are_right(
    here: Path, options: Any, code: int, words: str, capsys: Any
) -> None:
    assert evaluate("pictures", "five", *options) == code
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not (here / "worked").exists()


def test_what_callables_return_is_looked_at(here: Path, capsys: Any) -> None:
    options = ("--against", "five", "--features", "own_callables:text")
    assert evaluate("pictures", "five", *options) == 1
    assert "expected a tensor [B, D], received str" in capsys.readouterr().err
    options = ("--against", "five", "--features", "own_callables:turned")
    assert evaluate("pictures", "five", *options) == 1
    assert "expected real numbers, received complex ones" in capsys.readouterr().err
    for name, words in (("one", "received 1 (Tensor)"), ("names", "received 2 (list, list)")):
        assert evaluate("pictures", "told", "--clip", f"own_callables:{name}") == 1
        assert words in capsys.readouterr().err


def test_clip_holds_one_batch_at_a_time(here: Path) -> None:
    file = here / "r.json"
    options = ("--clip", "own_callables:largest", "--batch-size", 2, "--json", file)
    assert evaluate("pictures", "told", *options) == 0
    assert (here / "largest").read_text() == "2 2 1 "
    assert json.loads(file.read_text())["clip"]["mean"] == pytest.approx(100)
    assert json.loads(file.read_text())["clip"]["n"] == 5


def test_few_images_are_said_beside_the_distance(here: Path, capsys: Any) -> None:
    save(here / "three", 3)
    file = here / "r.json"
    assert evaluate("pictures", "five", "--against", "three", *OWN, "--json", file) == 0
    assert "low rank" in json.loads(file.read_text())["frechet"]["bias"]  # 3 of width 3
    assert evaluate("pictures", "five", "--against", "five", *OWN, "--json", file) == 0
    assert "low rank" not in json.loads(file.read_text())["frechet"]["bias"]


def test_deep_images_are_not_cut_at_255(tmp_path: Path) -> None:
    wide = (np.arange(16, dtype=np.uint16) * 4096).reshape(4, 4)
    Image.fromarray(wide).save(tmp_path / "a.png")
    with pytest.raises(OptionError, match="8 bits a channel, received mode I"):
        list(read_pixels(list_items(tmp_path)))


def test_an_image_too_large_to_be_meant_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(OptionError, match="a.jpg"):
        list(read_pixels(list_items(tmp_path)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "on line 1"),
        ('"text"', "on line 1"),
        ('{"file": "0.png", "prompt": 5}', "on line 1"),
        ('{"file": ["0.png"], "prompt": "a"}', "on line 1"),
        ('{"file": "0.png", "prompt": "a", "seed": "3"}', "on line 1"),
        ('{"file": "9.png", "prompt": "a"}', "a file in its folder, received '9.png'"),
        ('{"file": "../0.png", "prompt": "a"}', "a file in its folder"),
        ('{"file": "0.png", "prompt": "a"}\n{"file": "0.png", "prompt": "b"}', "again on line 2"),
    ],
)
def test_bad_lines_of_a_list(tmp_path: Path, line: str, words: str) -> None:
    folder = save(tmp_path / "f", 2)
    (folder / "prompts.jsonl").write_text(line)
    with pytest.raises(OptionError, match=words):
        list_items(folder)


def test_lines_end_at_line_feeds_alone(tmp_path: Path, capsys: Any) -> None:
    folder = save(tmp_path / "f", 1)
    told = {"file": "0.png", "prompt": "a\u2028b\u0085c\x0cd"}
    text = "\ufeff" + json.dumps(told, ensure_ascii=False) + "\r\n\r\n"
    (folder / "prompts.jsonl").write_bytes(text.encode())
    assert read_list(folder / "prompts.jsonl")["0.png"]["prompt"] == told["prompt"]
    (tmp_path / "t").write_bytes(b"one\x0ctwo\r\n\nthree")
    assert read_lines(tmp_path / "t") == ["one\x0ctwo", "", "three"]
    (tmp_path / "a").write_text("one\u2028two\nthree\n")
    (tmp_path / "b").write_text("one two\nthree\n")
    assert evaluate("words", tmp_path / "a", tmp_path / "b") == 0
    assert "0.00 %" in capsys.readouterr().out
    (folder / "prompts.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="no UTF-8"):
        list_items(folder)


def export(folder: Path, suite: str, prompts: Path, out: Path, *options: str) -> int:
    fixed = ("--suite", suite, "--prompts", prompts, "--out", out)
    return evaluate("export", folder, *fixed, *options)


def geneval(tmp_path: Path) -> Path:
    file = tmp_path / "metadata.jsonl"
    lines = [json.dumps({"prompt": f"image {k}"}) + "\n" for k in range(3)]
    file.write_text("".join(lines))
    return file


def test_an_export_has_its_name_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts, out = save(tmp_path / "f", 3, captions=True), geneval(tmp_path), tmp_path / "o"
    before = os.fsync
    calls: list[int] = []

    def interrupted(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 5:
            raise KeyboardInterrupt
        before(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        assert export(folder, "geneval", prompts, out, "--per-prompt", "1") == 130
    left = {file.name for file in tmp_path.iterdir()}
    assert len(calls) >= 5 and left == {"f", "metadata.jsonl"}
    out.mkdir()
    assert export(folder, "geneval", prompts, out, "--per-prompt", "1") == 0
    assert sorted(p.name for p in out.iterdir()) == ["00000", "00001", "00002"]
    assert {file.name for file in tmp_path.iterdir()} == {"f", "metadata.jsonl", "o"}


def test_images_that_are_links_are_not_exported_as_links(tmp_path: Path) -> None:
    store, folder = save(tmp_path / "store", 1), tmp_path / "f"
    folder.mkdir()
    (folder / "0.png").symlink_to(Path("..") / "store" / "0.png")
    (folder / "prompts.jsonl").write_text('{"file": "0.png", "prompt": "image 0"}')
    prompts, out = tmp_path / "m.jsonl", tmp_path / "deep" / "o"
    prompts.write_text('{"prompt": "image 0"}')
    assert export(folder, "geneval", prompts, out, "--per-prompt", "1") == 0
    made = out / "00000/samples/0000.png"
    assert not made.is_symlink() and made.read_bytes() == (store / "0.png").read_bytes()


@pytest.mark.parametrize(
    ("suite", "content", "options", "words"),
    [
        ("geneval", '{"prompt": 5}', (), "expected a text each, received 5"),
        ("geneval", '{"prompt": " "}', (), "expected a text each"),
        ("geneval", "[1]", (), "TypeError"),
        ("hpsv2", '{"a cat": 1}', (), "no list in"),
        ("hpsv2", '["a", null]', (), "received None for 'prompts/00001'"),
        ("partiprompts", "Category\tPrompt\nAnimals\n", (), "received None for '00000'"),
        ("partiprompts", "Prompt\n" + "x" * 200_000, (), "field larger"),
        ("vbench", "\n\n", (), "received none in"),
        ("hpsv2", '["image 0", "image 9"]', ("--partial",), "scores the next image"),
        ("dpg", "a", (), "a folder of *.txt"),
        ("geneval", '{"prompt": "image 0"}', ("--per-prompt", "0"), "at least 1"),
        ("hpsv2", '["image 0"]', ("--per-prompt", "2"), "expected 1 for hpsv2"),
    ],
)
def test_bad_prompts_of_suites(
    tmp_path: Path, suite: str, content: str, options: tuple[str, ...], words: str, capsys: Any
) -> None:
    folder, prompts = save(tmp_path / "f", 2, captions=True), tmp_path / "prompts.json"
    prompts.write_text(content)
    assert export(folder, suite, prompts, tmp_path / "o", *options) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"f", "prompts.json"}


def test_an_export_takes_no_file_for_its_folder(tmp_path: Path, capsys: Any) -> None:
    folder, prompts = save(tmp_path / "f", 3, captions=True), geneval(tmp_path)
    assert export(folder, "geneval", prompts, prompts, "--per-prompt", "1") == 2
    assert "an empty folder, or none yet" in capsys.readouterr().err
    assert len(prompts.read_text().splitlines()) == 3


def test_unlike_grids_leave_nothing(tmp_path: Path, capsys: Any) -> None:
    folder, prompts = save(tmp_path / "f", 4), tmp_path / "p"
    Image.new("RGB", (8, 8)).save(folder / "3.png")
    lines = [json.dumps({"file": f"{k}.png", "prompt": "a"}) + "\n" for k in range(4)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    prompts.mkdir()
    (prompts / "item.txt").write_text("a")
    assert export(folder, "dpg", prompts, tmp_path / "o") == 1
    assert "expected one size for a grid" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"f", "p"}


def test_words_in_several_forms_are_one(tmp_path: Path, capsys: Any) -> None:
    composed, parts = tmp_path / "a", tmp_path / "b"
    composed.write_text("un café\n")
    parts.write_text("un cafe\u0301\n")
    assert evaluate("words", composed, parts) == 0
    assert "word error rate: 0.00 %" in capsys.readouterr().out
    composed.write_text("don't well-known \uff21\n")
    parts.write_text("Don\u02bct well\u2011known a\n")
    assert evaluate("words", composed, parts, "--simplify") == 0
    assert "0.00 %" in capsys.readouterr().out


def test_an_empty_reference_has_no_rate(tmp_path: Path, capsys: Any) -> None:
    empty, heard, file = tmp_path / "a", tmp_path / "b", tmp_path / "r.json"
    empty.write_text("\n")
    heard.write_text("something\n")
    assert evaluate("words", empty, heard, "--json", file) == 2
    assert "at least one word" in capsys.readouterr().err and not file.exists()
    empty.write_text("\nsome\n")
    heard.write_text("thing\nsome\n")  # one word inserted, one word in all
    assert evaluate("words", empty, heard, "--json", file) == 0
    assert json.loads(file.read_text())["rate"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--count", 1), "--count: expected at least 2 to compare features, received 1"),
        (("--seed", 2**64), f"seed: expected a 64-bit integer, received {2**64}"),
    ],
)
def test_exactness_is_refused_before_a_model_is_opened(
    options: tuple[Any, ...], words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmaccel.loading.open_pipeline", lambda *_, **__: pytest.fail("opened"))
    assert evaluate("exactness", "scenes", *options) == 2
    assert words in capsys.readouterr().err
