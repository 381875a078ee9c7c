"""Prompts and batch sizes of the `evaluate` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.catalog import MODELS
from mmaccel.errors import OptionError

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage


def pick_prompts(pipe: TextToImage, model: str, file: Path | None, count: int | None) -> list[str]:
    """The prompts of a run: the lines of a file, or the examples of the model.

    Args:
        pipe: the model.
        model: its name on the command line.
        file: one prompt a line; None takes the examples.
        count: length of the list, in which prompts repeat; None takes each once.

    Raises:
        OptionError: no text file, no prompts in it, or a prompt that the model cannot draw.
    """
    examples = MODELS[model].examples if model in MODELS else pipe.image_model.examples
    prompts = list(examples) if file is None else read_prompts(file)
    prompts = [prompts[k % len(prompts)] for k in range(count or len(prompts))]
    for prompt in dict.fromkeys(prompts):
        pipe.image_model.encode(prompt)
    return prompts


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file that are not empty.

    Raises:
        OptionError: no text file, or no such line.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise OptionError(
            f"--prompts: expected a text file in UTF-8, received {str(file)!r} ({reason}); "
            "write a prompt a line"
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise OptionError(
            f"--prompts: expected a prompt a line, received none in {str(file)!r}; write some"
        )
    return prompts


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
