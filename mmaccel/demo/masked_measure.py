"""The figures of the `scenes-masked` card, each measured here and nowhere typed in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from mmaccel.demo.masked_decode import MaskedModel, unmask
from mmaccel.demo.masked_scenes import MaskedScenes
from mmaccel.demo.scenes_check import score_pictures
from mmaccel.demo.scenes_data import EVALUATION_SEED, make_captions
from mmaccel.demo.scenes_generator import N_PICTURE_TOKENS
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.tokenizers_vq.autoencoder import PictureTokenizer

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_BATCH = 50


def picture_reader(model: Any, words: CaptionWords) -> MaskedModel:
    """A masked generator with its ids, for the plain decoder."""
    return MaskedModel(
        model,
        slots=N_PICTURE_TOKENS,
        tokens=words.n_image_tokens,
        mask_id=model.config.mask_token_id,
        pad_id=words.pad,
        shift=model.config.logit_shift,
    )


def measure_masked_loss(model: Any, work: str | Path, device: str = "cpu") -> dict[str, Any]:
    """The bound and the loss at several shares of hidden slots; 500 pictures, fixed masks."""
    task = MaskedScenes(work, shift=model.config.logit_shift)
    bound = task.validate(model, device)
    return {
        "validation_nats_per_token": round(bound, 4),
        "validation_bits_per_token": round(bound / math.log(2), 4),
        "bits_per_hidden_token": {
            str(share): round(task.at_share(model, device, share) / math.log(2), 4)
            for share in SHARES
        },
        "validation_pictures": sum(len(ids) for ids, _ in task.checks),
    }


def measure_masked_samples(
    model: Any,
    tokenizer: PictureTokenizer,
    *,
    count: int = 100,
    order: str = "random",
    per_step: int = 4,
    guidance_scale: float = 2.0,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Fills canvases for fresh captions with the plain decoder; the checker reads the pictures.

    Args:
        model: of `build_masked`.
        tokenizer: decodes its tokens.
        count: number of captions, `EVALUATION_SEED` 0..count-1.
        order, per_step, guidance_scale, temperature: see `unmask`.

    Returns:
        The scores, each with the half-width of its 95 % interval (normal approximation).
    """
    words = CaptionWords(tokenizer.vocab_size)
    reader = picture_reader(model, words)
    captions = make_captions(EVALUATION_SEED, range(count))
    pictures = []
    for start in range(0, count, _BATCH):
        tokens, _ = unmask(
            reader,
            [words.encode(c) for c in captions[start : start + _BATCH]],
            seed=start,
            order=order,
            per_step=per_step,
            temperature=temperature,
            free=words.unconditional(),
            guidance=guidance_scale,
        )
        pictures.append(tokenizer.decode(tokens))
    scores = score_pictures(torch.cat(pictures), captions)
    return {
        "order": order,
        "per_step": per_step,
        "passes": -(-N_PICTURE_TOKENS // per_step),
        "captions": count,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "scores": {k: round(v, 4) for k, v in scores.items()},
        "half_widths": {
            k: round(1.96 * math.sqrt(p * (1 - p) / count), 4) for k, p in scores.items()
        },
    }
