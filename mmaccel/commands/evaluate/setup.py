"""Models, prompts and batch sizes of the `evaluate` commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.catalog import MODELS
from mmaccel.checks import show
from mmaccel.commands.options import split_values
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, read_lines
from mmaccel.options import LoadOptions

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

NEW_TOKENS = 64
NewTokens = Annotated[int | None, typer.Option(help=f"of a text at most; by default {NEW_TOKENS}")]


def open_measured(
    model: str,
    load: LoadOptions,
    *,
    max_new_tokens: int | None,
    size: str | None,
    decoder: Path | None,
    **others: Any,
) -> TextToImage:
    """A model of images, or a causal LM, whose `image_model` is a `ContinuedTexts`.

    Args:
        model: its name on the command line.
        load: how it is opened.
        max_new_tokens: of a text; None takes `NEW_TOKENS`.
        size, decoder, others: options for images, None where they are not given.

    Raises:
        OptionError: an option for the other kind of model. See also `open_pipeline`.
        UnsupportedModelError: see `find_causal_lm` and `open_texts`.
    """
    from transformers.utils import logging

    from mmaccel.evaluation.texts import find_causal_lm, open_texts
    from mmaccel.loading import load_keywords, open_pipeline
    from mmaccel.pipelines.pipeline import read_loading

    loading = read_loading(load_keywords(load))
    source = None if load.family else find_causal_lm(model, loading.config.hub)
    if source is None:
        _refuse("a model of images", max_new_tokens=max_new_tokens)
        return open_pipeline(model, load, size=size, decoder=decoder)
    _refuse("a causal LM", size=size, decoder=decoder, **others)
    logging.disable_progress_bar()
    return open_texts(source, loading, max_new_tokens or NEW_TOKENS)


def _refuse(what: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"--{name.replace('_', '-')}: expected none for {what}, received "
                f"{show(str(value))}; leave it out"
            )


def pick_prompts(pipe: TextToImage, model: str, file: Path | None, count: int | None) -> list[str]:
    """The prompts of a run: the lines of a file, or the examples of the model.

    Args:
        pipe: the model.
        model: its name on the command line.
        file: one prompt a line; None takes the examples.
        count: length of the list, in which prompts repeat; None takes each once.

    Raises:
        OptionError: no text file, no prompts in it, or a prompt that the model does not take.
    """
    from mmaccel.pipelines.text_to_image.model import encode_prompts

    examples: Sequence[str] = pipe.image_model.examples
    if model in MODELS:
        examples = MODELS[model].examples
    prompts = list(examples) if file is None else read_prompts(file)
    prompts = [prompts[k % len(prompts)] for k in range(count or len(prompts))]
    encode_prompts(pipe.image_model, list(dict.fromkeys(prompts)), None, pipe.image_model.params)
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
