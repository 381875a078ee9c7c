"""How many tokens an utterance may have."""

from __future__ import annotations

import math
from typing import Any

from mmaccel.errors import OptionError
from mmaccel.pipelines.speech_model import SpeechModel

_USUAL = 30.0  # seconds
_MOST = 3600.0
_ROUNDING = 1e-6  # frames: 0.28 s at 50 a second are 14, though floats make them a little more


def count_slots(speech: SpeechModel, prompt: int, max_seconds: float | None) -> int:
    """Tokens of an utterance at most, the end token included.

    Args:
        speech: the model.
        prompt: tokens of the longest prompt.
        max_seconds: of sound; None is 30, or what the model has room for.

    Raises:
        OptionError: no length, or one the model has no room for.
    """
    columns, limit = speech.layout.columns, getattr(speech.window, "max_positions", None)
    room = math.inf if limit is None else (limit - prompt) // columns  # the last is not fed
    per_second = speech.sample_rate / speech.frame_samples
    asked = _USUAL if max_seconds is None else check_seconds(max_seconds)
    frames = max(1, math.ceil(asked * per_second - _ROUNDING))
    if max_seconds is None:
        frames = max(1, int(min(frames, room)))
    if frames > room:
        most = math.floor(1000 * room / per_second) / 1000
        remedy = f", or set max_seconds to at most {most:g}" if most > 0 else ""
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {prompt} of the prompt "
            f"and {frames * columns} of {asked:g} s; shorten the text{remedy}"
        )
    return frames * columns + 1


def check_seconds(asked: Any) -> float:
    """A length that was asked for.

    Raises:
        OptionError: no number, or one outside 0..3600, or 0.
    """
    is_number = isinstance(asked, int | float) and not isinstance(asked, bool)
    if not is_number or not 0 < asked <= _MOST:
        raise OptionError(
            f"max_seconds: expected a number in 0..{_MOST:g}, 0 excluded, received {asked!r}; "
            f"{_USUAL:g} suits most texts"
        )
    return float(asked)
