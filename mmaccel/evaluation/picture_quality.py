"""What a folder of pictures is worth: distances from others, captions read back, CLIP score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmaccel.catalog import load
from mmaccel.errors import OptionError
from mmaccel.evaluation.clip_score import Embed, score_captions
from mmaccel.evaluation.features import Extract, extract_all
from mmaccel.evaluation.frechet import Array, frechet_floor, frechet_of
from mmaccel.evaluation.kid import measure_kid
from mmaccel.evaluation.picture_folder import Item, list_items, read_pixels

_NO_NUMBER = {float("inf"), float("-inf")}


def measure_distances(first: Array, second: Array, seed: int = 0) -> dict[str, Any]:
    """Fréchet distance with its floor, and KID, ready for JSON.

    Args:
        first: `[N, D]`, features of the pictures.
        second: `[M, D]`, of those they are held against.
        seed: of splits and subsets.
    """
    frechet = asdict(frechet_of(first, second))
    frechet["floor"] = frechet_floor(first, second, seed=seed)
    kid = asdict(measure_kid(first, second, seed=seed))
    return {"frechet": frechet, "kid": {k: plain_number(v) for k, v in kid.items()}}


def reference_features(
    against: str, count: int, extract: Extract, batch_size: int
) -> tuple[Array, int]:
    """Features of the pictures to compare with, and how many they are.

    Args:
        against: "scenes", which draws `count` pictures that no training saw, or a folder.
        count: see above.
        extract: see `mmaccel.evaluation.features`.
        batch_size: pictures extracted together.
    """
    if against == "scenes":
        drawn = load("mmaccel.demo.scenes_features:draw_reference")(count)
        features = extract_all(drawn.split(batch_size), extract)
    else:
        features = extract_all(read_pixels(list_items(Path(against)), batch_size), extract)
    return features, len(features)


def check_captions(items: Sequence[Item], batch_size: int = 64) -> list[dict[str, bool] | None]:
    """The verdicts of the caption checker on each picture; None where its caption is no sentence of
    scenes, or it has none, or it is not of 64x64 pixels.
    """
    read_caption = load("mmaccel.demo.scenes_caption:read_caption")
    check = load("mmaccel.demo.scenes_check:check_pictures")
    verdicts: list[dict[str, bool] | None] = [None] * len(items)
    readable = [k for k, item in enumerate(items) if _reads(read_caption, item.prompt)]
    for k in range(0, len(readable), batch_size):
        part = readable[k : k + batch_size]
        (pixels,) = read_pixels([items[i] for i in part], len(part))
        if pixels.shape[-2:] != (64, 64):
            return verdicts
        found = check(pixels.float() / 255, [items[i].prompt for i in part])
        for i, verdict in zip(part, found, strict=True):
            verdicts[i] = {**asdict(verdict), "whole": verdict.whole}
    return verdicts


def sum_verdicts(verdicts: Sequence[dict[str, bool] | None]) -> dict[str, Any] | None:
    """Shares of right verdicts with their 95 % intervals, and n; None of no verdicts."""
    told = [v for v in verdicts if v is not None]
    if not told:
        return None
    n = len(told)
    shares = {name: sum(v[name] for v in told) / n for name in told[0]}
    return {"n": n, "shares": shares, "intervals": {k: wilson(p, n) for k, p in shares.items()}}


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n (E. B. Wilson, 1927), which holds at 0 and 1 too."""
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def measure_clip(items: Sequence[Item], embed: Embed, batch_size: int) -> dict[str, Any]:
    """CLIP score of pictures that carry captions, ready for JSON.

    Raises:
        OptionError: none does.
    """
    told = [item for item in items if item.prompt is not None]
    if not told:
        raise OptionError(
            "clip: expected pictures with captions, received none; make them with mmaccel "
            "generate, or write prompts.jsonl beside them"
        )
    pixels = list(torch.cat(list(read_pixels(told, batch_size))))
    found = score_captions(pixels, [str(item.prompt) for item in told], embed, batch_size)
    return {
        "n": len(told),
        "mean": found.mean,
        "half_width": plain_number(found.half_width),
        "scores": dict(zip((item.file.name for item in told), found.scores.tolist(), strict=True)),
    }


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
