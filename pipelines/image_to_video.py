"""Image to video: first frames to tokens, the rest of a clip's tokens by a policy, then frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.engine import Engine, UseGraphs
from mmaccel.pipelines.model_folder import check_place
from mmaccel.pipelines.model_source import find_model
from mmaccel.pipelines.one_run import alone
from mmaccel.pipelines.picture_model import check_filters, choose_filters, pick_policy
from mmaccel.pipelines.pictures import check_at_least_one
from mmaccel.pipelines.video import Clip, Clips
from mmaccel.pipelines.video_model import VideoModel
from mmaccel.pipelines.video_rows import RowRenderer
from mmaccel.pipelines.video_start import read_start
from mmaccel.places import Places
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise, check_seed

CODEC = "nvidia/Cosmos-Tokenize1-DV8x16x16-720p"


class ImageToVideo:
    """Clips that begin with given frames, by any window policy. One run at a time: the model keeps
    one cache.

    Args:
        video: the model.
        source: where it lies, if that is known.
        engine: how passes are carried out; None is `Engine()`.
        codec: where its codec lies, if that is known.
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
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cuda_graphs: UseGraphs = "auto",
    ) -> ImageToVideo:
        """Load a model from disk or from the Hugging Face hub.

        Args:
            name: a folder, or an id of the hub (downloaded to its cache): Cosmos-Predict1-4B or
                12B.
            codec: the same of what turns tokens into frames; None takes the authors', from the hub.
            device: where to run.
            dtype: of model and codec. "bitwise" is promised in float32 and float64.
            cuda_graphs: see `mmaccel.pipelines.engine.Engine`.

        Raises:
            OptionError: no such model, codec, device or dtype; a bad `cuda_graphs`.
            UnsupportedModelError: nothing we know, or tensors that are missing or too many.
        """
        from mmaccel.pipelines.cosmos_video import load_cosmos

        how = Engine(cuda_graphs)
        how.check(device)
        check_place(device, dtype)
        source = find_model(name, {})
        codec_source = find_model(CODEC if codec is None else codec, {}, "codec")
        video = load_cosmos(source, codec_source, Place(device, dtype))
        return cls(video, source, how, codec_source)

    def __call__(
        self,
        start: Any,
        *,
        policy: Policy | None = None,
        seed: int | Sequence[int] = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        batch_size: int | None = None,
        on_step: OnStep | None = None,
    ) -> Clips:
        """Continue frames.

        Args:
            start: a PIL picture, a list of them, or a tensor `[F, height, width, 3]`, uint8 or
                float in 0..1. Of more frames than the model takes, the last ones count.
            policy: how to decode; `Jacobi()` where none is given.
            seed: one, or several for as many clips with the same start. A clip depends on its own
                seed and start alone.
            temperature, top_k, top_p, min_p: see `mmaccel.Filters`. What is None is as the model's
                authors recommend (`video.filters`); top_k 0 and top_p 1 keep all tokens.
            batch_size: clips in the making at most; None makes all together. The place of a
                finished one is taken by the next.
            on_step: called after every pass with the state of the running places.

        Returns:
            Clips in the order of the seeds, and stats. A bitwise `policy` and `batch_size` change
            what they cost, not how they look.

        Raises:
            OptionError: an argument outside its domain, before anything is made.
            UnsupportedModelError: a codec that does not belong to the model.
            NumericsError: the model or its codec returned NaN.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        filters = choose_filters(
            self.video.filters, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        made: dict[int, Clip] = {}

        def keep(clip: Clip) -> None:
            made[clip.index] = clip

        stats = self.serve(
            start, filters, policy=policy, seed=seed, batch_size=batch_size, deliver=keep,
            on_step=on_step,
        )  # fmt: skip
        return Clips([made[k] for k in sorted(made)], stats)

    def serve(
        self,
        start: Any,
        filters: Filters,
        *,
        policy: Policy | None = None,
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        deliver: Callable[[Clip], None],
        on_step: OnStep | None = None,
    ) -> Stats:
        """Continue frames, hand each clip out as soon as it is finished, and keep none.

        Args:
            filters: temperature and truncation, without guidance; `video.filters` is what the
                model's authors recommend.
            deliver: called with every clip, in the order they end; an exception from it ends the
                run and reaches the caller.
            start, policy, seed, batch_size, on_step: see `__call__`.

        Returns:
            What all of it cost; `seconds` are without those of frames and `deliver`.

        Raises:
            OptionError, UnsupportedModelError, NumericsError, BusyError: as `__call__`.
        """
        video, model = self.video, self.model
        check_filters(filters)
        if filters.guidance_scale != 1:
            raise OptionError(
                f"guidance_scale: expected 1, as a clip has no unconditional start, received "
                f"{filters.guidance_scale}; leave it out"
            )
        checked = check_seed(seed)
        seeds = [checked] if isinstance(checked, int) else list(checked)
        if not seeds:
            raise OptionError("seed: expected an integer or a list of them, received []; give one")
        places = len(seeds) if batch_size is None else batch_size
        check_at_least_one("batch_size", places)
        noise = Noise.from_seed(seeds, len(seeds), model.device)
        run = pick_policy(policy, model)
        frames = read_start(start, video.size, video.starts)
        renderer = RowRenderer(video, seeds, len(frames), deliver)
        with alone(model), torch.no_grad():
            renderer.given = given = video.encode(frames)  # [f, h, w]
            rows = given.flatten().expand(len(seeds), -1).to(model.device)
            lengths = torch.full((len(seeds),), rows.shape[1], device=model.device)
            seats = Places(places, renderer.take)
            prompt = Prompt(rows, lengths, 1, layout=video.layout, places=seats)
            length = (video.n_frames - len(given)) * video.layout.frame
            self.engine.prepare(model, prompt, run, filters)
            options: dict[str, Any] = dict(filters=filters, noise=noise, on_step=on_step)
            stats = run.sample(model, prompt, length, **options).stats
        stats.pixel_seconds = renderer.pixel_seconds
        stats.seconds -= renderer.seconds
        return stats

    @property
    def model(self) -> TokenModel:
        """What predicts tokens."""
        return self.video.window
