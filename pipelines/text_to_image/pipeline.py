"""Text to image: prompts to image tokens under a decoding policy, then tokens to images.

`TextToImage` makes images in two ways. A call and `stream` decode fixed batches. `serve` decodes
any number of requests, each with its own seed, with continuous batching; the seed of a request
alone decides its image, whatever runs next to it. `ImageGenerator` serves requests of several image
sizes with one loaded model: `mmaccel generate`, batches and the ComfyUI nodes use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_callable, check_choice, check_int, show
from mmaccel.contracts import (
    Arrivals,
    CanvasPolicy,
    FinishedRow,
    OnCanvasStep,
    Policy,
    Prompt,
)
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_IMAGES, MAX_SIDE
from mmaccel.options import LoadKeywords
from mmaccel.pipelines.layers.methods import reducing
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.media import RowPlan, check_deliver
from mmaccel.pipelines.pipeline import Pipeline, read_loading
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.pipelines.step_callback import call_back, is_interrupted
from mmaccel.pipelines.text_to_image.model import (
    Encoded,
    ImageModel,
    check_params,
    choose_params,
    encode_prompts,
    pick_policy,
    spread_negatives,
)
from mmaccel.pipelines.text_to_image.outputs import (
    OUTPUT_TYPES,
    ImageOutput,
    Request,
    RequestOutput,
    check_prompts,
    check_requests,
    convert_images,
    join,
)
from mmaccel.pipelines.text_to_image.registry import open_images
from mmaccel.reduction.kv_cache.contract import CacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.canvas.masked_parallel import set_steps
from mmaccel.samplers.noise import Noise, choose_seed
from mmaccel.samplers.sampling_params import SamplingParams

_WARM_UP_PASSES = 3

AnyPolicy = Policy | CanvasPolicy | str | Mapping[str, Any]
"""What `mmaccel.catalog.read_policy` takes."""
AnyMethod = CacheMethod | AttentionMethod | str | Mapping[str, Any] | None
"""What `mmaccel.catalog.read_method` takes, or None."""


class TextToImage(Pipeline):
    """Images from prompts, by any policy. One run at a time: the model has one cache.

    Args:
        host: the model, an `ImageModel`.
        source, engine: see `mmaccel.pipelines.pipeline.Pipeline`.
    """

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
            size: width and height in pixels, for models with several sizes; None takes the model's
                default.
            decoder: a file with the image decoder, for checkpoints that have none.
            **options: see `mmaccel.options.LoadOptions`; families are in docs/models.md.

        Raises:
            OptionError: no such model, option, device, dtype, size or family, or a bad value; a
                file is missing.
            UnsupportedModelError: an unknown family, missing or surplus tensors, files that cannot
                be read or do not fit each other, or code that is not trusted.
            MissingBackendError: a device map, and the package accelerate is not installed.
        """
        loading = read_loading(options, size=size, decoder=decoder)
        return cls(*open_images(name, loading.config, loading.family), loading.engine)

    @property
    def image_model(self) -> ImageModel:
        """The model with its layout, prompts and renderer."""
        image_model: ImageModel = self.host
        return image_model

    @property
    def length(self) -> int:
        """Number of tokens in an image."""
        return self.image_model.layout.frame

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of an image in pixels."""
        return self.image_model.size

    def resize(self, size: tuple[int, int]) -> Self:
        """This pipeline for images of another size. Weights are shared; nothing is loaded.

        Both pipelines together still have one run at a time.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size that the model does not have; most models have one.
        """
        image_model = self.image_model.resize(LoadConfig(size=size).size or self.size)
        resized = type(self)(image_model, self.source, replace(self.engine))
        resized._offloaded = self._offloaded
        return resized

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        policy: AnyPolicy | None = None,
        kv_cache: AnyMethod = None,
        attention: AnyMethod = None,
        negative_prompt: str | Sequence[str | None] | None = None,
        seed: int | Sequence[int] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        on_step: OnStep | OnCanvasStep | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], Any] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        return_dict: bool = True,
    ) -> ImageOutput:
        """Make images.

        Args:
            prompt: one or several.
            policy: how to decode: a policy, its short name, or a dictionary such as
                `{"name": "jacobi", "window": 32}`. None is `Jacobi()`, or
                `LosslessUnmask()` for a model that fills a canvas.
            kv_cache, attention: which entries of a prompt stay in the layers' caches, and which
                cached keys a pass attends to, as in `mmaccel.attach`; None keeps all.
            negative_prompt: prompt to guide away from, for models whose authors have one: one for
                all or one per prompt; None and "" use the model's own unconditional prompt.
            seed: one for all (image b is item b of it), or one per image. With one per image an
                image depends on its own seed and prompt alone. None draws one, see `generator`;
                `stats.seed` says which.
            guidance_scale: classifier-free guidance; 1 runs without the unconditional rows.
            temperature, top_k, top_p, min_p: see `mmaccel.SamplingParams`. None takes the value
                that the model's authors recommend (`image_model.params`); top_k 0 and top_p 1 keep
                all tokens.
            num_images_per_prompt: images of each prompt, one after another.
            batch_size: images decoded together; None decodes all together.
            on_step: called after every pass with the state of the running batch.
            generator: draws the seeds in place of `seed`: one generator draws one seed for all
                images, several draw one each. Each call advances them. None is torch's global
                generator, which `torch.manual_seed` seeds.
            output_type: "pil", "pt" (`[B, 3, H, W]`), "np" (`[B, H, W, 3]`), both float32 in 0..1
                in steps of 1/255, or "tokens", which decodes no pixels and leaves `images` empty.
            callback_on_step_end: called after every pass as diffusers' pipelines call it: with this
                pipeline, the number of the pass from 0, the tokens that the slowest image has, and
                `{"tokens": …, "lengths": …}`, copies that it must not change. It may set
                `pipe._interrupt = True`, which ends the call after this pass.
            height, width: of the images in pixels, for models with several sizes; None is the
                pipeline's own. Each call with another size prepares anew; `resize` does it once.
            num_inference_steps: the `steps` of `MaskedParallel`; None under other policies, where
                the message of a number says so.
            return_dict: False returns `(images,)`, as in diffusers.

        Returns:
            An `ImageOutput`: images, tokens `[B, h*w]` int64 and stats. A bitwise `policy` and
            `batch_size` change the cost, not the images. Under other policies an image may
            differ between batch sizes where an acceptance depends on the last bit of a probability.
            A call that was interrupted has the images of the batches before, and the tokens so far.

        Raises:
            OptionError: a prompt or an argument outside its domain, before any pass; or a callback
                that changes a tensor.
            UnsupportedModelError: a model whose layers do not carry `kv_cache` or `attention`.
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
        prompts = [prompt] if isinstance(prompt, str) else check_prompts(prompt)
        n = num_images_per_prompt
        check_int("num_images_per_prompt", n, 1, MAX_IMAGES, hint="ask for 1 or more")
        check_choice("output_type", output_type, OUTPUT_TYPES)
        if num_inference_steps is not None:
            policy = self._set_steps(policy, num_inference_steps)
        for name, side in (("height", height), ("width", width)):
            if side is not None:
                check_int(name, side, 1, MAX_SIDE, hint="None is the pipeline's own")
        wanted = (int(width or self.size[0]), int(height or self.size[1]))
        pipe = self if wanted == self.size else self.resize(wanted)
        seed = choose_seed(seed, generator)
        check_callable("callback_on_step_end", callback_on_step_end)
        check_callable("on_step", on_step)
        if callback_on_step_end is not None:
            on_step = _call_back(self, callback_on_step_end, on_step)
        negatives = spread_negatives(negative_prompt, len(prompts))
        batches = pipe.stream(
            [text for text in prompts for _ in range(n)],
            params,
            policy=policy,
            kv_cache=kv_cache,
            attention=attention,
            negatives=[text for text in negatives for _ in range(n)],
            seed=seed,
            batch_size=batch_size,
            on_step=on_step,
            has_pixels=output_type != "tokens",
        )
        made = []
        self._interrupt = False
        for batch in batches:
            made.append(batch)
            if self._interrupt:
                break
        output = join(made)
        images = convert_images(output.images, output_type)
        if not return_dict:
            return (images,)  # type: ignore[return-value]
        return replace(output, images=images)

    def stream(
        self,
        prompts: Sequence[str],
        params: SamplingParams,
        *,
        policy: AnyPolicy | None = None,
        kv_cache: AnyMethod = None,
        attention: AnyMethod = None,
        negatives: Sequence[str | None] | None = None,
        seed: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        on_step: OnStep | OnCanvasStep | None = None,
        has_pixels: bool = True,
    ) -> Iterator[ImageOutput]:
        """Make images batch by batch, and yield each batch as soon as it is finished.

        Args:
            prompts: one per image, at least one.
            params: guidance, temperature and truncation.
            negatives: one negative prompt per image, None or "" where it has none; None for all.
            policy, kv_cache, attention, seed, batch_size, on_step: as in `__call__`.
            has_pixels: whether tokens are decoded to images. They are not where `on_step` ended a
                row of the batch early.

        Returns:
            Batches, in order. All arguments are checked at once, before the first batch is read.

        Raises:
            OptionError, UnsupportedModelError: as in `__call__`.
        """
        prompts = check_prompts(prompts)
        step = len(prompts) if batch_size is None else batch_size
        check_int("batch_size", step, 1, hint="ask for 1 or more")
        check_params(params)
        check_callable("on_step", on_step)
        encoded = encode_prompts(self.image_model, prompts, negatives, params)
        seed = choose_seed(seed)
        noise = Noise.from_seed(seed, len(prompts), self.model.device)
        decoding = self.choose(policy, kv_cache, attention)
        chosen = decoding.policy
        methods = decoding.methods

        def batches() -> Iterator[ImageOutput]:
            for first in range(0, len(prompts), step):
                part = slice(first, first + step)
                own = Noise(noise.seeds[part], noise.items[part])
                with alone(self.model), torch.no_grad(), self._at_work():
                    prompt = self._prompt(encoded[part], params)
                    with reducing(self.model, methods, prompt.branches):
                        self.engine.prepare(self.model, prompt, chosen, params)
                        made = chosen.sample(
                            self.model, prompt, self.length, params=params, noise=own,
                            on_step=on_step,
                        )  # fmt: skip
                methods.record(made.stats, *self.model.n_evicted)
                made.stats.seed = seed
                began = time.perf_counter()
                images = []
                seeds = [int(s + k) for s, k in zip(own.seeds.tolist(), own.items.tolist())]
                if has_pixels and int(made.lengths.min()) == self.length:
                    images = self._render(made.tokens, prompts[part], seeds)
                made.stats.pixel_seconds = time.perf_counter() - began
                tokens = made.tokens.cpu()
                passes = made.passes.cpu()
                yield ImageOutput(images, tokens, passes, made.stats, prompts[part], first)

        return batches()

    def serve(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        policy: AnyPolicy | None = None,
        kv_cache: AnyMethod = None,
        attention: AnyMethod = None,
        rows: int = 8,
        deliver: Callable[[RequestOutput], None],
        on_step: OnStep | OnCanvasStep | None = None,
        arrivals: Callable[[int], Sequence[Request]] | None = None,
        prompt_width: int = 0,
        encoded: Encoded | None = None,
    ) -> Stats:
        """Make an image for every request, with continuous batching.

        Args:
            requests: at least one.
            params: guidance, temperature and truncation of all.
            policy, kv_cache, attention: as in `TextToImage.__call__`. Under methods of layers all
                requests begin together: at most `rows`, and none that join.
            rows: images decoded at a time at most; the next request starts when one has finished.
            deliver: called with every image as soon as it is finished, one at a time. An exception
                from it ends the run and reaches the caller. A row that `on_step` ends early is not
                rendered and not delivered.
            on_step: called after every pass with the state of the running rows.
            arrivals: called between two passes, once all `requests` have begun, with the number of
                requests that may join (at least 1); returns that many or fewer, or none. The run
                ends when all have finished and there are no more. Their numbers, as in the `rows`
                of `on_step`, follow those of the requests before.
            prompt_width: tokens of the longest prompt that may join; see `Encoded.width`. No more
                are reserved than the model has positions for.
            encoded: the prompts of `requests`, from `encode_prompts` for this model and `params`;
                None encodes them.

        Returns:
            Stats of all requests; `seconds` excludes the time spent in pixels and in `deliver`.
            With a bitwise policy an image has the pixels of `pipe(prompt, seed=[seed])`, with the
            request's negative prompt where it has one.

        Raises:
            OptionError: a request or an argument outside its domain, before any pass; or a request
                that joins.
            NumericsError: the model returned NaN; its `rows` are indices of requests.
            BusyError: another run of this model has not ended.
        """
        requests = check_requests(requests)
        check_int("rows", rows, 1, hint="ask for 1 or more")
        check_params(params)
        check_deliver(deliver)
        check_callable("on_step", on_step)
        check_callable("arrivals", arrivals)
        check_int("prompt_width", prompt_width, 0, hint="0 is the longest prompt's")
        if encoded is None:
            texts, negatives = zip(*[(request.prompt, request.negative) for request in requests])
            encoded = encode_prompts(self.image_model, texts, negatives, params)
        seeds = [request.seed for request in requests]
        noise = Noise.from_seed(seeds, len(requests), self.model.device)
        decoding = self.choose(policy, kv_cache, attention)
        running = dict(enumerate(requests))  # by number; without those that have finished
        numbers = count(len(requests))

        def finish(row: FinishedRow) -> RequestOutput | None:
            """Render one image by itself, so that no other image affects its pixels."""
            request = running.pop(row.row)
            tokens = row.tokens
            if len(tokens) < self.length:
                return None
            seed = Noise.from_seed([request.seed], 1).seeds.tolist()
            image = self.image_model.render(tokens[None], [request.prompt], seed)
            return RequestOutput(
                request, image[0], tokens.cpu(), row.passes, row.total_variation, row.nats
            )

        def receive(most: int) -> Arrivals | None:
            assert arrivals is not None
            asked = arrivals(most)
            if not asked:
                return None
            asked = check_requests(asked)
            running.update((next(numbers), request) for request in asked)
            texts, negatives = zip(*[(request.prompt, request.negative) for request in asked])
            prompt = self._prompt(
                encode_prompts(self.image_model, texts, negatives, params), params
            )
            seeds = [request.seed for request in asked]
            return Arrivals(prompt, Noise.from_seed(seeds, len(asked), self.model.device))

        with alone(self.model), self._at_work():
            with torch.no_grad():
                prompt = self._prompt(encoded, params)
            room = self.fit_prompt(prompt_width, self.length) - prompt.tokens.shape[1]
            if arrivals is not None and room > 0:
                prompt = replace(prompt, tokens=F.pad(prompt.tokens, (0, room)))
            plan = RowPlan(
                prompt=prompt, length=self.length, max_num_seqs=rows, params=params,
                noise=noise,
                arrivals=None if arrivals is None else receive,
            )  # fmt: skip
            return self.decode_rows(decoding, plan, finish=finish, deliver=deliver, on_step=on_step)

    def _set_steps(self, policy: AnyPolicy | None, steps: Any) -> Any:
        """The policy of a call with `num_inference_steps`.

        Raises:
            OptionError: a policy without such steps.
        """
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

    def _prompt(self, encoded: Encoded, params: SamplingParams) -> Prompt:
        """Token rows of encoded prompts, with unconditional rows where guidance is on."""
        is_guided = params.guidance_scale != 1
        return self.image_model.prompt(encoded.prompts, is_guided, encoded.negatives)


def _call_back(
    pipe: TextToImage, callback: Callable[..., Any], on_step: Any
) -> Callable[[Any], Any]:
    """`on_step` that also calls a callback in diffusers' way, and ends rows where it interrupts."""

    def step(progress: Any) -> Any:
        state = {"tokens": progress.tokens, "lengths": progress.lengths}
        at = progress.passes - 1, int(progress.lengths.min())
        call_back(callback, pipe, *at, state, remedy="which a policy and a layout decide")
        limit = None if on_step is None else on_step(progress)
        return progress.lengths if is_interrupted(pipe) else limit

    return step


@dataclass(frozen=True)
class GenerationSettings:
    """How images are made.

    Attributes:
        name: short name of the policy.
        policy: the policy.
        params: guidance, temperature and truncation.
        kv_cache, attention: methods of the model's layers; None for none.
    """

    name: str
    policy: Any
    params: SamplingParams
    kv_cache: AnyMethod = None
    attention: AnyMethod = None


class ImageGenerator:
    """A model that is loaded once and serves requests of any of its image sizes.

    Args:
        pipe: the model.

    Attributes:
        pipe: the model in the size that was asked for last.
    """

    def __init__(self, pipe: TextToImage) -> None:
        self.pipe = pipe
        self._default_size = pipe.size

    def resize(self, size: tuple[int, int] | None) -> TextToImage:
        """Switch to another image size, with the same weights; None is the size at loading.

        Raises:
            OptionError: a size that the model does not have.
        """
        size = size or self._default_size
        if size != self.pipe.size:
            self.pipe = self.pipe.resize(size)
        return self.pipe

    def draw(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        deliver: Callable[[RequestOutput], None] | None = None,
        encoded: Encoded | None = None,
    ) -> ImageOutput:
        """Make images and return them together, in the order of the requests.

        Args:
            requests: each with its own index as its tag.
            settings, rows, on_step: as in `run_all`.
            deliver: called with every image as soon as it is finished.
            encoded: as in `TextToImage.serve`.
        """
        made: dict[int, RequestOutput] = {}

        def keep(output: RequestOutput) -> None:
            made[output.request.tag] = output
            if deliver is not None:
                deliver(output)

        stats = self.run_all(requests, settings, keep, rows, on_step, encoded=encoded)
        done = [made[k] for k in range(len(requests))]
        tokens = torch.stack([each.tokens for each in done])
        passes = torch.tensor([each.passes for each in done], device=tokens.device)
        prompts = [request.prompt for request in requests]
        return ImageOutput([each.image for each in done], tokens, passes, stats, prompts)

    def run_all(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        deliver: Callable[[RequestOutput], None],
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> Stats:
        """Make images in the present size; see `TextToImage.serve`."""
        return self.pipe.serve(
            requests,
            settings.params,
            policy=settings.policy,
            kv_cache=settings.kv_cache,
            attention=settings.attention,
            rows=rows,
            deliver=deliver,
            on_step=on_step,
            encoded=encoded,
        )


def warm_up(
    pipe: TextToImage,
    policy: Policy | CanvasPolicy,
    params: SamplingParams,
    text: str,
    rows: int,
    callback: Callable[[], None] | None = None,
) -> float:
    """Run a few passes, so that the first measured image does not pay for allocations.

    The tokens are not decoded to pixels, which takes some models long.

    Args:
        pipe: the model.
        policy, params: as they will be measured.
        text: prompt of the images, which are thrown away.
        rows: images decoded together.
        callback: called after every pass; an exception from it ends the warming up.

    Returns:
        Seconds of a pass, without the first.
    """
    ends: list[float] = []

    def stop(progress: Any) -> Any:
        ends.append(time.perf_counter())
        if callback is not None:
            callback()
        return torch.zeros_like(progress.lengths) if progress.passes >= _WARM_UP_PASSES else None

    image_model = pipe.image_model
    window = pipe.image_model.window
    encoded = [image_model.encode(text)] * rows
    noise = Noise.from_seed(0, rows, window.device)
    with alone(window), torch.no_grad():
        prompt = image_model.prompt(encoded, params.guidance_scale != 1)
        pipe.engine.prepare(window, prompt, policy, params)
        policy.sample(window, prompt, pipe.length, params=params, noise=noise, on_step=stop)
    return (ends[-1] - ends[0]) / max(1, len(ends) - 1)
