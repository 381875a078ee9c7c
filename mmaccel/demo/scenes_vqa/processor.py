"""The processor of `scenes-vqa`, of transformers' own classes; torchvision is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.scenes_vqa.data import CANVAS, TILE

if TYPE_CHECKING:
    from transformers import LlavaNextProcessor

PAD, BOS, EOS, UNKNOWN, IMAGE = range(5)
N_WORDS = 71
PATCH = 4
PINPOINTS = [[CANVAS, CANVAS], [TILE, CANVAS], [CANVAS, TILE]]
FOLDER = DEMO_WEIGHTS / "scenes-vqa" / "processor"


def make_tokenizer() -> Any:
    """Lower case, `<bos>` first, padded on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


def make_processor() -> LlavaNextProcessor:
    """`processor(images=..., text=..., padding=True, return_tensors="pt")`, with an `<image>` for
    each image: `input_ids`, `attention_mask` [B, T], `pixel_values` [N, 5, 3, 40, 40] and
    `image_sizes` [N, 2] of all N images, resized to 80x80 (as in training), 40x80 or 80x40.
    """
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    return LlavaNextProcessor(
        image_processor=LlavaNextImageProcessorPil.from_pretrained(FOLDER),
        tokenizer=make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
