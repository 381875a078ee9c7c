"""Which command a model is for: one that is given to another command is named, with its own."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isfile  # unlike Path.is_file, false for names too long for a file
from pathlib import Path
from typing import Any, NamedTuple

from mmaccel.catalog import CLIP_MODELS, DEMO_WEIGHTS
from mmaccel.config_files import read_json
from mmaccel.errors import OptionError


class Task(NamedTuple):
    """What a command does, its pipeline, a model that ships or "", and what stands before a model's
    name on its command line.
    """

    does: str
    pipeline: str
    demo: str = ""
    option: str = "--model "


_CACHES = "evaluate cache"
PROMPTED_CLIPS = "animate 'a red circle moves left'"
"""Models whose clips begin with a prompt; those of "animate" continue frames."""
TASKS = {
    "generate": Task("makes images from prompts", "TextToImage", "scenes"),
    "answer": Task("answers questions about images", "ImageToText", "scenes-vqa"),
    "speak": Task("speaks texts", "TextToSpeech", "voices"),
    "animate": Task("continues images to clips", "ImageToVideo"),
    PROMPTED_CLIPS: Task("makes clips from prompts", "TextToVideo", "moving-scenes"),
    _CACHES: Task("answers questions about long texts", "docs/results-reduction.md", "recall", ""),
}
SERVED = {"generate": "serve", "speak": "serve --task speech"}  # by the command of a model
_BY_NAME = dict.fromkeys(CLIP_MODELS, PROMPTED_CLIPS)  # also where their weights are missing
_MAKES_IMAGES = ("janus", "emu3", "chameleon", "chameleon_xllmx", "imagegpt")  # some also answer
# in tokenizers of speech models
_SPEAK = (b'"<|s_0|>"', b'"<custom_token_10>"', b'"<|text_start|>"')
_PIPELINES = ("GlmImagePipeline",)


def find_demos() -> dict[str, Path]:
    files = sorted(DEMO_WEIGHTS.glob("*/config.json"))
    return {file.parent.name: file.parent for file in files}


def check_task(name: Any, command: str, option: str = "model", *, is_served: bool = False) -> None:
    """Refuse a demo model or a folder that is known to be for another command.

    `name` is a demo model's or a path; others are left to the loader. `command` is a key of
    `TASKS`; `mmaccel serve`, where `is_served`, takes models of several. Messages name `option`.
    """
    folder = find_demos().get(str(name), Path(str(name)))
    actual = find_command(folder) or _BY_NAME.get(str(name))
    if actual is None or actual == command:
        return
    expected, task = TASKS[command], TASKS[actual]
    instead = f"give {expected.option}{expected.demo}, or run" if expected.demo else "run"
    actual = SERVED.get(actual, actual) if is_served else actual
    run = f"mmaccel {actual} {task.option}{name}"
    raise OptionError(
        f"{option}: expected a model that {expected.does} ({expected.pipeline}), received {name}, "
        f"which {task.does} ({task.pipeline}); {instead} {run}"
    )


def find_command(folder: Path) -> str | None:
    """The command that a folder's model is for; None where its files tell none, or several."""
    if isfile(folder / "words.json"):
        words = read_json(folder / "words.json")
        if "questions" in words:
            return _CACHES
        return PROMPTED_CLIPS if "n_frames" in words else "generate"
    if isfile(folder / "voices.json"):
        return "speak"
    if read_json(folder / "model_index.json", may_lack=True).get("_class_name") in _PIPELINES:
        return "generate"
    config = read_json(folder / "config.json", may_lack=True)
    tokenizer = folder / "tokenizer.json"
    if config and isfile(tokenizer) and any(map(tokenizer.read_bytes().__contains__, _SPEAK)):
        return "speak"
    is_reader = isinstance(config.get("vision_config"), Mapping)
    return "answer" if is_reader and config.get("model_type") not in _MAKES_IMAGES else None
