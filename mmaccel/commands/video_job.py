"""One run of `mmaccel animate`: make clips, write each as it is finished, sum up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.commands.collector import wake_collector
from mmaccel.outputs.machine import versions
from mmaccel.outputs.picture_files import picture_name, plainly
from mmaccel.outputs.video_files import write_video
from mmaccel.pipelines.image_to_video import ImageToVideo
from mmaccel.pipelines.model_folder import content_hash
from mmaccel.pipelines.picture_model import choose_filters
from mmaccel.pipelines.pictures import add_stats
from mmaccel.results import EXACT_DTYPE, Stats, promise_in

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.video import Clip


def open_animator(
    model: str, codec: str | None, device: str, dtype: Any, engine: str
) -> ImageToVideo:
    """Load a model that continues clips; the arguments are those of the command line.

    Raises:
        OptionError, UnsupportedModelError: see `ImageToVideo.from_pretrained`.
    """
    pipe = ImageToVideo.from_pretrained(
        model, codec=codec, device=device, dtype=dtype, engine=engine
    )
    wake_collector()
    return pipe


@dataclass
class VideoJob:
    """What to continue, once it is checked, and how much of it is made."""

    pipe: ImageToVideo
    starts: dict[Path, list[Image]]
    seed: int
    count: int
    name: str
    policy: Any
    law: dict[str, Any]  # of the filters' fields those that were given
    batch_size: int
    out: Path
    suffix: str
    model: str
    dtype: str
    kept: int = 0
    parts: list[Stats] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What clips of this run were made from beside start and seed, ready for JSON."""
        assert self.pipe.source is not None and self.pipe.codec is not None  # opened by name
        filters = vars(choose_filters(self.pipe.video.filters, **self.law))
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source),
            "codec": content_hash(self.pipe.codec),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            "policy": self.name,
            "policy_options": {name: plainly(v) for name, v in vars(self.policy).items()},
            **{name: filters[name] for name in FILTERS if name != "guidance_scale"},
        }

    def write(self, start: Path, made: Clip) -> None:
        """Write one clip; only the same one is overwritten.

        Raises:
            OSError: it cannot be written; with what was kept.
        """
        is_exact = self.dtype == EXACT_DTYPE and self.policy.exactness == "bitwise"
        given = made.tokens[: made.n_read].flatten().tolist()  # what the start was read as
        recipe = {**self.settings, "start": given, "n_given": made.n_given}
        if not is_exact:
            recipe["rows"] = self.batch_size
        facts = {
            "start": start.name,
            "seed": made.seed,
            **self.settings,
            "exactness": promise_in(self.policy.exactness, self.dtype),
            "frames": len(made.frames),
            "n_given": made.n_given,
            "fps": made.fps,
            "tokens": made.tokens.numel(),
            "passes": made.passes,
            "versions": versions(),
        }
        name = picture_name(made.seed, start.stem, self.name, recipe, f".{self.suffix}")
        try:
            write_video(self.out / name, made.frames, made.fps, facts)
        except OSError as error:
            raise OSError(
                f"--out: expected room for {name} in {str(self.out)!r}, received {error.strerror}; "
                f"kept {self.kept} clips; make room, and run it again"
            ) from error
        self.kept += 1

    def batches(self) -> Iterator[tuple[Path, list[Image], list[int]]]:
        """Starts with the seeds of clips that are made together."""
        seeds = [self.seed + k for k in range(self.count)]
        for start, frames in self.starts.items():
            for first in range(0, self.count, self.batch_size):
                yield start, frames, seeds[first : first + self.batch_size]


def run_video(job: VideoJob) -> bool:
    """Make all clips; False if Ctrl-C came before the last."""
    try:
        with _progress(job.count * len(job.starts)) as watch:
            for start, frames, seeds in job.batches():
                clips = job.pipe(frames, policy=job.policy, seed=seeds, on_step=watch, **job.law)
                for made in clips.clips:
                    job.write(start, made)
                job.parts.append(clips.stats)
                watch.finish(len(clips))
    except KeyboardInterrupt:
        return False
    print(f"{job.kept} {'clip' if job.kept == 1 else 'clips'} in {job.out}")
    print(add_stats(job.parts))
    return True


class _Watch:
    """Tells a bar how much of the clips is made."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task, self._finished = bar, task, 0

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`."""
        done = float(progress.lengths.sum()) / progress.tokens.shape[1]
        self._bar.update(self._task, completed=self._finished + done)

    def finish(self, n_clips: int) -> None:
        """So many clips are written."""
        self._finished += n_clips
        self._bar.update(self._task, completed=self._finished)


@contextmanager
def _progress(total: int) -> Iterator[_Watch]:
    """A progress bar on stderr."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    from mmaccel.commands.terminal import stderr_console

    columns = ("clips", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console()) as bar:
        yield _Watch(bar, bar.add_task("clips", total=total))
