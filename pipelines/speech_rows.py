"""Finished rows of codes to utterances."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mmaccel.errors import NumericsError, OptionError
from mmaccel.pipelines.speech import Utterance
from mmaccel.pipelines.speech_model import SpeechModel
from mmaccel.pipelines.speech_plan import Plan
from mmaccel.places import EndedRow


class RowSpeaker:
    """Where finished rows become utterances and are handed out.

    Args:
        speech: the model.
        plan: what is said.
        deliver: called with every utterance.

    Raises:
        OptionError: `deliver` cannot be called.

    Attributes:
        made: utterances by row.
        seconds: spent here.
        sound_seconds: of these, what rendering took.
    """

    def __init__(
        self, speech: SpeechModel, plan: Plan, deliver: Callable[[Utterance], None] | None
    ) -> None:
        if deliver is not None and not callable(deliver):
            raise OptionError(f"deliver: expected a function, received {deliver!r}; give one")
        self._speech, self._plan, self._deliver = speech, plan, deliver
        self._seeds = plan.seeds
        self.made: dict[int, Utterance] = {}
        self.seconds = self.sound_seconds = 0.0

    def take(self, row: EndedRow) -> None:
        """Turn one row into sound, by itself, so that others do not enter it.

        Raises:
            NumericsError: the codec returned NaN.
        """
        began, speech = time.perf_counter(), self._speech
        tokens = row.tokens
        is_finished = bool(len(tokens)) and int(tokens[-1]) in speech.layout.ends
        columns = speech.layout.columns
        whole = min(len(tokens) - is_finished, self._plan.length - 1) // columns * columns
        tokens, seed = tokens[:whole], self._seeds[row.row]
        sound = speech.render(tokens, seed) if whole else torch.zeros(0)
        if bool(sound.isnan().any()):
            raise NumericsError(
                "waveform: expected samples in -1..1, received NaN from the codec; "
                "copy its weights again",
                (row.row,),
            )
        self.sound_seconds += time.perf_counter() - began
        made = Utterance(
            row.row, self._plan.texts[row.row], self._plan.voice, seed, sound,
            speech.sample_rate, tokens.cpu(), row.passes, is_finished, row.total_variation,
        )  # fmt: skip
        self.made[row.row] = made
        if self._deliver is not None:
            self._deliver(made)
        self.seconds += time.perf_counter() - began
