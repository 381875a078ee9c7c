"""What a folder of images, clips or sound is worth: distances from others, prompts read back, CLIP
score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.clip_score import Embed, score_batches
from mmaccel.evaluation.quality.frechet import Array, frechet_floor, frechet_of
from mmaccel.evaluation.quality.image_folder import Item, read_clips, read_pixels
from mmaccel.evaluation.quality.kid import measure_kid

_NO_NUMBER = {float("inf"), float("-inf")}


def measure_distances(first: Array, second: Array, seed: int = 0) -> dict[str, Any]:
    """Fréchet distance with its floor, and KID, ready for JSON.

    Args:
        first: `[N, D]`, features of the images.
        second: `[M, D]`, of those they are compared with.
        seed: of splits and subsets.
    """
    frechet = asdict(frechet_of(first, second))
    frechet["floor"] = frechet_floor(first, second, seed=seed)
    kid = asdict(measure_kid(first, second, seed=seed))
    return {"frechet": frechet, "kid": {k: plain_number(v) for k, v in kid.items()}}


def check_sizes(
    items: Sequence[Item], others: Sequence[Item] | None, count: int | None, noun: str = "images"
) -> None:
    """Refuse too few items for a distance, before anything is extracted.

    Args:
        items: the images, clips or sounds.
        others: those they are compared with; None where they will be drawn.
        count: how many will be.
        noun: what they are, in the message.

    Raises:
        OptionError: fewer than two on a side.
    """
    n_others = count or len(items) if others is None else len(others)
    if min(len(items), n_others) < 2:
        raise OptionError(
            f"{noun}: expected at least 2 on both sides, received {len(items)} and {n_others}; "
            "a covariance needs two"
        )


def reference_pixels(
    others: Sequence[Item] | None, count: int, batch_size: int
) -> Iterable[torch.Tensor]:
    """The images to compare with, batch by batch.

    Args:
        others: of a folder; None draws `count` images of scenes that no training saw.
        count: see above.
        batch_size: images extracted together.
    """
    from mmaccel.demo.scenes.features import draw_reference

    if others is not None:
        return read_pixels(others, batch_size)
    return draw_reference(count).split(batch_size)


def reference_clips(
    others: Sequence[Item] | None, count: int, batch_size: int
) -> Iterable[torch.Tensor]:
    """The clips to compare with, batch by batch (arguments as `reference_pixels`)."""
    from mmaccel.demo.moving_scenes.features import draw_reference_clips

    if others is not None:
        return read_clips(others, batch_size)
    firsts = range(0, count, batch_size)
    return (draw_reference_clips(k, min(batch_size, count - k)) for k in firsts)


def check_clip_captions(
    items: Sequence[Item], batch_size: int = 16
) -> list[dict[str, bool] | None]:
    """The verdicts of the tracker on each clip; None where its prompt is no sentence of moving
    scenes, or it has none, or its frames are not of 64x64 pixels.
    """
    from mmaccel.demo.moving_scenes.caption import read_caption
    from mmaccel.demo.moving_scenes.tracker import check_clips

    verdicts: list[dict[str, bool] | None] = [None] * len(items)
    readable = [k for k, item in enumerate(items) if _reads(read_caption, item.prompt)]
    for k in range(0, len(readable), batch_size):
        part = readable[k : k + batch_size]
        (clips,) = read_clips([items[i] for i in part], len(part))
        if clips.shape[-2:] != (64, 64):
            return verdicts
        found = check_clips(clips.float() / 255, [str(items[i].prompt) for i in part])
        for i, verdict in zip(part, found, strict=True):
            verdicts[i] = {**asdict(verdict), "whole": verdict.whole}
    return verdicts


def check_captions(items: Sequence[Item], batch_size: int = 64) -> list[dict[str, bool] | None]:
    """The verdicts of the prompt checker on each image; None where its prompt is no sentence of
    scenes, or it has none, or it is not of 64x64 pixels.
    """
    from mmaccel.demo.scenes.caption import read_caption
    from mmaccel.demo.scenes.checker import check_images

    verdicts: list[dict[str, bool] | None] = [None] * len(items)
    readable = [k for k, item in enumerate(items) if _reads(read_caption, item.prompt)]
    for k in range(0, len(readable), batch_size):
        part = readable[k : k + batch_size]
        (pixels,) = read_pixels([items[i] for i in part], len(part))
        if pixels.shape[-2:] != (64, 64):
            return verdicts
        found = check_images(pixels.float() / 255, [str(items[i].prompt) for i in part])
        for i, verdict in zip(part, found, strict=True):
            verdicts[i] = {**asdict(verdict), "whole": verdict.whole}
    return verdicts


def sum_verdicts(verdicts: Sequence[dict[str, bool] | None]) -> dict[str, Any] | None:
    """Shares of right verdicts with their 95 % intervals, and n; None of no verdicts."""
    known = [v for v in verdicts if v is not None]
    if not known:
        return None
    n = len(known)
    shares = {name: sum(v[name] for v in known) / n for name in known[0]}
    return {"n": n, "shares": shares, "intervals": {k: wilson(p, n) for k, p in shares.items()}}


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n (E. B. Wilson, 1927), which holds at 0 and 1 too."""
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def measure_clip(items: Sequence[Item], embed: Embed, batch_size: int) -> dict[str, Any]:
    """CLIP score of images that carry prompts, ready for JSON.

    Raises:
        OptionError: none does.
    """
    described = with_captions(items)
    cuts = [described[k : k + batch_size] for k in range(0, len(described), batch_size)]
    texts = ([str(item.prompt) for item in part] for part in cuts)
    found = score_batches(zip(read_pixels(described, batch_size), texts, strict=True), embed)
    return {
        "n": len(described),
        "mean": found.mean,
        "half_width": plain_number(found.half_width),
        "scores": dict(
            zip((item.file.name for item in described), found.scores.tolist(), strict=True)
        ),
    }


def with_captions(items: Sequence[Item]) -> list[Item]:
    """The images that carry prompts.

    Raises:
        OptionError: none does.
    """
    described = [item for item in items if item.prompt is not None]
    if not described:
        raise OptionError(
            "clip: expected images with captions, received none; make them with mmaccel "
            "generate, or write prompts.jsonl next to them"
        )
    return described


def plain_number(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: None for these."""
    is_none = isinstance(value, float) and (np.isnan(value) or value in _NO_NUMBER)
    return None if is_none else value


def _reads(read_caption: Callable[[str], object], prompt: str | None) -> bool:
    if prompt is None:
        return False
    try:
        read_caption(prompt)
    except OptionError:
        return False
    return True
