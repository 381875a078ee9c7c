"""`scenes-masked`, the Llama of `scenes` attending both ways: the model, its task, its figures.

Chang et al., 2022, arXiv 2202.04200; Nie et al., 2025, arXiv 2502.09992.
Departures: begun from the next-token model's weights, with one id more for the mask, and logits of
slot i may stand at position i - 1 as there (Ye et al., 2025, arXiv 2508.15487). They do unless told
otherwise: from the weights of `scenes`, 100 steps brought the validation bound to 4.19 nats per
token so, and to 4.57 with logits at position i.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.scenes.checker import score_images
from mmaccel.demo.scenes.data import EVALUATION_SEED, CaptionWords, make_captions
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer
from scripts.training.generator import read_weights
from scripts.training.masking import (
    MaskedModel,
    draw_counts,
    hidden_losses,
    hide,
    masked_loss,
    slots_of,
    unmask,
)
from scripts.training.optim import mixed_precision
from scripts.training.scenes import N_IMAGE_TOKENS, Scenes, build_generator

_TRAIN, _CHECK = 1, 2
_GROWN = ("model.embed_tokens.weight", "lm_head.weight")


class MaskedScenes(Scenes):
    """Captions and images of a work folder, read through masks.

    Args:
        work, emphasis, one_shape: see `Scenes`.
        shift: where the logits of position i stand: at i - shift.
        power: see `masked_loss`.
    """

    def __init__(
        self,
        work: str | Path,
        emphasis: int = 1,
        one_shape: bool = False,
        shift: int = 1,
        power: float = 1.0,
    ) -> None:
        super().__init__(work, emphasis, one_shape)
        self.shift, self.power = shift, power
        self.mask_id = self.words.vocab_size
        self.options = {"shift": shift, "power": power}

    def build(self, start: str | None) -> Any:
        """See `Task`; `start` may hold a next-token generator, which gets one id more."""
        model = build_masked(self.words, self.shift)
        if start is not None:
            model.load_state_dict(grow(read_weights(start), self.mask_id))
        return model

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        rng = np.random.default_rng((_TRAIN, step))
        counts = draw_counts(rng, len(ids), N_IMAGE_TOKENS)
        hidden = hide(slots_of(labels), counts, rng).to(ids.device)
        return masked_loss(self._losses(model, ids, hidden), hidden, self.power)

    def validate(self, model: Any, device: str) -> float:
        """The bound on the negative log-likelihood per token; 500 images, fixed masks."""
        return self._checked(model, device, None)

    def at_share(self, model: Any, device: str, share: float) -> float:
        """Nats per hidden token when `share` of the slots are hidden; fixed masks."""
        return self._checked(model, device, share)

    @torch.no_grad()
    def _checked(self, model: Any, device: str, share: float | None) -> float:
        model.eval()
        total = 0.0
        for k, (ids, labels) in enumerate(self.checks):
            rng = np.random.default_rng((_CHECK, k))
            if share is None:
                counts = draw_counts(rng, len(ids), N_IMAGE_TOKENS)
            else:
                counts = np.full(len(ids), max(1, round(share * N_IMAGE_TOKENS)))
            hidden = hide(slots_of(labels), counts, rng).to(device)
            with mixed_precision(device):
                total += float(masked_loss(self._losses(model, ids.to(device), hidden), hidden))
        model.train()
        return total / len(self.checks)

    def _losses(self, model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden_losses(
            model, ids, hidden, mask_id=self.mask_id, pad_id=self.words.pad, shift=self.shift
        )


def build_masked(words: CaptionWords, shift: int) -> Any:
    """A new `LlamaForCausalLM` with one id more, the mask; its configuration says so.

    Args:
        words: fixes the other ids.
        shift: saved as `logit_shift`.
    """
    model = build_generator(words)
    model.resize_token_embeddings(words.vocab_size + 1, mean_resizing=False)
    model.config.mask_token_id, model.config.logit_shift = words.vocab_size, shift
    return model


def grow(weights: dict[str, Tensor], mask_id: int) -> dict[str, Tensor]:
    """Gives the embedding and the head a row for the mask id, their mean, where they have none."""
    return {
        name: torch.cat([w, w.mean(0, keepdim=True)]) if name in _GROWN and len(w) == mask_id else w
        for name, w in weights.items()
    }


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_BATCH = 50


def image_reader(model: Any, words: CaptionWords) -> MaskedModel:
    """A masked generator with its ids, for the plain decoder."""
    return MaskedModel(
        model,
        slots=N_IMAGE_TOKENS,
        tokens=words.n_image_tokens,
        mask_id=model.config.mask_token_id,
        pad_id=words.pad,
        shift=model.config.logit_shift,
    )


def measure_masked_loss(model: Any, work: str | Path, device: str = "cpu") -> dict[str, Any]:
    """The bound and the loss at several shares of hidden slots; 500 images, fixed masks."""
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
    tokenizer: ImageTokenizer,
    *,
    count: int = 100,
    order: str = "random",
    per_step: int = 4,
    guidance_scale: float = 2.0,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Fills canvases for fresh captions with the plain decoder; the checker reads the images.

    Args:
        model: of `build_masked`.
        tokenizer: decodes its tokens.
        count: number of captions, `EVALUATION_SEED` 0..count-1.
        order, per_step, guidance_scale, temperature: see `unmask`.

    Returns:
        The scores, each with the half-width of its 95 % interval (normal approximation).
    """
    words = CaptionWords(tokenizer.vocab_size)
    reader = image_reader(model, words)
    captions = make_captions(EVALUATION_SEED, range(count))
    images = []
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
        images.append(tokenizer.decode(tokens))
    scores = score_images(torch.cat(images), captions)
    return {
        "order": order,
        "per_step": per_step,
        "passes": -(-N_IMAGE_TOKENS // per_step),
        "captions": count,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "scores": {k: round(v, 4) for k, v in scores.items()},
        "half_widths": {
            k: round(1.96 * math.sqrt(p * (1 - p) / count), 4) for k, p in scores.items()
        },
    }
