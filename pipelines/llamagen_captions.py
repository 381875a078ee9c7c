"""Pictures by LlamaGen from captions, which go through flan-t5-xl.

Departures: the authors repair and strip captions with ftfy and BeautifulSoup; here they are put in
lower case. Captions that are too long are refused, not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.checkpoint import (
    Place,
    check_caption,
    count_tokens,
    load_model,
    load_processor,
)
from mmaccel.pipelines.encoded_captions import NoNegatives
from mmaccel.pipelines.llamagen import resize
from mmaccel.pipelines.llamagen_window import LlamaGenWindow
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid
from mmaccel.tokenizers_vq.vqgan import VQGAN

if TYPE_CHECKING:
    from PIL.Image import Image


UNGUIDED = "whose authors guide away from a condition that was learned for none"


class CaptionPictures(NoNegatives):
    """A `PictureModel` whose captions go through T5.

    Args:
        window: of a text-conditional transformer.
        tokenizer: VQ-16.
        words: T5's tokenizer.
        encoder: T5's encoder.
    """

    family, instead = "LlamaGen", UNGUIDED
    examples: tuple[str, ...] = ("a photo of a red fox in the snow",)
    filters = Filters(guidance_scale=7.5, top_k=1000)

    def __init__(self, window: LlamaGenWindow, tokenizer: VQGAN, words: Any, encoder: Any) -> None:
        self.window, self.tokenizer, self.words, self.encoder = window, tokenizer, words, encoder
        self.layout = Grid(*tokenizer.grid, window.vocab_size)

    @property
    def size(self) -> tuple[int, int]:
        """See `PictureModel.size`."""
        rows, columns = self.tokenizer.grid
        return columns * self.tokenizer.step, rows * self.tokenizer.step

    def resize(self, size: tuple[int, int]) -> CaptionPictures:
        """See `PictureModel.resize`: a square whose sides are multiples of 16 pixels."""
        side = count_side(size, self.tokenizer.step)
        model = resize(self.window.model, side**2)
        window = LlamaGenWindow(model, self.window.attention)
        return CaptionPictures(
            window, self.tokenizer.resize((side, side)), self.words, self.encoder
        )

    def encode(self, caption: str) -> list[int]:
        """T5's ids of a caption in lower case.

        Raises:
            OptionError: none, or more than the model has positions for.
        """
        ids: list[int] = self.words(check_caption(caption, self.words).lower())["input_ids"]
        room = self.window.model.config.cls_token_num
        if len(ids) > room:
            raise OptionError(
                f"prompt: expected at most {room} tokens, received {len(ids)}; shorten the caption"
            )
        return ids

    @torch.no_grad()
    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`; features stand on the right, zeros before them."""
        self.refuse_negatives(negatives)
        room, device = self.window.model.config.cls_token_num, self.window.device
        rows = [[*ids, *[self.words.pad_token_id] * (room - len(ids))] for ids in encoded]
        lengths = torch.tensor([len(ids) for ids in encoded], device=device)
        mask = torch.arange(room, device=device) < lengths[:, None]  # [B, T]
        made = self.encoder(
            input_ids=torch.tensor(rows, device=device), attention_mask=mask.long()
        ).last_hidden_state * mask[..., None].to(self.encoder.dtype)
        features = torch.stack([row.roll(room - len(ids), 0) for row, ids in zip(made, encoded)])
        prompt = self.window.condition_on_captions(features, mask.flip(1), guided)
        return replace(prompt, layout=self.layout)

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        return to_images(self.tokenizer.decode(tokens))


def count_side(size: tuple[int, int], step: int) -> int:
    """Tokens a side of a square picture, `step` pixels each.

    Raises:
        OptionError: no square, or sides that are no multiples of `step`.
    """
    rows, columns = count_tokens(size, step)
    if rows != columns:
        raise OptionError(f"size: expected a square, received {size[0]}x{size[1]}; try {min(size)}")
    return rows


def load_t5(folder: Path, place: Place) -> tuple[Any, Any]:
    """Tokenizer and encoder of the T5 that lies in a folder beside the transformer.

    Raises:
        OptionError: there is none.
        UnsupportedModelError: transformers cannot read it.
    """
    from transformers import AutoTokenizer, T5EncoderModel

    places = [
        f for f in sorted(folder.iterdir()) if "t5" in f.name and (f / "config.json").exists()
    ]
    if not places:
        raise OptionError(
            f"model: expected T5 in {folder}, such as flan-t5-xl/config.json, received none; "
            "download google/flan-t5-xl there"
        )
    encoder = load_model(T5EncoderModel, places[0], place)
    return load_processor(AutoTokenizer, places[0]), encoder
