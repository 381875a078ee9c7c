"""`ImageModel`, the parent of every family of text-to-image models, and prompts encoded for it.

A negative prompt is one to be guided away from: with classifier-free guidance (J. Ho and T.
Salimans, 2022, arXiv 2207.12598) the logits are u + s (c - u), and the row that gives u is
conditioned on it instead of on the model's own unconditional prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser, kind_of
from mmaccel.contracts import Layout, Prompt, TokenModel, check_policy
from mmaccel.errors import OptionError
from mmaccel.pipelines.loading.checkpoint import LoadConfig, check_size
from mmaccel.pipelines.text_to_image.outputs import to_images
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageModel(ABC):
    """Prompts to token ids, and image tokens to images.

    A family's child has `encode` and `decode`, and `unconditional` where it has guidance. It
    overrides what else differs.

    Args:
        window: predicts image tokens: token after token, or in any order.
        layout: how they lie; `layout.frame` is the number of slots of an image.
        size: width and height of an image in pixels.

    Attributes:
        family: name of the family, for people.
        examples: prompts for a first try.
        filters: guidance, temperature and truncation as the model's authors recommend.
        no_guidance: why there is no guidance, after "as"; None where there is.
        no_negatives: why there are no negative prompts, after a comma; None where there are.
        pad: id that fills short rows; it is never attended to.
    """

    family: str = "this model"
    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)
    params = SamplingParams()
    no_guidance: str | None = None
    no_negatives: str | None = "whose class has none"
    pad: int = 0

    window: Any  # a TokenModel or a Denoiser; children know which

    def __init__(self, window: TokenModel | Denoiser, layout: Grid, size: tuple[int, int]) -> None:
        self.window, self.layout, self.size = window, layout, size

    @abstractmethod
    def encode(self, caption: str) -> Any:
        """A prompt, checked and ready for `prompt`: ids, unless `make_prompt` is overridden.

        Raises:
            OptionError: nothing the model can draw.
        """

    def encode_negative(self, caption: str) -> Any:
        """A negative prompt, checked and ready for `prompt`; here refused.

        Raises:
            OptionError: nothing the model can draw, or a model whose authors guide without.
        """
        raise OptionError(
            f"negative prompt: expected none for {self.family}, {self.no_negatives}, received "
            f"{caption!r:.80}; leave it out"
        )

    def unconditional(self) -> list[int]:
        """Ids of a row that has no negative prompt; asked for with guidance only."""
        raise NotImplementedError(f"{type(self).__name__}: expected ids of the unconditional row")

    def prompt(
        self,
        encoded: Sequence[Any],
        guided: bool,
        negatives: Sequence[Any | None] | None = None,
    ) -> Prompt:
        """What stands before the images of B encoded prompts; the next run is theirs.

        Args:
            encoded: what `encode` made.
            guided: whether a branch of B unconditional rows follows.
            negatives: what `encode_negative` made for each of the B unconditional rows; None leaves
                a row, or all of them, the model's own.

        Raises:
            OptionError: guidance, or negative prompts, for a model whose authors have none.
        """
        given = [each for each in negatives or () if each is not None]
        if given and self.no_negatives is not None:
            ImageModel.encode_negative(self, given[0])
        if guided and self.no_guidance is not None:
            raise OptionError(
                f"guidance_scale: expected 1, as {self.no_guidance}, received another; leave it out"
            )
        return self.make_prompt(encoded, guided, negatives)

    def make_prompt(
        self, encoded: Sequence[Any], guided: bool, negatives: Sequence[Any | None] | None
    ) -> Prompt:
        """See `prompt`, whose arguments are checked: rows of ids, padded on the right."""
        rows = list(encoded)
        if guided:
            own = negatives or [None] * len(rows)
            rows += [self.unconditional() if ids is None else ids for ids in own]
        made = stack_rows(rows, 2 if guided else 1, self.layout, self.window.device, self.pad)
        return self.begin(made)

    def begin(self, prompt: Prompt) -> Prompt:
        """Tell the window whose run is next, where it has to know; hands the prompt back."""
        return prompt

    def resize(self, size: tuple[int, int]) -> Self:
        """This model for images of another size; weights are shared, nothing is loaded.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size the model does not draw.
        """
        made = copy(self)
        made.set_size(size)
        return made

    def set_size(self, size: tuple[int, int]) -> None:
        """Draw images of this size from now on; here there is only one.

        Raises:
            OptionError: a size the model does not draw.
        """
        check_size(LoadConfig(size=size), self.size)

    @torch.no_grad()
    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """Tokens `[B, layout.frame]` int64 to B images.

        Args:
            tokens: of the images, structural ones included.
            captions: their prompts.
            seeds: theirs, for models that draw once more between tokens and pixels.
        """
        return to_images(self.decode(tokens))

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, layout.frame]` to pixels `[B, 3, H, W]` in 0..1."""
        raise NotImplementedError(f"{type(self).__name__}: expected decode, or a render of its own")


def stack_rows(
    rows: Sequence[Sequence[int]], branches: int, layout: Layout, device: torch.device, pad: int = 0
) -> Prompt:
    """Rows of ids, branch by branch, as one prompt.

    Args:
        rows: R lists of ids, none empty.
        branches: G; R is a multiple of it.
        layout: of what is made.
        device: where the tensors go.
        pad: fills short rows on the right; it is never attended to.
    """
    longest = max(map(len, rows))
    padded = [[*row, *[pad] * (longest - len(row))] for row in rows]  # [R, T]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return Prompt(torch.tensor(padded, device=device), lengths, branches, layout=layout)


@dataclass(frozen=True)
class Encoded:
    """Encoded prompts of B images.

    Attributes:
        captions: B of `ImageModel.encode`.
        negatives: B of `ImageModel.encode_negative`, None where a row has none; None where no row
            has one.
    """

    captions: list[Any]
    negatives: list[Any] | None = None

    def __getitem__(self, part: slice) -> Encoded:
        """Some of them."""
        negatives = None if self.negatives is None else self.negatives[part]
        return Encoded(self.captions[part], negatives)


def encode_captions(
    images: ImageModel,
    captions: Sequence[str],
    negatives: Sequence[str | None] | None,
    params: SamplingParams,
) -> Encoded:
    """Check prompts and encode them.

    Args:
        images: the model.
        captions: B prompts.
        negatives: B negative prompts, None or empty where an image has none; None for all.
        filters: of the run.

    Raises:
        OptionError: a prompt the model does not take or has no room for; a negative prompt
            without guidance, or for a model whose authors have none.
    """
    encoded = [images.encode(caption) for caption in captions]
    texts = spread_negatives(negatives, len(encoded))
    own = [None if text is None else _encode_negative(images, text) for text in texts]
    known = [each for each in own if each is not None]
    if known and params.guidance_scale == 1:
        raise OptionError(
            "negative prompt: expected a guidance_scale other than 1 beside it, received 1, with "
            "which there is no row it could stand in; set guidance_scale, or leave it out"
        )
    check_room(images, [*encoded, *known])
    return Encoded(encoded, own if known else None)


def spread_negatives(given: Any, count: int) -> list[str | None]:
    """Negative prompts of `count` images, one each; None where there is none.

    Args:
        given: a text for all, a list of texts and None, or None.
        count: of images.

    Raises:
        OptionError: something else, or a list of another length.
    """
    if given is None or isinstance(given, str):
        texts: list[Any] = [given] * count
    else:
        is_list = isinstance(given, Sequence) and not isinstance(given, bytes)
        texts = list(given) if is_list else []
        if len(texts) != count or not all(isinstance(t, str | None) for t in texts):
            raise OptionError(
                f"negative prompt: expected a text for all, or a list of {count} (one a caption, "
                f"None for none), received {given!r:.200}; write as many as there are captions"
            )
    return [text if text is not None and text.strip() else None for text in texts]


def _encode_negative(images: ImageModel, text: str) -> Any:
    try:
        return images.encode_negative(text)
    except OptionError as error:
        said = str(error)
        raise OptionError(said if said.startswith("negative") else f"negative {said}") from error


def check_room(images: ImageModel, encoded: Sequence[Any]) -> None:
    """Refuse prompts with which an image has more positions than the model.

    Args:
        images: the model.
        encoded: what its `encode` made; what has no length takes what the model keeps for it.

    Raises:
        OptionError: with the number there may be.
    """
    limit: int | None = getattr(images.window, "max_positions", None)
    longest = max((len(item) for item in encoded if isinstance(item, list)), default=0)
    positions = longest + images.layout.frame - 1  # the last token is not fed
    if limit is not None and positions > limit:
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {positions}, of which "
            f"{longest} are a prompt's; shorten it, or draw smaller images"
        )


def choose_params(recommended: SamplingParams, **given: Any) -> SamplingParams:
    """The filters of a run: what is given, and what is recommended where that is None.

    Args:
        recommended: of the model.
        **given: fields of `SamplingParams`; a top_k of 0 keeps all tokens.

    Raises:
        OptionError: a value outside its domain.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("top_k") == 0 and not isinstance(chosen["top_k"], bool):
        chosen["top_k"] = None
    return replace(recommended, **chosen)


def check_params(params: Any) -> None:
    """Refuse anything but `SamplingParams`.

    Raises:
        OptionError: something else.
    """
    if not isinstance(params, SamplingParams):
        raise OptionError(f"params: expected mmaccel.SamplingParams(...), received {params!r}")


def pick_policy(policy: Any, window: TokenModel | Denoiser) -> Any:
    """A policy of the model's kind: the one that is given, or an exact one.

    Raises:
        OptionError: no policy, or one of another kind.
    """
    kind = kind_of(window)
    if policy is None:
        policy = Jacobi() if kind == "window" else LosslessUnmask(order="halton")
    check_policy(policy, kind)
    return policy
