"""`scenes`, `scenes-masked` and `moving-scenes`: image tokenizers, and small Llamas over words and
image tokens.

Tokenizer: finite scalar quantization needs no auxiliary loss (arXiv 2309.15505, section 3), so the
objective is the reconstruction error alone, weighted towards the objects, because a caption speaks
of them and the ground is most of the image. Generator: Touvron et al., 2023, arXiv 2302.13971,
section 2.2, by way of transformers; clips are one sequence of tokens, frame after frame (Yan et
al., "VideoGPT", 2021, arXiv 2104.10157), each frame tokenized by itself. No image comes twice.

The masked model attends both ways (Chang et al., 2022, arXiv 2202.04200; Nie et al., 2025, arXiv
2502.09992). Departures: begun from the weights of `scenes`, with one id more for the mask, and
logits of slot i stand at position i - 1 as there (Ye et al., 2025, arXiv 2508.15487): so 100 steps
brought the validation bound to 4.19 nats per token, and to 4.57 with logits at position i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.moving_scenes import data as moving
from mmaccel.demo.scenes import data as still
from mmaccel.demo.scenes.data import World
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from mmaccel.tokenizers_vq.autoencoder import (
    ImageTokenizer,
    ImageTokenizerConfig,
    load_tokenizer,
    save_tokenizer,
)
from scripts.training.loop import Batch, Plan, Task, build_llama, pack
from scripts.training.masking import Masked

_DROPPED = 0.1  # share of captions replaced by the empty one, for guidance
_CHECKED, _CHECK_BATCH = 160, 20  # items of the validation
_GROWN = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Kind:
    """A world and the models of it.

    Attributes:
        world: draws and describes.
        seeds: of training, validation and of the tokenizer's training.
        words: of captions, and most of a caption.
        tokenizer: fields of `ImageTokenizerConfig`.
        llama: sizes of the generator.
    """

    world: World
    seeds: tuple[int, int, int]
    words: tuple[tuple[str, ...], int]
    tokenizer: dict[str, Any]
    llama: dict[str, Any]

    def vocabulary(self, n_image_tokens: int) -> CaptionWords:
        """The words with their ids, behind those of images."""
        return CaptionWords(n_image_tokens, *self.words)


STILLS = Kind(
    world=still.STILLS,
    seeds=(still.TRAIN_SEED, still.VALIDATION_SEED, still.TOKENIZER_SEED),
    words=(tuple(still.WORDS), still.MAX_WORDS),
    tokenizer=dict(
        size=64, levels=[8, 5, 5, 5], encoder_width=96, encoder_depth=2, decoder_width=128,
        decoder_depth=3, fine_width=32, fine_depth=1,
    ),
    llama=dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4
    ),
)  # fmt: skip
CLIPS = Kind(
    world=moving.CLIPS,
    seeds=(moving.TRAIN_SEED, moving.VALIDATION_SEED, moving.TOKENIZER_SEED),
    words=(tuple(moving.WORDS), moving.MAX_WORDS),
    tokenizer=dict(
        size=64, levels=[8, 8, 6, 5], encoder_width=64, encoder_depth=2, decoder_width=96,
        decoder_depth=2, fine_width=32, fine_depth=2, patch=8,
    ),
    llama=dict(
        hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=3,
        tie_word_embeddings=True,
    ),
)  # fmt: skip
PLANS = {
    "scenes": {
        "tokenizer": Plan(2000, 1900, 64, rate_rest=1.6e-3, average=0, mixed=True),
        "generator": Plan(11600, 2500, 32, mixed=True),
    },
    "scenes-masked": {"generator": Plan(8300, 3000, 32, mixed=True)},
    "moving-scenes": {
        "tokenizer": Plan(1500, 1400, 6, rate_rest=1.6e-3, average=0, mixed=True),
        "generator": Plan(8000, 2500, 12, mixed=True),
    },
}


class Tokenizer(Task):
    """Frames, drawn as they are needed, to themselves."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        _, held_out, self.seed = kind.seeds
        self.held_out = kind.world.make(held_out, range(400 // kind.world.n_frames))[2]

    def build(self, before: Path | None) -> ImageTokenizer:
        return ImageTokenizer(ImageTokenizerConfig(**self.kind.tokenizer))

    def batch(self, step: int, size: int) -> Batch:
        """Frames of `size` scenes, twice."""
        frames = self.kind.world.make(self.seed, range(step * size, (step + 1) * size))[2]
        images = frames.flatten(0, 1).float() / 255
        return images, images

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return (object_weight(ids) * (model(ids).float() - labels).square()).mean()

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """The peak signal-to-noise ratio in decibels."""
        return {"psnr": psnr(model, self.held_out.flatten(0, 1).to(device))}

    def save(self, model: Any, folder: Path) -> None:
        save_tokenizer(model, folder)


def object_weight(images: Tensor, gain: float = 3.0) -> Tensor:
    """Weights [B, 1, h, w] of mean 1: within two pixels of an object 1 + gain times the others."""
    light, dark = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    # the vivid and the white; grounds are neither
    solid = ((light - dark > 0.5) | (dark > 0.8)).float()
    weight = 1 + gain * max_pool2d(solid, 5, stride=1, padding=2)
    return weight / weight.mean()


def psnr(tokenizer: Any, images: Tensor) -> float:
    """Of the mean error of reconstructions of images [N, 3, 64, 64] uint8, in decibels."""
    errors = []
    for part in images.split(100):
        real = part.float() / 255
        again = tokenizer.decode(tokenizer.encode(real)).clamp(0, 1)
        errors.append((again - real).square().mean((1, 2, 3)))
    return -10 * math.log10(float(torch.cat(errors).mean()))


class Generator(Task):
    """Captions, and images or clips token by token, drawn and encoded as they are needed.

    Args:
        kind: what is drawn.
        tokenizer: folder of the image tokenizer.
        device: where scenes are drawn and encoded.
    """

    def __init__(self, kind: Kind, tokenizer: Path, device: str = "cpu") -> None:
        self.kind, self.device = kind, device
        self.tokenizer = self.open_tokenizer(tokenizer).to(device)
        self.words = kind.vocabulary(self.tokenizer.vocab_size)
        rows, columns = self.tokenizer.grid
        self.n_tokens = kind.world.n_frames * rows * columns
        self.train_seed, seed, _ = kind.seeds
        firsts = range(0, _CHECKED, _CHECK_BATCH)
        self.checks = [self._examples(seed, range(k, k + _CHECK_BATCH)) for k in firsts]

    open_tokenizer: Callable[[Path], Any] = staticmethod(load_tokenizer)

    def build(self, before: Path | None) -> Any:
        return build_llama(
            vocab_size=self.words.vocab_size,
            max_position_embeddings=self.words.max_words + 2 + self.n_tokens,
            bos_token_id=self.words.bos,
            eos_token_id=None,
            pad_token_id=self.words.pad,
            **self.kind.llama,
        )

    def batch(self, step: int, size: int) -> Batch:
        indices = range(step * size, (step + 1) * size)
        return self._examples(self.train_seed, indices, _DROPPED)

    def _examples(self, seed: int, indices: range, drop: float = 0.0) -> Batch:
        with torch.device(self.device):
            _, captions, frames = self.kind.world.make(seed, indices)
        is_dropped = np.random.default_rng((seed, 1, indices.start)).random(len(captions)) < drop
        tokens = self.tokenizer.encode(frames.flatten(0, 1).float() / 255)
        prompts = [
            self.words.unconditional() if gone else self.words.encode(caption)
            for caption, gone in zip(captions, is_dropped, strict=True)
        ]
        return self.pack(prompts, tokens.view(len(captions), -1))

    def pack(self, prompts: list[list[int]], tokens: Tensor) -> Batch:
        """Of prompts and tokens `[B, L]` ids and labels."""
        pairs = zip(prompts, tokens.tolist(), strict=True)
        return pack([[(prompt, False), (own, True)] for prompt, own in pairs], self.words.pad)


class MaskedGenerator(Masked, Generator):
    """The same images, read through masks."""

    shift = 1

    def __init__(self, kind: Kind, tokenizer: Path, device: str = "cpu") -> None:
        super().__init__(kind, tokenizer, device)
        self.mask_id, self.pad_id = self.words.vocab_size, self.words.pad

    def build(self, before: Path | None) -> Any:
        """Begins from the weights of `scenes`; the mask's rows are the mean of all."""
        from transformers import AutoModelForCausalLM

        start = before or DEMO_WEIGHTS / "scenes"
        model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        weights = model.state_dict()
        for name in _GROWN:
            weights[name] = torch.cat([weights[name], weights[name].mean(0, keepdim=True)])
        model.resize_token_embeddings(self.mask_id + 1, mean_resizing=False)
        model.load_state_dict(weights)
        model.config.mask_token_id, model.config.logit_shift = self.mask_id, self.shift
        return model
