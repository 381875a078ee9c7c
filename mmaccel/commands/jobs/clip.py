"""The run of `mmaccel animate`."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.jobs.media import CodecJob, JobProgress
from mmaccel.commands.options import check_count
from mmaccel.limits import MAX_IMAGES
from mmaccel.options import given
from mmaccel.outputs.video_files import pick_format, read_frames, write_video
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.outputs import add_stats
from mmaccel.results import Stats
from mmaccel.samplers.noise import check_seed
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.image_to_video.types import Clip

_MAX_FRAMES = 9  # of a start, for all models here


class ClipJob(CodecJob):
    """Images and clips to continue.

    Attributes:
        starts: first frames of the clips, by file.
        suffix: of the files.
    """

    unit = "clip"
    pipeline = ImageToVideo

    def read(self) -> None:
        flags = self.flags
        check_count("count", flags.count, MAX_IMAGES)
        super().read()
        check_seed(self.seeds)
        choose_params(SamplingParams(), **given(flags.sampling))
        self.suffix = f".{pick_format(flags.file_format)}"
        self.starts = {start: read_frames(start, _MAX_FRAMES) for start in flags.starts}

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
                policy=self.policy,
                seed=self.seeds,
                batch_size=self.flags.batch_size,
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
        """What a clip depends on, apart from its start and seed; ready for JSON."""
        return self.codec_settings(self.params)

    def write_clip(self, start: Path, clip: Clip) -> None:
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
        self.write_payload(start.stem, clip, source, facts, write)
