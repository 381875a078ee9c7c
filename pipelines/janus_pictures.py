"""Pictures by Janus checkpoints, as `mmaccel generate` and `TextToImage` make them.

Model: X. Chen et al., "Janus-Pro", 2025 (arXiv 2501.17811). Its authors draw at temperature 1 with
guidance 5 and keep all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.checkpoint import (
    Place,
    check_caption,
    check_size,
    load_model,
    load_processor,
)
from mmaccel.pipelines.encoded_captions import NoNegatives
from mmaccel.pipelines.generate_call import align_left
from mmaccel.pipelines.janus import Janus, JanusCodes
from mmaccel.pipelines.janus_call import prepare_picture
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_GUIDANCE = 5.0


class JanusPictures(NoNegatives):
    """A `PictureModel`.

    Args:
        model: `JanusForConditionalGeneration`.
        processor: `JanusProcessor`.
    """

    family = "Janus"
    instead = "whose authors guide away from padding in the place of the words"
    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.window = JanusCodes(model)
        shape = model.model.vision_model.config
        self.size: tuple[int, int] = (shape.image_size, shape.image_size)
        side = isqrt(shape.num_image_tokens)
        self.layout = Grid(side, side, self.window.vocab_size)
        self.filters = Filters(guidance_scale=_GUIDANCE)

    def encode(self, caption: str) -> list[int]:
        """A caption as a user's turn, and the token that opens a picture."""
        said = [{"type": "text", "text": check_caption(caption, self.processor.tokenizer)}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": said}], add_generation_prompt=True
        )
        made = self.processor(text=[text], generation_mode="image", return_tensors="pt")
        ids: list[int] = made["input_ids"][0].tolist()
        return ids

    def resize(self, size: tuple[int, int]) -> JanusPictures:
        """See `PictureModel.resize`; there is one size."""
        check_size(Place(size=size), self.size)
        return self

    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`; the unconditional rows are the library's own."""
        self.refuse_negatives(negatives)
        longest = max(map(len, encoded))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in encoded])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in encoded])
        device = self.window.device
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        options = {**given, "generation_mode": "image", "guidance_scale": _GUIDANCE}
        seen = prepare_picture(self.model, (), options)  # rows do not depend on the scale
        rows = slice(None if guided else len(encoded))
        tokens, mask = seen.tokens[rows], seen.mask[rows]
        branches = 2 if guided else 1
        return self.window.begin(
            Prompt(align_left(tokens, mask), mask.sum(1), branches, layout=self.layout)
        )

    @torch.no_grad()
    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        shown = self.processor.image_processor
        pixels = self.model.decode_image_tokens(tokens).float()  # [B, H, W, 3]
        mean, std = (pixels.new_tensor(v) for v in (shown.image_mean, shown.image_std))
        return to_images((pixels * std + mean).permute(0, 3, 1, 2))


def load_janus(folder: Path, place: Place) -> JanusPictures:
    """Load a checkpoint such as deepseek-community/Janus-Pro-1B.

    Raises:
        OptionError: another size than the model's.
        UnsupportedModelError: files that are missing or do not fit.
    """
    from transformers import JanusForConditionalGeneration, JanusProcessor

    processor = load_processor(JanusProcessor, folder)
    if processor.chat_template is None:
        raise UnsupportedModelError(
            f"model: expected a chat template in {folder}, received none; copy chat_template.jinja "
            "or chat_template.json too"
        )
    model = load_model(JanusForConditionalGeneration, folder, place)
    side = model.model.vision_model.config.image_size
    check_size(place, (side, side))
    if not hasattr(model.generation_config, "generation_kwargs"):  # lost where others fill in
        opening = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
        model.generation_config.generation_kwargs = {"boi_token_id": opening}
    Janus().check(model)
    return JanusPictures(model, processor)
