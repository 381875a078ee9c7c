"""Next-scale decoding: a whole scale of tokens a pass.

K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024, arXiv 2404.02905, section 3.2: the
tokens of a scale are independent given the scales before, so that drawing them together is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmaccel.capabilities import Exclusions, Words
from mmaccel.checks import check_fields
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.scale_pass import ScalePass


@dataclass(frozen=True)
class NextScale(RunPolicy):
    """Draws a scale of an image a pass: the loop of VAR, HART and Infinity.

    Any other canvas policy draws the same tokens in more passes.

    Loses: nothing; it is the plain loop of these models.
    """

    block: ClassVar[None] = None  # type: ignore[misc]
    cache: ClassVar[str] = "none"  # type: ignore[misc]
    exactness: ClassVar[Exactness] = "bitwise"

    @property
    def needs(self) -> Words:
        return frozenset({"scales"})

    @property
    def excludes(self) -> Exclusions:
        return {}

    def __post_init__(self) -> None:
        check_fields(self)

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        return super().open(model, prompt, length, pass_type=ScalePass, **options)

    def decode(self, run: CanvasRun) -> Generation:
        with run.interruptible():
            while run.sync():
                predictions = run.forward()
                # tokens of a scale are independent: together they cost no nats
                certain = replace(predictions, entropy=torch.zeros_like(predictions.entropy))
                run.commit(certain, predictions.is_open)
        return run.generation()
