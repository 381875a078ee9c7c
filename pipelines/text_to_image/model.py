"""`PromptedModel` and `ImageModel`, parents of models that draw from prompts, and the encoding of
prompts for them.

Classifier-free guidance (J. Ho and T. Salimans, 2022, arXiv 2207.12598) computes the logits
u + s (c - u). A negative prompt replaces the model's own unconditional prompt in the row that gives
u.
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

from mmaccel.catalog import read_policy
from mmaccel.checks import check_length, show
from mmaccel.contracts import Denoiser, Layout, Prompt, TokenModel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_size
from mmaccel.pipelines.text_to_image.outputs import to_images
from mmaccel.policies import check_policy
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


class PromptedModel(ABC):
    """Encodes prompts to token ids, and decodes the tokens that follow: an image, or a clip.

    The class of a model family defines `encode` and `render`, and `unconditional` if the model has
    guidance. It overrides further methods where the family differs.

    Args:
        window: predicts the tokens: a `TokenModel` or a `Denoiser`.
        layout: order of the tokens; `layout.frame` is the number of slots of an image.
        size: width and height of an image in pixels.

    Attributes:
        family: name of the family in messages.
        examples: example prompts.
        params: guidance, temperature and truncation that the model's authors recommend.
        no_guidance: reason why the model has no guidance, a clause that follows "as"; None if it
            has guidance.
        no_negatives: reason why the model has no negative prompts, a clause that follows the
            family's name; None if it has them.
        pad: id that fills short rows; no token attends to it.
    """

    family: str = "this model"
    examples: tuple[str, ...] = ()
    params = SamplingParams()
    no_guidance: str | None = None
    no_negatives: str | None = "whose class has none"
    pad: int = 0

    window: Any  # a TokenModel or a Denoiser

    def __init__(self, window: TokenModel | Denoiser, layout: Grid, size: tuple[int, int]) -> None:
        self.window, self.layout, self.size = window, layout, size

    @property
    def length(self) -> int:
        """Number of tokens that follow a prompt."""
        return self.layout.frame

    @property
    def reader(self) -> Any:
        """The model of transformers that embeds the ids of prompts; None where there is none."""
        return getattr(self.window, "model", None)

    @abstractmethod
    def encode(self, text: str) -> Any:
        """Check a user's prompt and encode it for `prompt`: to ids, unless `make_prompt` differs.

        Raises:
            OptionError: a prompt that the model does not take.
        """

    def encode_negative(self, text: str) -> Any:
        """Check a negative prompt and encode it for `prompt`. This class refuses all of them.

        Raises:
            OptionError: a prompt that the model does not take, or a model without negative prompts.
        """
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
        """Build the prompt rows of B results, and prepare the model for a run with them.

        Args:
            encoded: B results of `encode`.
            guided: whether a branch of B unconditional rows follows.
            negatives: B results of `encode_negative`; None for a row, or for all rows, uses the
                model's own unconditional prompt.

        Raises:
            OptionError: guidance or negative prompts for a model without.
        """
        given = [each for each in negatives or () if each is not None]
        if given and self.no_negatives is not None:
            PromptedModel.encode_negative(self, given[0])
        if guided and self.no_guidance is not None:
            raise OptionError(
                f"guidance_scale: expected 1, as {self.no_guidance}, received another; leave it out"
            )
        return self.make_prompt(encoded, guided, negatives)

    def make_prompt(
        self, encoded: Sequence[Any], guided: bool, negatives: Sequence[Any | None] | None
    ) -> Prompt:
        """Build the rows for `prompt`, which has checked the arguments: ids padded on the right."""
        rows = list(encoded)
        if guided:
            own = negatives or [None] * len(rows)
            rows += [self.unconditional() if ids is None else ids for ids in own]
        prompt = stack_rows(rows, 2 if guided else 1, self.layout, self.window.device, self.pad)
        return self.begin(prompt)

    def begin(self, prompt: Prompt) -> Prompt:
        """Prepare the window for a run with `prompt`, where the window needs it; return it."""
        return prompt

    def resize(self, size: tuple[int, int]) -> Self:
        """A copy of this model for images of another size; the copy shares the weights.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size that the model does not have.
        """
        resized = copy(self)
        resized.set_size(size)
        return resized

    def set_size(self, size: tuple[int, int]) -> None:
        """Change the image size of this model; this class allows its one size only.

        Raises:
            OptionError: a size that the model does not have.
        """
        check_size(LoadConfig(size=size).size, self.size)

    @abstractmethod
    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        """Decode tokens to B results.

        Args:
            tokens: `[B, length]` int64, structural tokens included.
            prompts: the B texts.
            seeds: B seeds, for models whose decoder draws random numbers.
        """


class ImageModel(PromptedModel):
    """A `PromptedModel` of images. The class of a family defines `encode` and `decode`."""

    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)

    @torch.no_grad()
    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """Decode tokens to B images.

        Args:
            tokens: `[B, layout.frame]` int64, structural tokens included.
            prompts, seeds: see `PromptedModel.render`.
        """
        return to_images(self.decode(tokens))

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens `[B, layout.frame]` to pixels `[B, 3, H, W]` in 0..1."""
        raise NotImplementedError(f"{type(self).__name__}: expected decode or render")


def stack_rows(
    rows: Sequence[Sequence[int]], branches: int, layout: Layout, device: torch.device, pad: int = 0
) -> Prompt:
    """Stack rows of ids to one prompt.

    Args:
        rows: R lists of ids, none empty, branch by branch.
        branches: G; R is a multiple of it.
        layout: of the generated tokens.
        device: of the prompt's tensors.
        pad: id that fills short rows on the right; no token attends to it.
    """
    longest = max(map(len, rows))
    padded = [[*row, *[pad] * (longest - len(row))] for row in rows]  # [R, T]
    lengths = torch.tensor([len(row) for row in rows], device=device, dtype=torch.int64)
    return Prompt(lengths.new_tensor(padded), lengths, branches, layout=layout)


@dataclass(frozen=True)
class Encoded:
    """Encoded prompts of B images.

    Attributes:
        prompts: B results of `PromptedModel.encode`.
        negatives: B results of `PromptedModel.encode_negative`, None where a row has no negative
            prompt; None if no row has one.
    """

    prompts: list[Any]
    negatives: list[Any] | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest prompt; those that are no lists of ids, as classes, count 0."""
        items = [*self.prompts, *(self.negatives or ())]
        return max((len(item) for item in items if isinstance(item, list)), default=0)

    def __getitem__(self, part: slice) -> Encoded:
        """The prompts of some images."""
        negatives = None if self.negatives is None else self.negatives[part]
        return Encoded(self.prompts[part], negatives)


def make_rows(model: PromptedModel, encoded: Encoded, params: SamplingParams) -> Prompt:
    """Token rows of encoded prompts, with unconditional rows where guidance is on."""
    return model.prompt(encoded.prompts, params.guidance_scale != 1, encoded.negatives)


def encode_prompts(
    model: PromptedModel,
    prompts: Sequence[str],
    negatives: Sequence[str | None] | None,
    params: SamplingParams,
) -> Encoded:
    """Check prompts and encode them.

    Args:
        prompts: B prompts.
        negatives: B negative prompts, None or empty where an image has none; None for all.

    Raises:
        OptionError: a prompt that the model does not take or that is too long for it; a negative
            prompt without guidance, or for a model without negative prompts.
        UnsupportedModelError: a tokenizer with ids that the model does not have.
    """
    encoded = [model.encode(text) for text in prompts]
    texts = spread_negatives(negatives, len(encoded))
    own = [None if text is None else _encode_negative(model, text) for text in texts]
    given = [each for each in own if each is not None]
    if given and params.guidance_scale == 1:
        raise OptionError(
            "negative prompt: expected a guidance_scale other than 1 with it, received 1, which "
            "runs no unconditional rows; set guidance_scale, or leave it out"
        )
    _check_ids(model, [*encoded, *given])
    _check_positions(model, [*encoded, *given])
    return Encoded(encoded, own if given else None)


def spread_negatives(given: Any, count: int) -> list[str | None]:
    """Negative prompts of `count` images, one each; None where an image has none.

    Args:
        given: one text for all, a list of texts and None, or None.
        count: number of images.

    Raises:
        OptionError: another type, or a list of another length.
    """
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
    """Encode an example and the unconditional row, as a run does.

    Raises:
        UnsupportedModelError: ids that the model does not have; or another exception of a broken
            tokenizer.
    """
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
    """Check that the model has positions for the longest prompt and what follows it.

    Prompts that are not lists of ids, such as class labels, are not counted here.
    """
    limit: int | None = getattr(model.window, "max_positions", None)
    longest = max((len(item) for item in encoded if isinstance(item, list)), default=0)
    positions = longest + model.length - 1  # the last token is not processed
    if limit is not None and positions > limit:
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {positions}, of which "
            f"{longest} are a prompt's; shorten it, draw smaller images, or ask for fewer tokens"
        )


def choose_params(recommended: SamplingParams, **given: Any) -> SamplingParams:
    """The sampling parameters of a run: the given values, and the recommended ones for None.

    Args:
        recommended: by the model's authors.
        **given: fields of `SamplingParams`; a top_k of 0 keeps all tokens.

    Raises:
        OptionError: a value outside its domain.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    top_k = chosen.get("top_k")
    if isinstance(top_k, Integral) and not isinstance(top_k, bool) and top_k == 0:
        chosen["top_k"] = None
    return replace(recommended, **chosen)


def pick_policy(policy: Any, window: TokenModel | Denoiser) -> Any:
    """The given policy, or for None an exact policy of the model's kind.

    Args:
        policy: as `mmaccel.catalog.read_policy` takes it.

    Raises:
        OptionError: not a policy, or a policy for another kind of model.
    """
    kind = window.kind
    if policy is None:
        policy = Jacobi() if kind == "window" else LosslessUnmask()
    policy = read_policy(policy)
    check_policy(policy, kind)
    return policy
