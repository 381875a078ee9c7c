"""What stands against a baseline of `mmaccel.evaluation.baseline_decoding`, model and machine."""

from __future__ import annotations

from typing import Any

import torch

from mmaccel.errors import OptionError
from mmaccel.evaluation import baseline_decoding
from mmaccel.evaluation.baseline_decoding import BASELINES, BaselineDecoding
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.pipelines.word_pictures import WordPictures
from mmaccel.samplers.filters import Filters

_TRIED = 3  # tokens: the prompt's pass, and two that would be compiled


def check_names(names: list[str]) -> None:
    """Refuse a name that is no baseline, or stands twice.

    Raises:
        OptionError: with those there are.
    """
    for k, name in enumerate(names):
        if name not in BASELINES or name in names[:k]:
            raise OptionError(
                f"--baseline: expected some of {', '.join(BASELINES)}, each once, received "
                f"{name!r}; leave it out, or correct it"
            )


def find_obstacle(pipe: Any, name: str, caption: str, filters: Filters) -> str:
    """Why a baseline cannot run; empty where it can. A few tokens are made to find out.

    Args:
        pipe: a `TextToImage`.
        name: one of `BASELINES`.
        caption: to try it with.
        filters: of the runs.

    Cost: three passes, and for `compiled` a graph of one addition.
    """
    if not isinstance(pipe.pictures, WordPictures) or type(pipe.model) is not CausalLMWindow:
        return (
            f"transformers' generate makes no pictures of {type(pipe.pictures).__name__} with "
            f"{type(pipe.model).__name__} by itself; models of plain text and picture ids only"
        )
    if filters.processor is not None:
        return "the model's filters have a processor, which generate would not be given"
    if name == "compiled":
        reason = _try(lambda: _compile(pipe.model.device))
        if reason:
            return f"torch.compile does not work here ({reason}); on a processor it needs g++"
    decoding = BaselineDecoding(pipe, "static" if name == "compiled" else name, [caption])
    try:
        reason = _try(lambda: decoding.decode([caption], filters, [0], _TRIED))
    finally:
        decoding.close()
    return reason and f"transformers' generate does not run so ({reason})"


def _compile(device: torch.device) -> None:
    program = torch.compile(lambda x: x * 2 + 1, backend=baseline_decoding.BACKEND, dynamic=False)
    program(torch.ones(5, device=device))


def _try(call: Any) -> str:
    """What a call failed with, in a line; empty where it did not."""
    try:
        call()
    except Exception as error:  # compilers raise what they like
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""
