"""Image to video: the first frames are encoded, a policy decodes the rest of a clip's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_callable
from mmaccel.contracts import FinishedRow, Policy, Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.pipelines.image_to_video.preprocessing import read_start
from mmaccel.pipelines.image_to_video.types import Clip, Clips, VideoModel
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.hub import HubOptions
from mmaccel.pipelines.loading.moving import (
    MovablePipeline,
    Part,
    describe,
    drop_computed,
    find_parts,
)
from mmaccel.pipelines.loading.placement import choose_placement
from mmaccel.pipelines.loading.refusal import refusing
from mmaccel.pipelines.loading.sources import find_model
from mmaccel.pipelines.loading.tasks import check_task
from mmaccel.pipelines.media import (
    RowPlan,
    check_deliver,
    collect_payloads,
    decode_rows,
    pick_max_num_seqs,
)
from mmaccel.pipelines.runner.engine import Engine, UseCompile, UseFused, UseGraphs
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.pipelines.text_to_image.model import check_params, choose_params, pick_policy
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.drafting.coarse import use_folder
from mmaccel.samplers.noise import Noise, choose_seed
from mmaccel.samplers.sampling_params import SamplingParams

CODEC = "nvidia/Cosmos-Tokenize1-DV8x16x16-720p"


class ImageToVideo(MovablePipeline):
    """Clips that begin with given frames, by any window policy. One run at a time: the model has
    one cache.

    Args:
        video: the model.
        source: folder it was loaded from, if known.
        engine: how passes are carried out; None is `Engine()`.
        codec: folder its codec was loaded from, if known.
    """

    def __init__(
        self,
        video: VideoModel,
        source: Path | None = None,
        engine: Engine | None = None,
        codec: Path | None = None,
    ) -> None:
        self.video, self.source, self.codec = video, source, codec
        self.engine = engine or Engine()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        codec: str | Path | None = None,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str = "auto",
        cuda_graphs: UseGraphs = "auto",
        fused: UseFused = "auto",
        compile: UseCompile = "auto",
        trust_remote_code: bool = False,
        torch_dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        variant: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        device_map: Any = None,
        offload_folder: str | Path | None = None,
    ) -> ImageToVideo:
        """Load a model from disk or from the Hugging Face hub.

        Args:
            name: a folder, or an id of the hub (downloaded to its cache): Cosmos-Predict1-4B or
                12B.
            codec: the same of the codec, which turns tokens into frames; None takes the one that
                the authors published, from the hub.
            device, dtype: where model and codec run and in which format; see
                `TextToImage.from_pretrained`.
            cuda_graphs, fused, compile: see `mmaccel.pipelines.runner.engine.Engine`.
            trust_remote_code: whether the codec's TorchScript may read and write files; False
                refuses a codec that can.
            torch_dtype: another name of `dtype`.
            revision, variant, token, local_files_only, cache_dir: of a download, see
                `mmaccel.pipelines.loading.hub.HubOptions`.
            device_map: of accelerate, in place of `device`: "auto", a device, or devices by names
                of modules of the model that predicts tokens; other parts are on the first device
                that computes. Not for families that transformers does not load.
            offload_folder: where weights go that the device map puts on the "disk".

        Raises:
            OptionError: no such model, codec, device or dtype; a bad `cuda_graphs`
                or `fused`.
            UnsupportedModelError: files of another model, missing or surplus tensors, files that
                cannot be read or do not fit each other, or code that is not trusted.
            MissingBackendError: a device map, and the package accelerate is not installed.
        """
        from mmaccel.pipelines.models.cosmos.video import load_cosmos

        engine = Engine(cuda_graphs, fused=fused, compile=compile)
        device, dtype = choose_placement(
            device, dtype if torch_dtype is None else torch_dtype, device_map
        )
        hub = HubOptions(revision, token, variant, local_files_only, cache_dir)
        engine.check(device)
        check_task(name, "animate")
        source = find_model(name, {}, hub=hub)
        check_task(source, "animate")
        own = replace(hub, revision=None, variant=None)
        codec_source = find_model(CODEC if codec is None else codec, {}, "codec", own)
        load_config = LoadConfig(
            device, dtype, trust_remote_code=trust_remote_code, hub=hub, device_map=device_map,
            offload_folder=offload_folder,
        )  # fmt: skip
        with refusing(
            f"a Cosmos model in {source} and its codec in {codec_source}",
            "files that do not fit", "copy both folders again",
        ):  # fmt: skip
            video = load_cosmos(source, codec_source, load_config)
        use_folder(video.window, source)
        return cls(video, source, engine, codec_source)

    def __call__(
        self,
        start: Any,
        *,
        policy: Policy | None = None,
        seed: int | Sequence[int] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        batch_size: int | None = None,
        deliver: Callable[[Clip], None] | None = None,
        on_step: OnStep | None = None,
        return_dict: bool = True,
    ) -> Clips:
        """Continue frames.

        Args:
            start: a PIL image, a list of them, or a tensor `[F, height, width, 3]`, uint8 or
                float in 0..1. If it has more frames than the model takes, the last ones are used.
            policy: how to decode; None is `Jacobi()`.
            seed: one, or several for as many clips with the same start. A clip depends on its own
                seed and start alone. None draws one from torch's global generator; `stats.seed`
                says which.
            temperature, top_k, top_p, min_p: see `mmaccel.SamplingParams`. None takes the value
                that the model's authors recommend (`video.params`); top_k 0 and top_p 1 keep all
                tokens.
            batch_size: clips that are decoded at a time at most; None decodes all together. The
                next clip starts when one has finished.
            deliver: called with every clip as soon as it is finished, in the order they end. An
                exception from it ends the run and reaches the caller.
            on_step: called after every pass with the state of the running rows.
            return_dict: False returns a tuple of the clips' frames alone, as in diffusers.

        Returns:
            Clips in the order of the seeds, and stats. A bitwise `policy` and `batch_size` change
            the cost, not the frames.

        Raises:
            OptionError: an argument outside its domain, before any pass.
            UnsupportedModelError: a codec that does not belong to the model.
            NumericsError: the model or its codec returned NaN.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        params = choose_params(
            self.video.params, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        made: dict[int, Clip] = {}
        stats = self.serve(
            start, params, policy=policy, seed=seed, batch_size=batch_size,
            deliver=collect_payloads(made, deliver), on_step=on_step,
        )  # fmt: skip
        clips = Clips([made[k] for k in sorted(made)], stats)
        if not return_dict:
            return ([clip.frames for clip in clips.clips],)  # type: ignore[return-value]
        return clips

    def serve(
        self,
        start: Any,
        params: SamplingParams,
        *,
        policy: Policy | None = None,
        seed: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        deliver: Callable[[Clip], None],
        on_step: OnStep | None = None,
    ) -> Stats:
        """Continue frames, and pass each clip to `deliver` as soon as it is finished.

        Args:
            params: temperature and truncation, without guidance; `video.params` is what the
                model's authors recommend.
            start, policy, seed, batch_size, deliver, on_step: see `__call__`.

        Returns:
            Stats; `seconds` excludes the time spent in the codec and in `deliver`.

        Raises:
            OptionError, UnsupportedModelError, NumericsError, BusyError: as `__call__`.
        """
        video, model = self.video, self.model
        check_params(params)
        if params.guidance_scale != 1:
            raise OptionError(
                f"guidance_scale: expected 1, as a clip has no unconditional start, received "
                f"{params.guidance_scale}; leave it out"
            )
        check_deliver(deliver)
        check_callable("on_step", on_step)
        seed = choose_seed(seed)
        seeds = [seed] if isinstance(seed, int) else list(seed)
        max_num_seqs = pick_max_num_seqs(batch_size, len(seeds))
        noise = Noise.from_seed(seeds, len(seeds), model.device)
        chosen = pick_policy(policy, model)
        frames = read_start(start, video.size, video.starts)

        def finish(row: FinishedRow) -> Clip:
            return finish_clip(video, given, len(frames), seeds[row.row], row)

        with alone(model), torch.no_grad(), self._at_work():
            given = video.encode(frames)  # [f, h, w]
            rows = given.flatten().expand(len(seeds), -1).to(model.device)
            lengths = torch.full((len(seeds),), rows.shape[1], device=model.device)
            plan = RowPlan(
                prompt=Prompt(rows, lengths, 1, layout=video.layout),
                length=(video.n_frames - len(given)) * video.layout.frame,
                max_num_seqs=max_num_seqs,
                params=params,
                noise=noise,
            )
            stats = decode_rows(
                model, self.engine, chosen, plan, finish=finish, deliver=deliver, on_step=on_step
            )
        stats.seed = seed
        return stats

    @property
    def model(self) -> TokenModel:
        """The model that predicts the tokens."""
        return self.video.window

    def __repr__(self) -> str:
        kind, (width, height) = type(self.video).__name__.removesuffix("Video"), self.video.size
        return f"ImageToVideo({kind}, {width}x{height}{describe(self)})"

    def _parts(self) -> dict[str, Part]:
        return find_parts(self.video)

    def _moved(self) -> None:
        drop_computed(self.model)
        self.engine.close()

    @property
    def _cuda_graphs(self) -> UseGraphs:
        return self.engine.cuda_graphs

    @property
    def _lock(self) -> Any:
        return self.model


def finish_clip(
    video: VideoModel, given: Tensor, n_given: int, seed: int, row: FinishedRow
) -> Clip:
    """Decode one row to frames, by itself, so that no other row affects it.

    Args:
        video: the model.
        given: `[f, rows, columns]` int64, the tokens of the given frames.
        n_given: number of given pixel frames.
        seed: of the row.
        row: the tokens of the other frames.
    """
    new = row.tokens.to(given.device).view(-1, *given[0].shape)
    whole = torch.cat((given, new))
    return Clip(
        row.row, seed, video.render(whole), n_given, len(given), video.fps, whole.cpu(),
        row.passes, row.total_variation,
    )  # fmt: skip
