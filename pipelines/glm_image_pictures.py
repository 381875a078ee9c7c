"""Pictures by GLM-Image, as `mmaccel generate` and `TextToImage` make them.

Model: Z.ai, "GLM-Image", 2026: an autoregressive model draws a small preview and the large grid,
32 pixels a token; diffusers' `GlmImagePipeline` paints the picture over it. The policy decodes the
first part, the second is the pipeline's own. Temperature and top-p are those of the checkpoint's
`generation_config.json`.

Departures: the library's sampling may also draw one of the special ids of the picture head; here
only the codebook's can stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import (
    Place,
    check_caption,
    count_tokens,
    load_model,
    unreadable,
)
from mmaccel.pipelines.encoded_captions import NoNegatives
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.glm_image import GlmImage, GlmImageWindow, make_positions
from mmaccel.pipelines.picture_model import stack_rows
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_STEP = 32  # pixels a token
_SIDE = 1024


class GlmImagePictures(NoNegatives):
    """A `PictureModel`.

    Args:
        pipe: `GlmImagePipeline`.
        size: width and height in pixels.
        painting: further arguments of the pipeline's call, such as num_inference_steps.
    """

    family, instead = "GLM-Image", "whose first part was trained without guidance"
    examples: tuple[str, ...] = ("a red fox in the snow, early morning light",)

    def __init__(self, pipe: Any, size: tuple[int, int], **painting: Any) -> None:
        self.pipe, self.painting = pipe, painting
        self.model = pipe.vision_language_encoder
        n_codes = self.model.config.vq_config.num_embeddings
        self.window = GlmImageWindow(self.model, vocab_size=n_codes)
        self._draw(size)
        given, _ = self.model._prepare_generation_config(None, do_sample=True)  # as the pipeline
        self.filters = Filters(
            temperature=given.temperature, top_k=given.top_k or None, top_p=given.top_p
        )

    def resize(self, size: tuple[int, int]) -> GlmImagePictures:
        """See `PictureModel.resize`: sides are multiples of 32 pixels."""
        count_tokens(size, _STEP)
        made = copy(self)
        made._draw(size)
        return made

    def encode(self, caption: str) -> list[int]:
        """A caption as a user's turn, both grids' sizes, and the token that opens a picture."""
        text = check_caption(caption, self.pipe.processor.tokenizer)
        ids: list[int] = self._prepare(text)["input_ids"][0].tolist()
        return ids

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
                "guidance_scale: expected 1, as GLM-Image's first part was trained without "
                "guidance, received another; leave it out"
            )
        made = stack_rows(encoded, 1, self.layout, self.window.device)
        batch, longest = made.tokens.shape
        ids = torch.stack([row.roll(longest - int(n)) for row, n in zip(made.tokens, made.lengths)])
        index = torch.arange(longest, device=ids.device)
        others = {
            "attention_mask": (index >= longest - made.lengths[:, None]).long(),
            "image_grid_thw": self._grids.to(ids.device).repeat(batch, 1),
            "images_per_sample": torch.full((batch,), len(self._grids), device=ids.device),
        }
        call = GenerateCall(self.model, ids, None, None, None, others=others)
        self.window.begin(make_positions(call))
        return made

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`; the pipeline's noise is that of the seeds."""
        rows, columns = int(self._grids[0, 1]), int(self._grids[0, 2])
        large = tokens[:, -self._n_large :].view(-1, 1, rows, columns)
        fine = F.interpolate(large.float(), scale_factor=2, mode="nearest").long().flatten(1)
        drawn = self.pipe(
            prompt=list(captions),
            width=self.size[0],
            height=self.size[1],
            prior_token_ids=fine,
            generator=[torch.Generator().manual_seed(seed % 2**63) for seed in seeds],
            **self.painting,
        )
        images: list[Image] = drawn.images
        return images

    def _draw(self, size: tuple[int, int]) -> None:
        """From now on pictures have this size."""
        self.size = size
        self._grids = self._prepare("a")["image_grid_thw"]  # the large one, then the preview
        self._n_large = int(self._grids[0].prod())
        self.layout = Grid(1, int(self._grids.prod(1).sum()), self.window.vocab_size)

    def _prepare(self, caption: str) -> Any:
        said = [{"type": "text", "text": caption}]
        processor, (width, height) = self.pipe.processor, self.size
        text = processor.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
        return processor(text=[text], target_h=height, target_w=width, return_tensors="pt")


def load_glm_image(folder: Path, place: Place) -> GlmImagePictures:
    """Load a checkpoint such as zai-org/GLM-Image.

    Raises:
        OptionError: sides that are no multiples of 32 pixels.
        UnsupportedModelError: files that are missing or do not fit.
    """
    from diffusers import AutoencoderKL, GlmImagePipeline
    from diffusers.models.transformers.transformer_glm_image import GlmImageTransformer2DModel
    from transformers import GlmImageForConditionalGeneration, T5EncoderModel

    size = place.size or (_SIDE, _SIDE)
    count_tokens(size, _STEP)
    with warnings.catch_warnings():  # of diffusers, whose older versions know the older name alone
        warnings.simplefilter("ignore", FutureWarning)
        parts = {
            name: load_model(kind, folder / name, place, dtype_name=dtype_name)
            for name, kind, dtype_name in (
                ("vision_language_encoder", GlmImageForConditionalGeneration, "dtype"),
                ("text_encoder", T5EncoderModel, "dtype"),
                ("transformer", GlmImageTransformer2DModel, "torch_dtype"),
                ("vae", AutoencoderKL, "torch_dtype"),
            )
        }
    try:
        pipe = GlmImagePipeline.from_pretrained(folder, local_files_only=True, **parts)
    except unreadable() as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model: expected a GlmImagePipeline in {folder}, received one that diffusers refuses "
            f"({reason}); copy the folder again"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    GlmImage().check(pipe.vision_language_encoder)
    return GlmImagePictures(pipe, size)
