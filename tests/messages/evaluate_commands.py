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
def text(images):
    return "no numbers"
def turned(images):
    return torch.ones(len(images), 2) * 1j
def flat(images):
    return images.float().mean()
def one(images, texts):
    return torch.ones(len(texts), 2)
def names(images, texts):
    return texts, texts
"""
MEANS = ("--features", "mine:means")
AGAINST = ("pictures", "five", "--against", "five")
INCEPTION = (*AGAINST, "--features", "inception")


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
    _case("no folder", ("pictures", "none", "--against", "five"), "expected a folder", "'none'"),
    _case("no images", ("pictures", "empty", "--against", "five"), "received none in"),
    _case("one image", ("pictures", "single", "--against", "five"), "both sides", "1 and 5"),
    _case("unlike sizes", ("pictures", "mixed", "--against", "five"), "6x6 (0.png)", "8x8 (z.png)"),
    _case("half an image", ("pictures", "broken", "--against", "five"), "1.png"),
    _case("16 bits", ("pictures", "deep", "--against", "deep"), "8 bits a channel", "mode I"),
    _case("others: no folder", (*AGAINST[:3], "none", *MEANS), "expected a folder", "'none'"),
    _case("others: one image", (*AGAINST[:3], "single", *MEANS), "both sides", "5 and 1"),
    _case("one scene", (*AGAINST[:3], "scenes", *MEANS, "--count", 1), "received 5 and 1"),
    _case("a count of a folder", (*AGAINST, *MEANS, "--count", 9), "--against scenes with it"),
    _case("features of nothing", ("pictures", "five", *MEANS), "--against with them"),
    _case("weights of nothing", ("pictures", "five", "--weights", "w"), "--against with them"),
    _case("inception without weights", INCEPTION, "a file for inception"),
    _case("inception without its package", (*INCEPTION, "--weights", "mine.py"), "torch-fidelity"),
    _case("weights of scenes", (*AGAINST, "--weights", "w.pth"), "expected none for scenes"),
    _case("a folder for figures", (*AGAINST, "--json", "empty"), "expected a file name"),
    _case("a folder for items", (*AGAINST, *MEANS, "--items", "five"), "expected a file name"),
    _case("batches of none", (*AGAINST, "--batch-size", "0"), "at least 1"),
    _case("a module that is none", (*AGAINST, "--features", "not_python:means"), "not_python"),
    _case(
        "a module by a dot", (*AGAINST, "--features", ".mine:means"), "inception or module:function"
    ),
    _case("a number", (*AGAINST, "--features", "mine:number"), "name a callable"),
    _case("features in words", (*AGAINST, "--features", "mine:text"), "tensor [B, D]", "str"),
    _case("complex features", (*AGAINST, "--features", "mine:turned"), "real numbers", "complex"),
    _case("one feature in all", (*AGAINST, "--features", "mine:flat"), "expected [5, D]"),
    _case("no embedding", (*AGAINST, *MEANS, "--clip", "nowhere:f"), "nowhere"),
    _case("no captions", (*AGAINST, *MEANS, "--clip", "mine:one"), "images with captions"),
    _case("one embedding", ("pictures", "listed", "--clip", "mine:one"), "received 1 (Tensor)"),
    _case("texts", ("pictures", "listed", "--clip", "mine:names"), "received 2 (list, list)"),
)
CLIPS = (
    _case("no clips", ("clips", "five"), "ending in .mp4", "make some with mmaccel animate"),
    _case("one clip", ("clips", "moving", "--against", "moving-scenes", "--count", 1), "2 and 1"),
    _case("a count of clips", ("clips", "moving", "--count", 9), "--against moving-scenes with it"),
    _case("features of no clips", ("clips", "moving", *MEANS), "--against with it"),
    _case("clips of others", ("clips", "moving", "--against", "moving"), "[B, 10, 3, 64, 64]"),
    _case("unlike clips", ("clips", "unlike", "--against", "moving"), "3 frames of 6x6 (0.gif)"),
    _case(
        "no features of clips",
        ("clips", "moving", "--against", "moving", "--features", "a"),
        "moving-scenes or module:function",
    ),
    _case("no sounds", ("speech", "five", "--against", "sounds"), "make some with mmaccel speak"),
    _case("8 kHz", ("speech", "sounds", "--against", "sounds"), "16000 Hz", "received 8000 Hz"),
    _case("no WAV", ("speech", "torn", "--against", "sounds"), "a WAV file", "a.wav"),
    _case("speech of nothing", ("speech", "sounds"), "--against: expected a folder of WAV files"),
)
LISTS = (
    _listed("[1]", "on line 1"),
    _listed('"text"', "on line 1"),
    _listed('{"file": "0.png", "prompt": 5}', "on line 1"),
    _listed('{"file": ["0.png"], "prompt": "a"}', "on line 1"),
    _listed('{"file": "0.png", "prompt": "a", "seed": "3"}', "on line 1"),
    _listed('{"file": "0.png", "prompt": "x"}\n{"file": "1.png"}', "on line 2"),
    _listed('{"file": "9.png", "prompt": "a"}', "a file in its folder", "'9.png'"),
    _listed('{"file": "../0.png", "prompt": "a"}', "a file in its folder"),
    _listed('{"file": "0.png", "prompt": "a"}\n{"file": "0.png", "prompt": "b"}', "on line 2"),
)
SUITES = (
    _suite("genevall", "{}", "expected one of geneval, dpg"),
    _suite("geneval", "{", "expected a file as geneval has"),
    _suite("geneval", '{"text": "a cat"}', "KeyError"),
    _suite("geneval", '{"prompt": 5}', "no text for '00000'"),
    _suite("geneval", '{"prompt": " "}', "no text for '00000'"),
    _suite("geneval", "[1]", "TypeError"),
    _suite("geneval", '{"prompt": "image 0"}', "at least 1", options=("--per-prompt", "0")),
    _suite("dpg", "a cat", "a folder of *.txt as dpg has"),
    _suite("hpsv2", '{"a cat": 1}', "no list in"),
    _suite("hpsv2", '["a", null]', "no text for 'p/00001'"),
    _suite("hpsv2", '["image 0", "image 9"]', "scores the next image", options=("--partial",)),
    _suite("hpsv2", '["image 0"]', "expected 1 for hpsv2", options=("--per-prompt", "2")),
    _suite("partiprompts", "Text\na cat\n", "KeyError"),
    _suite("partiprompts", "Category\tPrompt\nAnimals\n", "no text for '00000'"),
    _suite("partiprompts", "Prompt\n" + "x" * 200_000, "field larger"),
    _suite("vbench", "\n\n", "no prompts"),
)
SPEED = tuple(
    _case(" ".join(map(str, options)), ("speed", *options, "--out", "o"), *says)
    for options, says in (
        (("--runs", 19), ("at least 20 and 1", "19 and 2", "mmaccel bench")),
        (("--batch-sizes", "1,x"), ("integers in 1..65536", "1,2,4,8")),
        (("--policy", "nonsense"), ("expected one of",)),
        (("--prompts", "none.txt"), ("--prompts", "a file that can be read")),
        (("--baseline", "vllm"), ("each once", "'vllm'")),
        (("--baseline", "static", "--baseline", "static"), ("each once", "'static'")),
    )
)
TEXTS = (
    _case("a size of texts", ("exactness", "stdlib", "--size", 256), "--size", "for a causal LM"),
    _case("guided texts", ("exactness", "stdlib", "--guidance", 2), "--guidance-scale", "'2.0'"),
    _case("tokens of images", ("exactness", "--max-new-tokens", 9), "for a model of images", "'9'"),
    _case("no tokens", ("speed", "stdlib", "--max-new-tokens", 0), "at least 1"),
)
OTHERS = (
    _case("fewer lines", ("words", "a", "b"), "expected 2", "received 1", a="x\ny\n", b="x\n"),
    _case("no words", ("words", "a", "b", "--json", "j"), "at least one word", a="\n", b="x\n"),
    _case("no file", ("words", "a", "b"), "'b'", a="x\n"),
    *(
        _case(f"an input as {' '.join(out)}", ("words", "a", "b", *out), "named once", a="x", b="x")
        for out in (("--json", "./b"), ("--items=a",), ("--json", "a", "--items", "b"))
    ),
    _case("one image of features", ("exactness", "--count", 1), "--count", "at least 2", "1"),
    _case("a long seed", ("exactness", "--seed", 2**64), "seed", "64-bit integer"),
    _case("few sequences", ("exactness", "--samples", 10), "--samples", "1000", "10"),
)
VISUAL = (
    _case("fraction", ("visual-tokens", "--keep", "1.5"), "--keep", "a number in (0, 1]"),
    _case("method", ("visual-tokens", "--methods", "nonsense"), "--methods: expected some of"),
    _case("no questions", ("visual-tokens", "--questions", "0"), "--questions", "at least 1"),
    _case("no data", ("visual-tokens", "--data", "no.jsonl"), "--data: expected a file"),
    _case("dtype", ("visual-tokens", "--dtype", "float8"), "dtype: expected auto"),
    _case("no model", ("visual-tokens", "nowhere"), "model: expected a folder"),
    _case("an empty folder", ("visual-tokens", "empty"), "expected config.json"),
    _case(
        "no configuration",
        ("visual-tokens", "empty"),
        "a configuration of transformers",
        **{"empty/tokenizer.json": ""},
    ),
)
LINE = '{"prompt": "a b", "answer": "c", "task": "t"}'
CACHE = (
    _case("budget", ("cache", "--budgets", "1.5"), "--budgets", "a number in (0, 1]"),
    _case("no budget", ("cache", "--budgets", ","), "--budgets", "write for example"),
    _case("a policy", ("cache", "--methods", "nonsense"), "--methods: expected some of"),
    _case("no field", ("cache", "--methods", "snapkv:window"), "--methods: expected name=value"),
    _case("a short document", ("cache", "--length", "8"), "--length", "64..65536"),
    _case("no question", ("cache", "--questions", "0"), "--questions", "at least 1"),
    _case("no lines", ("cache", "--data", "no.jsonl"), "--data: expected a file"),
    _case("an empty file", ("cache", "--data", "q"), "received none in 'q'", q="\n"),
    _case("half a line", ("cache", "--data", "q"), "on line 2", q=f"{LINE}\n{LINE[:30]}\n"),
    _case("no task", ("cache", "--data", "q"), "texts prompt, answer", q='{"prompt": "a"}\n'),
    _case("all tasks", ("cache", "--data", "q"), 'but "all"', q=LINE.replace('"t"', '"all"')),
    _case("nowhere", ("cache", "nowhere"), "model: expected a folder"),
    _case(
        "another command",
        ("cache", "scenes"),
        "give recall, or run mmaccel generate --model scenes",
    ),
)
CASES = (*PICTURES, *CLIPS, *LISTS, *SUITES, *SPEED, *TEXTS, *VISUAL, *CACHE, *OTHERS)
