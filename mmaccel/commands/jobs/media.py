"""One run of `mmaccel generate`, `speak`, `animate` or `answer`: decode and write, then a summary.

`MediaJob` is the run. A modality says what it decodes, what a result depends on and how it is
written: `ImageJob`, `SpeechJob`, `ClipJob`, `PromptedClipJob`, `AnswerJob`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mmaccel.commands.files import check_folder, check_written, not_written, open_folder
from mmaccel.commands.options import check_count, pick_seed, say_drawn, set_threads
from mmaccel.commands.process import Stopped, resume_collector
from mmaccel.commands.terminal import count_of, progress_bar, say
from mmaccel.limits import MAX_BATCH
from mmaccel.loading import place
from mmaccel.outputs.image_files import describe_settings, image_name
from mmaccel.outputs.machine import versions
from mmaccel.pipelines.media import RunProgress
from mmaccel.results import EXACT_DTYPE, Stats, exactness_in
from mmaccel.samplers.drafting.coarse import coarse_facts
from mmaccel.samplers.sampling_params import SamplingParams

_SPELLING = ("model", "policy", "policy_options", "decoder")  # a file name has hash and repr


class MediaJob(ABC):
    """A run whose flags are checked and whose model is loaded.

    Args:
        flags: of the command.

    Attributes:
        seed: of the first result.
        is_seed_drawn: whether the seed is said, because nobody chose it.
        load: how the model is opened; device and dtype are names.
        layers: methods of the model's layers by slot.
        out: folder for the files; None where there are none.
        pipe: the pipeline, loaded by name.
        name: short name of the policy.
        policy: the policy.
        files: of the results that are written.

    Raises:
        OptionError: a flag or an input outside its domain, before any work.
        UnsupportedModelError, MissingBackendError: see `from_pretrained` of the pipeline.
    """

    unit: ClassVar[str]
    """Noun for a result, such as "clip"."""

    def __init__(self, flags: Any) -> None:
        self.flags = flags
        self.layers = flags.layer.read()
        self.seed, self.is_seed_drawn = self.pick_seed()
        set_threads(flags.threads)
        self.load = place(flags.load)
        self.files: list[Path] = []
        self.out: Path | None = flags.out
        self.read()
        if self.out is not None:
            check_folder(self.out)
        self.pipe = self.open()
        resume_collector()
        self.name, self.policy = flags.method.choose(self.kind)
        self.prepare()
        if self.out is not None:
            open_folder(self.out)

    @property
    def kind(self) -> str:
        """Of the model: whose policies decode it."""
        return "window"

    @property
    def dtype(self) -> str:
        """Name of the number format."""
        return str(self.load.dtype)

    def pick_seed(self) -> tuple[int, bool]:
        """The seed of the first result, and whether it was drawn."""
        return pick_seed(self.flags.seed)

    @abstractmethod
    def read(self) -> None:
        """Read and check flags and inputs before the model is loaded, which takes long."""

    @abstractmethod
    def open(self) -> Any:
        """Load the pipeline."""

    def prepare(self) -> None:  # noqa: B027
        """Check the inputs with the model, before the folder is created."""

    @property
    @abstractmethod
    def n_files(self) -> int:
        """Number of results that the run makes."""

    @abstractmethod
    def decode(self, bar: Any) -> Stats:
        """Decode all results; write each as soon as it is finished, and update the bar."""

    @property
    def written(self) -> list[Path]:
        """What must be there at the end: results, each with a JSON file next to it."""
        return [*self.files, *(file.with_suffix(".json") for file in self.files)]

    @property
    def summary(self) -> str:
        """What was written, without the folder."""
        return count_of(len(self.files), self.unit)

    @property
    def notes(self) -> list[str]:
        """Remarks for the end of the run."""
        return []

    def run(self) -> None:
        """Decode and write all results, then print a summary.

        Raises:
            Stopped: a signal came before the last result; the written ones remain.
            OSError: a file cannot be written; the message has the number of written results.
            Incomplete: written files are gone.
        """
        if self.is_seed_drawn:
            say_drawn(self.seed)
        try:
            with self.progress() as bar:
                stats = self.decode(bar)
        except KeyboardInterrupt:
            raise Stopped(self.stopped) from None
        if self.out is not None:
            check_written(self.written, self.out)
        self.report(stats)
        for note in self.notes:
            say(f"note: {note}")

    def progress(self) -> AbstractContextManager[Any]:
        """A progress bar on stderr."""
        return _progress(self.unit, self.n_files)

    def report(self, stats: Stats) -> None:
        """Print what was made, and what it cost."""
        say(f"{self.summary} in {self.out}: {stats.summary}")
        say(stats)

    @property
    def state(self) -> str:
        """How many of the files are written."""
        return f"{len(self.files)} of {self.n_files} {self.unit}s are"

    @property
    def stopped(self) -> str:
        """What is said after a signal."""
        return f"stopped; {self.state} in {self.out}"

    def common_settings(self, params: SamplingParams, **files: Any) -> dict[str, Any]:
        """What a result depends on, apart from its seed and input; ready for JSON.

        Args:
            params: of the run.
            **files: what was loaded, beside the name of the model.
        """
        return {
            "model": self.flags.model,
            **files,
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            **describe_settings(self.name, self.policy, params),
            **{slot: repr(method) for slot, method in self.layers.items()},
            **coarse_facts(self.policy, self.pipe.model),
        }

    def name_settings(self, settings: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The settings that enter a file name, independent of how the flags were spelled.

        The number of rows is one of them where results are equal up to rounding only: outside
        float32, and where an acceptance may depend on the last bit of a probability.
        """
        own = {name: value for name, value in settings.items() if name not in _SPELLING}
        own |= {"policy": repr(self.policy)}
        is_exact = self.dtype == EXACT_DTYPE and self.policy.exactness == "bitwise"
        return own if is_exact else {**own, "rows": rows}

    def write(self, file: Path, write: Callable[[Path], object]) -> Path:
        """Write a file, and return its path.

        Raises:
            OSError: the file cannot be written; the message has the number of written results.
        """
        try:
            write(file)
        except OSError as error:
            raise not_written(file.name, file.parent, self.state, error) from error
        return file


class SidecarJob(MediaJob):
    """A run whose results have a JSON file next to them, by the policies of windows."""

    out: Path
    suffix: str
    """Of the files."""

    @property
    def rows(self) -> int:
        """Results that are decoded at a time at most."""
        return 1 if self.flags.batch_size is None else int(self.flags.batch_size)

    def read(self) -> None:
        check_count("batch-size", self.rows, MAX_BATCH)
        self.flags.method.choose("window")

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a result depends on, apart from its seed and input; ready for JSON."""

    def write_payload(
        self,
        title: str,
        payload: Any,
        source: Mapping[str, Any],
        facts: Mapping[str, Any],
        write: Callable[..., None],
    ) -> None:
        """Write one payload. Everything it depends on enters the file name, so that only the same
        payload is overwritten.

        Args:
            title: the file name begins with its first words.
            payload: with its `seed`, `passes` and `total_variation`.
            source: the input of this payload, as the model received it.
            facts: further entries of the JSON file.
            write: receives the path and, as `facts`, the content of the JSON file.

        Raises:
            OSError: see `write`.
        """
        own = self.name_settings(self.settings, self.rows) | dict(source)
        name = image_name(payload.seed, title, self.name, own, self.suffix)
        content = {
            "seed": payload.seed,
            **self.settings,
            "exactness": exactness_in(self.policy.exactness, self.dtype),
            **facts,
            "passes": payload.passes,
            "total_variation": payload.total_variation,
            "versions": versions(),
        }
        self.files.append(self.write(self.out / name, partial(write, facts=content)))


class JobProgress:
    """Shows the number of finished payloads of all runs of a job on a progress bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._before = 0.0
        self._run = RunProgress(0)

    def begin(self, rows: int) -> None:
        """Begin the next run, of so many rows."""
        self._before = self._before + self._run.payloads
        self._run = RunProgress(rows)

    def update(self, progress: Any) -> None:
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
