"""Text to image: captions to picture tokens under a decoding policy, then tokens to pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmaccel.canvas_contracts import CanvasPolicy, OnCanvasStep
from mmaccel.contracts import Policy
from mmaccel.pipelines.caption_words import check_captions
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.encoded_captions import encode_captions, spread_negatives
from mmaccel.pipelines.engine import Engine, UseGraphs
from mmaccel.pipelines.one_run import alone
from mmaccel.pipelines.picture_model import (
    check_filters,
    choose_filters,
    pick_policy,
)
from mmaccel.pipelines.picture_models import open_pictures
from mmaccel.pipelines.picture_requests import RequestService
from mmaccel.pipelines.pictures import Pictures, check_at_least_one, join
from mmaccel.results import OnStep
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


class TextToImage(RequestService):
    """Pictures from captions, by any policy. One run at a time: the model keeps one cache.

    For many captions, `serve` makes each picture as soon as there is a place for it.

    Args:
        pictures: the model.
        source: where it lies, if that is known.
        engine: how passes are carried out; None is `Engine()`.
    """

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        size: tuple[int, int] | None = None,
        decoder: str | Path | None = None,
        family: str | None = None,
        cuda_graphs: UseGraphs = "auto",
        sync_every: int = 1,
    ) -> TextToImage:
        """Load a model that ships with the package, one on disk, or one of the Hugging Face hub.

        Args:
            name: "scenes", a folder or file, or an id of the hub (downloaded to its cache).
            device: where to run.
            dtype: of the generator; "bitwise" is promised in float32 and float64.
            size: width and height in pixels, for models that draw several.
            decoder: a file with the picture decoder, for checkpoints that have none.
            family: how the checkpoint is to be read; None finds out. See docs/models.md.
            cuda_graphs, sync_every: see `mmaccel.pipelines.engine.Engine`.

        Raises:
            OptionError: no such model, device, dtype, size or family; a bad `cuda_graphs`; a file
                is missing.
            UnsupportedModelError: nothing we know, or tensors that are missing or too many.
        """
        how, file = Engine(cuda_graphs, sync_every), decoder
        file = Path(file) if isinstance(file, str) else file
        how.check(device)
        return cls(*open_pictures(name, Place(device, dtype, size, file), family), how)

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        policy: Policy | CanvasPolicy | None = None,
        negative_prompt: str | Sequence[str | None] | None = None,
        seed: int | Sequence[int] = 0,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Pictures:
        """Make pictures.

        Args:
            prompt: one caption or several.
            policy: how to decode; `Jacobi()` where none is given, or, for a model that fills a
                canvas, `LosslessUnmask(order="halton")`.
            negative_prompt: what is guided away from, for models whose authors have it: one for all
                or one per caption; None and "" leave the model's own unconditional prompt.
            seed: one for all (picture b is item b of it), or one per picture. With one per
                picture a picture depends on its own seed and caption alone.
            guidance_scale: classifier-free guidance; 1 runs without the unconditional rows.
            temperature, top_k, top_p, min_p: see `mmaccel.Filters`. What is None is as the model's
                authors recommend (`pictures.filters`); top_k 0 and top_p 1 keep all tokens.
            num_images_per_prompt: pictures of each caption, one after another.
            batch_size: pictures made together; None makes all together.
            on_step: called after every pass with the state of the running batch.

        Returns:
            Images, tokens `[B, h*w]` int64 and stats. A bitwise `policy` and `batch_size` change
            what the pictures cost, not the pictures; under other policies a picture may differ
            between batch sizes where an acceptance hangs on the last bit of a probability.

        Raises:
            OptionError: a caption or an argument outside its domain, before anything is made.
            NumericsError: the model returned NaN.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        filters = choose_filters(
            self.pictures.filters,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        captions = [prompt] if isinstance(prompt, str) else check_captions(prompt)
        check_at_least_one("num_images_per_prompt", num_images_per_prompt)
        negatives = spread_negatives(negative_prompt, len(captions))
        n = num_images_per_prompt
        batches = self.stream(
            [text for text in captions for _ in range(n)],
            filters,
            policy=policy,
            negatives=[text for text in negatives for _ in range(n)],
            seed=seed,
            batch_size=batch_size,
            on_step=on_step,
        )
        return join(list(batches))

    def stream(
        self,
        captions: Sequence[str],
        filters: Filters,
        *,
        policy: Policy | CanvasPolicy | None = None,
        negatives: Sequence[str | None] | None = None,
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Iterator[Pictures]:
        """Make pictures batch by batch, handing each batch out as it is finished.

        Args:
            captions: one per picture, at least one.
            filters: guidance, temperature and truncation.
            negatives: one per picture, None or "" where it has none; None for all.
            policy, seed, batch_size, on_step: as in `__call__`.

        Returns:
            Batches, in order. Everything is checked at once, before the first is asked for.

        Raises:
            OptionError: as in `__call__`.
        """
        captions = check_captions(captions)
        check_at_least_one("batch_size", len(captions) if batch_size is None else batch_size)
        check_filters(filters)
        asked = encode_captions(self.pictures, captions, negatives, filters)
        noise = Noise.from_seed(seed, len(captions), self.model.device)
        run = pick_policy(policy, self.model)
        step = len(captions) if batch_size is None else batch_size

        def batches() -> Iterator[Pictures]:
            for first in range(0, len(captions), step):
                part = slice(first, first + step)
                own = Noise(noise.seeds[part], noise.items[part])
                with alone(self.model):
                    made = self._decode(asked[part], run, filters, own, on_step)
                began = time.perf_counter()
                drawn = [int(s + k) for s, k in zip(own.seeds.tolist(), own.items.tolist())]
                images = self.pictures.render(made.tokens, captions[part], drawn)
                made.stats.pixel_seconds = time.perf_counter() - began
                tokens, passes = made.tokens.cpu(), made.passes.cpu()
                yield Pictures(images, tokens, passes, made.stats, list(captions[part]), first)

        return batches()
