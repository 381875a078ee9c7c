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
from PIL import Image

from tests.fixtures.commands import Said, say
from tests.messages.case import Refused

CALLABLES = """
import torch
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
AGAINST = ("pictures", "five", "--against", "five")


def _make_folder(folder: Path) -> None:
    """`five` images, the same `listed` with prompts, `mixed` sizes, `empty`, `deep`; callables."""
    for name, count in (("five", 5), ("listed", 5), ("mixed", 2), ("empty", 0)):
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
    lines = [json.dumps({"file": f"{k}.png", "prompt": f"image {k}"}) for k in range(5)]
    (folder / "listed" / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "deep").mkdir()
    wide = (np.arange(16, dtype=np.uint16) * 4096).reshape(4, 4)
    for name in ("a.png", "b.png"):
        Image.fromarray(wide).save(folder / "deep" / name)
    (folder / "mine.py").write_text(CALLABLES)


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
    _case("unlike sizes", ("pictures", "mixed", "--against", "five"), "6x6 (0.png)", "8x8 (z.png)"),
    _case("one feature in all", (*AGAINST, "--features", "mine:flat"), "expected [N, D]"),
    _case("unlike clips", ("clips", "unlike", "--against", "moving"), "[3, 6, 6] (0.gif)"),
)
LISTS = (
    _listed('{"file": "../0.png", "prompt": "a"}', "each file of the folder once"),
    _listed('{"file": "0.png", "prompt": "a"}\n{"file": "0.png", "prompt": "b"}', "on line 2"),
)
SUITES = (
    _suite("genevall", "{}", "expected one of geneval, dpg"),
    _suite("geneval", '{"prompt": " "}', "one without a text"),
)
OTHERS = (
    _case("few runs", ("speed", "--runs", 19, "--out", "o"), "--runs", "20", "p90"),
    _case("no loop", ("exactness", "--generate", "mine:none"), "--generate", "'mine:none'"),
    _case("no --generate", ("exactness", "--reference", "mine:means"), "--generate with it"),
    _case("an input as output", ("words", "a", "b", "--json", "./b"), "named once", a="x", b="x"),
)
ANSWERS = (
    _case("an empty folder", ("visual-tokens", "empty"), "expected config.json"),
    _case("no field", ("cache", "--methods", "snapkv:window"), "--methods: expected name=value"),
)
CASES = (*PICTURES, *LISTS, *SUITES, *OTHERS, *ANSWERS)
