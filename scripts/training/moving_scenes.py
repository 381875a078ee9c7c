"""`moving-scenes`, a small Llama over words and the tokens of frames: tokenizer and training task.

Touvron et al., 2023, arXiv 2302.13971, section 2.2, by way of transformers' `LlamaForCausalLM`;
clips as one sequence of discrete tokens in raster order, frame after frame: Yan et al., "VideoGPT",
2021 (arXiv 2104.10157). Departures: the size; frames are tokenized one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.moving_scenes.data import (
    TOKENIZER_SEED,
    TRAIN_SEED,
    VALIDATION_SEED,
    CaptionWords,
    make_clips,
)
from mmaccel.demo.moving_scenes.layout import N_FRAMES
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, load_tokenizer
from scripts.training.data import IGNORE, pack
from scripts.training.scenes import image_loss, validation_loss
from scripts.training.scenes_tokenizer import fit_tokenizer

TOKENIZER_CONFIG: dict[str, Any] = {
    "size": 64,
    "levels": [8, 8, 6, 5],
    "encoder_width": 64,
    "encoder_depth": 2,
    "decoder_width": 96,
    "decoder_depth": 2,
    "fine_width": 32,
    "fine_depth": 2,
    "patch": 8,
}
WIDTH, DEPTH, HEADS, INNER = 192, 6, 3, 512
_CHECKED = 160  # clips of the validation loss
_CHECK_BATCH = 20
_STAGE = 10**8  # clips of a collection for each frame that is cut off: stages share none


def train_frame_tokenizer(work: str | Path, steps: int, clips: int, device: str = "cpu") -> None:
    """Trains the tokenizer on single frames, see `scenes_tokenizer`; writes `work/tokenizer/`.

    Args:
        work: folder for log and result; a complete tokenizer stays.
        steps: optimiser steps of 64 frames.
        clips: distinct training clips.
        device: "cpu" or "cuda".
    """
    work = Path(work)
    work.mkdir(parents=True, exist_ok=True)
    done = work / "tokenizer.done"
    if done.exists():
        return
    pools = [
        np.concatenate(
            [
                make_clips(seed, range(start, start + 50))[2].flatten(0, 1).numpy()
                for start in range(0, count, 50)
            ]
        )
        for seed, count in ((TOKENIZER_SEED, clips), (VALIDATION_SEED, 50))
    ]
    fit_tokenizer(
        work,
        TOKENIZER_CONFIG,
        images=pools[0],
        held_out=pools[1],
        steps=steps,
        batch=64,
        rate=1.6e-3,
        device=device,
    )
    done.touch()


def encode_clips(tokenizer: ImageTokenizer, clips: Tensor) -> np.ndarray:
    """Tokens of clips, frame after frame, each in raster order.

    Args:
        tokenizer: encodes frames.
        clips: [B, F, 3, 64, 64] uint8.

    Returns:
        [B, F·h·w] int64.
    """
    frames = clips.flatten(0, 1).float() / 255
    return tokenizer.encode(frames).view(len(clips), -1).cpu().numpy()


def build_generator(words: CaptionWords, clip_tokens: int) -> Any:
    """A new `LlamaForCausalLM` with random weights, float32.

    Args:
        words: fixes the vocabulary.
        clip_tokens: tokens of a clip.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words.vocab_size,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=words.max_words + 2 + clip_tokens,
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=words.bos,
            eos_token_id=None,
            pad_token_id=words.pad,
            use_cache=True,
        )
    )


class MovingScenes:
    """Captions and clips, drawn and encoded as they are needed: no clip comes twice.

    Args:
        work: holds `tokenizer/`.
        n_frames: clips are cut after so many frames (a first stage costs less on short clips).
        one_shape: every batch as wide as the widest (a compiled model is compiled once).
        drop: share of captions replaced by the empty caption, for guidance.
        device: where clips are drawn and encoded.
    """

    def __init__(
        self,
        work: str | Path,
        n_frames: int = N_FRAMES,
        one_shape: bool = False,
        drop: float = 0.1,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.tokenizer = load_tokenizer(Path(work) / "tokenizer").to(device)
        self.words = CaptionWords(self.tokenizer.vocab_size)
        self.n_frames, self.drop = n_frames, drop
        rows, columns = self.tokenizer.grid
        self.frame_tokens = rows * columns
        widest = self.words.max_words + 2 + n_frames * self.frame_tokens
        self.width = widest if one_shape else None
        self.options: dict[str, Any] = {"n_frames": n_frames, "drop": drop}
        self.checks = [
            self._examples(VALIDATION_SEED, range(k, k + _CHECK_BATCH))
            for k in range(0, _CHECKED, _CHECK_BATCH)
        ]

    def build(self, start: str | None) -> Any:
        from scripts.training.generator import read_weights

        model = build_generator(self.words, N_FRAMES * self.frame_tokens)
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        first = _STAGE * (N_FRAMES - self.n_frames) + step * size
        return self._examples(TRAIN_SEED, range(first, first + size), self.drop)

    def distinct(self, steps: int, size: int) -> int:
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return image_loss(model, ids, labels)

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats per token: of clips, of their first frames, and of the frames after them."""
        nats = validation_loss(model, self.checks, device)
        firsts = [(ids, keep_slots(labels, 0, self.frame_tokens)) for ids, labels in self.checks]
        first = validation_loss(model, firsts, device)
        later = (nats * self.n_frames - first) / (self.n_frames - 1)
        return {"validation": nats, "first_frame": first, "later_frames": later}

    def _examples(self, seed: int, indices: range, drop: float = 0.0) -> tuple[Tensor, Tensor]:
        with torch.device(self.device):
            _, captions, clips = make_clips(seed, indices)
        dropped = np.random.default_rng((seed, 1, indices.start)).random(len(captions)) < drop
        prompts = [
            self.words.unconditional() if gone else self.words.encode(caption)
            for caption, gone in zip(captions, dropped, strict=True)
        ]
        tokens = encode_clips(self.tokenizer, clips[:, : self.n_frames])
        return pack(prompts, tokens, self.words.pad, self.width)


def keep_slots(labels: Tensor, first: int, last: int) -> Tensor:
    """Labels with `IGNORE` everywhere but on the tokens `first` to `last - 1` of each clip.

    Args:
        labels: [B, T] int64 of `pack`.
        first, last: in the order of a clip's tokens.

    Returns:
        [B, T] int64.
    """
    slot = (labels != IGNORE).cumsum(1) - 1
    return labels.where((slot >= first) & (slot < last), IGNORE)
