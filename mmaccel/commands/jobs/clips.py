"""The run of `mmaccel animate` with a model that reads prompts, for those of the command line."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mmaccel.catalog import CLIP_MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.jobs.media import JobProgress, SidecarJob
from mmaccel.limits import MAX_IMAGES
from mmaccel.loading import open_clip_pipeline
from mmaccel.options import given
from mmaccel.outputs.video_files import check_sides, pick_format, read_frames, write_video
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.model import (
    choose_params,
    encode_prompts,
    spread_negatives,
)
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.results import Stats
from mmaccel.samplers.noise import check_seed
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_video.pipeline import TextToVideo
    from mmaccel.pipelines.text_to_video.types import ClipOutput

_MAX_FRAMES = 64  # of a start


class PromptedClipJob(SidecarJob):
    """Clips of prompts; clip k has the seed of the job and k.

    Attributes:
        prompts: one for each clip.
        negative: negative prompt.
        params: sampling parameters.
        suffix: of the files.
    """

    unit = "clip"

    def read(self) -> None:
        flags = self.flags
        flags.check_prompts()
        shared.check_count("count", flags.count, MAX_IMAGES)
        super().read()
        choose_params(SamplingParams(), **given(flags.sampling))
        (self.negative,) = spread_negatives(flags.negative, 1)
        self.suffix = f".{pick_format(flags.file_format)}"
        self.start = None if flags.start is None else read_frames(flags.start, _MAX_FRAMES)

    def open(self) -> TextToVideo:
        pipe = open_clip_pipeline(self.flags.model, self.load)
        return pipe if self.start is None else pipe.start_with(self.start)

    def prepare(self) -> None:
        model = self.pipe.clip_model
        check_sides(self.suffix, model.size)
        self.params = choose_params(model.params, **given(self.flags.sampling))
        name = self.flags.model
        examples = CLIP_MODELS[name].examples if name in CLIP_MODELS else model.examples
        texts = self.flags.inputs or examples
        self.prompts = [text for text in texts for _ in range(self.flags.count)]
        check_seed(self.seeds)
        encode_prompts(model, self.prompts, self.negative, self.params)

    @property
    def seeds(self) -> list[int]:
        """The seed of each clip."""
        return [self.seed + k for k in range(len(self.prompts))]

    @property
    def n_files(self) -> int:
        return len(self.prompts)

    def decode(self, bar: JobProgress) -> Stats:
        def finish(output: ClipOutput) -> None:
            self.write_clip(output)
            bar.finish(output.clip.index)

        requests = [
            Request(prompt, seed, k, self.negative)
            for k, (prompt, seed) in enumerate(zip(self.prompts, self.seeds, strict=True))
        ]
        bar.begin(len(requests))
        stats: Stats = self.pipe.serve(
            requests,
            self.params,
            policy=self.policy,
            rows=self.rows,
            deliver=finish,
            on_step=bar.update,
            **self.layers,
        )
        return stats

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What a clip depends on, apart from its prompt and seed; ready for JSON."""
        return self.common_settings(
            self.params,
            weights=content_hash(self.pipe.source),
            **shared.given(negative=self.negative),
        )

    def write_clip(self, output: ClipOutput) -> None:
        """Write one clip.

        Raises:
            OSError: see `write_payload`.
        """
        clip = output.clip
        start = clip.tokens[: clip.n_read].flatten().tolist()
        source = {"prompt": clip.prompt, **({"start": start} if start else {})}
        facts = {"prompt": clip.prompt, **output.shape, "n_given": clip.n_given, "fps": clip.fps}
        if self.flags.start is not None:
            facts["start"] = self.flags.start.name
        write = partial(write_video, frames=clip.frames, fps=clip.fps)
        self.write_payload(clip.prompt, clip, source, facts, write)
