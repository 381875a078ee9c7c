"""Image to video: the first frames are encoded, a policy decodes the rest of a clip's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.errors import OptionError
from mmaccel.options import LoadKeywords, sampling_of, takes
from mmaccel.pipelines.call_options import DecodingOptions, TokenOptions
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.image_to_video.preprocessing import read_start
from mmaccel.pipelines.image_to_video.registry import open_video
from mmaccel.pipelines.image_to_video.types import Clip, Clips, VideoModel
from mmaccel.pipelines.media import (
    RowPlan,
    collect_payloads,
    pick_max_num_seqs,
)
from mmaccel.pipelines.pipeline import Pipeline, read_loading
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.noise import Noise, choose_seed
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ClipOptions(DecodingOptions):
    """What `ImageToVideo.__call__` and `serve` both take."""

    start: Any = field(kw_only=False)
    prompt: str | None = None
    seed: int | Sequence[int | None] | None = None
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    on_step: OnStep | None = None


@dataclass(frozen=True, kw_only=True)
class ClipCall(ClipOptions, TokenOptions):
    """The arguments of `ImageToVideo.__call__`, which explains them."""

    deliver: Callable[[Clip], None] | None = None
    return_dict: bool = True


@dataclass(frozen=True, kw_only=True)
class ClipServe(ClipOptions):
    """The arguments of `ImageToVideo.serve`, which explains them."""

    params: SamplingParams = field(kw_only=False)
    deliver: Callable[[Clip], None]


class ImageToVideo(Pipeline):
    """Clips that begin with given frames, by any window policy. One run at a time.

    `text_encoder` is the folder that what reads its prompts was loaded from, if any.
    """

    modality = "Video"

    def __init__(
        self,
        host: VideoModel,
        source: Path | None = None,
        engine: Engine | None = None,
        codec: Path | None = None,
        *,
        text_encoder: Path | None = None,
    ) -> None:
        super().__init__(host, source, engine, codec)
        self.text_encoder = text_encoder

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        codec: str | Path | None = None,
        text_encoder: str | Path | None = None,
        **options: Unpack[LoadKeywords],
    ) -> ImageToVideo:
        """Load a model from disk or from the Hugging Face hub.

        Args:
            name: a folder, or an id of the hub (downloaded to its cache): Cosmos-Predict1-4B or
                12B; 5B-Video2World or 13B-Video2World, which also read a text.
            codec: the same of the codec, which turns tokens into frames; None takes the one that
                the authors published, from the hub. Its TorchScript may read and write files; only
                `trust_remote_code=True` takes such a codec.
            text_encoder: the same of the T5 that encodes texts; None takes google-t5/t5-11b where
                the model reads any.
            **options: fields of `mmaccel.options.LoadOptions`.
        """
        engine, config = read_loading(options)
        opened = open_video(name, codec, text_encoder, config)
        return cls(
            opened.video,
            opened.source,
            engine,
            opened.codec,
            text_encoder=opened.text_encoder,
        )

    @property
    def video(self) -> VideoModel:
        video: VideoModel = self.host
        return video

    @property
    def size(self) -> tuple[int, int]:
        return self.video.size

    @takes(ClipCall)
    def __call__(self, call: ClipCall) -> Clips:
        """Continue frames; arguments that are not named here are those of `TextToVideo.__call__`.

        Args:
            start: a PIL image, a list of them, or a tensor `[F, height, width, 3]`, uint8 or float
                in 0..1. If it has more frames than the model takes, the last ones are used.
            prompt: what happens in the clip, for a model that reads a text.
            seed: one, or several for as many clips, each of which depends on its own alone.

        Returns:
            Clips in the order of the seeds, and stats. A bitwise `policy` and `batch_size` change
            the cost, not the frames.
        """
        params = choose_params(self.video.params, **sampling_of(call))
        finished: dict[int, Clip] = {}
        stats = self.serve(
            call.start,
            params,
            prompt=call.prompt,
            seed=call.seed,
            batch_size=call.batch_size,
            deliver=collect_payloads(finished, call.deliver),
            on_step=call.on_step,
            **call.decoding,
        )
        clips = Clips([finished[k] for k in sorted(finished)], stats)
        if not call.return_dict:
            return ([clip.frames for clip in clips.clips],)  # type: ignore[return-value]
        return clips

    @takes(ClipServe)
    def serve(self, call: ClipServe) -> Stats:
        """Continue frames, and pass each clip to `deliver` as soon as it is finished; no guidance.

        The stats' `seconds` exclude the time spent in the codec and in `deliver`.
        """
        video = self.video
        model = self.model
        params = call.params
        if params.guidance_scale != 1:
            raise OptionError(
                f"guidance_scale: expected 1, as a clip has no unconditional start, received "
                f"{params.guidance_scale}; leave it out"
            )
        seed = choose_seed(call.seed)
        seeds = [seed] if isinstance(seed, int) else list(seed)
        max_num_seqs = pick_max_num_seqs(call.batch_size, len(seeds))
        noise = Noise.from_seed(seeds, len(seeds), model.device)
        decoding = self.choose(call)
        frames = read_start(call.start, video.size, video.starts)
        prompt = video.encode_prompt(call.prompt)

        def finish(row: FinishedRow) -> Clip:
            clip = finish_clip(video, given, len(frames), seeds[row.row], row)
            return clip if call.prompt is None else replace(clip, prompt=call.prompt)

        with alone(model), torch.no_grad(), self._at_work():
            given = video.encode(frames)  # [f, h, w]
            rows = video.begin(prompt, given).expand(len(seeds), -1).to(model.device)
            lengths = rows.new_full((len(seeds),), rows.shape[1])
            plan = RowPlan(
                prompt=Prompt(rows, lengths, layout=video.layout, n_shown=given.numel()),
                length=(video.n_frames - len(given)) * video.layout.frame,
                max_num_seqs=max_num_seqs,
                params=params,
                noise=noise,
            )
            stats = self.decode_rows(
                decoding, plan, finish=finish, deliver=call.deliver, on_step=call.on_step
            )
        stats.seed = seed
        return stats


def finish_clip(
    video: VideoModel, given: Tensor, n_given: int, seed: int, row: FinishedRow
) -> Clip:
    """One row, decoded to frames by itself, so that no other row affects it: the tokens `given`
    `[f, rows, columns]` of the first `n_given` pixel frames, then those of `row`.
    """
    new = row.tokens.to(given.device).view(-1, *given[0].shape)
    whole = torch.cat((given, new))
    return Clip(
        row.row,
        seed,
        video.render(whole),
        n_given,
        len(given),
        video.fps,
        whole.cpu(),
        row.passes,
        row.total_variation,
    )
