"""The runs of `mmaccel speak` and `mmaccel animate`, whose models have a codec."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmaccel.commands import options as shared
from mmaccel.commands.jobs.media import JobProgress, SidecarJob
from mmaccel.commands.terminal import count_of, say
from mmaccel.limits import MAX_IMAGES, MAX_KEPT
from mmaccel.loading import load_keywords
from mmaccel.options import SAMPLING_FIELDS, LoadOptions, given
from mmaccel.outputs.sound_files import write_sound
from mmaccel.outputs.sound_streams import (
    SoundSink,
    check_pipe,
    find_loudspeaker,
    open_loudspeaker,
    open_standard_output,
)
from mmaccel.outputs.video_files import check_sides, pick_format, read_frames, write_video
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.plan import check_call, make_plan, pick_params
from mmaccel.results import Stats, add_stats
from mmaccel.samplers.noise import check_seed
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.image_to_video.types import Clip
    from mmaccel.pipelines.text_to_speech.streaming import StreamStats
    from mmaccel.pipelines.text_to_speech.types import Utterance

_MAX_FRAMES = 9  # of a start, for all models here


def open_pipe(pipeline: Any, model: str, load: LoadOptions, **parts: str | None) -> Any:
    """Load a `TextToSpeech` or an `ImageToVideo`.

    Args:
        pipeline: the class.
        model: name, folder or hub id.
        load: how it is opened.
        **parts: the same of its codec and others; None takes those that the authors published.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see its `from_pretrained`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    return pipeline.from_pretrained(model, **parts, **load_keywords(load))


class CodecJob(SidecarJob):
    """A run of a model with a codec."""

    pipeline: ClassVar[Any]
    """A `TextToSpeech` or an `ImageToVideo`."""

    def open(self) -> Any:
        return open_pipe(self.pipeline, self.flags.model, self.load, **self.parts)

    @property
    def parts(self) -> dict[str, str | None]:
        """What is loaded beside the model, by name."""
        return {"codec": self.flags.codec}

    def codec_settings(self, params: SamplingParams) -> dict[str, Any]:
        settings = self.common_settings(
            params, weights=content_hash(self.pipe.source), codec=content_hash(self.pipe.codec)
        )
        del settings["guidance_scale"]  # these models have no guidance
        return settings


class SpeechJob(CodecJob):
    """Texts to speak.

    Attributes:
        texts: what is said.
        options: given arguments of the call.
        max_seconds: length after which an utterance is cut.
        seconds: written seconds of sound.
        cut: notes on utterances that were cut.
    """

    unit = "utterance"
    suffix = ".wav"
    pipeline = TextToSpeech

    def read(self) -> None:
        flags = self.flags
        self.texts = flags.check_texts()
        super().read()
        options = given(flags.sampling) | shared.given(
            max_seconds=flags.max_seconds, repetition_penalty=flags.repetition_penalty
        )
        check_call(self.texts, self.seeds, **options)
        self.options = options | shared.given(voice=flags.voice)
        self.seconds = 0.0
        self.cut: list[str] = []

    @property
    def n_files(self) -> int:
        return len(self.texts)

    @property
    def seeds(self) -> list[int]:
        """The seed of each text."""
        return [self.seed + k for k in range(len(self.texts))]

    @property
    def notes(self) -> list[str]:
        """Which utterances were cut."""
        return self.cut

    def prepare(self) -> None:
        speech = self.pipe.speech
        plan = make_plan(
            speech,
            self.texts,
            self.seeds,
            in_parts=True,
            **self.options,
        )
        frames = (plan.length - 1) // speech.layout.columns
        self.max_seconds = frames * speech.frame_samples / speech.sample_rate

    def decode(self, bar: JobProgress) -> Stats:
        def finish(utterance: Utterance) -> None:
            self.write_utterance(utterance)
            bar.finish(utterance.index)

        bar.begin(len(self.texts))
        speech = self.pipe(
            self.texts, policy=self.policy, seed=self.seeds, batch_size=self.rows,
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
        speech = self.pipe.speech
        options = self.options
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
        self.count(utterance)

    def count(self, utterance: Utterance) -> None:
        """Count the sound of an utterance, and note whether it was cut."""
        self.seconds += utterance.seconds
        if not utterance.is_finished:
            self.cut.append(
                f"{utterance.text[:40]!r} was cut at {utterance.seconds:.1f} s; see --max-seconds"
            )


class ListenJob(SpeechJob):
    """Texts that are heard while they are decoded, by `--play` or `--stdout`; no files.

    Attributes:
        spoken: texts that were heard to their end.
        open_sink: opens what takes the sound, of a sample rate.
    """

    open_sink: Callable[[int], AbstractContextManager[SoundSink]]

    def read(self) -> None:
        super().read()
        self.out = None  # type: ignore[assignment]
        self.spoken = 0
        if self.flags.play:
            self.open_sink = partial(open_loudspeaker, find_loudspeaker())
        else:
            check_pipe()
            self.open_sink = open_standard_output

    def run(self) -> None:
        with self.open_sink(self.pipe.speech.sample_rate) as self.sink:
            super().run()

    def decode(self, bar: JobProgress) -> Stats:
        parts: list[StreamStats] = []
        bar.begin(len(self.texts))
        for k, (text, seed) in enumerate(zip(self.texts, self.seeds, strict=True)):
            stream = self.pipe.stream(
                text, policy=self.policy, seed=seed, **self.layers, **self.options
            )
            with stream:
                if not all(self.sink.write(chunk.waveform) for chunk in stream):
                    break
            parts.append(stream.stats)
            self.count(stream.utterance)
            bar.finish(k)
            self.spoken += 1
        self.streams = parts
        return add_stats(parts) if parts else Stats()

    def report(self, stats: Stats) -> None:
        if self.streams:
            seconds = stats.seconds + stats.pixel_seconds
            factor = seconds / self.seconds if self.seconds else 0.0
            first = self.streams[0].first_audio_seconds
            say(
                f"{self.summary} the first after {first:.2f} s, real-time factor "
                f"{factor:.2f}: {stats.summary}"
            )

    @property
    def summary(self) -> str:
        return f"{count_of(self.spoken, self.unit)}, {self.seconds:.1f} s of sound,"

    @property
    def stopped(self) -> str:
        return f"stopped; {self.spoken} of {self.n_files} {self.unit}s were spoken to their end"


class ClipJob(CodecJob):
    """Images and clips to continue.

    Attributes:
        starts: first frames of the clips, by file.
        prompt: what happens in the clips; None for a model that reads no text.
        suffix: of the files.
    """

    unit = "clip"
    pipeline = ImageToVideo

    def read(self) -> None:
        flags = self.flags
        files, self.prompt = flags.check_starts()
        shared.check_count("count", flags.count, MAX_IMAGES)
        super().read()
        check_seed(self.seeds)
        choose_params(SamplingParams(), **given(flags.sampling))
        self.suffix = f".{pick_format(flags.file_format)}"
        room, self.starts = MAX_KEPT, {}
        for start in files:
            frames = self.starts[start] = read_frames(start, _MAX_FRAMES, room=room)
            room -= sum(frame.width * frame.height for frame in frames)

    @property
    def parts(self) -> dict[str, str | None]:
        return super().parts | {"text_encoder": self.flags.text_encoder}

    def prepare(self) -> None:
        check_sides(self.suffix, self.pipe.video.size)
        self.pipe.video.encode_prompt(self.prompt)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the clips of a start."""
        return [self.seed + k for k in range(self.flags.count)]

    @property
    def n_files(self) -> int:
        return self.flags.count * len(self.starts)

    def decode(self, bar: JobProgress) -> Stats:
        parts: list[Stats] = []
        for start, frames in self.starts.items():

            def finish(clip: Clip, start: Path = start) -> None:
                self.write_clip(start, clip)
                bar.finish(clip.index)

            bar.begin(self.flags.count)
            stats = self.pipe.serve(
                frames,
                self.params,
                prompt=self.prompt,
                policy=self.policy,
                seed=self.seeds,
                batch_size=self.rows,
                deliver=finish,
                on_step=bar.update,
                **self.layers,
            )
            parts.append(stats)
        return add_stats(parts)

    @property
    def params(self) -> SamplingParams:
        """The given sampling parameters, and for the others those that the model recommends."""
        return choose_params(self.pipe.video.params, **given(self.flags.sampling))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What a clip depends on, apart from its start, prompt and seed; ready for JSON."""
        settings = self.codec_settings(self.params)
        if self.pipe.text_encoder is not None:
            settings["text_encoder"] = content_hash(self.pipe.text_encoder)
        return settings

    def write_clip(self, start: Path, clip: Clip) -> None:
        """Write one clip.

        Raises:
            OSError: see `write_payload`.
        """
        tokens = clip.tokens[: clip.n_read].flatten().tolist()  # of the start
        prompt = shared.given(prompt=self.prompt)
        source = {"start": tokens, "n_given": clip.n_given, **prompt}
        facts = {
            "start": start.name,
            **prompt,
            "frames": len(clip.frames),
            "n_given": clip.n_given,
            "fps": clip.fps,
            "tokens": clip.tokens.numel(),
        }
        write = partial(write_video, frames=clip.frames, fps=clip.fps)
        self.write_payload(start.stem, clip, source, facts, write)
