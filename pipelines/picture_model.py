"""What `TextToImage` needs of a model that makes pictures; one class for each family has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser, kind_of
from mmaccel.contracts import Layout, Prompt, TokenModel, check_policy
from mmaccel.errors import OptionError
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.jacobi import Jacobi
from mmaccel.samplers.lossless_unmask import LosslessUnmask
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


class PictureModel(Protocol):
    """Captions to prompts, and picture tokens to pictures.

    Attributes:
        window: predicts picture tokens: token after token, or in any order.
        layout: how they lie; `layout.frame` is a picture's number of slots.
        size: width and height of a picture in pixels.
        filters: guidance, temperature and truncation as the model's authors recommend.
        examples: captions for a first look.
    """

    window: TokenModel | Denoiser
    layout: Grid
    filters: Filters
    examples: tuple[str, ...]

    @property
    def size(self) -> tuple[int, int]:
        """See above."""

    def encode(self, caption: str) -> Any:
        """A caption, checked and made ready for `prompt`.

        Raises:
            OptionError: nothing the model can draw.
        """

    def encode_negative(self, caption: str) -> Any:
        """A negative caption, checked and made ready for `prompt`.

        Raises:
            OptionError: nothing the model can draw, or a model whose authors guide without.
        """

    def prompt(
        self,
        encoded: Sequence[Any],
        guided: bool,
        negatives: Sequence[Any | None] | None = None,
    ) -> Prompt:
        """What stands before the pictures of B encoded captions; the next run is theirs.

        Args:
            encoded: what `encode` made.
            guided: whether a branch of B unconditional rows follows.
            negatives: what `encode_negative` made for each of the B unconditional rows; None leaves
                a row, or all of them, the model's own.

        Raises:
            OptionError: guidance, or negative captions, for a model whose authors have none.
        """

    def resize(self, size: tuple[int, int]) -> PictureModel:
        """This model for pictures of another size; weights are shared, nothing is loaded.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size the model does not draw.
        """

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """Tokens `[B, layout.frame]` int64 to B pictures.

        Args:
            tokens: of the pictures, structural ones included.
            captions: theirs.
            seeds: theirs, for models that draw once more between tokens and pixels.
        """


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


def choose_filters(recommended: Filters, **given: Any) -> Filters:
    """The filters of a run: what is given, and what is recommended where that is None.

    Args:
        recommended: of the model.
        **given: fields of `Filters`; a top_k of 0 keeps all tokens.

    Raises:
        OptionError: a value outside its domain.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("top_k") == 0 and not isinstance(chosen["top_k"], bool):
        chosen["top_k"] = None
    return replace(recommended, **chosen)


def check_filters(filters: Any) -> None:
    """Refuse what is no `Filters`.

    Raises:
        OptionError: something else.
    """
    if not isinstance(filters, Filters):
        raise OptionError(f"filters: expected mmaccel.Filters(...), received {filters!r}")


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
