"""`mmaccel evaluate`: options, folders and files that are refused before anything is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.outputs.sound_files import to_wav
from tests.fixtures.commands import Said, say
from tests.messages.case import Refused

CALLABLES = """
import torch
number = 5
def means(images):
    open("worked", "a").close()
    return images.float().mean((2, 3))
def flat(images):
    return images.float().mean()
def nothing(images):
    return images.flatten(1) / 0 * 0
def short(images, texts):
    return torch.ones(len(texts), 2), torch.ones(1, 2)
"""
MEANS = ("--features", "mine:means")
AGAINST = ("pictures", "five", "--against", "five")


def _make_folder(folder: Path) -> None:
    """`five` images, the same `listed` with prompts, a `single` one, a `broken` one, `mixed` sizes,
    an `empty` folder; callables."""
    for name, count in (("five", 5), ("listed", 5), ("single", 1), ("mixed", 2), ("empty", 0)):
        (folder / name).mkdir()
        for k in range(count):
            Image.new("RGB", (6, 6), (9 * k, 0, 0)).save(folder / name / f"{k}.png")
    Image.new("RGB", (8, 8)).save(folder / "mixed" / "z.png")
    for name, sizes in (("moving", (6, 6)), ("unlike", (6, 8))):
        (folder / name).mkdir()
        for side in sizes:
            number = len(list((folder / name).iterdir()))
            pages = [Image.new("RGB", (side, side), (40 * k, 0, 0)) for k in range(3)]
            pages[0].save(folder / name / f"{number}.gif", save_all=True, append_images=pages[1:])
    (folder / "sounds").mkdir()
    for name in ("a", "b"):
        (folder / "sounds" / f"{name}.wav").write_bytes(to_wav(torch.zeros(9000), 8000))
    (folder / "torn").mkdir()
    for name in ("a", "b"):
        (folder / "torn" / f"{name}.wav").write_bytes(b"RIFF")
    lines = [json.dumps({"file": f"{k}.png", "prompt": f"image {k}"}) for k in range(5)]
    (folder / "listed" / "prompts.jsonl").write_text("\n".join(lines))
    for name in ("broken", "deep"):
        (folder / name).mkdir()
    whole = (folder / "five" / "1.png").read_bytes()
    (folder / "broken" / "1.png").write_bytes(whole[: len(whole) // 2])
    wide = (np.arange(16, dtype=np.uint16) * 4096).reshape(4, 4)
    for name in ("a.png", "b.png"):
        Image.fromarray(wide).save(folder / "deep" / name)
    (folder / "mine.py").write_text(CALLABLES)
    (folder / "not_python.py").write_text("def means(:\n")


def _evaluate(*arguments: object, files: dict[str, str] | None = None) -> Callable[[], Any]:
    """A run in a folder of its own, which says one line on stderr and leaves nothing."""

    def run() -> None:
        with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            folder = Path(name)
            _make_folder(folder)
            for file, text in (files or {}).items():
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_text(text)
            before = {str(path) for path in folder.rglob("*")}
            patch.chdir(folder)
            patch.setattr("mmaccel.loading.open_pipeline", lambda *_, **__: pytest.fail("opened"))
            patch.delitem(sys.modules, "mine", raising=False)
            try:
                say("evaluate", *arguments)
            finally:
                found = {str(path) for path in folder.rglob("*")}
                assert not {path for path in found - before if "__pycache__" not in path}

    return run


def _case(name: str, arguments: tuple[object, ...], *says: str, **files: str) -> Refused:
    return Refused(name, _evaluate(*arguments, files=files), says, Said)


def _listed(line: str, *says: str) -> Refused:
    """A line of `prompts.jsonl` beside the images."""
    call = _evaluate("pictures", "five", files={"five/prompts.jsonl": line})
    return Refused(f"prompts.jsonl: {line}", call, says, Said)


def _suite(suite: str, content: str, *says: str, options: tuple[str, ...] = ()) -> Refused:
    """A file of prompts of a suite."""
    fixed = ("export", "listed", "--suite", suite, "--prompts", "p.json", "--out", "o")
    call = _evaluate(*fixed, *options, files={"p.json": content})
    return Refused(f"{suite} {' '.join(options)}: {content[:40]!r}", call, says, Said)


PICTURES = (
    _case("no images", ("pictures", "empty", "--against", "five"), "received none in"),
    _case("one image", ("pictures", "single", *AGAINST[2:], *MEANS), "at least 2", "[1, 3]"),
    _case("unlike sizes", ("pictures", "mixed", "--against", "five"), "6x6 (0.png)", "8x8 (z.png)"),
    _case("half an image", ("pictures", "broken", "--against", "five"), "1.png"),
    _case("16 bits", ("pictures", "deep", "--against", "deep"), "8 bits a channel", "mode I"),
    _case("others: no folder", (*AGAINST[:3], "none", *MEANS), "expected a folder", "'none'"),
    _case("a folder for figures", (*AGAINST, "--json", "empty"), "expected a file name"),
    _case("a module that is none", (*AGAINST, "--features", "not_python:means"), "not_python"),
    _case("a number", (*AGAINST, "--features", "mine:number"), "name a callable"),
    _case("one feature in all", (*AGAINST, "--features", "mine:flat"), "expected [N, D]"),
    _case("no numbers", (*AGAINST, "--features", "mine:nothing"), "5 of 5 rows", "extractor"),
    _case("no captions", (*AGAINST, *MEANS, "--clip", "mine:short"), "images with captions"),
    _case("short", ("pictures", "listed", "--clip", "mine:short"), "two of [5, D]", "[1, 2]"),
    _case("no clips", ("clips", "five"), "ending in .mp4", "make some with mmaccel animate"),
    _case("clips of others", ("clips", "moving", "--against", "moving"), "[B, 10, 3, 64, 64]"),
    _case("unlike clips", ("clips", "unlike", "--against", "moving"), "[3, 6, 6] (0.gif)"),
    _case("8 kHz", ("speech", "sounds", "--against", "sounds"), "16000 Hz", "received 8000 Hz"),
    _case("no WAV", ("speech", "torn", "--against", "sounds"), "a WAV file", "a.wav"),
)
LISTS = (
    _listed("[1]", "on line 1"),
    _listed('{"file": "0.png", "prompt": "a", "seed": "3"}', "on line 1"),
    _listed('{"file": "0.png", "prompt": "x"}\n{"file": "1.png"}', "on line 2"),
    _listed('{"file": "../0.png", "prompt": "a"}', "each file of the folder once"),
    _listed('{"file": "0.png", "prompt": "a"}\n{"file": "0.png", "prompt": "b"}', "on line 2"),
)
SUITES = (
    _suite("genevall", "{}", "expected one of geneval, dpg"),
    _suite("geneval", "{", "expected a file as geneval has"),
    _suite("geneval", '{"prompt": " "}', "one without a text"),
    _suite("dpg", "a cat", "a folder of *.txt as dpg has"),
    _suite("hpsv2", '["image 0", "image 9"]', "scores the next image", options=("--partial",)),
    _suite("hpsv2", '["image 0"]', "expected one of 1", options=("--per-prompt", "2")),
    _suite("partiprompts", "Text\na cat\n", "KeyError"),
)
OTHERS = (
    _case("few runs", ("speed", "--runs", 19, "--out", "o"), "--runs", "20", "p90"),
    _case("no size", ("speed", "--batch-sizes", "1,x", "--out", "o"), "1..65536", "1,2,4,8"),
    _case("another side", ("speed", "--baseline", "vllm", "--out", "o"), "static", "'vllm'"),
    _case("no loop", ("exactness", "--generate", "mine:none"), "--generate", "'mine:none'"),
    _case("no --generate", ("exactness", "--reference", "mine:means"), "--generate with it"),
    _case("one image of features", ("exactness", "--count", 1), "--count", "at least 2", "1"),
    _case("few sequences", ("exactness", "--samples", 10), "--samples", "1000", "10"),
    _case("fewer lines", ("words", "a", "b"), "expected 2", "received 1", a="x\ny\n", b="x\n"),
    _case("no words", ("words", "a", "b", "--json", "j"), "at least one word", a="\n", b="x\n"),
    _case("an input as output", ("words", "a", "b", "--json", "./b"), "named once", a="x", b="x"),
)
LINE = '{"prompt": "a b", "answer": "c", "task": "t"}'
ANSWERS = (
    _case("fraction", ("visual-tokens", "--keep", "1.5"), "--keep", "a number in (0, 1]"),
    _case("method", ("visual-tokens", "--methods", "nonsense"), "--methods: expected some of"),
    _case("an empty folder", ("visual-tokens", "empty"), "expected config.json"),
    _case("no field", ("cache", "--methods", "snapkv:window"), "--methods: expected name=value"),
    _case("a short document", ("cache", "--length", "8"), "--length", "64..65536"),
    _case("half a line", ("cache", "--data", "q"), "on line 2", q=f"{LINE}\n{LINE[:30]}\n"),
    _case("nowhere", ("cache", "nowhere"), "model: expected a folder"),
)
CASES = (*PICTURES, *LISTS, *SUITES, *OTHERS, *ANSWERS)
