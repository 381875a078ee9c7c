"""One run of `mmaccel speak`: say texts, write each as it is finished, sum up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.commands.collector import wake_collector
from mmaccel.outputs.machine import versions
from mmaccel.outputs.picture_files import picture_name, plainly
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.model_folder import content_hash
from mmaccel.pipelines.speech_plan import make_plan, pick_filters
from mmaccel.pipelines.text_to_speech import TextToSpeech
from mmaccel.results import EXACT_DTYPE, promise_in

if TYPE_CHECKING:
    from mmaccel.pipelines.speech import Utterance


def open_speaker(
    model: str, codec: str | None, device: str, dtype: Any, family: str | None, engine: str
) -> TextToSpeech:
    """Load a model that speaks; the arguments are those of the command line.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see `TextToSpeech.from_pretrained`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    pipe = TextToSpeech.from_pretrained(
        model, codec=codec, device=device, dtype=dtype, family=family, engine=engine
    )
    wake_collector()
    return pipe


@dataclass
class SpeechJob:
    """What to say, how long it may last, once it is checked, and how much of it is said."""

    pipe: TextToSpeech
    texts: list[str]
    seed: int
    name: str
    policy: Any
    options: dict[str, Any]  # those of `TextToSpeech.__call__` that were given
    batch_size: int
    out: Path
    model: str
    dtype: str
    most_seconds: float = 0.0
    kept: int = 0

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
        assert self.pipe.source is not None and self.pipe.codec is not None  # opened by name
        given = {name: self.options[name] for name in FILTERS if name in self.options}
        filters = vars(pick_filters(self.pipe.speech, **given))
        penalty = self.options.get("repetition_penalty", self.pipe.speech.repetition_penalty)
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source),
            "codec": content_hash(self.pipe.codec),
            "voice": self.options.get("voice"),
            "max_seconds": self.most_seconds,  # other texts may have left less room than asked for
            "dtype": self.dtype,
            "device": str(self.pipe.speech.window.device),
            "policy": self.name,
            "policy_options": {name: plainly(v) for name, v in vars(self.policy).items()},
            **{name: filters[name] for name in FILTERS if name != "guidance_scale"},
            "repetition_penalty": penalty,
        }

    def write(self, made: Utterance) -> None:
        """Write one utterance; only the same one is overwritten.

        Raises:
            OSError: it cannot be written; with what was kept.
        """
        is_exact = self.dtype == EXACT_DTYPE and self.policy.exactness == "bitwise"
        recipe = {**self.settings, "text": made.text.strip()}  # commas and capitals are heard
        if not is_exact:
            recipe["rows"] = self.batch_size
        facts = {
            "text": made.text,
            "seed": made.seed,
            **self.settings,
            "exactness": promise_in(self.policy.exactness, self.dtype),
            "seconds": made.seconds,
            "sample_rate": made.sample_rate,
            "is_finished": made.is_finished,
            "tokens": len(made.tokens),
            "passes": made.passes,
            "total_variation": made.total_variation,
            "versions": versions(),
        }
        name = picture_name(made.seed, made.text, self.name, recipe, ".wav")
        try:
            write_sound(self.out / name, made.waveform, made.sample_rate, facts)
        except OSError as error:
            raise OSError(
                f"--out: expected room for {name} in {str(self.out)!r}, received {error.strerror}; "
                f"kept {self.kept} of {len(self.texts)} utterances; make room, and run it again"
            ) from error
        self.kept += 1


def run_speech(job: SpeechJob) -> bool:
    """Say all texts; False if Ctrl-C came before the last."""
    cut: list[str] = []

    def keep(made: Utterance) -> None:
        job.write(made)
        tick()
        if not made.is_finished:
            cut.append(f"{made.text[:40]!r} was cut at {made.seconds:.1f} s; see --max-seconds")

    try:
        with _progress(len(job.texts)) as tick:
            speech = job.pipe(
                job.texts, policy=job.policy, seed=job.seeds, batch_size=job.batch_size,
                deliver=keep, **job.options,
            )  # fmt: skip
    except KeyboardInterrupt:
        return False
    seconds = sum(made.seconds for made in speech.utterances)
    print(f"{job.kept} {'utterance' if job.kept == 1 else 'utterances'}, {seconds:.1f} s of sound, "
          f"in {job.out}")  # fmt: skip
    print(speech.stats)
    for note in cut:
        print(f"note: {note}")
    return True


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on stderr that counts utterances; yields what tells it of one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("utterances", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("utterances", total=total)
        yield lambda: bar.advance(task)
