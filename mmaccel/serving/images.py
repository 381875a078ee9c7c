"""Images: requests to jobs, jobs to images, and images to bytes.

A request is read as the row of a prompt file with the same fields, so that its PNG files are, byte
for byte, those that `mmaccel generate --prompts` writes for this row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.batch.prompts import Item, make_items, make_row, read_size, spell
from mmaccel.batch.worker import Setup, describe, negative_of, settings_of
from mmaccel.outputs.image_files import to_png
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.generator import GenerationSettings, ImageGenerator
from mmaccel.pipelines.text_to_image.model import ImageModel, encode_prompts
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.jobs import Job, Ticket

if TYPE_CHECKING:
    from mmaccel.serving.engine import Run

_QUALITY = 95  # of JPEG and WebP, where the request names none


@dataclass(frozen=True)
class ImageItem:
    """One image that a request asks for.

    Attributes:
        item: as of a prompt file.
        settings: how it is made.
        negative: prompt to guide away from; None is the model's own.
    """

    item: Item
    settings: GenerationSettings
    negative: str | None


class ImageBackend:
    """A text-to-image model behind the engine.

    Args:
        setup: model, policy and sampling parameters, as `mmaccel generate --prompts` has them.
        prefix_tree: keeps prompts for later requests; None: nothing does.

    Attributes:
        prefix_tree: see above.
        pipe: the loaded model, in the size that runs have by default.

    Raises:
        OptionError, UnsupportedModelError: the model cannot be opened.
    """

    def __init__(self, setup: Setup, prefix_tree: PrefixTree | None = None) -> None:
        self.prefix_tree = prefix_tree
        self._setup = setup
        self.pipe = setup.open()
        assert self.pipe.source is not None  # it was opened by name
        self._generator = ImageGenerator(self.pipe)
        self._weights = content_hash(self.pipe.source, setup.decoder)
        self._pipes = {self.pipe.size: self.pipe}

    @property
    def has_partial_images(self) -> bool:
        """Whether unfinished images can be shown: where decoding tokens is one cheap pass."""
        return type(self.pipe.prompted_model).render is ImageModel.render

    def plan(self, fields: Mapping[str, Any]) -> list[ImageItem]:
        """Check a request and plan its images. Called in any thread; nothing is decoded.

        Args:
            fields: of a row of a prompt file, by any of their names. Texts and numbers are within
                their limits, which the request's body has checked.

        Raises:
            OptionError: what this model cannot make.
        """
        values = {spell(name): value for name, value in fields.items()}
        if "size" in values:
            values["size"] = read_size(values["size"])
        row = make_row(**values)
        size = row.size or self.pipe.size
        pipe = self._pipes.get(size)
        if pipe is None:
            pipe = self._pipes[size] = self.pipe.resize(size)
        items = make_items([row], 0)
        settings = settings_of(self._setup, items[0], pipe)
        negative = negative_of(self._setup, items[0])
        return [ImageItem(item, settings, negative) for item in items]

    def jobs(self, items: list[ImageItem], ticket: Ticket, n_partial: int = 0) -> list[Job]:
        """Jobs for planned images.

        Args:
            items: of one request.
            ticket: receives what becomes of them.
            n_partial: unfinished images that are wanted of each.
        """
        first = items[0]
        size = first.item.row.size or self.pipe.size
        pipe = self._pipes[size]
        width = encode_prompts(
            pipe.prompted_model, [first.item.row.prompt], [first.negative], first.settings.params
        ).width
        steps = [pipe.length * (k + 1) // (n_partial + 1) for k in range(n_partial)]
        return [Job(item, size, width, ticket, [*steps]) for item in items]

    def run(self, run: Run, rows: int) -> None:
        pipe = self._generator.resize(run.group)
        settings: GenerationSettings = run.jobs[0].item.settings

        def deliver(made: RequestOutput) -> None:
            run.finish(made.request.tag, made, len(made.tokens), made.passes)

        pipe.serve(
            [_request(job) for job in run.jobs],
            settings.params,
            policy=settings.policy,
            rows=rows,
            deliver=deliver,
            on_step=run.step,
            prompt_width=run.width,
            arrivals=lambda most: [_request(job) for job in run.arrivals(most)],
            prefix_tree=self.prefix_tree,
        )

    def render_partial(self, job: Job, tokens: Tensor, is_known: Tensor) -> RequestOutput:
        """See `Backend.render_partial`. Slots without a token get the last known one, where the
        layout demands none.
        """
        image_model = self._generator.pipe.prompted_model
        last = tokens[is_known][-1:] if bool(is_known.any()) else torch.zeros_like(tokens[:1])
        filled = torch.where(is_known, tokens, last)
        forced = image_model.layout.forced(torch.arange(len(tokens), device=tokens.device)[None])
        if forced is not None:
            forced = forced.expand(1, -1)[0]
            filled = torch.where(forced >= 0, forced, filled)
        request = _request(job)
        image = image_model.render(filled[None], [request.prompt], [request.seed])[0]
        return RequestOutput(request, image, filled.cpu(), 0)

    def warm_up(self) -> None:
        """Run two passes of an example, which also shows whether this model can be served.

        Raises:
            OptionError, UnsupportedModelError: it cannot.
        """
        pipe = self.pipe
        example = pipe.prompted_model.examples[0]
        (item,) = make_items([make_row(prompt=example)], 0)
        settings = settings_of(self._setup, item, pipe)

        def stop(progress: Any) -> Any:
            return torch.zeros_like(progress.lengths) if progress.passes >= 2 else None

        pipe.serve(
            [Request(example, 0)],
            settings.params,
            policy=settings.policy,
            rows=1,
            deliver=lambda made: None,
            on_step=stop,
            arrivals=lambda most: [],
            prefix_tree=self.prefix_tree,
        )

    def to_bytes(self, made: RequestOutput, kind: str = "png", quality: int | None = None) -> bytes:
        """The file of an image. Called in any thread.

        Args:
            made: a finished or unfinished image.
            kind: "png", "jpeg" or "webp"; only PNG says how the image was made.
            quality: of the others.
        """
        if kind == "png":
            planned: ImageItem = made.request.tag.item
            facts = describe(
                self._setup, planned.item, planned.settings, self._weights, self.pipe.model
            )
            return to_png(made.image, {**facts, **made.shape})
        data = BytesIO()
        made.image.save(data, format=kind.upper(), quality=_QUALITY if quality is None else quality)
        return data.getvalue()


def make_setup(name: str, **options: Any) -> Setup:
    """The `Setup` of a server's model, which writes to no folder."""
    return Setup(name, Path(), **options)


def _request(job: Job) -> Request:
    planned: ImageItem = job.item
    return Request(planned.item.row.prompt, planned.item.seed, job, planned.negative)
