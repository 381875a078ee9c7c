"""Pictures by Chameleon checkpoints (Anole), as `mmaccel generate` and `TextToImage` make them.

Models: Chameleon Team, "Chameleon: Mixed-Modal Early-Fusion Foundation Models", 2024 (arXiv
2405.09818); E. Chern et al., "Anole", 2024 (arXiv 2407.06135). Guidance 3, temperature 0.7 and
top-p 0.9 are Chameleon's own.

transformers' class masks picture tokens in its logits and has no picture decoder. Here the logits
of picture tokens are computed from the body and the head, and pixels come from a VQGAN of our own,
whose weights are in the checkpoint (`model.vqmodel.decoder.*`) or in a file beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt, VisualTokenizer
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm import CausalLM
from mmaccel.pipelines.chameleon_decoder import INSIDE, load_decoder
from mmaccel.pipelines.checkpoint import (
    Place,
    check_caption,
    check_size,
    load_model,
    load_processor,
)
from mmaccel.pipelines.encoded_captions import NoNegatives, make_rows
from mmaccel.pipelines.image_token_window import ImageTokenWindow
from mmaccel.pipelines.picture_model import stack_rows
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_OPEN, _END_OF_TURN = "<racm3:break>", "<reserved08706>"


class ChameleonPictures(NoNegatives):
    """A `PictureModel`.

    Args:
        model: `ChameleonForConditionalGeneration`.
        tokenizer: its text tokenizer.
        decoder: turns codes of the VQGAN into pixels.
        row_end: name of the token that closes a row; None where there is none.
    """

    family = "Chameleon"
    instead = "whose authors guide away from a picture of nothing in particular"
    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)
    recommended = Filters(guidance_scale=3.0, temperature=0.7, top_p=0.9)

    def __init__(
        self, model: Any, tokenizer: Any, decoder: VisualTokenizer, row_end: str | None = None
    ) -> None:
        self.tokenizer, self.decoder, self.filters = tokenizer, decoder, self.recommended
        side = model.config.vq_config.resolution
        self.size: tuple[int, int] = (side, side)
        names = model.model.vocabulary_mapping
        ids = names.image_tokens
        structural = [] if row_end is None else [self.find(row_end)]
        self.window = ImageTokenWindow(model, ids, structural)
        closing = None if row_end is None else len(ids)
        n_tokens = self.window.vocab_size
        self.layout = Grid(*decoder.grid, n_tokens, tokens=(0, len(ids)), row_end=closing)
        self._codes = torch.tensor([names.bpe2img[i] for i in ids], device=self.window.device)

    def encode(self, caption: str) -> list[int]:
        """A caption as a user's turn, and what opens a picture."""
        text = self.say(check_caption(caption, self.tokenizer))
        words = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self.tokenizer.bos_token_id, *words, self.find(_END_OF_TURN), *self.opening()]

    def resize(self, size: tuple[int, int]) -> ChameleonPictures:
        """See `PictureModel.resize`; there is one size."""
        check_size(Place(size=size), self.size)
        return self

    def say(self, caption: str) -> str:
        """A caption as the user's turn has it."""
        return caption

    def opening(self) -> list[int]:
        """Ids that open a picture."""
        return [self.find(_OPEN)]

    def unconditional(self) -> list[int]:
        """Ids before a picture of nothing in particular."""
        return [self.tokenizer.bos_token_id, *self.opening()]

    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`."""
        self.refuse_negatives(negatives)
        rows = make_rows(encoded, guided, None, self.unconditional())
        branches = 2 if guided else 1
        return self.window.begin(stack_rows(rows, branches, self.layout, self.window.device))

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        grid = tokens.view(-1, self.layout.rows, self.layout.columns)[..., : self.layout.width]
        return to_images(self.decoder.decode(self._codes[grid.flatten(1)]))

    def find(self, name: str) -> int:
        """The id of a special token.

        Raises:
            UnsupportedModelError: the tokenizer has none of this name.
        """
        found: int | None = self.tokenizer.convert_tokens_to_ids(name)
        if found is None or found == self.tokenizer.unk_token_id:
            raise UnsupportedModelError(
                f"model: expected a tokenizer with {name}, received one without; "
                "copy Chameleon's tokenizer files, or name another --family"
            )
        return found


def load_chameleon(folder: Path, place: Place) -> ChameleonPictures:
    """Load a checkpoint such as leloy/Anole-7b-v0.1-hf.

    Raises:
        OptionError: another size than the model's, or no picture decoder.
        UnsupportedModelError: files that are missing or do not fit.
    """
    model, tokenizer = load_body(folder, place)
    shape = model.config.vq_config
    check_size(place, (shape.resolution, shape.resolution))
    side = shape.resolution // 2 ** (len(shape.channel_multiplier) - 1)
    return ChameleonPictures(model, tokenizer, load_decoder(folder, place, shape, (side, side)))


def load_body(folder: Path, place: Place) -> tuple[Any, Any]:
    """The transformer, self-checked, and its text tokenizer; the VQGAN may be there or not."""
    from transformers import AutoTokenizer, ChameleonForConditionalGeneration

    tokenizer = load_processor(AutoTokenizer, folder)
    model = load_model(
        ChameleonForConditionalGeneration, folder, place, spare=rf"^{re.escape(INSIDE)}"
    )
    CausalLM().check(model)
    return model, tokenizer
