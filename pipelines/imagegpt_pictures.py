"""Pictures by ImageGPT checkpoints, as `mmaccel generate` and `TextToImage` make them.

Model: M. Chen et al., "Generative Pretraining from Pixels", ICML 2020. A token is a colour of a
palette, a picture is drawn pixel by pixel, and there are no captions. Top-k 40 is what the model's
documentation uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import Place, check_size, load_model, load_processor
from mmaccel.pipelines.encoded_captions import NoNegatives
from mmaccel.pipelines.imagegpt import ImageGPT
from mmaccel.pipelines.picture_model import stack_rows
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_TABLES = r"\.attn\.(masked_)?bias$"  # causal masks, which older files keep


class ImageGPTPictures(NoNegatives):
    """A `PictureModel` without captions.

    Args:
        model: `ImageGPTForCausalImageModeling`.
        palette: `[V - 1, 3]`, colours in -1..1.
    """

    family, instead = "ImageGPT", "which takes no captions"
    examples: tuple[str, ...] = ("",)

    def __init__(self, model: Any, palette: Tensor) -> None:
        self.window = ImageGPT().wrap(model)
        self._palette = palette.to(self.window.device)
        self._start = model.config.vocab_size - 1
        side = isqrt(model.config.n_positions)
        self.size: tuple[int, int] = (side, side)
        self.layout = Grid(side, side, self.window.vocab_size)
        self.filters = Filters(top_k=40)

    def encode(self, caption: str) -> list[int]:
        """The token that opens every picture.

        Raises:
            OptionError: a caption.
        """
        if not isinstance(caption, str) or caption.strip():
            raise OptionError(
                f"prompt: expected none, as ImageGPT takes no captions, received {caption!r}; "
                "leave it out"
            )
        return [self._start]

    def resize(self, size: tuple[int, int]) -> ImageGPTPictures:
        """See `PictureModel.resize`; there is one size."""
        check_size(Place(size=size), self.size)
        return self

    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`.

        Raises:
            OptionError: guidance, or negative captions.
        """
        self.refuse_negatives(negatives)
        if guided:
            raise OptionError(
                "guidance_scale: expected 1, as ImageGPT takes no captions, received another; "
                "leave it out"
            )
        return stack_rows(encoded, 1, self.layout, self.window.device)

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        side = self.layout.rows
        pixels = self._palette[tokens].view(-1, side, side, 3).permute(0, 3, 1, 2)
        return to_images(pixels / 2 + 0.5)


def load_imagegpt(folder: Path, place: Place) -> ImageGPTPictures:
    """Load a checkpoint such as openai/imagegpt-small.

    Raises:
        OptionError: another size than the model's.
        UnsupportedModelError: files that are missing or do not fit, or a palette of another length.
    """
    from transformers import ImageGPTForCausalImageModeling, ImageGPTImageProcessor

    model = load_model(ImageGPTForCausalImageModeling, folder, place, spare=_TABLES)
    side = isqrt(model.config.n_positions)
    check_size(place, (side, side))
    clusters = load_processor(ImageGPTImageProcessor, folder).clusters
    wanted = (model.config.vocab_size - 1, 3)
    if clusters is None or torch.as_tensor(clusters).shape != wanted:
        received = "none" if clusters is None else list(torch.as_tensor(clusters).shape)
        raise UnsupportedModelError(
            f"model: expected a palette {list(wanted)} in preprocessor_config.json, received "
            f"{received}; copy the folder again"
        )
    ImageGPT().check(model)
    return ImageGPTPictures(model, torch.as_tensor(clusters).float())
