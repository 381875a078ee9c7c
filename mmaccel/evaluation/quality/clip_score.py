"""How well images fit their prompts, by an embedding of both: CLIP score.

J. Hessel et al., "CLIPScore: A Reference-free Evaluation Metric for Image Captioning", EMNLP 2021,
arXiv 2104.08718: the cosine of the two embeddings, not below 0, times a constant.

Departures: the constant is 100, which text-to-image papers and torchmetrics use, and not 2.5; the
embeddings come from a callable, so that any model of images and texts will do. Values of two
callables cannot be compared. torchmetrics wants a model and a processor of transformers, and gives
neither scores of images nor the interval of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mmaccel.checks import check_kind
from mmaccel.errors import NumericsError, ShapeError

Embed = Callable[[Tensor, list[str]], tuple[Tensor, Tensor]]
"""Images `[B, 3, H, W]` uint8 and B texts to two embeddings `[B, D]`."""


@dataclass(frozen=True)
class ClipScore:
    """A mean score.

    Attributes:
        mean: in 0..100.
        half_width: of the 95 % interval of the mean (normal approximation); NaN for one image.
        scores: `[N]` float64, of each image.
    """

    mean: float
    half_width: float
    scores: Tensor


@torch.no_grad()
def score_batches(batches: Iterable[tuple[Tensor, list[str]]], embed: Embed) -> ClipScore:
    """Score images batch by batch, so that no more than one batch is held at a time.

    Args:
        batches: at least one, of images `[B, 3, H, W]` uint8 and B texts.
        embed: see `Embed`.

    Raises:
        ShapeError: embeddings that are not two of `[B, D]`.
        NumericsError: an embedding that is not finite or is 0.
    """
    parts = []
    for pixels, texts in batches:
        seen, read = check_kind("embeddings", embed(pixels, texts), tuple)
        if seen.ndim != 2 or seen.shape != read.shape or len(seen) != len(texts):
            raise ShapeError(
                f"embeddings: expected two of [{len(texts)}, D], received {list(seen.shape)} and "
                f"{list(read.shape)}; return one row for each image and text"
            )
        both = torch.stack([seen.double().cpu(), read.double().cpu()])
        if not bool(both.isfinite().all()) or bool((both.norm(dim=-1) == 0).any()):
            raise NumericsError(
                "embeddings: expected finite vectors other than 0, received one that is not; "
                "check what the callable returns"
            )
        parts.append(100 * cosine_similarity(both[0], both[1]).clamp(min=0))
    scores = torch.cat(parts)
    spread = float(scores.std()) if len(scores) > 1 else math.nan
    return ClipScore(float(scores.mean()), 1.96 * spread / math.sqrt(len(scores)), scores)
