"""Command lines that are refused in one line, before anything is loaded, made or written."""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mmaccel.cli import main
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.media import image
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import CAPTIONS, build_tiny, build_tiny_clips, masked_beside_plain
from tests.messages.case import Refused

_LOADERS = (
    "mmaccel.loading.open_pipeline",
    "mmaccel.loading.open_with_parts",
    "mmaccel.loading.open_clip_pipeline",
    "mmaccel.ImageToText.from_pretrained",
)
_LONG = {"{prompt}": "red " * 120, "{name}": "x" * 300}


class Printed(Exception):
    """What a command printed and ended with; some words are of the library that reads options."""


@cache
def _home() -> Any:
    return tempfile.TemporaryDirectory()  # which Python removes at its end


@cache
def _model(name: str) -> Path:
    """A tiny model."""
    folder = Path(_home().name) / name
    folder.mkdir()
    if name == "masked":
        return masked_beside_plain(folder)[0]
    if name == "clips":
        return build_tiny_clips(folder)
    return build_tiny(folder) if name == "tiny" else build_checkpoint(name, folder)


def _prepare(folder: Path) -> None:
    """Files that command lines name."""
    image().save(folder / "a.png")
    (folder / "words.txt").write_text("no image", encoding="utf-8")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:200])
    (folder / "empty").mkdir()


def _refuse(arguments: list[str], code: int, loads: bool) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(chdir(folder))
        _prepare(folder)
        if "lm" in arguments:
            build_lm("llama").save_pretrained("lm")
        for target in () if loads else _LOADERS:
            stack.enter_context(patch(target, side_effect=AssertionError("a model was loaded")))
        before = set(folder.rglob("*"))
        printed = stack.enter_context(redirect_stdout(io.StringIO()))
        said = stack.enter_context(redirect_stderr(io.StringIO()))
        found = main(arguments)
        lines = said.getvalue().splitlines()
        assert found == code, (found, lines)
        assert len(lines) == 1 or loads, lines
        assert printed.getvalue() == ""
        left = set(folder.rglob("*")) - before
        assert not left or (loads and left == {folder / "out"})  # a model refuses in its folder
        raise Printed("\n".join(lines))


def _rows(
    rows: Iterable[tuple[Any, ...]], fixed: str = "", after: str = "", loads: bool = False
) -> Iterator[Refused]:
    """Refusals of command lines.

    Args:
        rows: a line, what is said of it, and the code where it is not 2.
        fixed, after: further words of each line, before and after it; words in braces are models.
        loads: whether a model may be opened.
    """
    for line, said, *code in rows:
        whole = " ".join(filter(None, (fixed, line, after)))
        call = _caller(whole, code[0] if code else 2, loads)
        yield Refused(whole, call, says=(said,), error=Printed)


def _caller(line: str, code: int, loads: bool) -> Callable[[], None]:
    def call() -> None:
        words = shlex.split(line)
        marks = {word for word in words if word.startswith("{")}
        named = {mark: _LONG.get(mark) or str(_model(mark.strip("{}"))) for mark in marks}
        _refuse([named.get(word, word) for word in words], code, loads)

    return call


_GENERATE = (
    ("--policy jacoby", "received 'jacoby'; did you mean jacobi?"),
    ("--model scene", "received 'scene'; did you mean scenes?"),
    ("--guidence-scale 2", "Possible options: --guidance"),
    ("--policy autoregressive --window 3", "received 'window'"),
    ("--dtype int8", "dtype: expected auto, float32, bfloat16, float16"),
    ("--drafts tarot", "drafts: expected one of"),
    ("--temperature -0.1", "temperature: expected a finite number >= 0"),
    ("--seed 18446744073709551616", "seed: expected a 64-bit integer"),
    ("--device meta", "device: expected a device of this machine, received 'meta'"),
    ("--no-such-option", "--no-such-option"),
    ("'a green dog'", "received 'green', 'dog'; it knows: a red"),
    ("'a a a a a a a a a a a a a'", "at most 12"),
)
_MEDIA = (
    ("speak '  '", "prompt: expected text to say, received ' '"),
    ("speak 'a \udcff fox'", "in whole characters"),
    ("speak fox --max-seconds nan", "max_seconds: expected a number"),
    ("speak", "TEXT: expected a text to say, received none"),
    ("speak fox --play --stdout", "--play: expected it or --stdout, received both"),
    ("speak fox --stdout --batch-size 2", "--batch-size: expected none with --stdout"),
    ("speak --prompts x.txt --play", "--prompts: expected no --play with it"),
    ("animate none.png", "start: expected a file, received 'none.png'"),
    ("animate words.txt", "which PyAV does not read"),
    ("animate 'a.png' --format avi", "--format: expected one of mp4, webp, gif"),
    ("animate", "FILE: expected images or videos that x continues, received none"),
    (
        "animate a.png --start a.png",
        "--start: expected none with x, which continues images and videos",
    ),
)
_CLIPS = (
    ("'a rad circle'", "received 'rad' (nearest: 'red')"),
    ("a.png", "received the file 'a.png'; give a prompt and --start a.png"),
    ("'a circle' --codec y", "--codec: expected none with"),
    ("--prompts p.jsonl --start a.png", "--prompts: expected no --start with it"),
    ("'a circle' --negative dragon", "negative prompt: expected words the model knows"),
    ("'a circle' --guidance-scale 1 --negative red", "expected a guidance_scale other than 1"),
    ("'a circle' --policy stepwise", "which decodes a canvas, not a window"),
)
_ANSWER = (
    ("answer 'what colour is the star?'", "image: expected at least one file before the question"),
    ("answer a.png", "question: expected it after the images, received the file"),
    ("answer a.png 'is <image> <image> red?'", "images: expected 2, one for each <image>"),
    ("answer a.png a.png 'is <image> red?'", "images: expected 1, one for each <image>"),
    (
        "answer a.png 'what colour is the star?' --visual-tokens dart",
        "DART: expected one of keep and n_keep, received neither",
    ),
    (
        "answer a.png 'what colour is the star?' --visual-tokens darts",
        "one of downsample, downsample-pixels",
    ),
    (
        "answer a.png 'what colour?' --visual-tokens dart --visual-tokens fastv --keep 0.5",
        "expected one method a stage",
    ),
    (
        "answer a.png 'what colour is the star?' --keep 0.5",
        "--keep: expected --visual-tokens with it",
    ),
    (
        "answer a.png 'what colour is the star?' --compare",
        "--compare: expected --visual-tokens with it",
    ),
    ("answer a.png 'what colour is the star?' -o b.png", "--out: expected --visual-tokens with it"),
    (
        "answer a.png 'what colour is the star?' --visual-tokens dart --keep 1 -o x/..",
        "--out: expected a",
    ),
    ("answer a.png 'what colour is the star?' --json .", "--json: expected a file name"),
    (
        "answer a.png 'what colour is the star?' --policy stepwise",
        "policy: expected one of autoregressive",
    ),
    ("answer a.png 'what colour is the star?' --model lm", "expected a vision-language model", 1),
)
_FAMILIES = (
    ("generate 'a fox' --model {imagegpt}", "prompt: expected none, as ImageGPT takes no prompts"),
    ("generate --guidance 2 --model {imagegpt}", "guidance_scale: expected 1"),
    (
        "generate 'a fox' --model {llamagen-c2i} --size 64",
        "prompt: expected the number of a class, 0..4",
    ),
    (
        "generate 'a a a a a a a a a ' --model {llamagen-t2i} --size 64",
        "prompt: expected at most 8 tokens, received 9",
    ),
    (
        "generate {prompt} --model {janus}",
        "positions: expected at most 128",
    ),
    ("generate ' ' --model {chameleon}", "prompt: expected a prompt"),
    ("generate 'a fox' --model {emu3} --size 16384", "positions: expected at most 128"),
    ("generate 'a fox' --model {emu3} --size 80000000", "--size: expected"),
    ("generate 'a <image> fox' --model {janus}", "prompt: expected words, received <image>"),
    ("generate '<boi>' --model {emu3} --size 64", "prompt: expected words, received <boi>"),
    ("generate 'a fox' --family imagegpt --model {janus}", "transformers refuses", 1),
    (
        "generate 'a fox' --model {emu3} --size 64x",
        "--size: expected pixels such as 768 or 1024x768",
    ),
)
_MASKED = (
    ("--policy jacobi", "which decodes a window, not a canvas"),
    ("--policy entropy-bounded --set gama=1", "received 'gama'"),
    ("--policy entropy-bounded --set gamma", "expected name=value"),
    ("--policy stepwise --set block=5", "divides 16 slots, received 5"),
    ("--policy local-leap --set end_threshold=0.9", "expected a prompt with stop"),
    ("--cuda-graphs on", "cuda_graphs=True", 1),
)
_WORDS = (
    ("generate --xyzzy", "No such option: --xyzzy; see mmaccel generate --help"),
    ("generate --num_images 2", "Possible options: --num-images"),
    ("animate a.png", "such as --model nvidia/Cosmos-Predict1-4B"),
    ("animate 'a red circle' --text-encoder x", "--text-encoder: expected none with moving-scenes"),
    ("comfy", "see mmaccel comfy --help"),
)

_NEGATIVE = (
    ("--negative 'a dragon'", "negative prompt: expected words"),
    ("--negative red --guidance 1", "negative prompt: expected a guidance_scale"),
)
_DRAWN = f"generate '{CAPTIONS[0]}' --out out --seed 0"

CASES = (
    *_rows(_WORDS),
    *_rows(_GENERATE, f"{_DRAWN} --model {{tiny}}", loads=True),
    *_rows(_NEGATIVE, f"{_DRAWN} --model {{tiny}}", loads=True),
    *_rows(_MASKED, f"{_DRAWN} --model {{masked}}", loads=True),
    *_rows(_FAMILIES, after="--out out --seed 0", loads=True),
    *_rows(_MEDIA, after="--model x --codec y --out out"),
    *_rows(_CLIPS, "animate", "--model {clips} --out out --seed 0", loads=True),
    *_rows(_ANSWER),
)
