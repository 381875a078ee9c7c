"""Text to image: prompts to image tokens under a decoding policy, then tokens to images.

A call and `stream` decode fixed batches; `serve` decodes requests with continuous batching, where
a request's seed alone decides its image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from mmaccel.checks import one_of, show, within
from mmaccel.contracts import FinishedRow
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_IMAGES, MAX_SIDE
from mmaccel.options import LoadKeywords, SamplingOptions, sampling_of, takes
from mmaccel.pipelines.call_options import DecodingOptions
from mmaccel.pipelines.hosts.step_callback import call_back, is_interrupted
from mmaccel.pipelines.media import RowPlan
from mmaccel.pipelines.pipeline import read_loading
from mmaccel.pipelines.text_to_image.model import (
    ImageModel,
    choose_params,
    encode_prompts,
    make_rows,
    pick_policy,
    spread_negatives,
)
from mmaccel.pipelines.text_to_image.outputs import (
    OUTPUT_TYPES,
    ImageOutput,
    Request,
    RequestOutput,
    check_prompts,
    convert_images,
    join,
)
from mmaccel.pipelines.text_to_image.prompted import PromptPipeline
from mmaccel.pipelines.text_to_image.registry import open_images
from mmaccel.policies import OnCanvasStep
from mmaccel.results import OnStep
from mmaccel.samplers.canvas.masked_parallel import set_steps
from mmaccel.samplers.noise import Noise, choose_seed
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ImageCall(SamplingOptions, DecodingOptions):
    """The arguments of `TextToImage.__call__`, which explains them."""

    prompt: str | Sequence[str] = field(kw_only=False)
    negative_prompt: str | Sequence[str | None] | None = None
    seed: int | Sequence[int | None] | None = None
    num_images_per_prompt: int = within(1, 1, MAX_IMAGES, "ask for 1 or more")
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    on_step: OnStep | OnCanvasStep | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    output_type: str = one_of("pil", OUTPUT_TYPES)
    callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], Any] | None = None
    height: int | None = within(None, 1, MAX_SIDE, "None is the pipeline's own")
    width: int | None = within(None, 1, MAX_SIDE, "None is the pipeline's own")
    num_inference_steps: int | None = None
    return_dict: bool = True


@dataclass(frozen=True, kw_only=True)
class ImageStream(DecodingOptions):
    """The arguments of `TextToImage.stream`, which explains them."""

    prompts: Sequence[str] = field(kw_only=False)
    params: SamplingParams = field(kw_only=False)
    negatives: Sequence[str | None] | None = None
    seed: int | Sequence[int | None] | None = None
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    on_step: OnStep | OnCanvasStep | None = None
    has_pixels: bool = True


class TextToImage(PromptPipeline):
    """Images from prompts, by any policy. One run at a time: the model has one cache."""

    modality = "Images"
    _interrupt = False  # of the running call; a callback may set it

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        size: tuple[int, int] | None = None,
        decoder: str | Path | None = None,
        **options: Unpack[LoadKeywords],
    ) -> TextToImage:
        """Load a model that ships with the package, one on disk, or one of the Hugging Face hub.

        Args:
            name: "scenes", a folder or file, or an id of the hub (downloaded to its cache).
            size: width and height in pixels, for models with several sizes.
            decoder: a file with the image decoder, for checkpoints that have none.
            **options: fields of `mmaccel.options.LoadOptions`; families are in docs/models.md.

        Raises:
            OptionError: no such model or family, a missing file, or a bad option.
            UnsupportedModelError: an unknown family, or files that do not fit or are not trusted.
        """
        engine, config = read_loading(options, size=size, decoder=decoder)
        return cls(*open_images(name, config), engine)

    @property
    def image_model(self) -> ImageModel:
        image_model: ImageModel = self.host
        return image_model

    @takes(ImageCall)
    def __call__(self, call: ImageCall) -> ImageOutput:
        """Make images.

        Args:
            prompt: one or several.
            policy: how to decode: a policy, its short name, or a dictionary such as `{"name":
                "jacobi", "window": 32}`. None is `Jacobi()`, or `LosslessUnmask()` for a model that
                fills a canvas.
            kv_cache, attention: which entries of a prompt stay in the layers' caches, and which
                cached keys a pass attends to, as in `mmaccel.attach`.
            negative_prompt: prompt to guide away from, for models whose authors have one: one for
                all or one per prompt; None and "" use the model's own unconditional prompt.
            seed: one for all (image b is item b of it), or one per image. With one per image an
                image depends on its own seed and prompt alone. None draws one, see `generator`;
                `stats.seed` says which.
            guidance_scale: classifier-free guidance; 1 runs without the unconditional rows.
            temperature, top_k, top_p, min_p, top_n_sigma, top_h, eta_cutoff, entropy_temperature,
                divergence_temperature: as in `mmaccel.SamplingParams`. None takes what the model's
                authors recommend (`image_model.params`); top_k 0 and top_p 1 keep all tokens.
            num_images_per_prompt: images of each prompt, one after another.
            batch_size: images decoded together; None decodes all together.
            on_step: called after every pass with the state of the running batch.
            generator: draws the seeds in place of `seed`: one generator draws one seed for all
                images, several draw one each. None is torch's global one (`torch.manual_seed`).
            output_type: "pil", "pt" (`[B, 3, H, W]`), "np" (`[B, H, W, 3]`), both float32 in 0..1
                in steps of 1/255, or "tokens", which decodes no pixels and leaves `images` empty.
            callback_on_step_end: called after every pass as diffusers' pipelines call it: with this
                pipeline, the number of the pass from 0, the tokens that the slowest image has, and
                `{"tokens": …, "lengths": …}`, copies that it must not change. It may set
                `pipe._interrupt = True`, which ends the call after this pass.
            height, width: in pixels, for models with several sizes. Each call with another size
                prepares anew; `resize` does it once.
            num_inference_steps: the `steps` of `MaskedParallel`, and of no other policy.
            return_dict: False returns `(images,)`, as in diffusers.

        Returns:
            Images, tokens `[B, h*w]` int64 and stats. A bitwise `policy` and `batch_size` change
            the cost, not the images. Under other policies an image may differ between batch sizes
            where an acceptance depends on the last bit of a probability. An interrupted call has
            the images of the batches before, and the tokens so far.

        Raises:
            OptionError: an argument, before any pass; or a callback that changes a tensor.
            BusyError: another run of this model has not ended (in another thread, or in `on_step`).
        """
        params = choose_params(self.image_model.params, **sampling_of(call))
        prompts = [call.prompt] if isinstance(call.prompt, str) else check_prompts(call.prompt)
        size = (int(call.width or self.size[0]), int(call.height or self.size[1]))
        pipe = self if size == self.size else self.resize(size)
        on_step = call.on_step
        if call.callback_on_step_end is not None:
            on_step = _call_back(self, call.callback_on_step_end, on_step)
        n = call.num_images_per_prompt
        negatives = spread_negatives(call.negative_prompt, len(prompts))
        batches = pipe.stream(
            [text for text in prompts for _ in range(n)],
            params,
            policy=self._set_steps(call.policy, call.num_inference_steps),
            kv_cache=call.kv_cache,
            attention=call.attention,
            negatives=[text for text in negatives for _ in range(n)],
            seed=choose_seed(call.seed, call.generator),
            batch_size=call.batch_size,
            on_step=on_step,
            has_pixels=call.output_type != "tokens",
        )
        finished = []
        self._interrupt = False
        for batch in batches:
            finished.append(batch)
            if self._interrupt:
                break
        output = join(finished)
        images = convert_images(output.images, call.output_type)
        if not call.return_dict:
            return (images,)  # type: ignore[return-value]
        return replace(output, images=images)

    @takes(ImageStream)
    def stream(self, call: ImageStream) -> Iterator[ImageOutput]:
        """Make images batch by batch, and yield each batch as soon as it is finished.

        All arguments, otherwise those of `__call__`, are checked before the first batch is read.

        Args:
            negatives: one negative prompt per image, None or "" where it has none; None for all.
            has_pixels: whether tokens are decoded to images, except where `on_step` ended a row.
        """
        prompts = check_prompts(call.prompts)
        params = call.params
        step = len(prompts) if call.batch_size is None else call.batch_size
        encoded = encode_prompts(self.image_model, prompts, call.negatives, params)
        seed = choose_seed(call.seed)
        noise = Noise.from_seed(seed, len(prompts), self.model.device)
        decoding = self.choose(call)

        def batches() -> Iterator[ImageOutput]:
            for first in range(0, len(prompts), step):
                rows = slice(first, first + step)
                rows_noise = Noise(noise.seeds[rows], noise.items[rows])
                with alone(self.model), torch.no_grad(), self._at_work():
                    plan = RowPlan(
                        prompt=make_rows(self.image_model, encoded[rows], params),
                        length=self.length,
                        max_num_seqs=len(rows_noise.seeds),
                        params=params,
                        noise=rows_noise,
                    )
                    batch = self.sample(decoding, plan, call.on_step)
                stats = batch.stats
                stats.seed = seed
                began = time.perf_counter()
                images = []
                pairs = zip(rows_noise.seeds.tolist(), rows_noise.items.tolist())
                seeds = [int(seed_of_row + item) for seed_of_row, item in pairs]
                if call.has_pixels and int(batch.lengths.min()) == self.length:
                    images = self._render(batch.tokens, prompts[rows], seeds)
                stats.pixel_seconds = time.perf_counter() - began
                tokens = batch.tokens.cpu()
                passes = batch.passes.cpu()
                yield ImageOutput(images, tokens, passes, stats, prompts[rows], first)

        return batches()

    def finish(self, request: Request, row: FinishedRow) -> RequestOutput:
        image = self._render_row(request, row)
        return RequestOutput(
            request, image, row.tokens.cpu(), row.passes, row.total_variation, row.nats
        )

    def _set_steps(self, policy: Any, steps: Any) -> Any:
        if steps is None:
            return policy
        if self.model.kind == "window":
            raise OptionError(
                f"num_inference_steps: expected none, received {show(steps)}; the model decides "
                "how many tokens an image has; leave it out, or choose passes with "
                "policy=mmaccel.Jacobi(window=32)"
            )
        return set_steps(pick_policy(policy, self.model), steps)

    def _render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        """Images of a finished batch; offloaded parts wait on the CPU afterwards."""
        try:
            return self.image_model.render(tokens, prompts, seeds)
        finally:
            self._rest()


def _call_back(
    pipe: TextToImage, callback: Callable[..., Any], on_step: Any
) -> Callable[[Any], Any]:
    """`on_step` that also calls a callback in diffusers' way, and ends rows where it interrupts."""

    def step(progress: Any) -> Any:
        state = {"tokens": progress.tokens, "lengths": progress.lengths}
        at = progress.passes - 1, int(progress.lengths.min())
        remedy = "which a policy and a layout decide"
        call_back(callback, pipe, *at, state, remedy=remedy, reads_interrupt=True)
        limit = None if on_step is None else on_step(progress)
        return progress.lengths if is_interrupted(pipe) else limit

    return step
