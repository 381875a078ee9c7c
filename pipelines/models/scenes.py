"""The demo models of this package: images from prompts in a closed list of words.

`scenes` is a causal LM; `scenes-masked`, a decoder without a causal mask, fills a canvas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.contracts import Denoiser, TokenModel, VisualTokenizer
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_size, load_model
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.scenes_vocabulary import (
    FILE,
    CaptionWords,
    read_masked,
    tokenizer_folder,
)
from mmaccel.pipelines.text_to_image.model import ImageModel, PromptedModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from mmaccel.tokenizers_vq.grid import Grid


class WordPrompts(PromptedModel):
    """A demo model whose prompts are words of a closed list, and whose frames have one size."""

    no_negatives = None
    params = SamplingParams(guidance_scale=2.0)
    float32_parts = ("tokenizer",)

    def __init__(
        self, window: TokenModel | Denoiser, tokenizer: VisualTokenizer, words: CaptionWords
    ) -> None:
        side: int = tokenizer.size  # type: ignore[attr-defined]
        super().__init__(window, self.make_layout(tokenizer), (side, side))
        self.tokenizer, self.words = tokenizer, words
        self.pad = words.pad
        self.examples = (words.words[0],)

    def make_layout(self, tokenizer: Any) -> Any:
        rows, columns = tokenizer.grid
        return Grid(rows, columns, tokenizer.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self.words.encode(text)

    def encode_negative(self, text: str) -> list[int]:
        return self.encode(text)

    def unconditional(self) -> list[int]:
        """Ids of the empty prompt."""
        return self.words.unconditional()

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens `[B, layout.frame]` to frames `[B, 3, H, W]` in 0..1."""
        return self.tokenizer.decode(tokens.to(ready(self.tokenizer)))


class WordImages(WordPrompts, ImageModel):
    """A demo model as an `ImageModel` of one size."""


def load_words(folder: Path, load_config: LoadConfig) -> WordImages:
    """Load a causal LM that draws scenes, of `config.json`, `model.safetensors`, `words.json`, and
    its image tokenizer in float32, `tokenizer.json` and `tokenizer.safetensors`.
    """
    return WordImages(*load_window(folder, load_config))


def load_window(folder: Path, load_config: LoadConfig) -> tuple[CausalLMWindow, Any, CaptionWords]:
    """The window, the tokenizer and the words of a causal LM in the folder of `load_words`."""
    tokenizer, words = load_vocabulary(folder, folder, load_config)
    model = load_decoder(folder, load_config, words.vocab_size)
    check_windows(model, CausalLMWindow(model))
    window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
    window.codes = tokenizer.codes()
    return window, tokenizer, words


def load_masked_words(folder: Path, load_config: LoadConfig) -> WordImages:
    """Load a masked model that draws scenes; `words.json` may name its image tokenizer's folder."""
    masked = read_masked(folder)
    if masked is None:
        raise OptionError(
            f"model: expected {FILE} with the mask's id in {folder}, received none; "
            "leave the family out"
        )
    tokenizer, words = load_vocabulary(tokenizer_folder(folder), folder, load_config)
    model = load_decoder(folder, load_config, words.vocab_size + 1)
    window = MaskedLM(
        model, masked["mask"], shift=masked["logit_shift"], vocab_size=tokenizer.vocab_size
    )
    return WordImages(window, tokenizer, words)


def load_vocabulary(
    tokenizer_path: Path, folder: Path, load_config: LoadConfig
) -> tuple[Any, CaptionWords]:
    """The image tokenizer of one folder and the word list of another."""
    tokenizer = load_tokenizer(tokenizer_path).to(load_config.device)
    check_size(load_config.size, (tokenizer.size, tokenizer.size))
    return tokenizer, CaptionWords.load(folder, tokenizer.vocab_size)


def load_decoder(folder: Path, load_config: LoadConfig, n_ids: int) -> Any:
    """A decoder with a vocabulary of `n_ids` ids."""
    from transformers import AutoModelForCausalLM

    model = load_model(AutoModelForCausalLM, folder, load_config)
    if model.config.vocab_size != n_ids:
        raise UnsupportedModelError(
            f"model: expected a vocabulary of {n_ids} ids (image tokens, special ids and words), "
            f"received {model.config.vocab_size}; the files do not belong together"
        )
    return model
