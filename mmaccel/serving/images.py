"""Images: requests to jobs, jobs to images, and images to bytes.

A request is read as the row of a prompt file with the same fields, so that its PNG files are, byte
for byte, those that `mmaccel generate --prompts` writes for this row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from mmaccel.batch.prompts import Item, make_items, make_row, read_size
from mmaccel.batch.worker import Setup, describe, negative_of, settings_of
from mmaccel.outputs.image_files import to_png
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.generator import GenerationSettings, ImageGenerator
from mmaccel.pipelines.text_to_image.model import ImageModel, encode_prompts
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.engine import Backend, Receiver
from mmaccel.serving.jobs import Job

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


class ImageBackend(Backend):
    """A text-to-image model behind the engine; see there."""

    route = "/v1/images/generations"

    def __init__(self, setup: Setup, prefix_tree: PrefixTree | None = None) -> None:
        super().__init__(setup, prefix_tree)
        assert self.pipe.source is not None  # it was opened by name
        self._generator = ImageGenerator(self.pipe)
        self._weights = content_hash(self.pipe.source, setup.decoder)
        self._pipes = {self.pipe.size: self.pipe}

    @property
    def has_partial_images(self) -> bool:
        """Whether unfinished images can be shown: where decoding tokens is one cheap pass."""
        return type(self.pipe.prompted_model).render is ImageModel.render

    @property
    def example(self) -> str:
        example: str = self.pipe.prompted_model.examples[0]
        return example

    def jobs(self, fields: Mapping[str, Any], ticket: Any, partials: int) -> list[Job]:
        sizes = {"size": read_size(fields["size"])} if "size" in fields else {}
        row = make_row(**{**fields, **sizes})
        size = row.size or self.pipe.size
        pipe = self._pipes.get(size)
        if pipe is None:
            pipe = self._pipes[size] = self.pipe.resize(size)
        items = make_items([row], 0)
        settings = settings_of(self.setup, items[0], pipe)
        negative = negative_of(self.setup, items[0])
        width = encode_prompts(pipe.prompted_model, [row.prompt], [negative], settings.params).width
        steps = [pipe.length * (k + 1) // (partials + 1) for k in range(partials)]
        planned = [ImageItem(item, settings, negative) for item in items]
        return [Job(item, size, width, ticket, [*steps]) for item in planned]

    def request(self, job: Job) -> Request:
        planned: ImageItem = job.item
        return Request(planned.item.row.prompt, planned.item.seed, job, planned.negative)

    def call(self, first: Job, finish: Receiver, hand_out: Receiver) -> Callable[..., Any]:
        settings: GenerationSettings = first.item.settings
        size: Any = first.group
        return partial(
            self._generator.resize(size).serve,
            params=settings.params,
            policy=settings.policy,
            deliver=lambda made: finish(made.request.tag, made),
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
        request = self.request(job)
        image = image_model.render(filled[None], [request.prompt], [request.seed])[0]
        return RequestOutput(request, image, filled.cpu(), 0)

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
                self.setup, planned.item, planned.settings, self._weights, self.pipe.model
            )
            return to_png(made.image, {**facts, **made.shape})
        data = BytesIO()
        made.image.save(data, format=kind.upper(), quality=_QUALITY if quality is None else quality)
        return data.getvalue()
