"""Emu3-Gen: text and image tokens with one head; a row-end token closes each row of an image.

X. Wang et al., "Emu3: Next-Token Prediction is All You Need", 2024 (arXiv 2409.18869): top-k 2048,
guidance 3 against a negative prompt, which a given one replaces.

Departures: the tokens after the last row are known, so they are not generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    count_tokens,
    load_model,
    load_processor,
)
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.text_to_image.model import ImageModel, restore_pixels
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid

_STEP = 8  # pixels a token
_SIDE = 720  # of the authors' images
_SUFFIX = " masterpiece, film grained, best quality."
_NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)
_N_CLOSING = 3  # tokens that `decode_image_tokens` drops at the end


class Emu3Images(ImageModel):
    """Emu3 as an `ImageModel`, in sides that are multiples of 8 pixels."""

    family = "Emu3"
    no_negatives = None
    examples = ("a portrait of a young girl.",)
    params = SamplingParams(guidance_scale=3.0, top_k=2048)
    window: ImageTokenWindow

    def __init__(self, model: Any, processor: Any, size: tuple[int, int]) -> None:
        self.model, self.processor = model, processor
        names = model.model.vocabulary_mapping
        self.window = ImageTokenWindow(model, names.image_tokens, [names.eol_token_id])
        self.set_size(size)

    def set_size(self, size: tuple[int, int]) -> None:
        rows, columns = count_tokens(size, _STEP)
        n_codes = self.window.vocab_size - 1  # the last token ends a row
        self.size = size
        self.layout = Grid(rows, columns, n_codes + 1, tokens=(0, n_codes), row_end=n_codes)
        self._negative = self._encode(_NEGATIVE)

    def encode(self, text: str) -> list[int]:
        """Ids of the prompt with the authors' suffix, of the grid's size and the image's start."""
        return self._encode(check_prompt(text, self.processor.tokenizer) + _SUFFIX)

    def encode_negative(self, text: str) -> list[int]:
        """Ids of a negative prompt, like the authors' own without their suffix."""
        return self._encode(check_prompt(text, self.processor.tokenizer))

    def unconditional(self) -> list[int]:
        """The authors' negative prompt."""
        return self._negative

    def begin(self, prompt: Prompt) -> Prompt:
        return self.window.begin(prompt)

    def decode(self, tokens: Tensor) -> Tensor:
        ready(self.model)
        height, width = self.layout.rows, self.layout.width
        pixels = []
        # one by one: the decoder needs more memory than the transformer
        for ids in F.pad(self.window.ids[tokens], (0, _N_CLOSING)).split(1):
            image = self.model.decode_image_tokens(image_tokens=ids, height=height, width=width)
            pixels.append(image)
        return restore_pixels(torch.cat(pixels), self.processor.image_processor)

    def _encode(self, text: str) -> list[int]:
        width, height = self.size
        encoded = self.processor(
            text=[text],
            return_for_image_generation=True,
            ratio=f"{width}:{height}",
            image_area=width * height,
            return_tensors="pt",
        )
        ids: list[int] = encoded["input_ids"][0].tolist()
        return ids


def load_emu3(folder: Path, load_config: LoadConfig) -> Emu3Images:
    """Load a checkpoint such as BAAI/Emu3-Gen-hf."""
    from transformers import Emu3ForConditionalGeneration, Emu3Processor

    size = load_config.size or (_SIDE, _SIDE)
    count_tokens(size, _STEP)
    processor = load_processor(Emu3Processor, folder, load_config)
    model = load_model(Emu3ForConditionalGeneration, folder, load_config)
    CausalLM().check(model)
    return Emu3Images(model, processor, size)
