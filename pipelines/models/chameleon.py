"""Chameleon models that generate images: Anole with one size, Lumina-mGPT with many.

Chameleon Team, "Chameleon: Mixed-Modal Early-Fusion Foundation Models", 2024 (arXiv 2405.09818);
E. Chern et al., "Anole", 2024 (arXiv 2407.06135), with Chameleon's guidance 3, temperature 0.7 and
top-p 0.9; D. Liu et al., "Lumina-mGPT", 2024 (arXiv 2408.02657), with its authors' guidance 4,
temperature 1 and top-k 2000. Size tokens (height and width in steps of 32 pixels) begin an image of
Lumina-mGPT, and a row-end token closes each row.

transformers' class masks image tokens in its logits and has no image decoder: logits are computed
from body and head, pixels by `VQGAN` (`model.vqmodel.decoder.*`, or a file next to it).

Departures: Lumina-mGPT's authors let the model generate the size tokens; here they are part of the
prompt.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    check_size,
    count_tokens,
    load_model,
    load_processor,
    read_weights,
)
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.llamagen.text_to_image import load_tokenizer
from mmaccel.pipelines.models.token_names import find_ids
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig, rename_taming
from mmaccel.weight_folders import open_weights

_OPEN = "<racm3:break>"
_END_OF_TURN = "<reserved08706>"
_DECODER = "model.vqmodel."  # names of its tensors in a checkpoint begin so
_DECODER_FILES = ("vqgan.ckpt", "vqgan.safetensors", "tokenizer/vqgan.ckpt")

_STEP = 32  # pixels of the sizes Lumina-mGPT has a token for
_ROW_END = "<reserved08799>"
_SIZES = 8800  # <reserved08801> is one step, and so on
_SIDE = 768


class ChameleonImages(ImageModel):
    """`ChameleonForConditionalGeneration` with its text tokenizer and the decoder of its codes;
    `row_end` is the name of the token that closes a row, or None.
    """

    family = "Chameleon"
    no_negatives = "whose authors use an unconditional row without a text"
    params = SamplingParams(guidance_scale=3.0, temperature=0.7, top_p=0.9)
    window: ImageTokenWindow
    float32_parts = ("decoder",)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        decoder: VQGAN,
        size: tuple[int, int],
        row_end: str | None = None,
    ) -> None:
        self.tokenizer, self.decoder = tokenizer, decoder
        mapping = model.model.vocabulary_mapping
        ids = mapping.image_tokens
        structural = [] if row_end is None else find_ids(tokenizer, row_end)
        window = ImageTokenWindow(model, ids, structural)
        closing = None if row_end is None else len(ids)
        n_tokens = window.vocab_size
        layout = Grid(*decoder.grid, n_tokens, tokens=(0, len(ids)), row_end=closing)
        super().__init__(window, layout, size)
        codes = [mapping.bpe2img[i] for i in ids]  # of the window's tokens
        self._codes = torch.tensor(codes, device=window.device, dtype=torch.int64)

    def encode(self, text: str) -> list[int]:
        """Ids of the prompt as a user message, and of the tokens before an image."""
        message = self.message(check_prompt(text, self.tokenizer))
        words = self.tokenizer(message, add_special_tokens=False)["input_ids"]
        end = find_ids(self.tokenizer, _END_OF_TURN)
        return [self.tokenizer.bos_token_id, *words, *end, *self.opening()]

    def message(self, text: str) -> str:
        """The user message that asks for a prompt."""
        return text

    def opening(self) -> list[int]:
        """Ids of the tokens before an image."""
        return find_ids(self.tokenizer, _OPEN)

    def unconditional(self) -> list[int]:
        """Ids of a prompt without text."""
        return [self.tokenizer.bos_token_id, *self.opening()]

    def begin(self, prompt: Prompt) -> Prompt:
        return self.window.begin(prompt)

    def decode(self, tokens: Tensor) -> Tensor:
        grid = tokens.view(-1, self.layout.rows, self.layout.columns)[..., : self.layout.width]
        codes = self._codes.to(tokens.device)[grid.flatten(1)]
        return self.decoder.decode(codes.to(ready(self.decoder)))


class LuminaImages(ChameleonImages):
    """Lumina-mGPT as an `ImageModel`, in sides that are multiples of 32 pixels."""

    family = "Lumina-mGPT"
    params = SamplingParams(guidance_scale=4.0, top_k=2000)

    def __init__(self, model: Any, tokenizer: Any, decoder: VQGAN, size: tuple[int, int]) -> None:
        super().__init__(model, tokenizer, decoder, size, _ROW_END)

    def set_size(self, size: tuple[int, int]) -> None:
        """The model must have tokens for both sides."""
        rows, columns = count_grid(size, self.tokenizer, self.decoder.step)
        self.size, self.decoder = size, self.decoder.resize((rows, columns))
        self.layout = replace(self.layout, rows=rows, width=columns)

    def message(self, text: str) -> str:
        """The prompt in the authors' sentence."""
        size = f"{self.size[0]}x{self.size[1]}"
        return f"Generate an image of {size} according to the following prompt:\n{text}"

    def opening(self) -> list[int]:
        """Ids of the tokens before an image of this size, height first."""
        sides = [f"<reserved{_SIZES + n // _STEP:05d}>" for n in self.size[::-1]]
        return find_ids(self.tokenizer, _OPEN, *sides)

    def unconditional(self) -> list[int]:
        """Ids of a prompt without text, without a first token as the authors have it."""
        return self.opening()


def load_chameleon(folder: Path, load_config: LoadConfig) -> ChameleonImages:
    """Load a checkpoint such as leloy/Anole-7b-v0.1-hf."""
    model, tokenizer = load_body(folder, load_config)
    shape = model.config.vq_config
    size = (shape.resolution, shape.resolution)
    check_size(load_config.size, size)
    side = shape.resolution // 2 ** (len(shape.channel_multiplier) - 1)
    decoder = load_decoder(folder, load_config, shape, (side, side))
    return ChameleonImages(model, tokenizer, decoder, size)


def load_lumina(folder: Path, load_config: LoadConfig) -> LuminaImages:
    """Load a checkpoint such as Alpha-VLLM/Lumina-mGPT-7B-768."""
    names = [part for part in folder.parts if part == folder.name or part.startswith("models--")]
    named = re.findall(r"-(512|768|1024)(?!\d)", " ".join(names))
    side = int(named[-1]) if named else _SIDE
    size = load_config.size or (side, side)
    count_tokens(size, _STEP)
    model, tokenizer = load_body(folder, load_config)
    shape = model.config.vq_config
    grid = count_grid(size, tokenizer, 2 ** (len(shape.channel_multiplier) - 1))
    return LuminaImages(model, tokenizer, load_decoder(folder, load_config, shape, grid), size)


def count_grid(size: tuple[int, int], tokenizer: Any, step: int) -> tuple[int, int]:
    """Rows and columns of tokens for a size in pixels, with `step` pixels per token."""
    count_tokens(size, _STEP)
    known = tokenizer.get_vocab()
    if any(f"<reserved{_SIZES + side // _STEP:05d}>" not in known for side in size):
        raise OptionError(
            f"size: expected sides the model has a token for, received {size[0]}x{size[1]}; "
            "draw smaller images"
        )
    return count_tokens(size, step)


def load_body(folder: Path, load_config: LoadConfig) -> tuple[Any, Any]:
    """Load and self-check the transformer, and load its text tokenizer; the VQGAN is optional."""
    from transformers import AutoTokenizer, ChameleonForConditionalGeneration

    tokenizer = load_processor(AutoTokenizer, folder, load_config)
    model = load_model(
        ChameleonForConditionalGeneration, folder, load_config, optional=rf"^{re.escape(_DECODER)}"
    )
    CausalLM().check(model)
    return model, tokenizer


def load_decoder(folder: Path, load_config: LoadConfig, shape: Any, grid: tuple[int, int]) -> VQGAN:
    """The VQGAN of a `ChameleonVQVAEConfig` and a grid; option `decoder` names another file."""
    files = [folder / name for name in _DECODER_FILES if (folder / name).is_file()]
    if load_config.decoder is not None:
        weights = read_weights(load_config.decoder)
    elif files:
        weights = read_weights(files[0])
    else:
        weights = _read_inside(folder)
    if not any(name.startswith("decoder.") for name in weights):
        where = folder if load_config.decoder is None else load_config.decoder
        raise OptionError(
            f"decoder: expected weights of VQGAN's decoder, received none in {where}; "
            "name Chameleon's vqgan.ckpt with --decoder, or put it into the folder"
        )
    config = VQGANConfig(
        multipliers=tuple(shape.channel_multiplier),
        channels=shape.base_channels,
        z_channels=shape.latent_channels,
        n_codes=shape.num_embeddings,
        code_width=shape.embed_dim,
        is_normalised=False,
        attends=bool(shape.attn_resolutions),
        n_blocks=shape.num_res_blocks,
    )
    named = rename_taming(weights, len(config.multipliers))
    return load_tokenizer(named, grid, config).to(load_config.device)


def _read_inside(folder: Path) -> dict[str, Tensor]:
    """The `vqmodel` tensors of a checkpoint; empty if it has none."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights = open_weights(file, "model", _name_inside)
        tensors |= weights.read(weights.shapes)
    if not tensors:
        for file in sorted(folder.glob("*.bin")):
            tensors |= {_name_inside(name): tensor for name, tensor in read_weights(file).items()}
    tensors.pop("", None)
    return tensors


def _name_inside(name: str) -> str:
    """The name of a tensor within `vqmodel`; "" for others."""
    return name.removeprefix(_DECODER) if name.startswith(_DECODER) else ""
