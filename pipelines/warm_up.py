"""A few passes before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mmaccel.canvas_contracts import CanvasPolicy
from mmaccel.contracts import Policy
from mmaccel.pipelines.one_run import alone
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image import TextToImage

_PASSES = 3


def warm_up(
    pipe: TextToImage,
    policy: Policy | CanvasPolicy,
    filters: Filters,
    caption: str,
    rows: int,
    look: Callable[[], None] | None = None,
) -> None:
    """Run a few passes, so that the first measured picture does not pay for allocations.

    Nothing is turned into pixels, which some models take long for.

    Args:
        pipe: the model.
        policy, filters: as they will be measured.
        caption: of the pictures nobody will see.
        rows: pictures made together.
        look: called after every pass; an exception from it ends the warming up.
    """

    def stop(progress: Any) -> Any:
        if look is not None:
            look()
        return torch.zeros_like(progress.lengths) if progress.passes >= _PASSES else None

    window: Any
    encoded, window = pipe.pictures.encode(caption), pipe.pictures.window
    noise = Noise.from_seed(0, rows, window.device)
    with alone(window), torch.no_grad():
        prompt = pipe.pictures.prompt([encoded] * rows, filters.guidance_scale != 1)
        policy.sample(window, prompt, pipe.length, filters=filters, noise=noise, on_step=stop)
