"""Prompts and batch sizes of the `evaluate` commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.catalog import MODELS
from mmaccel.checks import show
from mmaccel.commands.options import split_values
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, read_lines

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
        OptionError: no text file within the limits, or no such line.
    """
    prompts = [line.strip() for line in read_lines(file, "--prompts") if line.strip()]
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
    parts = split_values("--batch-sizes", text)
    sizes = [int(part) if re.fullmatch(r"\d{1,9}", part) else 0 for part in parts]
    if not parts or not all(1 <= size <= MAX_BATCH for size in sizes):
        raise OptionError(
            f"--batch-sizes: expected integers in 1..{MAX_BATCH} with commas, received "
            f"{show(text)}; write 1,2,4,8"
        )
    return list(dict.fromkeys(sizes))
