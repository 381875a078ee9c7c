"""Pictures by Emu3-Gen checkpoints, as `mmaccel generate` and `TextToImage` make them.

Model: X. Wang et al., "Emu3: Next-Token Prediction is All You Need", 2024 (arXiv 2409.18869). Rows
of the grid end with a token of their own; what follows the last row is known and not generated.
Guidance 3 against a negative prompt and top-k 2048 are the authors'; a negative caption that is
given takes the place of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.pipelines.causal_lm import CausalLM
from mmaccel.pipelines.checkpoint import (
    Place,
    check_caption,
    count_tokens,
    load_model,
    load_processor,
)
from mmaccel.pipelines.encoded_captions import make_rows
from mmaccel.pipelines.image_token_window import ImageTokenWindow
from mmaccel.pipelines.picture_model import stack_rows
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_STEP = 8  # pixels a token
_SIDE = 720  # of the authors' pictures
_PRAISE = " masterpiece, film grained, best quality."
_NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)
_BEHIND = 3  # tokens that `decode_image_tokens` drops at the end


class Emu3Pictures:
    """A `PictureModel`.

    Args:
        model: `Emu3ForConditionalGeneration`.
        processor: `Emu3Processor`.
        size: width and height in pixels.
    """

    examples: tuple[str, ...] = ("a portrait of a young girl.",)

    def __init__(self, model: Any, processor: Any, size: tuple[int, int]) -> None:
        self.model, self.processor = model, processor
        names = model.model.vocabulary_mapping
        self.window = ImageTokenWindow(model, names.image_tokens, [names.eol_token_id])
        self.filters = Filters(guidance_scale=3.0, top_k=2048)
        self._draw(size)

    def resize(self, size: tuple[int, int]) -> Emu3Pictures:
        """See `PictureModel.resize`: sides are multiples of 8 pixels."""
        made = copy(self)
        made._draw(size)
        return made

    def encode(self, caption: str) -> list[int]:
        """A caption with the authors' words behind it, the grid's size, what opens a picture."""
        return self._encode(check_caption(caption, self.processor.tokenizer) + _PRAISE)

    def encode_negative(self, caption: str) -> list[int]:
        """A negative caption as the authors' own is written: without their words of praise."""
        return self._encode(check_caption(caption, self.processor.tokenizer))

    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`; unconditional rows have a negative prompt, by default the
        authors'.
        """
        rows = make_rows(encoded, guided, negatives, self._negative)
        branches = 2 if guided else 1
        return self.window.begin(stack_rows(rows, branches, self.layout, self.window.device))

    @torch.no_grad()
    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        ids = F.pad(self.window.ids[tokens], (0, _BEHIND))
        parts = [  # one by one: the decoder takes more memory than all the rest
            self.model.decode_image_tokens(
                image_tokens=row[None], height=self.layout.rows, width=self.layout.width
            )
            for row in ids
        ]
        pixels = torch.cat(parts).float()  # [B, 3, H, W]
        shown = self.processor.image_processor
        mean, std = (
            pixels.new_tensor(v)[:, None, None] for v in (shown.image_mean, shown.image_std)
        )
        return to_images(pixels * std + mean)

    def _draw(self, size: tuple[int, int]) -> None:
        """From now on pictures have this size."""
        rows, columns = count_tokens(size, _STEP)
        n_codes = self.window.vocab_size - 1  # the last token ends a row
        self.size = size
        self.layout = Grid(rows, columns, n_codes + 1, tokens=(0, n_codes), row_end=n_codes)
        self._negative = self._encode(_NEGATIVE)

    def _encode(self, text: str) -> list[int]:
        width, height = self.size
        made = self.processor(
            text=[text],
            return_for_image_generation=True,
            ratio=f"{width}:{height}",
            image_area=width * height,
            return_tensors="pt",
        )
        ids: list[int] = made["input_ids"][0].tolist()
        return ids


def load_emu3(folder: Path, place: Place) -> Emu3Pictures:
    """Load a checkpoint such as BAAI/Emu3-Gen-hf.

    Raises:
        OptionError: sides that are no multiples of 8 pixels.
        UnsupportedModelError: files that are missing or do not fit.
    """
    from transformers import Emu3ForConditionalGeneration, Emu3Processor

    size = place.size or (_SIDE, _SIDE)
    count_tokens(size, _STEP)
    processor = load_processor(Emu3Processor, folder)
    model = load_model(Emu3ForConditionalGeneration, folder, place)
    CausalLM().check(model)
    return Emu3Pictures(model, processor, size)
