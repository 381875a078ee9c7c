"""Text to image: prompts to image tokens under a decoding policy, then tokens to images.

There are two ways to ask. `stream`, and a call, make fixed batches. `serve` takes any number of
requests, each with its own seed, and gives the place of a finished one to the next (see
`mmaccel.contracts`); the seed of a request alone decides its image, whatever runs next to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from mmaccel.canvas_contracts import CanvasPolicy, Denoiser, OnCanvasStep
from mmaccel.contracts import ContinuousBatching, FinishedRow, Policy, TokenModel
from mmaccel.errors import OptionError
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.runner.engine import Engine, UseGraphs
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.pipelines.text_to_image.model import (
    Encoded,
    ImageModel,
    check_params,
    choose_params,
    encode_captions,
    pick_policy,
    spread_negatives,
)
from mmaccel.pipelines.text_to_image.outputs import (
    ImageOutput,
    Request,
    RequestOutput,
    check_at_least_one,
    check_captions,
    check_requests,
    join,
)
from mmaccel.pipelines.text_to_image.registry import open_images
from mmaccel.results import Generation, OnStep, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class TextToImage:
    """Images from prompts, by any policy. One run at a time: the model keeps one cache.

    Args:
        images: the model.
        source: where it lies, if that is known.
        engine: how passes are carried out; None is `Engine()`.
    """

    def __init__(
        self, images: ImageModel, source: Path | None = None, engine: Engine | None = None
    ) -> None:
        self.image_model, self.source, self.engine = images, source, engine or Engine()

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
            decoder: a file with the image decoder, for checkpoints that have none.
            family: how the checkpoint is to be read; None finds out. See docs/models.md.
            cuda_graphs, sync_every: see `mmaccel.pipelines.runner.engine.Engine`.

        Raises:
            OptionError: no such model, device, dtype, size or family; a bad `cuda_graphs`; a file
                is missing.
            UnsupportedModelError: nothing we know, or tensors that are missing or too many.
        """
        how, file = Engine(cuda_graphs, sync_every), decoder
        file = Path(file) if isinstance(file, str) else file
        how.check(device)
        return cls(*open_images(name, LoadConfig(device, dtype, size, file), family), how)

    @property
    def model(self) -> TokenModel | Denoiser:
        """What predicts image tokens."""
        return self.image_model.window

    @property
    def length(self) -> int:
        """Tokens of an image."""
        return self.image_model.layout.frame

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of an image in pixels."""
        return self.image_model.size

    def resize(self, size: tuple[int, int]) -> Self:
        """This pipeline for images of another size: weights are shared, nothing is loaded.

        What is true of one pipeline is true of both together: one run at a time.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size the model does not draw; most models draw one.
        """
        images = self.image_model.resize(LoadConfig(size=size).size or self.size)
        return type(self)(images, self.source, replace(self.engine))

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
    ) -> ImageOutput:
        """Make images.

        Args:
            prompt: one or several.
            policy: how to decode; `Jacobi()` where none is given, or, for a model that fills a
                canvas, `LosslessUnmask(order="halton")`.
            negative_prompt: what is guided away from, for models whose authors have it: one for all
                or one per prompt; None and "" leave the model's own unconditional prompt.
            seed: one for all (image b is item b of it), or one per image. With one per image an
                image depends on its own seed and prompt alone.
            guidance_scale: classifier-free guidance; 1 runs without the unconditional rows.
            temperature, top_k, top_p, min_p: see `mmaccel.SamplingParams`. What is None is as the model's
                authors recommend (`pictures.params`); top_k 0 and top_p 1 keep all tokens.
            num_images_per_prompt: images of each prompt, one after another.
            batch_size: images made together; None makes all together.
            on_step: called after every pass with the state of the running batch.

        Returns:
            Images, tokens `[B, h*w]` int64 and stats. A bitwise `policy` and `batch_size` change
            what the images cost, not the images; under other policies an image may differ
            between batch sizes where an acceptance hangs on the last bit of a probability.

        Raises:
            OptionError: a prompt or an argument outside its domain, before anything is made.
            NumericsError: the model returned NaN.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        params = choose_params(
            self.image_model.params,
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
            params,
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
        params: SamplingParams,
        *,
        policy: Policy | CanvasPolicy | None = None,
        negatives: Sequence[str | None] | None = None,
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Iterator[ImageOutput]:
        """Make images batch by batch, handing each batch out as it is finished.

        Args:
            captions: one prompt per image, at least one.
            filters: guidance, temperature and truncation.
            negatives: one per image, None or "" where it has none; None for all.
            policy, seed, batch_size, on_step: as in `__call__`.

        Returns:
            Batches, in order. Everything is checked at once, before the first is asked for.

        Raises:
            OptionError: as in `__call__`.
        """
        captions = check_captions(captions)
        check_at_least_one("batch_size", len(captions) if batch_size is None else batch_size)
        check_params(params)
        asked = encode_captions(self.image_model, captions, negatives, params)
        noise = Noise.from_seed(seed, len(captions), self.model.device)
        run = pick_policy(policy, self.model)
        step = len(captions) if batch_size is None else batch_size

        def batches() -> Iterator[ImageOutput]:
            for first in range(0, len(captions), step):
                part = slice(first, first + step)
                own = Noise(noise.seeds[part], noise.items[part])
                with alone(self.model):
                    made = self._decode(asked[part], run, params, own, on_step)
                began = time.perf_counter()
                drawn = [int(s + k) for s, k in zip(own.seeds.tolist(), own.items.tolist())]
                images = self.image_model.render(made.tokens, captions[part], drawn)
                made.stats.pixel_seconds = time.perf_counter() - began
                tokens, passes = made.tokens.cpu(), made.passes.cpu()
                yield ImageOutput(images, tokens, passes, made.stats, list(captions[part]), first)

        return batches()

    def serve(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        policy: Policy | CanvasPolicy | None = None,
        rows: int = 8,
        deliver: Callable[[RequestOutput], None],
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Stats:
        """Make an image for every request, and hand each out as soon as it is finished.

        Args:
            requests: at least one.
            filters: guidance, temperature and truncation of all.
            policy: as in `TextToImage.__call__`.
            rows: most images in the making; the next request takes the place of one whose tokens
                are made.
            deliver: called with every finished image, one at a time; an exception from it ends
                the run and reaches the caller.
            on_step: called after every pass with the state of the places.

        Returns:
            What all of it cost; `seconds` are without those of pixels and `deliver`. With a
            bitwise policy an image has the pixels of `pipe(caption, seed=[seed])`, with the
            request's negative caption where it has one.

        Raises:
            OptionError: a request or an argument outside its domain, before anything is made.
            NumericsError: the model returned NaN; its `rows` are indices of requests.
            BusyError: another run of this model has not ended.
        """
        requests = check_requests(requests)
        check_at_least_one("rows", rows)
        check_params(params)
        captions, negatives = zip(*[(request.caption, request.negative) for request in requests])
        asked = encode_captions(self.image_model, captions, negatives, params)
        seeds = [request.seed for request in requests]
        noise = Noise.from_seed(seeds, len(requests), self.model.device)
        run = pick_policy(policy, self.model)
        if not callable(deliver):
            raise OptionError(f"deliver: expected a function, received {deliver!r}; give one")
        counter = _Counter(self.image_model, requests, noise.seeds.tolist(), deliver)
        places = ContinuousBatching(rows, counter.finish)
        with alone(self.model):
            stats = self._decode(asked, run, params, noise, on_step, places).stats
        stats.pixel_seconds = counter.pixel_seconds
        stats.seconds -= counter.seconds
        return stats

    @torch.no_grad()
    def _decode(
        self, asked: Encoded, policy: Any, params: SamplingParams, noise: Noise, on_step: Any,
        places: ContinuousBatching | None = None,
    ) -> Generation:  # fmt: skip
        """Encoded prompts to tokens `[B, N]`, all of them together or in some places."""
        prompt = self.image_model.prompt(
            asked.captions, params.guidance_scale != 1, asked.negatives
        )
        prompt = prompt if places is None else replace(prompt, batching=places)
        self.engine.prepare(self.model, prompt, policy, params)
        options = dict(params=params, noise=noise, on_step=on_step)
        made: Generation = policy.sample(self.model, prompt, self.length, **options)
        return made


class _Counter:
    """Where finished images are rendered and handed out."""

    def __init__(
        self, images: ImageModel, requests: Sequence[Request], seeds: Sequence[int],
        deliver: Callable[[RequestOutput], None],
    ) -> None:  # fmt: skip
        self._images, self._requests, self._seeds = images, requests, seeds
        self._deliver = deliver
        self.pixel_seconds = self.seconds = 0.0

    def finish(self, row: FinishedRow) -> None:
        """Render one image by itself, so that others do not enter its pixels, and deliver it."""
        began, request, seed = time.perf_counter(), self._requests[row.row], self._seeds[row.row]
        image = self._images.render(row.tokens[None], [request.caption], [seed])[0]
        self.pixel_seconds += time.perf_counter() - began
        spent = row.total_variation, row.nats
        self._deliver(RequestOutput(request, image, row.tokens.cpu(), row.passes, *spent))
        self.seconds += time.perf_counter() - began
