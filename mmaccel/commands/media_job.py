"""One run of `mmaccel speak` or `mmaccel animate`: decode and write each payload, then a summary.

A payload is an utterance or a clip. `MediaJob` is the run, `SpeechJob` and `VideoJob` its kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.files import check_written, not_written
from mmaccel.commands.options import say_drawn
from mmaccel.commands.process import Stopped, resume_collector
from mmaccel.commands.terminal import count_of, progress_bar, say
from mmaccel.loading import load_keywords
from mmaccel.options import SAMPLING_FIELDS, LoadOptions
from mmaccel.outputs.image_files import describe_settings, image_name
from mmaccel.outputs.machine import versions
from mmaccel.outputs.sound_files import write_sound
from mmaccel.outputs.video_files import write_video
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.media import RunProgress
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.outputs import add_stats
from mmaccel.pipelines.text_to_speech.plan import make_plan, pick_params
from mmaccel.results import EXACT_DTYPE, Stats, exactness_in
from mmaccel.samplers.drafting.coarse import coarse_facts

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.image_to_video.types import Clip
    from mmaccel.pipelines.text_to_speech.types import Utterance
    from mmaccel.samplers.sampling_params import SamplingParams

_SPELLING = ("model", "policy", "policy_options")  # a file name has hash and repr instead


def open_pipe(pipeline: Any, model: str, load: LoadOptions, codec: str | None) -> Any:
    """Load a `TextToSpeech` or an `ImageToVideo`.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see its `from_pretrained`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    pipe = pipeline.from_pretrained(model, codec=codec, **load_keywords(load))
    resume_collector()
    return pipe


@dataclass(kw_only=True)
class MediaJob(ABC):
    """Checked settings of a run, and the files that are written.

    Attributes:
        pipe: a `TextToSpeech` or an `ImageToVideo`, loaded by name.
        seed: of the first payload.
        name: of the policy.
        policy: the policy.
        options: given arguments of the pipeline.
        batch_size: largest number of rows decoded together.
        out: folder for the files.
        model, dtype: as given on the command line.
        layers: methods of the model's layers by slot.
        is_seed_drawn: whether the seed is said, because nobody chose it.
        files: of the payloads that are written; each has a JSON file next to it.
    """

    pipe: Any
    seed: int
    name: str
    policy: Any
    options: dict[str, Any]
    batch_size: int
    out: Path
    model: str
    dtype: str
    layers: dict[str, Any] = field(default_factory=dict)
    is_seed_drawn: bool = False
    files: list[Path] = field(default_factory=list)

    @property
    @abstractmethod
    def unit(self) -> str:
        """Noun for a payload, such as "clip"."""

    @property
    @abstractmethod
    def n_files(self) -> int:
        """Number of files that the run writes."""

    @abstractmethod
    def decode(self, bar: JobProgress) -> Stats:
        """Decode all payloads; write each as soon as it is finished, and update the bar."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a payload depends on, apart from its seed and input; ready for JSON."""

    @property
    def summary(self) -> str:
        """What was written, without the folder."""
        return count_of(len(self.files), self.unit)

    @property
    def notes(self) -> list[str]:
        """Remarks for the end of the run."""
        return []

    def run(self) -> None:
        """Decode and write all payloads, then print a summary.

        Raises:
            Stopped: a signal came before the last payload; the written ones remain.
            Incomplete: written files are gone.
        """
        if self.is_seed_drawn:
            say_drawn(self.seed)
        try:
            with _progress(self.unit, self.n_files) as bar:
                stats = self.decode(bar)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {self.state} in {self.out}") from None
        facts = [file.with_suffix(".json") for file in self.files]
        check_written([*self.files, *facts], self.out)
        say(f"{self.summary} in {self.out}: {stats.summary}")
        say(stats)
        for note in self.notes:
            say(f"note: {note}")

    @property
    def state(self) -> str:
        """How many of the files are written."""
        return f"{len(self.files)} of {self.n_files} {self.unit}s are"

    def common_settings(self, params: SamplingParams) -> dict[str, Any]:
        """What a payload depends on, apart from its seed and input; ready for JSON."""
        settings = describe_settings(self.name, self.policy, params)
        del settings["guidance_scale"]  # these models have no guidance
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source),
            "codec": content_hash(self.pipe.codec),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            **settings,
            **{slot: repr(method) for slot, method in self.layers.items()},
            **coarse_facts(self.policy, self.pipe.model),
        }

    def write_payload(
        self,
        title: str,
        payload: Any,
        source: Mapping[str, Any],
        facts: Mapping[str, Any],
        suffix: str,
        write: Callable[..., None],
    ) -> None:
        """Write one payload. Everything it depends on enters the file name, so that only the same
        payload is overwritten.

        Args:
            title: the file name begins with its first words.
            payload: with its `seed`, `passes` and `total_variation`.
            source: the input of this payload, as the model received it.
            facts: further entries of the JSON file.
            suffix: of the file.
            write: receives the path and, as `facts`, the content of the JSON file.

        Raises:
            OSError: the file cannot be written; the message has the number of written files.
        """
        own = {name: value for name, value in self.settings.items() if name not in _SPELLING}
        own |= {"policy": repr(self.policy), **source}
        if self.dtype != EXACT_DTYPE or self.policy.exactness != "bitwise":
            own["rows"] = self.batch_size
        name = image_name(payload.seed, title, self.name, own, suffix)
        content = {
            "seed": payload.seed,
            **self.settings,
            "exactness": exactness_in(self.policy.exactness, self.dtype),
            **facts,
            "passes": payload.passes,
            "total_variation": payload.total_variation,
            "versions": versions(),
        }
        try:
            write(self.out / name, facts=content)
        except OSError as error:
            raise not_written(name, self.out, self.state, error) from error
        self.files.append(self.out / name)


@dataclass(kw_only=True)
class SpeechJob(MediaJob):
    """Texts to speak.

    Attributes:
        texts: one file each.
        max_seconds: length after which an utterance is cut; `check` computes it.
        seconds: written seconds of sound.
        cut: notes on utterances that were cut.
    """

    texts: list[str]
    max_seconds: float = 0.0
    seconds: float = 0.0
    cut: list[str] = field(default_factory=list)

    unit = "utterance"

    @property
    def n_files(self) -> int:
        """See `MediaJob`."""
        return len(self.texts)

    @property
    def seeds(self) -> list[int]:
        """The seed of each text."""
        return [self.seed + k for k in range(len(self.texts))]

    @property
    def notes(self) -> list[str]:
        """Which utterances were cut."""
        return self.cut

    def check(self) -> None:
        """Check the texts with the model, before the folder is created.

        Raises:
            OptionError, UnsupportedModelError: as `TextToSpeech.__call__`.
        """
        speech = self.pipe.speech
        plan = make_plan(speech, self.texts, self.seeds, batch_size=self.batch_size, **self.options)
        frames = (plan.length - 1) // speech.layout.columns
        self.max_seconds = frames * speech.frame_samples / speech.sample_rate

    def decode(self, bar: JobProgress) -> Stats:
        """See `MediaJob`."""

        def finish(utterance: Utterance) -> None:
            self.write(utterance)
            bar.finish(utterance.index)

        bar.begin(len(self.texts))
        speech = self.pipe(
            self.texts, policy=self.policy, seed=self.seeds, batch_size=self.batch_size,
            deliver=finish, **self.layers, **self.options,
        )  # fmt: skip
        stats: Stats = speech.stats
        return stats

    @property
    def summary(self) -> str:
        """See `MediaJob`."""
        return f"{super().summary}, {self.seconds:.1f} s of sound,"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What an utterance depends on, apart from its text and seed; ready for JSON."""
        speech, options = self.pipe.speech, self.options
        params = {name: options[name] for name in SAMPLING_FIELDS if name in options}
        return {
            **self.common_settings(pick_params(speech, **params)),
            "voice": options.get("voice"),
            "max_seconds": self.max_seconds,  # a longer text of the same run may reduce it
            "repetition_penalty": options.get("repetition_penalty", speech.repetition_penalty),
        }

    def write(self, utterance: Utterance) -> None:
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
        self.write_payload(utterance.text, utterance, source, facts, ".wav", write)
        self.seconds += utterance.seconds
        if not utterance.is_finished:
            self.cut.append(
                f"{utterance.text[:40]!r} was cut at {utterance.seconds:.1f} s; see --max-seconds"
            )


@dataclass(kw_only=True)
class VideoJob(MediaJob):
    """Images and clips to continue.

    Attributes:
        starts: first frames of the clips, by file.
        count: clips of each start.
        suffix: of the files.
    """

    starts: dict[Path, list[Image]]
    count: int
    suffix: str

    unit = "clip"

    @property
    def n_files(self) -> int:
        """See `MediaJob`."""
        return self.count * len(self.starts)

    def decode(self, bar: JobProgress) -> Stats:
        """See `MediaJob`."""
        seeds = [self.seed + k for k in range(self.count)]
        parts: list[Stats] = []
        for start, frames in self.starts.items():

            def finish(clip: Clip, start: Path = start) -> None:
                self.write(start, clip)
                bar.finish(clip.index)

            bar.begin(self.count)
            parts.append(self.pipe.serve(
                frames, self.params, policy=self.policy, seed=seeds, batch_size=self.batch_size,
                deliver=finish, on_step=bar.update, **self.layers,
            ))  # fmt: skip
        return add_stats(parts)

    @property
    def params(self) -> SamplingParams:
        """The given sampling parameters, and for the others those that the model recommends."""
        return choose_params(self.pipe.video.params, **self.options)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What a clip depends on, apart from its start and seed; ready for JSON."""
        return self.common_settings(self.params)

    def write(self, start: Path, clip: Clip) -> None:
        """Write one clip.

        Raises:
            OSError: see `write_payload`.
        """
        tokens = clip.tokens[: clip.n_read].flatten().tolist()  # of the start
        source = {"start": tokens, "n_given": clip.n_given}
        facts = {
            "start": start.name,
            "frames": len(clip.frames),
            "n_given": clip.n_given,
            "fps": clip.fps,
            "tokens": clip.tokens.numel(),
        }
        write = partial(write_video, frames=clip.frames, fps=clip.fps)
        self.write_payload(start.stem, clip, source, facts, f".{self.suffix}", write)


class JobProgress:
    """Shows the number of finished payloads of all runs of a job on a progress bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._before, self._run = 0.0, RunProgress(0)

    def begin(self, rows: int) -> None:
        """Begin the next run, of so many rows."""
        self._before, self._run = self._before + self._run.payloads, RunProgress(rows)

    def update(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`."""
        self._run.update(progress)
        self._show()

    def finish(self, index: int) -> None:
        """Count a payload as written."""
        self._run.finish(index)
        self._show()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._before + self._run.payloads)


@contextmanager
def _progress(unit: str, total: int) -> Iterator[JobProgress]:
    """A progress bar on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskProgressColumn,
        TimeRemainingColumn,
    )

    time = TimeRemainingColumn(elapsed_when_finished=True)
    columns = (f"{unit}s", BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), time)
    with progress_bar(*columns) as bar:
        yield JobProgress(bar, bar.add_task(f"{unit}s", total=total))
