"""The node that says texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import find_policy
from mmaccel.comfy.law_widgets import OWN, law_widgets
from mmaccel.comfy.open_speaker import OpenSpeaker
from mmaccel.comfy.policies import NamedPolicy, default_policy
from mmaccel.comfy.record import tell_run
from mmaccel.comfy.request import SEEDS, read_captions
from mmaccel.comfy.table import (
    AUDIO,
    POLICY,
    PREFIX,
    SPEAKER,
    STATS,
    Host,
    Made,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.pipelines.speech import Speech, Utterance
from mmaccel.pipelines.speech_plan import check_call

_REPORT = 0.1  # seconds between two at least


@dataclass(frozen=True)
class SpeechRecord:
    """A finished run; as text, a table and a line for each utterance with its own seed."""

    model: OpenSpeaker
    chosen: NamedPolicy
    speech: Speech

    def __str__(self) -> str:
        """The text."""
        own = [_line(made) for made in self.speech.utterances]
        return tell_run(self.model, self.chosen, self.speech.stats, own)


def _line(made: Utterance) -> str:
    end = "" if made.is_finished else " (cut)"
    n = len(made.tokens)
    return f"seed {made.seed}: {made.seconds:.2f} s{end}, {n} tokens in {made.passes} forward " \
           f"passes: {made.text}"  # fmt: skip


class _Watch:
    """Asks for interrupts and tells of progress; changes nothing."""

    def __init__(self, host: Host, rows: int) -> None:
        self._host, self._rows = host, rows
        self._length = 0  # slots of a row, which the first pass tells
        self._ended: set[int] = set()
        self._reported = time.monotonic()

    def finish(self, made: Utterance) -> None:
        """An utterance is finished, however long it is."""
        self._host.check_interrupt()
        self._ended.add(made.index)
        self._report(0)

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`. Whatever the host raises ends the run."""
        self._host.check_interrupt()
        self._length = progress.tokens.shape[1]
        if time.monotonic() - self._reported < _REPORT:
            return
        running = zip(progress.rows, progress.lengths.tolist())
        self._report(sum(n for row, n in running if row not in self._ended))
        self._reported = time.monotonic()

    def _report(self, n_running: int) -> None:
        done = len(self._ended) * self._length + n_running
        self._host.report(done, self._rows * self._length, None)


def generate_speech(
    host: Host, *, speech_model: OpenSpeaker, policy: NamedPolicy | None, text: str, voice: str,
    seed: int, batch_size: int, **options: Any,
) -> Made:  # fmt: skip
    """Say texts, the same as `mmaccel speak` says with these settings.

    Raises:
        OptionError: a text the model cannot say, or a policy of another kind; before any pass.
    """
    pipe = speech_model.pipe
    chosen = policy or default_policy(pipe.model)
    find_policy(chosen.name, "window")
    texts = read_captions(text)
    seeds = [(seed + k) % SEEDS for k in range(len(texts))]
    own: dict[str, Any] = {**options, "voice": voice.strip() or None, "batch_size": batch_size}
    watch = _Watch(host, len(texts))
    host.check_interrupt()
    speech = pipe(
        texts, policy=chosen.policy, seed=seeds, deliver=watch.finish, on_step=watch, **own
    )
    audio = {"waveform": pad_sounds(speech), "sample_rate": pipe.speech.sample_rate}
    return Made((audio, SpeechRecord(speech_model, chosen, speech)))


def pad_sounds(speech: Speech) -> Tensor:
    """Utterances as ComfyUI's `[B, 1, samples]` float32, with silence behind the shorter ones."""
    longest = max(1, *(len(made.waveform) for made in speech.utterances))
    padded = torch.zeros(len(speech), 1, longest)
    for row, made in zip(padded, speech.utterances):
        row[0, : len(made.waveform)] = made.waveform
    return padded


def check_speech(*, text: str, seed: int, repetition_penalty: float | None, **values: Any) -> None:
    """Refuse what no model takes, before any is loaded.

    Raises:
        OptionError: no text, or a seed, a filter, a penalty or a length outside its domain.
    """
    law = ("max_seconds", "temperature", "top_k", "top_p", "min_p")
    own = {name: values[name] for name in law}
    check_call(read_captions(text), seed, repetition_penalty=repetition_penalty, **own)


SPEAK = NodeSpec(
    id=f"{PREFIX}GenerateSpeech",
    title="MMAccel Generate Speech",
    summary="Says texts under a decoding policy.",
    inputs=(
        Socket("speech_model", SPEAKER, "From MMAccel Load Speech Model."),
        Socket("policy", POLICY, "How to decode; without one, an exact policy.", is_optional=True),
        Widget(
            "text", "text", "Dealing with family secrets is never easy.",
            "What to say. One utterance a line: several lines make a batch, the shorter ones "
            "followed by silence.", is_multiline=True,
        ),
        Widget("voice", "text", "", "For models that know several; empty is the usual one."),
        Widget(
            "seed", "int", 0,
            "Of the first line; the second has seed + 1, and so on, as with mmaccel speak. "
            "A browser counts exactly up to 9007199254740992; larger ones come out rounded.",
            0, SEEDS - 1, 1, is_seed=True,
        ),
        Widget(
            "max_seconds", "float", 0.0,
            "Cut longer ones; 0 is 30, or less where the model has no room for so many.",
            0, 3600, 0.5, stands_for=((0.0, None),),
        ),
        Widget(
            "batch_size", "int", 1,
            "Utterances in the making at most: more take more memory, and less time each.",
            1, 256, 1,
        ),
        *law_widgets(),
        Widget(
            "repetition_penalty", "float", -1.0,
            f"Makes tokens that occurred less likely; 1 is none. {OWN}",
            -1, 10, 0.05, stands_for=((-1.0, None),),
        ),
    ),
    outputs=(
        Output("audio", AUDIO, "One sound per line."),
        Output("stats", STATS, "For MMAccel Stats."),
    ),
    run=generate_speech,
    check=check_speech,
    folder="speech",
)  # fmt: skip
