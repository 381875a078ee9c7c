"""One run of `mmaccel animate`: make clips, write each as it is finished, sum up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.coded_job import CodedJob
from mmaccel.commands.collector import wake_collector
from mmaccel.commands.terminal import progress_bar
from mmaccel.opening import parse_cuda_graphs
from mmaccel.outputs.video_files import write_video
from mmaccel.pipelines.image_to_video import ImageToVideo
from mmaccel.pipelines.picture_model import choose_filters
from mmaccel.pipelines.pictures import add_stats
from mmaccel.results import Stats

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.video import Clip
    from mmaccel.samplers.filters import Filters


def open_animator(
    model: str, codec: str | None, device: str, dtype: Any, cuda_graphs: str
) -> ImageToVideo:
    """Load a model that continues clips; the arguments are those of the command line.

    Raises:
        OptionError, UnsupportedModelError: see `ImageToVideo.from_pretrained`.
    """
    pipe = ImageToVideo.from_pretrained(
        model, codec=codec, device=device, dtype=dtype,
        cuda_graphs=parse_cuda_graphs(cuda_graphs),
    )  # fmt: skip
    wake_collector()
    return pipe


@dataclass(kw_only=True)
class VideoJob(CodedJob):
    """What to continue, once it is checked, and how much of it is made.

    Attributes:
        starts: frames by file.
        count: clips of each.
        suffix: of the files.
        parts: stats by start.
    """

    starts: dict[Path, list[Image]]
    count: int
    suffix: str
    parts: list[Stats] = field(default_factory=list)

    unit = "clip"

    @property
    def n_asked(self) -> int:
        """See `CodedJob`."""
        return self.count * len(self.starts)

    @property
    def filters(self) -> Filters:
        """What was given, and what is recommended where nothing was."""
        return choose_filters(self.pipe.video.filters, **self.options)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What clips of this run were made from beside start and seed, ready for JSON."""
        return self.base(self.filters)

    def write(self, start: Path, made: Clip) -> None:
        """Write one clip; only the same one is overwritten.

        Raises:
            OSError: it cannot be written; with what was kept.
        """
        given = made.tokens[: made.n_read].flatten().tolist()  # what the start was read as
        source = {"start": given, "n_given": made.n_given}
        facts = {
            "start": start.name,
            "frames": len(made.frames),
            "n_given": made.n_given,
            "fps": made.fps,
            "tokens": made.tokens.numel(),
        }

        def write(file: Path, told: dict[str, Any]) -> None:
            write_video(file, made.frames, made.fps, told)

        self.keep(start.stem, made, self.settings, source, facts, f".{self.suffix}", write)


def run_video(job: VideoJob) -> bool:
    """Make all clips; False if Ctrl-C came before the last."""
    seeds = [job.seed + k for k in range(job.count)]
    try:
        with _progress(job.n_asked) as watch:
            for start, frames in job.starts.items():

                def keep(made: Clip, start: Path = start) -> None:
                    job.write(start, made)
                    watch.finish(made)

                stats = job.pipe.serve(
                    frames, job.filters, policy=job.policy, seed=seeds,
                    batch_size=job.batch_size, deliver=keep, on_step=watch,
                )  # fmt: skip
                job.parts.append(stats)
                watch.turn()
    except KeyboardInterrupt:
        return False
    print(f"{job.kept} {job.unit}{'s' * (job.kept != 1)} in {job.out}")
    print(add_stats(job.parts))
    return True


class _Watch:
    """Tells a bar how much of the clips is made."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task, self._finished = bar, task, 0
        self._ended: set[int] = set()  # of this start

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`."""
        running = zip(progress.rows, progress.lengths.tolist())
        made = sum(n for row, n in running if row not in self._ended)
        self._bar.update(self._task, completed=self._finished + made / progress.tokens.shape[1])

    def finish(self, made: Clip) -> None:
        """A clip is written."""
        self._ended.add(made.index)
        self._finished += 1
        self._bar.update(self._task, completed=self._finished)

    def turn(self) -> None:
        """Go on with the next start."""
        self._ended.clear()


@contextmanager
def _progress(total: int) -> Iterator[_Watch]:
    """A progress bar on stderr."""
    from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn

    columns = ("clips", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        yield _Watch(bar, bar.add_task("clips", total=total))
