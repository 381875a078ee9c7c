"""What a text-to-image pipeline is asked for, and what it hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Stats
from mmaccel.samplers.noise import check_seed

if TYPE_CHECKING:
    from PIL.Image import Image

_WEAKER: tuple[Exactness, ...] = ("bitwise", "distribution", "relaxed")


@dataclass(frozen=True)
class Request:
    """One image to make.

    Args:
        caption: the prompt.
        seed: 64-bit integer.
        tag: whatever tells it from others; it is handed back as it is.
        negative: prompt to be guided away from; None or "" is the model's own.
    """

    caption: str
    seed: int
    tag: Any = None
    negative: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished image, and what it cost.

    Attributes:
        request: what was asked for.
        image: PIL image, RGB.
        tokens: `[N]` int64, on the CPU.
        passes: forward passes it took part in while it was unfinished.
        total_variation, nats: as in `mmaccel.Stats`, of this image.
    """

    request: Request
    image: Image
    tokens: Tensor
    passes: int
    total_variation: float = 0.0
    nats: float = 0.0


@dataclass(frozen=True)
class ImageOutput:
    """Finished images and what they cost.

    Attributes:
        images: B PIL images, RGB; a command that shows fewer keeps the first ones only.
        tokens: `[B, h*w]` int64, raster order.
        passes: `[B]` int64, forward passes each image took part in while it was unfinished.
        stats: of the whole batch, or summed over the batches a long list was made in.
        prompts: B of them.
        first: index of the first of them in the list asked for.
    """

    images: list[Image]
    tokens: Tensor
    passes: Tensor
    stats: Stats
    prompts: list[str]
    first: int = 0


def to_images(pixels: Tensor) -> list[Image]:
    """Pixels `[B, 3, H, W]` float in 0..1 to B PIL images, 8 bits a channel, rounded."""
    from PIL import Image

    values = pixels.mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in values]


def add_stats(parts: Sequence[Stats]) -> Stats:
    """Sum the stats of runs made one after another; the promise is the weakest of theirs.

    Args:
        parts: at least one, all of the same policy.
    """
    total: dict[str, Any] = {"policy": parts[0].policy, "branches": parts[0].branches}
    total["exactness"] = max((p.exactness for p in parts), key=_WEAKER.index)
    runners = {p.runner for p in parts}
    total["runner"] = runners.pop() if len(runners) == 1 else "eager"
    total["runner_reason"] = "; ".join({p.runner_reason: None for p in parts if p.runner_reason})
    total["attention"], total["reference"] = parts[-1].attention, parts[-1].reference
    total["fallbacks"] = list(dict.fromkeys(text for p in parts for text in p.fallbacks))
    notes = Counter(text for p in parts for text in p.notes)
    total["notes"] = [
        text if n == len(parts) else f"{text} (in {n} of {len(parts)} batches)"
        for text, n in notes.items()
    ]
    widest = max(len(p.accepted) for p in parts)
    total["accepted"] = [
        sum(p.accepted[k] for p in parts if k < len(p.accepted)) for k in range(widest)
    ]
    for f in fields(Stats):
        if f.name not in total:
            total[f.name] = sum(getattr(p, f.name) for p in parts)
    return Stats(**total)


def join(parts: Sequence[ImageOutput]) -> ImageOutput:
    """Put batches made one after another together, in their order; at least one."""
    return ImageOutput(
        [image for p in parts for image in p.images],
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.passes for p in parts]),
        add_stats([p.stats for p in parts]),
        [prompt for p in parts for prompt in p.prompts],
        parts[0].first,
    )


def check_at_least_one(name: str, value: int) -> None:
    """Refuse a count below 1.

    Raises:
        OptionError: with its name.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"{name}: expected an integer of at least 1, received {value!r}; ask for 1 or more"
        )


def check_captions(captions: Any) -> list[str]:
    """Prompts as a list of their own; `ImageModel.encode` checks each.

    Raises:
        OptionError: no list, or an empty one.
    """
    if isinstance(captions, str) or not isinstance(captions, Sequence) or not captions:
        raise OptionError(
            f"prompt: expected a caption or a list of them, received {captions!r}; write one"
        )
    return list(captions)


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
                f"seed: expected one integer, received {request.seed!r}; a request is one image"
            )
    return list(requests)
