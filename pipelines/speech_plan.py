"""A call of `TextToSpeech`, checked: what is to be said, how long it may be, under which law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import check_caption
from mmaccel.pipelines.picture_model import choose_filters, stack_rows
from mmaccel.pipelines.picture_request import check_at_least_one
from mmaccel.pipelines.repetition_penalty import WindowedRepetitionPenalty
from mmaccel.pipelines.speech_length import check_seconds, count_slots
from mmaccel.pipelines.speech_model import SpeechModel
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise, check_seed

_WHOLE_PREFIX = 2**31 - 1  # tokens that the repetition penalty looks back at


@dataclass(frozen=True)
class Plan:
    """What a call will do.

    Attributes:
        texts: B of them.
        voice: who says them.
        filters: temperature, truncation and penalty.
        prompt: B rows.
        length: slots of a row, the last of which is for an end alone.
        places: rows in the making at most.
        noise: of B rows.
    """

    texts: list[str]
    voice: str | None
    filters: Filters
    prompt: Prompt
    length: int
    places: int
    noise: Noise

    @property
    def seeds(self) -> list[int]:
        """Of each text, in 0..2**64-1."""
        pairs = zip(self.noise.seeds.tolist(), self.noise.items.tolist())
        return [int(seed + item) % 2**64 for seed, item in pairs]


def make_plan(
    speech: SpeechModel, texts: Sequence[str], seed: int | Sequence[int], *,
    voice: str | None = None, max_seconds: float | None = None, batch_size: int | None = None,
    **filters: Any,
) -> Plan:  # fmt: skip
    """What a call with these arguments will do; everything is checked, nothing is made.

    Args:
        speech: the model.
        texts: B of them; for the others see `TextToSpeech.__call__`.

    Raises:
        OptionError, UnsupportedModelError: as there.
    """
    chosen, layout, device = pick_filters(speech, **filters), speech.layout, speech.window.device
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise OptionError(f"text: expected a text or a list of them, received {texts!r}; write one")
    rows = [speech.encode(each, voice) for each in texts]
    _check_ids(rows, speech.window.vocab_size)
    length = count_slots(speech, max(map(len, rows)), max_seconds)
    places = len(rows) if batch_size is None else batch_size
    check_at_least_one("batch_size", places)
    noise = Noise.from_seed(seed, len(rows), device)
    prompt = stack_rows(rows, 1, layout, device)
    prompt = replace(prompt, stop_tokens=torch.tensor(layout.ends, device=device))
    return Plan(list(texts), voice, chosen, prompt, length, places, noise)


def check_call(
    texts: Sequence[str], seed: int | Sequence[int], *, max_seconds: float | None = None,
    repetition_penalty: float | None = None, **filters: Any,
) -> None:  # fmt: skip
    """Refuse what no model takes, before one is loaded.

    Args:
        texts: as in `make_plan`, like all others.

    Raises:
        OptionError: with what is wrong.
    """
    for text in texts:
        check_caption(text, None, "text to say")
    check_seed(seed)
    if max_seconds is not None:
        check_seconds(max_seconds)
    choose_filters(Filters(), **filters)
    if repetition_penalty is not None:
        WindowedRepetitionPenalty(repetition_penalty, _WHOLE_PREFIX)


def _check_ids(rows: Sequence[Sequence[int]], size: int) -> None:
    largest = max(map(max, rows))
    if largest >= size:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of the model's {size} ids, received a text with id "
            f"{largest}; give a checkpoint and a tokenizer that belong together"
        )


def pick_filters(
    speech: SpeechModel, *, repetition_penalty: float | None = None, **given: Any
) -> Filters:
    """The filters of a run: what is given, and what is recommended where that is None.

    Raises:
        OptionError: a value outside its domain.
    """
    chosen, penalty = choose_filters(speech.filters, **given), repetition_penalty
    penalty = speech.repetition_penalty if penalty is None else penalty
    rule = WindowedRepetitionPenalty(penalty, _WHOLE_PREFIX)
    return chosen if rule.penalty == 1 else replace(chosen, processor=rule.over_window)
