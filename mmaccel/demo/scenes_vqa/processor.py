"""Words and processor of `scenes-vqa`, of transformers' own classes; torchvision is not needed.

Words are pieces of a WordPiece vocabulary that has every word of the questions; a number is two
pieces, so that `72` is read digit by digit and written as one word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.demo.scenes.layout import COLOURS, SHAPES, SIZES
from mmaccel.demo.scenes_vqa.layout import CANVAS, TILE
from mmaccel.demo.scenes_vqa.views import MEAN, PATCH, STD

if TYPE_CHECKING:
    from transformers import LlavaNextProcessor

PAD, BOS, EOS, UNKNOWN, IMAGE = range(5)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>")
_DIGITS = "0123456789"
WORDS = (
    *SPECIAL,
    *_DIGITS,
    *(f"##{digit}" for digit in _DIGITS),
    *COLOURS,
    *SHAPES,
    *(f"{shape}s" for shape in SHAPES),
    *SIZES,
    *"a above an are below colour dot how is left many no number object objects of on".split(),
    *"or right shape sign the there what which yes ?".split(),
)
PINPOINTS = [[CANVAS, CANVAS], [TILE, CANVAS], [CANVAS, TILE]]


def make_tokenizer() -> Any:
    """A fast tokenizer: lower case, `<bos>` first, padded on the left."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: k for k, word in enumerate(WORDS)}
    tokenizer: Any = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_processor() -> LlavaNextProcessor:
    """The processor of `scenes-vqa`.

    `processor(images=..., text=..., padding=True, return_tensors="pt")` with one `<image>` in the
    text for each image gives `input_ids` and `attention_mask` [B, T], `pixel_values`
    [N, 5, 3, 40, 40] and `image_sizes` [N, 2] for N images in all. Images are resized to 80x80 (or
    40x80, 80x40 where that fits their shape better); they were 80x80 in training.
    """
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    images = LlavaNextImageProcessorPil(
        image_grid_pinpoints=PINPOINTS,
        size={"shortest_edge": TILE},
        crop_size={"height": TILE, "width": TILE},
        resample=4,  # means of squares of pixels
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
