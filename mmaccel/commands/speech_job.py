"""One run of `mmaccel speak`: say texts, write each as it is finished, sum up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.commands.coded_job import CodedJob
from mmaccel.commands.collector import wake_collector
from mmaccel.commands.terminal import progress_bar
from mmaccel.opening import parse_cuda_graphs
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.speech_plan import make_plan, pick_filters
from mmaccel.pipelines.text_to_speech import TextToSpeech

if TYPE_CHECKING:
    from mmaccel.pipelines.speech import Utterance


def open_speaker(
    model: str, codec: str | None, device: str, dtype: Any, family: str | None, cuda_graphs: str
) -> TextToSpeech:
    """Load a model that speaks; the arguments are those of the command line.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see `TextToSpeech.from_pretrained`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    pipe = TextToSpeech.from_pretrained(
        model, codec=codec, device=device, dtype=dtype, family=family,
        cuda_graphs=parse_cuda_graphs(cuda_graphs),
    )  # fmt: skip
    wake_collector()
    return pipe


@dataclass(kw_only=True)
class SpeechJob(CodedJob):
    """What to say, how long it may last, once it is checked, and how much of it is said.

    Attributes:
        texts: one file each.
        most_seconds: of an utterance, which `check` finds out.
    """

    texts: list[str]
    most_seconds: float = 0.0

    unit = "utterance"

    @property
    def n_asked(self) -> int:
        """See `CodedJob`."""
        return len(self.texts)

    @property
    def seeds(self) -> list[int]:
        """Of each text."""
        return [self.seed + k for k in range(len(self.texts))]

    def check(self) -> None:
        """Refuse what cannot be said before a folder is made.

        Raises:
            OptionError, UnsupportedModelError: as `TextToSpeech.__call__`.
        """
        speech = self.pipe.speech
        plan = make_plan(speech, self.texts, self.seeds, batch_size=self.batch_size, **self.options)
        frames = (plan.length - 1) // speech.layout.columns
        self.most_seconds = frames * speech.frame_samples / speech.sample_rate

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What utterances of this run were made from beside text and seed, ready for JSON."""
        speech, options = self.pipe.speech, self.options
        given = {name: options[name] for name in FILTERS if name in options}
        return {
            **self.base(pick_filters(speech, **given)),
            "voice": options.get("voice"),
            "max_seconds": self.most_seconds,  # other texts may have left less room than asked for
            "repetition_penalty": options.get("repetition_penalty", speech.repetition_penalty),
        }

    def write(self, made: Utterance) -> None:
        """Write one utterance; only the same one is overwritten.

        Raises:
            OSError: it cannot be written; with what was kept.
        """
        source = {"text": made.text.strip()}  # commas and capitals are heard
        facts = {
            "text": made.text,
            "seconds": made.seconds,
            "sample_rate": made.sample_rate,
            "is_finished": made.is_finished,
            "tokens": len(made.tokens),
        }

        def write(file: Path, told: dict[str, Any]) -> None:
            write_sound(file, made.waveform, made.sample_rate, told)

        self.keep(made.text, made, self.settings, source, facts, ".wav", write)


def run_speech(job: SpeechJob) -> bool:
    """Say all texts; False if Ctrl-C came before the last."""
    cut: list[str] = []

    def keep(made: Utterance) -> None:
        job.write(made)
        tick()
        if not made.is_finished:
            cut.append(f"{made.text[:40]!r} was cut at {made.seconds:.1f} s; see --max-seconds")

    try:
        with _progress(job.n_asked) as tick:
            speech = job.pipe(
                job.texts, policy=job.policy, seed=job.seeds, batch_size=job.batch_size,
                deliver=keep, **job.options,
            )  # fmt: skip
    except KeyboardInterrupt:
        return False
    seconds = sum(made.seconds for made in speech.utterances)
    plural = "s" * (job.kept != 1)
    print(f"{job.kept} {job.unit}{plural}, {seconds:.1f} s of sound, in {job.out}")
    print(speech.stats)
    for note in cut:
        print(f"note: {note}")
    return True


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on stderr that counts utterances; yields what tells it of one."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    columns = ("utterances", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("utterances", total=total)
        yield lambda: bar.advance(task)
