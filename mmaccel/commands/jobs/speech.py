"""The run of `mmaccel speak`."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mmaccel.commands import options as shared
from mmaccel.commands.jobs.media import CodecJob, JobProgress
from mmaccel.options import SAMPLING_FIELDS, given
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.plan import check_call, make_plan, pick_params
from mmaccel.results import Stats

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_speech.types import Utterance


class SpeechJob(CodecJob):
    """Texts to speak.

    Attributes:
        options: given arguments of the call.
        max_seconds: length after which an utterance is cut.
        seconds: written seconds of sound.
        cut: notes on utterances that were cut.
    """

    unit = "utterance"
    suffix = ".wav"
    pipeline = TextToSpeech

    def read(self) -> None:
        super().read()
        flags = self.flags
        options = given(flags.sampling) | shared.given(
            max_seconds=flags.max_seconds, repetition_penalty=flags.repetition_penalty
        )
        check_call(flags.texts, self.seeds, **options)
        self.options = options | shared.given(voice=flags.voice)
        self.seconds = 0.0
        self.cut: list[str] = []

    @property
    def n_files(self) -> int:
        return len(self.flags.texts)

    @property
    def seeds(self) -> list[int]:
        """The seed of each text."""
        return [self.seed + k for k in range(len(self.flags.texts))]

    @property
    def notes(self) -> list[str]:
        """Which utterances were cut."""
        return self.cut

    def prepare(self) -> None:
        speech = self.pipe.speech
        plan = make_plan(
            speech, self.flags.texts, self.seeds, batch_size=self.flags.batch_size, **self.options
        )
        frames = (plan.length - 1) // speech.layout.columns
        self.max_seconds = frames * speech.frame_samples / speech.sample_rate

    def decode(self, bar: JobProgress) -> Stats:
        def finish(utterance: Utterance) -> None:
            self.write_utterance(utterance)
            bar.finish(utterance.index)

        bar.begin(len(self.flags.texts))
        speech = self.pipe(
            self.flags.texts, policy=self.policy, seed=self.seeds, batch_size=self.flags.batch_size,
            deliver=finish, **self.layers, **self.options,
        )  # fmt: skip
        stats: Stats = speech.stats
        return stats

    @property
    def summary(self) -> str:
        return f"{super().summary}, {self.seconds:.1f} s of sound,"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What an utterance depends on, apart from its text and seed; ready for JSON."""
        speech, options = self.pipe.speech, self.options
        params = {name: options[name] for name in SAMPLING_FIELDS if name in options}
        return {
            **self.codec_settings(pick_params(speech, **params)),
            "voice": options.get("voice"),
            "max_seconds": self.max_seconds,  # a longer text of the same run may reduce it
            "repetition_penalty": options.get("repetition_penalty", speech.repetition_penalty),
        }

    def write_utterance(self, utterance: Utterance) -> None:
        """Write one utterance.

        Raises:
            OSError: see `write_payload`.
        """
        source = {"text": utterance.text.strip()}  # punctuation and capitals change the sound
        facts = {
            "text": utterance.text,
            "seconds": utterance.seconds,
            "sample_rate": utterance.sample_rate,
            "is_finished": utterance.is_finished,
            "tokens": len(utterance.tokens),
        }
        write = partial(write_sound, waveform=utterance.waveform, sample_rate=utterance.sample_rate)
        self.write_payload(utterance.text, utterance, source, facts, write)
        self.seconds += utterance.seconds
        if not utterance.is_finished:
            self.cut.append(
                f"{utterance.text[:40]!r} was cut at {utterance.seconds:.1f} s; see --max-seconds"
            )
