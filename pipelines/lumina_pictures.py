"""Pictures by Lumina-mGPT checkpoints, as `mmaccel generate` and `TextToImage` make them.

Model: D. Liu et al., "Lumina-mGPT", 2024 (arXiv 2408.02657): Chameleon, trained on to draw in many
sizes. A picture opens with its height and width in steps of 32 pixels, and every row of tokens ends
with a token of its own. Guidance 4, temperature 1 and top-k 2000 are the authors'.

Departures: the authors' code lets the model choose the size it was asked for in words; here the
tokens of the size are put in place.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError
from mmaccel.pipelines.chameleon_pictures import ChameleonPictures, load_body, load_decoder
from mmaccel.pipelines.checkpoint import Place, count_tokens
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.vqgan import VQGAN

_STEP = 32  # pixels of the sizes that have a token
_ROW_END = "<reserved08799>"
_SIZES = 8800  # <reserved08801> is one step, and so on
_SIDE = 768


class LuminaPictures(ChameleonPictures):
    """A `PictureModel`; see `ChameleonPictures`.

    Args:
        model, tokenizer, decoder: as there.
        size: width and height in pixels.
    """

    family = "Lumina-mGPT"
    recommended = Filters(guidance_scale=4.0, top_k=2000)
    decoder: VQGAN

    def __init__(self, model: Any, tokenizer: Any, decoder: VQGAN, size: tuple[int, int]) -> None:
        super().__init__(model, tokenizer, decoder, _ROW_END)
        self.size = size

    def resize(self, size: tuple[int, int]) -> LuminaPictures:
        """See `PictureModel.resize`: sides are multiples of 32 pixels that have a token."""
        rows, columns = count_grid(size, self.tokenizer, self.decoder.step)
        made = copy(self)
        made.size, made.decoder = size, self.decoder.resize((rows, columns))
        made.layout = replace(self.layout, rows=rows, width=columns)
        return made

    def say(self, caption: str) -> str:
        """A caption in the authors' sentence."""
        size = f"{self.size[0]}x{self.size[1]}"
        return f"Generate an image of {size} according to the following prompt:\n{caption}"

    def opening(self) -> list[int]:
        """Ids that open a picture of the size, height first."""
        sides = [self.find(f"<reserved{_SIZES + n // _STEP:05d}>") for n in self.size[::-1]]
        return [*super().opening(), *sides]

    def unconditional(self) -> list[int]:
        """See `ChameleonPictures.unconditional`; the authors put no token before it."""
        return self.opening()


def load_lumina(folder: Path, place: Place) -> LuminaPictures:
    """Load a checkpoint such as Alpha-VLLM/Lumina-mGPT-7B-768.

    Raises:
        OptionError: sides that are no multiples of 32 pixels, or no picture decoder.
        UnsupportedModelError: files that are missing or do not fit.
    """
    names = [part for part in folder.parts if part == folder.name or part.startswith("models--")]
    named = re.findall(r"-(512|768|1024)(?!\d)", " ".join(names))
    side = int(named[-1]) if named else _SIDE
    size = place.size or (side, side)
    count_tokens(size, _STEP)
    model, tokenizer = load_body(folder, place)
    shape = model.config.vq_config
    grid = count_grid(size, tokenizer, 2 ** (len(shape.channel_multiplier) - 1))
    return LuminaPictures(model, tokenizer, load_decoder(folder, place, shape, grid), size)


def count_grid(size: tuple[int, int], tokenizer: Any, step: int) -> tuple[int, int]:
    """Rows and columns of tokens for a size in pixels, `step` of them a token.

    Raises:
        OptionError: sides that are no multiples of 32 pixels, or that have no token.
    """
    count_tokens(size, _STEP)
    known = tokenizer.get_vocab()
    if any(f"<reserved{_SIZES + side // _STEP:05d}>" not in known for side in size):
        raise OptionError(
            f"size: expected sides the model has a token for, received {size[0]}x{size[1]}; "
            "draw smaller pictures"
        )
    return count_tokens(size, step)
