"""One loaded model that turns requests into images and what is known of each.

It writes nothing. `mmaccel generate`, batches, their shards and Ray's actors keep what it makes in
files (for the latter three see `mmaccel.batch.worker`); the nodes of ComfyUI hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmaccel.canvas_contracts import CanvasPolicy, OnCanvasStep
from mmaccel.contracts import Policy
from mmaccel.pipelines.runner.run_lock import alone
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, Request, RequestOutput
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

_WARM_UP_PASSES = 3


@dataclass(frozen=True)
class GenerationSettings:
    """How images are made.

    Attributes:
        name: short name of the policy.
        policy: it.
        filters: guidance, temperature and truncation.
    """

    name: str
    policy: Any
    params: SamplingParams


@dataclass(frozen=True)
class Finished:
    """An image, and what is known of it.

    Attributes:
        output: what was asked for, the image, and what it cost.
        settings: how it was made.
    """

    output: RequestOutput
    settings: GenerationSettings

    @property
    def shape(self) -> dict[str, int]:
        """Number of tokens, and width and height in pixels."""
        width, height = self.output.image.size
        return {"tokens": len(self.output.tokens), "width": width, "height": height}

    @property
    def cost(self) -> dict[str, Any]:
        """Forward passes it took part in, and what a relaxed policy spent on it."""
        spent = {"total_variation": self.output.total_variation, "nats": self.output.nats}
        is_relaxed = self.settings.policy.exactness == "relaxed"
        return {"passes": self.output.passes, **(spent if is_relaxed else {})}


class ImageGenerator:
    """A model that is loaded once and draws any of its sizes.

    Args:
        pipe: the model.

    Attributes:
        pipe: it, in the size that was asked for last.
    """

    def __init__(self, pipe: TextToImage) -> None:
        self.pipe, self._usual = pipe, pipe.size

    def resize(self, size: tuple[int, int] | None) -> TextToImage:
        """The model for images of a size, with the same weights; None is the size it came in.

        Raises:
            OptionError: a size it does not draw.
        """
        size = size or self._usual
        if size != self.pipe.size:
            self.pipe = self.pipe.resize(size)
        return self.pipe

    def run(self, request: Request, settings: GenerationSettings) -> Finished:
        """Make one image."""
        made: list[Finished] = []
        self.run_all([request], settings, made.append, 1)
        return made[0]

    def draw(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        deliver: Callable[[RequestOutput], None] | None = None,
    ) -> ImageOutput:
        """Make images and hand them out together, in the order of the requests.

        Args:
            requests: each with its own index as its tag.
            settings, rows, on_step: as in `run_all`.
            deliver: called with every image as soon as it is finished.
        """
        made: dict[int, RequestOutput] = {}

        def keep(finished: Finished) -> None:
            made[finished.output.request.tag] = finished.output
            if deliver is not None:
                deliver(finished.output)

        stats = self.run_all(requests, settings, keep, rows, on_step)
        done = [made[k] for k in range(len(requests))]
        tokens = torch.stack([each.tokens for each in done])
        passes = torch.tensor([each.passes for each in done])
        captions = [request.caption for request in requests]
        return ImageOutput([each.image for each in done], tokens, passes, stats, captions)

    def run_all(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        deliver: Callable[[Finished], None],
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Stats:
        """Make images in the present size; see `TextToImage.serve`, which has the exceptions.

        Args:
            requests: any number, in any order.
            settings: of all of them.
            deliver: called with every image as soon as it is finished.
            rows: most images in the making; the place of a finished one is taken by the next.
            on_step: called after every pass.
        """
        return self.pipe.serve(
            requests, settings.params, policy=settings.policy, rows=rows, on_step=on_step,
            deliver=lambda output: deliver(Finished(output, settings)),
        )  # fmt: skip


def warm_up(
    pipe: TextToImage,
    policy: Policy | CanvasPolicy,
    params: SamplingParams,
    caption: str,
    rows: int,
    look: Callable[[], None] | None = None,
) -> None:
    """Run a few passes, so that the first measured image does not pay for allocations.

    Nothing is turned into pixels, which some models take long for.

    Args:
        pipe: the model.
        policy, filters: as they will be measured.
        caption: prompt of the images nobody will see.
        rows: images made together.
        look: called after every pass; an exception from it ends the warming up.
    """

    def stop(progress: Any) -> Any:
        if look is not None:
            look()
        return torch.zeros_like(progress.lengths) if progress.passes >= _WARM_UP_PASSES else None

    window: Any
    encoded, window = pipe.image_model.encode(caption), pipe.image_model.window
    noise = Noise.from_seed(0, rows, window.device)
    with alone(window), torch.no_grad():
        prompt = pipe.image_model.prompt([encoded] * rows, params.guidance_scale != 1)
        policy.sample(window, prompt, pipe.length, params=params, noise=noise, on_step=stop)
