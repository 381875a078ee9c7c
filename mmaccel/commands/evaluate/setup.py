"""Prompts and batch sizes of the `evaluate` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.catalog import MODELS
from mmaccel.errors import OptionError

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage


def pick_captions(pipe: TextToImage, model: str, file: Path | None, count: int | None) -> list[str]:
    """Prompts of a run: those of a file, a prompt a line, or the model's examples, repeated up to
    a number; None takes each once. `model` is its name on the command line.

    Raises:
        OptionError: no text file, no prompts in it, or one that the model cannot draw.
    """
    examples = MODELS[model].examples if model in MODELS else pipe.image_model.examples
    captions = list(examples) if file is None else read_captions(file)
    captions = [captions[k % len(captions)] for k in range(count or len(captions))]
    for caption in dict.fromkeys(captions):
        pipe.image_model.encode(caption)
    return captions


def read_captions(file: Path) -> list[str]:
    """The lines of a text file that are not empty.

    Raises:
        OptionError: no text file, or none.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise OptionError(
            f"--prompts: expected a text file in UTF-8, received {str(file)!r} ({reason}); "
            "write a caption a line"
        ) from error
    captions = [line.strip() for line in lines if line.strip()]
    if not captions:
        raise OptionError(
            f"--prompts: expected a caption a line, received none in {str(file)!r}; write some"
        )
    return captions


def parse_sizes(text: str) -> list[int]:
    """The value of `--batch-sizes`: integers of 1 or more with commas, each once.

    Raises:
        OptionError: anything else, or none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(
            f"--batch-sizes: expected integers of 1 or more with commas, received {text!r}; "
            "write 1,2,4,8"
        )
    return list(dict.fromkeys(int(part) for part in parts))
