"""ImageGPT: palette colours of pixels as tokens, in raster order, without prompts.

M. Chen et al., "Generative Pretraining from Pixels", ICML 2020; top-k 40 as in the model's
documentation. Its attention cuts its causal mask from a table by the cache length, and takes no
other: each pass writes its rows' masks into that table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import show
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_size,
    load_model,
    load_processor,
)
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid

_TABLES = r"\.attn\.(masked_)?bias$"  # causal masks in older files


class ImageGPT(CausalLM):
    """`ImageGPTForCausalImageModeling`."""

    name: ClassVar[str] = "imagegpt"

    def wrap(self, model: Any) -> CausalLMWindow:
        return ImageGPTWindow(model)

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """The model cuts its causal mask by the cache's length, which is fixed in a static one."""
        if type(call.cache).__name__ == "StaticCache":
            yield "a StaticCache, whose size ImageGPT takes for the number of its tokens"


class ImageGPTWindow(CausalLMWindow):
    """A token model that writes each pass's masks into the causal tables."""

    own_vocabulary = True
    reserved = (*CausalLMWindow.reserved, "_table")
    prompt_step = 1  # the table has no room for surplus tokens
    _table: Tensor

    def reserve(self, rows: int, positions: int) -> None:
        """Also allocate one table `[R, 1, S, S]` of booleans, which all layers share."""
        super().reserve(rows, positions)
        shape = (rows, 1, positions + 1, positions + 1)
        self._table = torch.zeros(shape, dtype=torch.bool, device=self.device)

    def keep_rows(self, rows: Tensor) -> None:
        """As in `CausalLMWindow`, with as many tables; a pass writes what it reads of them."""
        super().keep_rows(rows)
        self._table = self._table[rows]

    @property
    def _rows_table(self) -> torch.Tensor:
        """The tables of the pass's rows."""
        return self._table[: self.run_caches().layout.rows]

    def forward(self, entries: Pass) -> Tensor:
        """Logits of slots after the end of the table are zeros."""
        tokens = entries.tokens[:, : self._table.shape[-1]]
        inside = super().forward(replace(entries, tokens=tokens))
        n_outside = entries.tokens.shape[1] - inside.shape[1]
        if self.last_states is not None:
            self.last_states = F.pad(self.last_states, (0, 0, 0, n_outside))
        return F.pad(inside, (0, 0, 0, n_outside))

    def replaced_tensors(self) -> dict[str, Tensor]:
        """Replace every layer's causal table by the pass's table."""
        names = (name for name, _ in self.model.named_buffers() if name.endswith(".attn.bias"))
        return super().replaced_tensors() | dict.fromkeys(names, self._rows_table)

    def compute(self, **inputs: Any) -> Any:
        visible = inputs.pop("attention_mask") == 0  # [R, 1, W, span]
        width, span = visible.shape[2:]
        # the model reads these rows of its table, as if W entries had joined a cache of the others
        self._rows_table[:, :, span - width : span, :span] = visible
        return super().compute(**inputs)


class ImageGPTImages(ImageModel):
    """An `ImageModel` of one size and the empty prompt; its palette is `[V - 1, 3]` in -1..1."""

    family = "ImageGPT"
    no_guidance = "ImageGPT takes no prompts"
    no_negatives = "which takes no prompts"
    examples = ("",)
    params = SamplingParams(top_k=40)

    def __init__(self, model: Any, palette: Tensor) -> None:
        window = ImageGPT().wrap(model)
        side = isqrt(model.config.n_positions)
        super().__init__(window, Grid(side, side, window.vocab_size), (side, side))
        self._palette = palette.to(window.device)
        self._start = model.config.vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """The id of the token before every image."""
        if not isinstance(text, str) or text.strip():
            raise OptionError(
                f"prompt: expected none, as ImageGPT takes no prompts, received {show(text)}; "
                "leave it out"
            )
        return [self._start]

    def decode(self, tokens: Tensor) -> Tensor:
        side = self.layout.rows
        pixels = self._palette.to(tokens.device)[tokens].view(-1, side, side, 3).permute(0, 3, 1, 2)
        return pixels / 2 + 0.5


def load_imagegpt(folder: Path, load_config: LoadConfig) -> ImageGPTImages:
    """Load a checkpoint such as openai/imagegpt-small."""
    from transformers import ImageGPTForCausalImageModeling, ImageGPTImageProcessor

    model = load_model(ImageGPTForCausalImageModeling, folder, load_config, optional=_TABLES)
    side = isqrt(model.config.n_positions)
    check_size(load_config.size, (side, side))
    clusters = load_processor(ImageGPTImageProcessor, folder, load_config).clusters
    ImageGPT().check(model)
    return ImageGPTImages(model, torch.as_tensor(clusters).float())
