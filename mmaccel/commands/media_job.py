"""One run of `mmaccel speak` or `mmaccel animate`: decode, write each payload at once, sum up.

`MediaJob` is the run; `SpeechJob` and `VideoJob` say what its payloads are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.catalog import make_policy
from mmaccel.commands.collector import wake_collector
from mmaccel.commands.run_setup import given, merge_fields, parse_window
from mmaccel.commands.terminal import Stopped, progress_bar
from mmaccel.loading import parse_cuda_graphs, pick_name
from mmaccel.outputs.image_files import image_name, plainly
from mmaccel.outputs.machine import versions
from mmaccel.outputs.sound_files import write_sound
from mmaccel.outputs.video_files import write_video
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.media import RunProgress
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.outputs import add_stats
from mmaccel.pipelines.text_to_speech.plan import make_plan, pick_params
from mmaccel.results import EXACT_DTYPE, Stats, exactness_in

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.image_to_video.types import Clip
    from mmaccel.pipelines.text_to_speech.types import Utterance
    from mmaccel.samplers.sampling_params import SamplingParams

_SPELLING = ("model", "policy", "policy_options")  # settings that others in a file name repeat


def choose_policy(
    policy: str | None, window: str | None, set_fields: list[str] | None
) -> tuple[str, Any]:
    """The short name of a window policy and the policy, from `--policy`, `--window` and `--set`.

    Raises:
        OptionError: no such policy or field, or a value outside its domain.
    """
    options = merge_fields(given(window=parse_window(window)), set_fields)
    name, options = pick_name(policy, options, "window")
    return name, make_policy(name, **options)


def open_pipe(pipeline: Any, model: str, *, cuda_graphs: str, **options: Any) -> Any:
    """Load a `TextToSpeech` or an `ImageToVideo`; `cuda_graphs` is the value of the option.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see its `from_pretrained`.
    """
    use_graphs = parse_cuda_graphs(cuda_graphs)
    pipe = pipeline.from_pretrained(model, cuda_graphs=use_graphs, **options)
    wake_collector()
    return pipe


@dataclass(kw_only=True)
class MediaJob(ABC):
    """Checked settings of a run, and how many of its files are written.

    Attributes:
        pipe: a `TextToSpeech` or an `ImageToVideo`, loaded by name.
        seed: of the first payload.
        name: of the policy.
        policy: the policy.
        options: the pipeline's own arguments that were given.
        batch_size: rows that are decoded at a time at most.
        out: folder for the files.
        model, dtype: as they were given.
        kept: files written.
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
    kept: int = 0

    @property
    @abstractmethod
    def unit(self) -> str:
        """What a file holds, such as "clip"."""

    @property
    @abstractmethod
    def n_asked(self) -> int:
        """Files that the run writes."""

    @abstractmethod
    def decode(self, bar: JobProgress) -> Stats:
        """Decode all payloads, write each as soon as it is finished, and show it on the bar."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that decide the payloads beside seed and input, ready for JSON."""

    @property
    def summary(self) -> str:
        """What was written, without the folder."""
        return f"{self.kept} {self.unit}{'s' * (self.kept != 1)}"

    @property
    def notes(self) -> list[str]:
        """Remarks for the end of the run."""
        return []

    def run(self) -> None:
        """Decode and write all payloads, then print a summary.

        Raises:
            Stopped: Ctrl-C came before the last; what was written is kept.
        """
        try:
            with _progress(self.unit, self.n_asked) as bar:
                stats = self.decode(bar)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {self.told} in {self.out}") from None
        print(f"{self.summary} in {self.out}")
        print(stats)
        for note in self.notes:
            print(f"note: {note}")

    @property
    def told(self) -> str:
        """How many of the files are written."""
        return f"kept {self.kept} of {self.n_asked} {self.unit}s"

    def base(self, params: SamplingParams) -> dict[str, Any]:
        """The settings that decide the payloads beside seed and input, ready for JSON."""
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source),
            "codec": content_hash(self.pipe.codec),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            "policy": self.name,
            "policy_options": {name: plainly(v) for name, v in vars(self.policy).items()},
            **{name: vars(params)[name] for name in FILTERS if name != "guidance_scale"},
        }

    def keep(
        self,
        title: str,
        made: Any,
        source: Mapping[str, Any],
        facts: Mapping[str, Any],
        suffix: str,
        write: Callable[..., None],
    ) -> None:
        """Write one payload. The file name depends on all that decides the payload, so only the
        same payload is overwritten.

        Args:
            title: the file name begins with its first words.
            made: the payload, with its `seed`, `passes` and `total_variation`.
            source: the input of this payload, as the model received it.
            facts: further entries of the JSON file.
            suffix: of the file.
            write: receives the path and, as `facts`, the content of the JSON file.

        Raises:
            OSError: the file cannot be written; the message says how many files are kept.
        """
        recipe = {name: value for name, value in self.settings.items() if name not in _SPELLING}
        recipe |= {"policy": repr(self.policy), **source}
        if self.dtype != EXACT_DTYPE or self.policy.exactness != "bitwise":
            recipe["rows"] = self.batch_size
        name = image_name(made.seed, title, self.name, recipe, suffix)
        told = {
            "seed": made.seed,
            **self.settings,
            "exactness": exactness_in(self.policy.exactness, self.dtype),
            **facts,
            "passes": made.passes,
            "total_variation": made.total_variation,
            "versions": versions(),
        }
        try:
            write(self.out / name, facts=told)
        except OSError as error:
            raise OSError(
                f"--out: expected room for {name} in {str(self.out)!r}, received {error.strerror}; "
                f"{self.told}; make room, and run it again"
            ) from error
        self.kept += 1


@dataclass(kw_only=True)
class SpeechJob(MediaJob):
    """Texts to speak.

    Attributes:
        texts: one file each.
        max_seconds: after which an utterance is cut; `check` computes it.
        seconds: of sound that are written.
        cut: remarks on utterances that were cut.
    """

    texts: list[str]
    max_seconds: float = 0.0
    seconds: float = 0.0
    cut: list[str] = field(default_factory=list)

    unit = "utterance"

    @property
    def n_asked(self) -> int:
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
        """Check the texts against the model, before a folder is made.

        Raises:
            OptionError, UnsupportedModelError: as `TextToSpeech.__call__`.
        """
        speech = self.pipe.speech
        plan = make_plan(speech, self.texts, self.seeds, batch_size=self.batch_size, **self.options)
        frames = (plan.length - 1) // speech.layout.columns
        self.max_seconds = frames * speech.frame_samples / speech.sample_rate

    def decode(self, bar: JobProgress) -> Stats:
        """See `MediaJob`."""

        def keep(made: Utterance) -> None:
            self.write(made)
            bar.finish(made.index)

        bar.begin(len(self.texts))
        speech = self.pipe(
            self.texts, policy=self.policy, seed=self.seeds, batch_size=self.batch_size,
            deliver=keep, **self.options,
        )  # fmt: skip
        stats: Stats = speech.stats
        return stats

    @property
    def summary(self) -> str:
        """See `MediaJob`."""
        return f"{super().summary}, {self.seconds:.1f} s of sound,"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the utterances beside text and seed, ready for JSON."""
        speech, options = self.pipe.speech, self.options
        params = {name: options[name] for name in FILTERS if name in options}
        return {
            **self.base(pick_params(speech, **params)),
            "voice": options.get("voice"),
            "max_seconds": self.max_seconds,  # a longer text of the same run may have shortened it
            "repetition_penalty": options.get("repetition_penalty", speech.repetition_penalty),
        }

    def write(self, made: Utterance) -> None:
        """Write one utterance.

        Raises:
            OSError: see `MediaJob.keep`.
        """
        source = {"text": made.text.strip()}  # commas and capitals are heard
        facts = {
            "text": made.text,
            "seconds": made.seconds,
            "sample_rate": made.sample_rate,
            "is_finished": made.is_finished,
            "tokens": len(made.tokens),
        }
        write = partial(write_sound, waveform=made.waveform, sample_rate=made.sample_rate)
        self.keep(made.text, made, source, facts, ".wav", write)
        self.seconds += made.seconds
        if not made.is_finished:
            self.cut.append(
                f"{made.text[:40]!r} was cut at {made.seconds:.1f} s; see --max-seconds"
            )


@dataclass(kw_only=True)
class VideoJob(MediaJob):
    """Starts to continue.

    Attributes:
        starts: frames by file.
        count: clips of each.
        suffix: of the files.
    """

    starts: dict[Path, list[Image]]
    count: int
    suffix: str

    unit = "clip"

    @property
    def n_asked(self) -> int:
        """See `MediaJob`."""
        return self.count * len(self.starts)

    def decode(self, bar: JobProgress) -> Stats:
        """See `MediaJob`."""
        seeds = [self.seed + k for k in range(self.count)]
        parts: list[Stats] = []
        for start, frames in self.starts.items():

            def keep(made: Clip, start: Path = start) -> None:
                self.write(start, made)
                bar.finish(made.index)

            bar.begin(self.count)
            parts.append(self.pipe.serve(
                frames, self.params, policy=self.policy, seed=seeds, batch_size=self.batch_size,
                deliver=keep, on_step=bar.update,
            ))  # fmt: skip
        return add_stats(parts)

    @property
    def params(self) -> SamplingParams:
        """The filters that were given, and those that are recommended where none were."""
        return choose_params(self.pipe.video.params, **self.options)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the clips beside start and seed, ready for JSON."""
        return self.base(self.params)

    def write(self, start: Path, made: Clip) -> None:
        """Write one clip.

        Raises:
            OSError: see `MediaJob.keep`.
        """
        tokens = made.tokens[: made.n_read].flatten().tolist()  # of the start
        source = {"start": tokens, "n_given": made.n_given}
        facts = {
            "start": start.name,
            "frames": len(made.frames),
            "n_given": made.n_given,
            "fps": made.fps,
            "tokens": made.tokens.numel(),
        }
        write = partial(write_video, frames=made.frames, fps=made.fps)
        self.keep(start.stem, made, source, facts, f".{self.suffix}", write)


class JobProgress:
    """Shows on a progress bar how many payloads are finished, over all runs of a job."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._before, self._run = 0.0, RunProgress(0)

    def begin(self, rows: int) -> None:
        """The next run begins."""
        self._before, self._run = self._before + self._run.payloads, RunProgress(rows)

    def update(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`."""
        self._run.update(progress)
        self._show()

    def finish(self, index: int) -> None:
        """A payload of the run is written."""
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
