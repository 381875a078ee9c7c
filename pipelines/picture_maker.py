"""A maker: one loaded model that turns requests into pictures and what is known of each.

It writes nothing. `mmaccel generate`, batches, their shards and Ray's actors keep what it makes in
files (for the latter three see `mmaccel.batch.worker`); the nodes of ComfyUI hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmaccel.canvas_contracts import OnCanvasStep
from mmaccel.pipelines.picture_request import Request, Served
from mmaccel.pipelines.pictures import Pictures
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.filters import Filters

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image import TextToImage


@dataclass(frozen=True)
class Recipe:
    """How pictures are made.

    Attributes:
        name: short name of the policy.
        policy: it.
        filters: guidance, temperature and truncation.
    """

    name: str
    policy: Any
    filters: Filters


@dataclass(frozen=True)
class Finished:
    """A picture, and what is known of it.

    Attributes:
        served: whose it is, the picture, and what it cost.
        recipe: how it was made.
    """

    served: Served
    recipe: Recipe

    @property
    def shape(self) -> dict[str, int]:
        """Number of tokens, and width and height in pixels."""
        width, height = self.served.image.size
        return {"tokens": len(self.served.tokens), "width": width, "height": height}

    @property
    def cost(self) -> dict[str, Any]:
        """Forward passes it took part in, and what a relaxed policy spent on it."""
        spent = {"total_variation": self.served.total_variation, "nats": self.served.nats}
        is_relaxed = self.recipe.policy.exactness == "relaxed"
        return {"passes": self.served.passes, **(spent if is_relaxed else {})}


class Maker:
    """A model that is loaded once and draws any of its sizes.

    Args:
        pipe: the model.

    Attributes:
        pipe: it, in the size that was asked for last.
    """

    def __init__(self, pipe: TextToImage) -> None:
        self.pipe, self._usual = pipe, pipe.size

    def resize(self, size: tuple[int, int] | None) -> TextToImage:
        """The model for pictures of a size, with the same weights; None is the size it came in.

        Raises:
            OptionError: a size it does not draw.
        """
        size = size or self._usual
        if size != self.pipe.size:
            self.pipe = self.pipe.resize(size)
        return self.pipe

    def run(self, request: Request, recipe: Recipe) -> Finished:
        """Make one picture."""
        made: list[Finished] = []
        self.run_all([request], recipe, made.append, 1)
        return made[0]

    def draw(
        self,
        requests: Sequence[Request],
        recipe: Recipe,
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        deliver: Callable[[Served], None] | None = None,
    ) -> Pictures:
        """Make pictures and hand them out together, in the order of the requests.

        Args:
            requests: each with its own index as its tag.
            recipe, rows, on_step: as in `run_all`.
            deliver: called with every picture as soon as it is finished.
        """
        made: dict[int, Served] = {}

        def keep(finished: Finished) -> None:
            made[finished.served.request.tag] = finished.served
            if deliver is not None:
                deliver(finished.served)

        stats = self.run_all(requests, recipe, keep, rows, on_step)
        done = [made[k] for k in range(len(requests))]
        tokens = torch.stack([each.tokens for each in done])
        passes = torch.tensor([each.passes for each in done])
        captions = [request.caption for request in requests]
        return Pictures([each.image for each in done], tokens, passes, stats, captions)

    def run_all(
        self,
        requests: Sequence[Request],
        recipe: Recipe,
        deliver: Callable[[Finished], None],
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Stats:
        """Make pictures in the present size; see `TextToImage.serve`, which has the exceptions.

        Args:
            requests: any number, in any order.
            recipe: of all of them.
            deliver: called with every picture as soon as it is finished.
            rows: most pictures in the making; the place of a finished one is taken by the next.
            on_step: called after every pass.
        """
        return self.pipe.serve(
            requests, recipe.filters, policy=recipe.policy, rows=rows, on_step=on_step,
            deliver=lambda served: deliver(Finished(served, recipe)),
        )  # fmt: skip
