"""Parents of models that draw from prompts, and the encoding of prompts for them.

Classifier-free guidance (J. Ho and T. Salimans, 2022, arXiv 2207.12598) computes the logits u + s
(c - u). A negative prompt replaces the model's own unconditional one in the row of u.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from mmaccel.catalog import default_policy, read_policy
from mmaccel.checks import check_length, show
from mmaccel.contracts import Denoiser, Layout, Prompt, TokenModel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_size
from mmaccel.pipelines.text_to_image.outputs import to_images
from mmaccel.policies import check_policy
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image


class PromptedModel(ABC):
    """Encodes prompts to token ids, and decodes the tokens that follow: an image, or a clip.

    A family defines `encode` and `render`, and `unconditional` if it has guidance.
    """

    family: str = "this model"
    examples: tuple[str, ...] = ()
    params = SamplingParams()  # what the model's authors recommend
    no_guidance: str | None = None  # why, a clause that follows "as"; None if it has guidance
    # why, behind the name of the family; None if it has them
    no_negatives: str | None = "whose class has none"
    pad: int = 0

    window: Any  # a TokenModel or a Denoiser

    def __init__(self, window: TokenModel | Denoiser, layout: Any, size: tuple[int, int]) -> None:
        self.window, self.layout, self.size = window, layout, size

    @property
    def length(self) -> int:
        return self.layout.frame

    @property
    def reader(self) -> Any:
        """The model of transformers that embeds the ids of prompts; None where there is none."""
        return getattr(self.window, "model", None)

    @abstractmethod
    def encode(self, text: str) -> Any:
        """A user's prompt, for `prompt`: ids, unless `make_prompt` differs."""

    def encode_negative(self, text: str) -> Any:
        """A negative prompt, for `prompt`. This class refuses all of them."""
        raise OptionError(
            f"negative prompt: expected none for {self.family}, {self.no_negatives}, received "
            f"{text!r:.80}; leave it out"
        )

    def unconditional(self) -> list[int]:
        """Ids of an unconditional row without a negative prompt; called with guidance only."""
        raise NotImplementedError(f"{type(self).__name__}: expected ids of the unconditional row")

    def prompt(
        self,
        encoded: Sequence[Any],
        guided: bool,
        negatives: Sequence[Any | None] | None = None,
    ) -> Prompt:
        """The rows of B results of `encode`, and the model prepared for a run with them.

        If `guided`, B unconditional rows follow; `negatives` are results of `encode_negative`, None
        for a row, or all rows, with the model's own unconditional prompt.
        """
        texts = [each for each in negatives or () if each is not None]
        if texts and self.no_negatives is not None:
            PromptedModel.encode_negative(self, texts[0])
        if guided and self.no_guidance is not None:
            raise OptionError(
                f"guidance_scale: expected 1, as {self.no_guidance}, received another; leave it out"
            )
        return self.make_prompt(encoded, guided, negatives)

    def make_prompt(
        self, encoded: Sequence[Any], guided: bool, negatives: Sequence[Any | None] | None
    ) -> Prompt:
        """The rows for `prompt`, which has checked the arguments: ids padded on the right."""
        rows = list(encoded)
        if guided:
            for ids in negatives or [None] * len(rows):
                rows.append(self.unconditional() if ids is None else ids)
        prompt = stack_rows(rows, 2 if guided else 1, self.layout, self.window.device, self.pad)
        return self.begin(prompt)

    def begin(self, prompt: Prompt) -> Prompt:
        """Prepare the window for a run with `prompt`, where the window needs it; return it."""
        return prompt

    def resize(self, size: tuple[int, int]) -> Self:
        """A copy of this model for images of another size in pixels; it shares the weights."""
        resized = copy(self)
        resized.set_size(size)
        return resized

    def set_size(self, size: tuple[int, int]) -> None:
        """Change the image size of this model; this class allows its one size only."""
        check_size(LoadConfig(size=size).size, self.size)

    @abstractmethod
    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        """B results of tokens `[B, length]`; seeds are for decoders that draw random numbers."""


class ImageModel(PromptedModel):
    """A `PromptedModel` of images. The class of a family defines `encode` and `decode`."""

    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)

    @torch.no_grad()
    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """B images of tokens `[B, layout.frame]` int64, structural tokens included."""
        return to_images(self.decode(tokens))

    def decode(self, tokens: Tensor) -> Tensor:
        """Pixels `[B, 3, H, W]` in 0..1 of tokens `[B, layout.frame]`."""
        raise NotImplementedError(f"{type(self).__name__}: expected decode or render")


def stack_rows(
    rows: Sequence[Sequence[int]], branches: int, layout: Layout, device: torch.device, pad: int = 0
) -> Prompt:
    """R rows of ids, none empty, branch by branch, as one prompt; no token attends to `pad`."""
    longest = max(map(len, rows))
    padded = [[*row, *[pad] * (longest - len(row))] for row in rows]  # [R, T]
    lengths = torch.tensor([len(row) for row in rows], device=device, dtype=torch.int64)
    return Prompt(lengths.new_tensor(padded), lengths, branches, layout=layout)


@dataclass(frozen=True)
class Encoded:
    """Encoded prompts of B images, and negative ones, None where a row has none."""

    prompts: list[Any]
    negatives: list[Any] | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest prompt; those that are no lists of ids, as classes, count 0."""
        items = [*self.prompts, *(self.negatives or ())]
        return max((len(item) for item in items if isinstance(item, list)), default=0)

    def __getitem__(self, part: slice) -> Encoded:
        negatives = None if self.negatives is None else self.negatives[part]
        return Encoded(self.prompts[part], negatives)


def make_rows(model: PromptedModel, encoded: Encoded, params: SamplingParams) -> Prompt:
    return model.prompt(encoded.prompts, params.guidance_scale != 1, encoded.negatives)


def encode_prompts(
    model: PromptedModel,
    prompts: Sequence[str],
    negatives: Sequence[str | None] | None,
    params: SamplingParams,
) -> Encoded:
    """Check prompts and encode them, and negative prompts, None or empty where an image has none.

    Raises:
        OptionError: a prompt that the model does not take or that is too long for it; a negative
            prompt without guidance, or for a model without negative prompts.
    """
    encoded = [model.encode(text) for text in prompts]
    texts = spread_negatives(negatives, len(encoded))
    by_row = [None if text is None else _encode_negative(model, text) for text in texts]
    encoded_negatives = [each for each in by_row if each is not None]
    if encoded_negatives and params.guidance_scale == 1:
        raise OptionError(
            "negative prompt: expected a guidance_scale other than 1 with it, received 1, which "
            "runs no unconditional rows; set guidance_scale, or leave it out"
        )
    _check_ids(model, [*encoded, *encoded_negatives])
    _check_positions(model, [*encoded, *encoded_negatives])
    return Encoded(encoded, by_row if encoded_negatives else None)


def spread_negatives(given: Any, count: int) -> list[str | None]:
    """Negative prompts of `count` images, one each, of one for all or a list; None: none."""
    if given is None or isinstance(given, str):
        texts: list[Any] = [given] * count
    else:
        is_list = isinstance(given, Sequence) and not isinstance(given, bytes)
        if is_list:
            check_length("negative prompt", given)
        texts = list(given) if is_list else []
        if len(texts) != count or not all(isinstance(t, str | None) for t in texts):
            raise OptionError(
                f"negative prompt: expected a text for all, or a list of {count} (one per prompt, "
                f"None for none), received {show(given)}; write as many as there are prompts"
            )
    return [text if text is not None and text.strip() else None for text in texts]


def _encode_negative(model: PromptedModel, text: str) -> Any:
    try:
        return model.encode_negative(text)
    except OptionError as error:
        message = str(error)
        is_named = message.startswith("negative")
        raise OptionError(message if is_named else f"negative {message}") from error


def check_example(model: PromptedModel) -> None:
    """Encode an example and the unconditional row, as a run does."""
    try:
        encode_prompts(model, model.examples[:1], None, model.params)
    except OptionError:  # an example that is too long, or in words that a small model lacks
        return
    if type(model).unconditional is not PromptedModel.unconditional:
        rows = [model.unconditional()]
        _check_ids(model, rows)
        stack_rows(rows, 1, model.layout, model.window.device, model.pad)


def _check_ids(model: PromptedModel, encoded: Sequence[Any]) -> None:
    """Check that there are embeddings for all ids of the prompts that are lists of ids."""
    host = model.reader
    embeddings = host.get_input_embeddings() if hasattr(host, "get_input_embeddings") else None
    size = getattr(embeddings, "num_embeddings", None)
    largest = max((max(item) for item in encoded if isinstance(item, list) and item), default=-1)
    if size is not None and largest >= size:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of the model's {size} ids, received a prompt with id "
            f"{largest}; give a checkpoint and a tokenizer that belong together"
        )


def restore_pixels(pixels: Tensor, image_processor: Any) -> Tensor:
    """Pixels `[B, 3, H, W]` in 0..1 of those that an image processor of transformers makes."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32, device=pixels.device).view(3, 1, 1)
        for values in (image_processor.image_mean, image_processor.image_std)
    )
    return pixels.float() * deviation + mean


def _check_positions(model: PromptedModel, encoded: Sequence[Any]) -> None:
    """Check that the model has positions for the longest list of ids and what follows it."""
    limit: int | None = getattr(model.window, "max_positions", None)
    longest = max((len(item) for item in encoded if isinstance(item, list)), default=0)
    positions = longest + model.length - 1  # the last token is not processed
    if limit is not None and positions > limit:
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {positions}, of which "
            f"{longest} are a prompt's; shorten it, draw smaller images, or ask for fewer tokens"
        )


def choose_params(recommended: SamplingParams, **given: Any) -> SamplingParams:
    """Given fields of `SamplingParams`, for None the authors' values; a top_k of 0 keeps all."""
    chosen = {name: value for name, value in given.items() if value is not None}
    top_k = chosen.get("top_k")
    if isinstance(top_k, Integral) and not isinstance(top_k, bool) and top_k == 0:
        chosen["top_k"] = None
    return replace(recommended, **chosen)


def pick_policy(policy: Any, window: TokenModel | Denoiser) -> Any:
    """A policy as `read_policy` takes it, or for None an exact one of the model's kind."""
    policy = read_policy(default_policy(window) if policy is None else policy)
    check_policy(policy, window.kind)
    return policy
