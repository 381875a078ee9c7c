"""Requests to a text-to-image pipeline, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.checks import check_length, show
from mmaccel.errors import OptionError
from mmaccel.results import ShortRepr, Stats, add_stats
from mmaccel.samplers.noise import choose_one_seed
from mmaccel.tokenizers_vq.decoded import limit

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Request:
    """A request for one image.

    Args:
        seed: 64-bit integer.
        tag: any object that identifies the request; the output returns it unchanged.
        negative: prompt to guide away from; None or "" uses the model's own unconditional prompt.
    """

    prompt: str
    seed: int
    tag: Any = None
    negative: str | None = None


@dataclass(frozen=True, repr=False)
class RequestOutput(ShortRepr):
    """A finished image and its cost."""

    request: Request
    image: Image
    tokens: Tensor  # [N] int64, on the CPU
    passes: int  # forward passes it took part in while it was unfinished
    total_variation: float = 0.0  # as in `Stats`, of this image
    nats: float = 0.0


@dataclass(frozen=True, repr=False)
class ImageOutput(ShortRepr):
    """Finished images and their cost.

    Attributes:
        images: B PIL images, RGB, or what `output_type` asked for; commands store the first ones.
        tokens: `[B, h*w]` int64, raster order.
        passes: `[B]` int64, forward passes each image took part in while it was unfinished.
        stats: of the whole batch, or summed over several batches.
        first: index of the first image in the list of the call.
    """

    images: Any
    tokens: Tensor
    passes: Tensor
    stats: Stats
    prompts: list[str]
    first: int = 0


OUTPUT_TYPES = ("pil", "pt", "np", "tokens")


def convert_images(images: list[Image], output_type: str) -> Any:
    """PIL images of one size as diffusers' `output_type` asks for them: "pil", the images; "pt", a
    tensor `[B, 3, H, W]`; "np", an array `[B, H, W, 3]`; both float32 in 0..1 in steps of 1/255.
    """
    if output_type == "pil" or not images:
        return images
    import numpy as np

    array = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    return array if output_type == "np" else torch.from_numpy(array).permute(0, 3, 1, 2)


def to_images(pixels: Tensor) -> list[Image]:
    """Pixels `[B, 3, H, W]` float in 0..1 to B PIL images, 8 bits a channel, rounded."""
    from PIL import Image

    values = limit(pixels).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in values]


def join(parts: Sequence[ImageOutput]) -> ImageOutput:
    return ImageOutput(
        [image for p in parts for image in p.images],
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.passes for p in parts]),
        add_stats([p.stats for p in parts]),
        [prompt for p in parts for prompt in p.prompts],
        parts[0].first,
    )


def check_prompts(prompts: Any) -> list[str]:
    """A copy of a list of prompts; `ImageModel.encode` checks each."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise OptionError(
            f"prompt: expected a prompt or a list of them, received {show(prompts)}; write one"
        )
    check_length("prompt", prompts)
    return list(prompts)


def check_requests(requests: Any) -> list[Request]:
    """A copy of a list of requests, with drawn seeds for -1."""
    is_list = isinstance(requests, Sequence) and not isinstance(requests, str) and bool(requests)
    if is_list:
        check_length("requests", requests)
    if not is_list or not all(isinstance(request, Request) for request in requests):
        raise OptionError(
            f"requests: expected a list of mmaccel.Request(prompt, seed), received "
            f"{show(requests)}; write one"
        )
    return [replace(request, seed=choose_one_seed(request.seed)) for request in requests]
