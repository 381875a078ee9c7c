"""Picture decoding: encoded captions to picture tokens, by a policy and under an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import TokenModel
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.encoded_captions import Encoded
from mmaccel.pipelines.engine import Engine
from mmaccel.pipelines.picture_model import PictureModel
from mmaccel.places import Places
from mmaccel.results import Generation
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


class PictureDecoding:
    """What the ways to ask for pictures have in common; see `TextToImage`."""

    def __init__(
        self, pictures: PictureModel, source: Path | None = None, engine: Engine | None = None
    ) -> None:
        self.pictures, self.source, self.engine = pictures, source, engine or Engine()

    @property
    def model(self) -> TokenModel | Denoiser:
        """What predicts picture tokens."""
        return self.pictures.window

    @property
    def length(self) -> int:
        """Tokens of a picture."""
        return self.pictures.layout.frame

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a picture in pixels."""
        return self.pictures.size

    def resize(self, size: tuple[int, int]) -> Self:
        """This pipeline for pictures of another size: weights are shared, nothing is loaded.

        What is true of one pipeline is true of both together: one run at a time.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size the model does not draw; most models draw one.
        """
        pictures = self.pictures.resize(Place(size=size).size or self.size)
        return type(self)(pictures, self.source, replace(self.engine))

    @torch.no_grad()
    def _decode(
        self, asked: Encoded, policy: Any, filters: Filters, noise: Noise, on_step: Any,
        places: Places | None = None,
    ) -> Generation:  # fmt: skip
        """Encoded captions to tokens `[B, N]`, all of them together or in some places."""
        prompt = asked.prompt(self.pictures, filters.guidance_scale != 1)
        prompt = prompt if places is None else replace(prompt, places=places)
        self.engine.prepare(self.model, prompt, policy, filters)
        options = dict(filters=filters, noise=noise, on_step=on_step)
        made: Generation = policy.sample(self.model, prompt, self.length, **options)
        return made
