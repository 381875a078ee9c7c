"""Encoded captions: what is asked for, checked, and as a model's prompt takes it.

A negative caption is one to be guided away from: with classifier-free guidance (J. Ho and T.
Salimans, 2022, arXiv 2207.12598) the logits are u + s (c - u), and the row that gives u is
conditioned on it where it otherwise has a model's own unconditional prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.picture_model import PictureModel
from mmaccel.samplers.filters import Filters


@dataclass(frozen=True)
class Encoded:
    """Captions of B pictures.

    Attributes:
        captions: B of `PictureModel.encode`.
        negatives: B of `PictureModel.encode_negative`, None where a row has none; None where no row
            has one.
    """

    captions: list[Any]
    negatives: list[Any] | None = None

    def __len__(self) -> int:
        """B."""
        return len(self.captions)

    def __getitem__(self, part: slice) -> Encoded:
        """Some of them."""
        negatives = None if self.negatives is None else self.negatives[part]
        return Encoded(self.captions[part], negatives)

    def prompt(self, pictures: PictureModel, guided: bool) -> Prompt:
        """See `PictureModel.prompt`; a model that knows of no negative captions is given none."""
        if self.negatives is None:
            return pictures.prompt(self.captions, guided)
        return pictures.prompt(self.captions, guided, self.negatives)


def encode_captions(
    pictures: PictureModel,
    captions: Sequence[str],
    negatives: Sequence[str | None] | None,
    filters: Filters,
) -> Encoded:
    """Check captions and make them ready.

    Args:
        pictures: the model.
        captions: B of them.
        negatives: B negative captions, None or empty where a picture has none; None for all.
        filters: of the run.

    Raises:
        OptionError: a caption the model does not take or has no room for; a negative caption
            without guidance, or for a model whose authors have none.
    """
    encoded = [pictures.encode(caption) for caption in captions]
    texts = spread_negatives(negatives, len(encoded))
    own = [None if text is None else _encode_negative(pictures, text) for text in texts]
    known = [each for each in own if each is not None]
    if known and filters.guidance_scale == 1:
        raise OptionError(
            "negative prompt: expected a guidance_scale other than 1 beside it, received 1, with "
            "which there is no row it could stand in; set guidance_scale, or leave it out"
        )
    check_room(pictures, [*encoded, *known])
    return Encoded(encoded, own if known else None)


def spread_negatives(given: Any, count: int) -> list[str | None]:
    """Negative captions of `count` pictures, one each; None where there is nothing to be said.

    Args:
        given: a text for all, a list of texts and None, or None.
        count: of pictures.

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


def _encode_negative(pictures: PictureModel, text: str) -> Any:
    if not hasattr(pictures, "encode_negative"):
        raise OptionError(
            f"negative prompt: expected a model with encode_negative, received a "
            f"{type(pictures).__name__}; leave it out"
        )
    try:
        return pictures.encode_negative(text)
    except OptionError as error:
        said = str(error)
        raise OptionError(said if said.startswith("negative") else f"negative {said}") from error


def check_room(pictures: PictureModel, encoded: Sequence[Any]) -> None:
    """Refuse captions with which a picture has more positions than the model.

    Args:
        pictures: the model.
        encoded: what its `encode` made; what has no length takes what the model keeps for it.

    Raises:
        OptionError: with the number there may be.
    """
    limit: int | None = getattr(pictures.window, "max_positions", None)
    longest = max((len(item) for item in encoded if isinstance(item, list)), default=0)
    positions = longest + pictures.layout.frame - 1  # the last token is not fed
    if limit is not None and positions > limit:
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {positions}, of which "
            f"{longest} are a prompt's; shorten it, or draw smaller pictures"
        )


def make_rows(
    encoded: Sequence[list[int]],
    guided: bool,
    negatives: Sequence[list[int] | None] | None,
    unconditional: list[int],
) -> list[list[int]]:
    """The rows of a prompt: B captions, then, with guidance, B rows that are guided away from.

    Args:
        encoded, guided, negatives: as in `PictureModel.prompt`.
        unconditional: ids of a row without a negative caption.
    """
    if not guided:
        return list(encoded)
    own = [None] * len(encoded) if negatives is None else negatives
    return [*encoded, *[unconditional if ids is None else ids for ids in own]]


class NoNegatives:
    """A part of a `PictureModel` whose authors draw without negative captions.

    Attributes:
        family: its name, for people.
        instead: what its authors do, in words.
    """

    family: ClassVar[str]
    instead: ClassVar[str]

    def encode_negative(self, caption: str) -> Any:
        """See `PictureModel.encode_negative`: there are none."""
        self.refuse_negatives([caption])

    def refuse_negatives(self, negatives: Sequence[Any | None] | None) -> None:
        """Refuse what `PictureModel.prompt` is given as `negatives`.

        Raises:
            OptionError: there is one.
        """
        found = [each for each in negatives or () if each is not None]
        if found:
            raise OptionError(
                f"negative prompt: expected none for {self.family}, {self.instead}, received "
                f"{found[0]!r:.80}; leave it out"
            )
