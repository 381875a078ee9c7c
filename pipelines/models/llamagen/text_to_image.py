"""LlamaGen as image models: one from class labels, one from prompts encoded by flan-t5-xl.

P. Sun et al., 2024 (arXiv 2406.06525), from the published files. The authors use guidance 4 and
top-k 2000 for classes, guidance 7.5 and top-k 1000 for prompts.

Departures: the authors clean prompts with ftfy and BeautifulSoup; here prompts are converted to
lower case only. Prompts that are too long are refused, not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    count_tokens,
    fill,
    read_weights,
    refuse_device_map,
    shape_of,
)
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.models.class_prompts import ClassPrompts
from mmaccel.pipelines.models.llamagen.token_model import (
    LlamaGenTextWindow,
    LlamaGenWindow,
    load_transformer,
)
from mmaccel.pipelines.models.t5 import load_t5, read_ids
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig

_STEP = 16  # pixels a token
_FILES = (".pt", ".pth", ".safetensors")


class LlamaGenImages(ImageModel):
    """Parent class of both kinds of LlamaGen: square images, and the image tokenizer VQ-16."""

    family = "LlamaGen"
    no_negatives = "whose authors use a learned unconditional row"
    window: LlamaGenWindow
    float32_parts = ("tokenizer",)

    def __init__(self, window: LlamaGenWindow, tokenizer: VQGAN) -> None:
        (rows, columns), step = tokenizer.grid, tokenizer.step
        layout = Grid(rows, columns, window.vocab_size)
        super().__init__(window, layout, (columns * step, rows * step))
        self.tokenizer = tokenizer
        window.codes = tokenizer.codes().detach()

    def set_size(self, size: tuple[int, int]) -> None:
        """A square whose sides are multiples of 16 pixels."""
        side = count_side(size, self.tokenizer.step)
        before = self.window
        window = type(before)(before.model, side, before.attention)
        window.coarse = before.coarse
        LlamaGenImages.__init__(self, window, self.tokenizer.resize((side, side)))

    def decode(self, tokens: Tensor) -> Tensor:
        return self.tokenizer.decode(tokens.to(ready(self.tokenizer)))


class ClassImages(ClassPrompts, LlamaGenImages):
    """LlamaGen as an `ImageModel` whose prompts are class labels."""

    params = SamplingParams(guidance_scale=4.0, top_k=2000)

    @property
    def n_classes(self) -> int:
        return self.window.num_classes


class PromptImages(LlamaGenImages):
    """LlamaGen whose prompts are texts, encoded by T5's tokenizer (`words`) and encoder."""

    examples = ("a photo of a red fox in the snow",)
    params = SamplingParams(guidance_scale=7.5, top_k=1000)

    window: LlamaGenTextWindow

    def __init__(
        self, window: LlamaGenTextWindow, tokenizer: VQGAN, words: Any, encoder: Any
    ) -> None:
        super().__init__(window, tokenizer)
        self.words, self.encoder = words, encoder

    @property
    def reader(self) -> Any:
        return self.encoder

    def encode(self, text: str) -> list[int]:
        """T5's ids of a prompt in lower case."""
        return read_ids(self.words, check_prompt(text, self.words).lower(), self.window.n_first)

    @torch.no_grad()
    def make_prompt(self, encoded: Sequence[list[int]], guided: bool, negatives: Any) -> Prompt:
        width = self.window.n_first
        device = self.window.device
        rows = [[*ids, *[self.words.pad_token_id] * (width - len(ids))] for ids in encoded]
        lengths = torch.tensor([len(ids) for ids in encoded], device=device, dtype=torch.int64)
        mask = torch.arange(width, device=device) < lengths[:, None]  # [B, T]
        features = self.encoder(
            input_ids=lengths.new_tensor(rows),
            attention_mask=mask.long(),
        ).last_hidden_state
        ready(self.window.model)
        prompt = self.window.begin(features, lengths, guided)
        return replace(prompt, layout=self.layout)


def load_llamagen(source: Path, load_config: LoadConfig) -> LlamaGenImages:
    """Load a published transformer, a file such as `c2i_L_256.pt` or a folder with one, and the
    tokenizer (and T5) next to it; `decoder` is the tokenizer's file, such as `vq_ds16_c2i.pt`.
    """
    refuse_device_map(load_config, "LlamaGen")
    folder = source if source.is_dir() else source.parent
    file = source
    if source.is_dir():  # a tokenizer's name may have c2i in it, too
        file = find_file(folder, r"^(?!vq).*[ct]2i", "LlamaGen's transformer", "c2i_L_256.pt")
    decoder = load_config.decoder or find_file(
        folder, "^vq", "LlamaGen's tokenizer (--decoder)", "vq_ds16_c2i.pt"
    )
    named = re.search(r"_(256|384|512)\b", file.stem)
    side = int(named[1]) if named else 256
    rows = count_side(load_config.size or (side, side), _STEP)
    model = load_transformer(read_weights(file), dtype=load_config.dtype, device=load_config.device)
    tokenizer = load_tokenizer(read_weights(decoder), (rows, rows)).to(load_config.device)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of {model.config.vocab_size} codes, received "
            f"{tokenizer.vocab_size} in {decoder}; give the one of the same size"
        )
    if not hasattr(model, "condition"):
        window = LlamaGenWindow(model, rows)
        check_windows(model, window)
        return ClassImages(window, tokenizer)
    reader = LlamaGenTextWindow(model, rows)
    check_windows(model, reader)
    return PromptImages(reader, tokenizer, *find_t5(folder, load_config))


def find_file(folder: Path, pattern: str, what: str, example: str) -> Path:
    """The only file of a folder whose name matches a pattern."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in _FILES and re.search(pattern, file.stem)
    ]
    if len(files) != 1:
        raise OptionError(
            f"model: expected one file with {what} in {folder}, such as {example}, "
            f"received {[file.name for file in files] or 'none'}; name the file itself"
        )
    return files[0]


def count_side(size: tuple[int, int], step: int) -> int:
    """Number of tokens per side of a square image, with `step` pixels per token."""
    rows, columns = count_tokens(size, step)
    if rows != columns:
        raise OptionError(f"size: expected a square, received {size[0]}x{size[1]}; try {min(size)}")
    return rows


def find_t5(folder: Path, load_config: LoadConfig) -> tuple[Any, Any]:
    """Load the tokenizer and the encoder of the T5 in a folder next to the transformer."""
    folders = [
        f for f in sorted(folder.iterdir()) if "t5" in f.name and (f / "config.json").exists()
    ]
    if not folders:
        raise OptionError(
            f"model: expected T5 in {folder}, such as flan-t5-xl/config.json, received none; "
            "download google/flan-t5-xl there"
        )
    return load_t5(folders[0], load_config)


def load_tokenizer(
    weights: Mapping[str, Tensor], grid: tuple[int, int], config: VQGANConfig | None = None
) -> VQGAN:
    """The image tokenizer, by default `vq_ds16` (16 pixels a token), sized by its weights."""
    if config is None:
        config = VQGANConfig()
        if "quantize.embedding.weight" in weights:
            n_codes, _ = shape_of(weights, "quantize.embedding.weight", 2)
            config = replace(config, n_codes=n_codes)
        if "encoder.conv_in.weight" in weights:
            channels, *_ = shape_of(weights, "encoder.conv_in.weight", 4)
            config = replace(config, channels=channels)
    with (
        refusing("sizes of a VQGAN", f"{config}", "give the published file", option="weights"),
        torch.device("meta"),
    ):
        tokenizer = VQGAN(config, grid)
    fill(tokenizer, weights)
    return tokenizer.float().eval().requires_grad_(False)
