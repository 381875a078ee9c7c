"""Image to text: questions about images, answered under a policy, maybe on fewer visual tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from mmaccel.catalog import read_policy
from mmaccel.checks import show, within
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.handle import attach
from mmaccel.options import LoadKeywords, PassKeywords, sampling_of, takes
from mmaccel.pipelines.call_options import AnyMethod, TokenOptions
from mmaccel.pipelines.hosts.attach.layer_methods import read_methods
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_position_limit
from mmaccel.pipelines.hosts.loading.moving import Part, describe
from mmaccel.pipelines.hosts.logits.position_rules import EntropyTemperature, TopNSigma
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.hosts.vision_language.visuals import find_placeholder
from mmaccel.pipelines.image_to_text.loading import check_processor, open_vision_language
from mmaccel.pipelines.image_to_text.prompts import check_questions, make_inputs, read_images
from mmaccel.pipelines.image_to_text.types import Answer, Answers
from mmaccel.pipelines.image_to_text.views import find_image_tokens
from mmaccel.pipelines.media import pick_max_num_seqs
from mmaccel.pipelines.pipeline import Decoding, Pipeline, read_loading
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.policies import Policy
from mmaccel.reduction.visual_tokens.contract import UseReducers, read_reducers
from mmaccel.results import Stats, add_stats
from mmaccel.samplers.noise import choose_seed, spread_seeds
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.jacobi import Jacobi

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_TOKENS = 64


@dataclass(frozen=True)
class VisionLanguageHost:
    """A model of transformers, which generates, and the processor that makes its prompts."""

    window: Any
    processor: Any

    def parts(self) -> dict[str, Part]:
        return {"model": Part(self.window)}


@dataclass(frozen=True, kw_only=True)
class Questions(TokenOptions):
    """The arguments of `ImageToText.__call__`, which explains them."""

    images: Any = field(kw_only=False)
    question: str | Sequence[str] = field(kw_only=False)
    max_new_tokens: int = within(DEFAULT_TOKENS, 1, hint="64 suits short answers")
    seed: int | Sequence[int | None] | None = None
    batch_size: int | None = within(None, 1, hint="ask for 1 or more")
    on_token: Callable[[int], None] | None = None


class ImageToText(Pipeline):
    """Answers questions about images, by any window policy. One run at a time.

    Args:
        model: a transformers model for images and text, in evaluation mode.
        processor: its processor, with a chat template or with `image_token`.
        policy: a policy, its short name, or a dictionary such as `{"name": "jacobi", "window":
            32}`; None is `Jacobi()`.
        visual_tokens: which visual tokens stay: a method or several, as in `mmaccel.attach`.
        kv_cache, attention: methods of the language model's layers, as in `mmaccel.attach`.
        **passes: fields of `pipelines.hosts.runner.engine.Engine`. Packed weights stay packed
            between calls.

    Raises:
        OptionError, UnsupportedModelError: a policy or a method of another kind of model, a
            processor that takes no images.
        AttachError: the model has a policy attached.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        policy: Policy | str | Mapping[str, Any] | None = None,
        visual_tokens: UseReducers = None,
        kv_cache: AnyMethod = None,
        attention: AnyMethod = None,
        source: Path | None = None,
        **passes: Unpack[PassKeywords],
    ) -> None:
        check_processor(processor)
        chosen = Jacobi() if policy is None else read_policy(policy)
        self.reducers = read_reducers(visual_tokens)
        super().__init__(VisionLanguageHost(model, processor), source, Engine(**passes))
        self.decoding = Decoding(chosen, read_methods(kv_cache, attention))
        self._attach(0).detach(keep_packed=True)  # refuses now what no call could use

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        policy: Policy | str | Mapping[str, Any] | None = None,
        visual_tokens: UseReducers = None,
        kv_cache: AnyMethod = None,
        attention: AnyMethod = None,
        **options: Unpack[LoadKeywords],
    ) -> ImageToText:
        """Load a model and its processor from disk or from the Hugging Face hub.

        Args:
            name: "scenes-vqa", which ships with the package; a folder that `save_pretrained` of
                model and processor wrote; or an id of the hub (downloaded to its cache).
            policy, visual_tokens, kv_cache, attention: of the pipeline.
            **options: fields of `mmaccel.options.LoadOptions`.
        """
        reducers = read_reducers(visual_tokens)
        engine, config = read_loading(options)
        if config.family is not None:
            raise OptionError(
                f"family: expected none, as transformers knows the class of a vision-language "
                f"model, received {show(config.family)}; leave it out"
            )
        model, processor, source = open_vision_language(name, config)
        return cls(
            model,
            processor,
            policy=policy,
            visual_tokens=reducers or None,
            kv_cache=kv_cache,
            attention=attention,
            source=source,
            **engine.options,
        )

    @property
    def processor(self) -> Any:
        return self.host.processor

    @property
    def policy(self) -> Any:
        return self.decoding.policy

    def with_methods(self, **methods: Any) -> ImageToText:
        """A pipeline of the same model with other policy, visual_tokens, kv_cache, attention."""
        options = self.engine.options
        return type(self)(self.model, self.processor, source=self.source, **methods, **options)

    @takes(Questions)
    def __call__(self, asked: Questions) -> Answers:
        """Answer questions.

        Args:
            images: a PIL image or the path of a file; a list of them that every question is about;
                or one such list for each question. They go before the question, or where `<image>`
                stands in it.
            question: one or several.
            max_new_tokens: after which an answer is cut.
            seed: of the first question, the next has the next; or one per question. None is 0 for
                greedy answers; for others one is drawn from torch's global generator, and
                `stats.seed` says which.
            temperature: None is 0, which takes the likeliest token.
            top_k, top_p, min_p, top_n_sigma, top_h, eta_cutoff, entropy_temperature: as in
                `mmaccel.SamplingParams`; None, and a top_k of 0, keep all.
            batch_size: questions that are answered at a time at most; None answers all together.
            on_token: called whenever all running rows of a batch have one more token, with the
                number of its rows. An exception from it ends the run and reaches the caller.

        Returns:
            Answers in the order of the questions. The model's generation config shapes them
            otherwise (repetition penalty, ends); its beams are not searched.
        """
        began = time.perf_counter()
        questions = check_questions(asked.question, self.processor.tokenizer)
        own_images = read_images(asked.images, len(questions))
        params = choose_sampling(**sampling_of(asked))
        seed = choose_seed(asked.seed) if params.temperature or asked.seed is not None else None
        seeds = spread_seeds(0 if seed is None else seed, len(questions))
        n_rows = pick_max_num_seqs(asked.batch_size, len(questions))
        read_seconds = time.perf_counter() - began
        batches = []
        with alone(self.model), self._at_work():
            for first in range(0, len(questions), n_rows):
                rows = slice(first, first + n_rows)
                batch = _Batch(first, questions[rows], own_images[rows], seeds[rows])
                batches.append(self._answer(batch, asked, params))
        stats = add_stats([batch.stats for batch in batches])
        stats.seed = seed
        return Answers(
            [answer for batch in batches for answer in batch.answers],
            stats,
            read_seconds + sum(batch.seconds for batch in batches),
            read_seconds + sum(batch.first_seconds for batch in batches),
        )

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        reducers = "".join(f", {one!r}" for one in self.reducers)
        return f"ImageToText({kind}{describe(self)}, {self.policy!r}{reducers})"

    @property
    def components(self) -> dict[str, Any]:
        return {"model": self.model, "processor": self.processor}

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        self.model.save_pretrained(folder, **options)
        self.processor.save_pretrained(folder)

    def _attach(self, seed: int | Sequence[int]) -> Any:
        return attach(
            self.model,
            self.policy,
            seed=seed,
            visual_tokens=self.reducers or None,
            kv_cache=self.decoding.methods.kv_cache,
            attention=self.decoding.methods.attention,
            **self.engine.options,
        )

    def _answer(self, batch: _Batch, asked: Questions, params: SamplingParams) -> Answers:
        began = time.perf_counter()
        n_new = asked.max_new_tokens
        inputs = make_inputs(self.processor, batch.questions, batch.images)
        ids = inputs["input_ids"]
        self._check_length(ids.shape[1], n_new)
        inputs = inputs.to(self.device, self.dtype)
        clock = _Clock(asked.on_token)
        run = self._attach(batch.seeds)
        try:
            with torch.no_grad():
                sequences = self.model.generate(
                    **inputs, max_new_tokens=n_new, streamer=clock, **_options(params)
                )
        finally:
            run.detach(keep_packed=True)
        seconds = time.perf_counter() - began
        stats: Stats = run.stats
        ends = _find_ends(self.model)
        visual = self._count_visual(ids)
        kept = find_image_tokens(self.model, self.processor, run.kept_tokens, inputs, batch.images)
        answers = []
        for row, text in enumerate(batch.questions):
            tokens, is_finished = _cut(sequences[row, ids.shape[1] :].cpu(), ends)
            images = kept[row]
            answer = Answer(
                index=batch.first + row,
                question=text,
                text=self._decode(tokens),
                seed=batch.seeds[row],
                tokens=tokens,
                is_finished=is_finished,
                passes=stats.passes + stats.prefill_passes,
                n_visual=visual[row],
                n_kept=sum(image.n_kept for image in images) if images else visual[row],
                images=images,
            )
            answers.append(answer)
        return Answers(answers, stats, seconds, clock.first - began)

    def _decode(self, tokens: Tensor) -> str:
        text: str = self.processor.batch_decode(tokens[None], skip_special_tokens=True)[0]
        return text.strip()

    def _check_length(self, prompt: int, max_new_tokens: int) -> None:
        limit = find_position_limit(self.model)
        if limit is not None and prompt + max_new_tokens - 1 > limit:
            raise OptionError(
                f"positions: expected at most {limit} (the model's), received {prompt} of the "
                f"prompt and {max_new_tokens} of the answer; ask for a shorter answer, or about "
                "fewer images"
            )

    def _count_visual(self, ids: Tensor) -> list[int]:
        """Visual tokens of each row; 0 for models whose class is not listed."""
        try:
            placeholder = find_placeholder(self.model, "image")
        except UnsupportedModelError:
            return [0] * len(ids)
        counts: list[int] = (ids == placeholder).sum(1).tolist()
        return counts


@dataclass(frozen=True)
class _Batch:
    """Questions that are answered together; `first` is the index of the first one."""

    first: int
    questions: Sequence[str]
    images: Sequence[Sequence[Image]]
    seeds: Sequence[int]


class _Clock:
    """A streamer of transformers that notes when the first tokens come, and tells of each."""

    def __init__(self, on_token: Callable[[int], None] | None) -> None:
        self._puts = 0
        self.first = 0.0
        self._on_token = on_token

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with every step's tokens."""
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()
        if self._puts > 1 and self._on_token is not None:
            self._on_token(len(value))

    def end(self) -> None:
        """Called at the end."""


def choose_sampling(**given: Any) -> SamplingParams:
    """The sampling parameters of a call; greedy unless a temperature is given."""
    return choose_params(SamplingParams(temperature=0.0), **given)


def _options(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as arguments of `generate`, for one token sequence a question."""
    one = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    if not params.temperature:
        return {"do_sample": False, **one}
    processors: list[Any] = []
    if params.entropy_temperature is not None:
        processors.append(EntropyTemperature(params.entropy_temperature))
    if params.top_n_sigma is not None:
        processors.append(TopNSigma(params.top_n_sigma))
    return {
        **one,
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "min_p": params.min_p,
        "top_h": params.top_h,
        "eta_cutoff": params.eta_cutoff or 0.0,
        "logits_processor": processors,
    }


def _find_ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [int(ends)]


def _cut(tokens: Tensor, ends: Sequence[int]) -> tuple[Tensor, bool]:
    """Tokens `[n]` up to their end, which is included, and whether there is one."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype))
    if not bool(is_end.any()):
        return tokens, False
    return tokens[: int(is_end.int().argmax()) + 1], True
