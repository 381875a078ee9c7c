"""One picture that somebody wants, and what is handed out for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.samplers.noise import check_seed

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Request:
    """One picture that somebody wants.

    Args:
        caption: of the picture.
        seed: 64-bit integer.
        tag: whatever helps to tell it from others; nobody looks at it.
        negative: what the picture is guided away from; None or "" is the model's own.
    """

    caption: str
    seed: int
    tag: Any = None
    negative: str | None = None


@dataclass(frozen=True)
class Served:
    """A finished picture.

    Attributes:
        request: whose it is.
        image: PIL picture, RGB.
        tokens: `[N]` int64, on the CPU.
        passes: forward passes it took part in while it was unfinished.
        total_variation, nats: as in `mmaccel.Stats`, of this picture.
    """

    request: Request
    image: Image
    tokens: Tensor
    passes: int
    total_variation: float = 0.0
    nats: float = 0.0


def check_requests(requests: Any) -> list[Request]:
    """Requests as a list of their own.

    Raises:
        OptionError: no list, an empty one, something else in it, or a seed that is none.
    """
    is_list = isinstance(requests, Sequence) and not isinstance(requests, str) and bool(requests)
    if not is_list or not all(isinstance(request, Request) for request in requests):
        raise OptionError(
            f"requests: expected a list of mmaccel.Request(caption, seed), received "
            f"{requests!r:.200}; write one"
        )
    for request in requests:
        if not isinstance(check_seed(request.seed), int):
            raise OptionError(
                f"seed: expected one integer, received {request.seed!r}; a request is one picture"
            )
    return list(requests)
