"""Text to video: prompts to the tokens of clips under a decoding policy, then tokens to frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, Unpack

from mmaccel.checks import within
from mmaccel.contracts import FinishedRow
from mmaccel.limits import MAX_IMAGES
from mmaccel.options import LoadKeywords, SamplingOptions, sampling_of, takes
from mmaccel.pipelines.call_options import DecodingOptions
from mmaccel.pipelines.image_to_video.preprocessing import read_start
from mmaccel.pipelines.image_to_video.types import Clip, Clips
from mmaccel.pipelines.media import collect_payloads, pick_max_num_seqs
from mmaccel.pipelines.pipeline import read_loading
from mmaccel.pipelines.text_to_image.model import choose_params, spread_negatives
from mmaccel.pipelines.text_to_image.outputs import Request, check_prompts
from mmaccel.pipelines.text_to_image.prompted import PromptPipeline
from mmaccel.pipelines.text_to_video.registry import open_clips
from mmaccel.pipelines.text_to_video.types import ClipModel, ClipOutput
from mmaccel.results import OnStep
from mmaccel.samplers.noise import choose_seed, spread_seeds
from mmaccel.samplers.run_lock import alone


@dataclass(frozen=True, kw_only=True)
class VideoCall(SamplingOptions, DecodingOptions):
    """The arguments of `TextToVideo.__call__`, which explains them."""

    prompt: str | Sequence[str] = field(kw_only=False)
    negative_prompt: str | Sequence[str | None] | None = None
    start: Any = None
    seed: int | Sequence[int | None] | None = None
    num_videos_per_prompt: int = within(1, 1, MAX_IMAGES, "ask for 1 or more")
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    deliver: Callable[[Clip], None] | None = None
    on_step: OnStep | None = None
    return_dict: bool = True


class TextToVideo(PromptPipeline):
    """Clips from prompts, by any window policy. One run at a time: the model has one cache."""

    modality = "Clips"

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Unpack[LoadKeywords]) -> TextToVideo:
        """Load "moving-scenes", a folder, or an id of the hub, by fields of `LoadOptions`."""
        engine, config = read_loading(options)
        return cls(*open_clips(name, config), engine)

    @property
    def clip_model(self) -> ClipModel:
        clip_model: ClipModel = self.host
        return clip_model

    def start_with(self, start: Any) -> Self:
        """This pipeline for clips that begin with frames, as `__call__` takes them. Weights are
        shared, and both pipelines together still have one run at a time.
        """
        model = self.clip_model
        frames = read_start(start, model.size, model.starts)
        with alone(self.model), self._at_work():
            started = model.start_with(frames)
        return self._share(started)

    @takes(VideoCall)
    def __call__(self, call: VideoCall) -> Clips:
        """Make clips; arguments that are not named here are those of `TextToImage.__call__`.

        Args:
            prompt: one or several.
            policy: how to decode; None is `Jacobi()`.
            start: what the clips begin with: a PIL image, a list of them, or a tensor `[F, height,
                width, 3]`, uint8 or float in 0..1; of more frames than the model takes the last.
            seed: of the first clip, the next has the next; or one per clip. A clip depends on its
                own seed, prompt and start alone.
            num_videos_per_prompt: clips of each prompt, one after another.
            batch_size: clips that are decoded at a time at most; None decodes all together. The
                next clip starts when one has finished.
            deliver: called with every clip as soon as it is finished, in the order they end. An
                exception from it ends the run and reaches the caller.
            return_dict: False returns a tuple of the clips' frames alone, as in diffusers.

        Returns:
            Clips in the order of the prompts, and stats. A bitwise `policy` and `batch_size` change
            the cost, not the frames.
        """
        params = choose_params(self.clip_model.params, **sampling_of(call))
        prompts = [call.prompt] if isinstance(call.prompt, str) else check_prompts(call.prompt)
        n = call.num_videos_per_prompt
        negatives = spread_negatives(call.negative_prompt, len(prompts))
        pairs = [pair for pair in zip(prompts, negatives, strict=True) for _ in range(n)]
        seed = choose_seed(call.seed)
        seeds = spread_seeds(seed, len(pairs))
        requests = []
        for index, (prompt, negative) in enumerate(pairs):
            requests.append(Request(prompt, seeds[index], index, negative))
        pipe = self if call.start is None else self.start_with(call.start)
        finished: dict[int, Clip] = {}
        collect = collect_payloads(finished, call.deliver)
        stats = pipe.serve(
            requests,
            params,
            rows=pick_max_num_seqs(call.batch_size, len(requests)),
            deliver=lambda output: collect(output.clip),
            on_step=call.on_step,
            **call.decoding,
        )
        stats.seed = seed
        clips = Clips([finished[index] for index in sorted(finished)], stats)
        if not call.return_dict:
            return ([clip.frames for clip in clips.clips],)  # type: ignore[return-value]
        return clips

    def finish(self, request: Request, row: FinishedRow) -> ClipOutput:
        model = self.clip_model
        tokens = model.join(row.tokens.cpu().unflatten(0, (-1, model.layout.frame)))
        n_given = len(model.given)
        clip = Clip(
            index=row.row,
            seed=request.seed,
            frames=self._render_row(request, row),
            n_given=n_given,
            n_read=n_given,
            fps=model.fps,
            tokens=tokens.unflatten(1, (model.layout.rows, model.layout.columns)),
            passes=row.passes,
            total_variation=row.total_variation,
            prompt=request.prompt,
        )
        return ClipOutput(request, clip)
