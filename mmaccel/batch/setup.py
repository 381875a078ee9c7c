"""What a worker is made from: plain values, so that it can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.results import EXACT_DTYPE

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage


@dataclass(frozen=True)
class Setup:
    """A model, a policy and a folder.

    Attributes:
        model: name, folder, file or id of the hub.
        out: folder for images.
        policy: short name; None is an exact one for the model.
        options: fields of the policy.
        filters: fields of `SamplingParams` that were given; the others are the model's recommendation.
        device, dtype, decoder, family, cuda_graphs: as `mmaccel generate` has them.
        size: pixels as the command line has them, for rows that say nothing.
        rows: images made together.
        negative: what is guided away from, for rows that say nothing.
    """

    model: str
    out: Path
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = EXACT_DTYPE
    decoder: Path | None = None
    family: str | None = None
    cuda_graphs: str = "auto"
    size: str | None = None
    rows: int = 8
    negative: str | None = None

    def open(self) -> TextToImage:
        """Load the model for images of the command line's size, or of the model's own.

        Raises:
            OptionError, UnsupportedModelError: as `mmaccel generate` does.
        """
        from mmaccel.loading import open_pipeline

        return open_pipeline(
            self.model,
            self.device,
            self.dtype,
            size=self.size,
            decoder=self.decoder,
            family=self.family,
            cuda_graphs=self.cuda_graphs,
        )
