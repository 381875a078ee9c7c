"""What a folder of images, clips or sound holds beside its features: prompts that are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from mmaccel.demo.moving_scenes.data import read_caption as read_clip_caption
from mmaccel.demo.moving_scenes.tracker import check_clips
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import read_caption
from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.image_folder import (
    IMAGES,
    MOVING,
    SOUNDS,
    Item,
    read_clips,
    read_pixels,
)
from mmaccel.evaluation.shares import wilson
from mmaccel.outputs.sound_files import read_sound

Verdict = dict[str, bool] | None


def _read_sounds(items: Sequence[Item], batch_size: int) -> Iterable[Any]:
    return (read_sound(item.file) for item in items)


@dataclass(frozen=True)
class Kind:
    """What a folder holds. `judge` makes verdicts of items in 0..1 and prompts; without
    `read_prompt`, which refuses prompts, none are read back, and no items drawn.
    """

    unit: str
    suffixes: Sequence[str]
    distance: str
    own: str
    read: Callable[[Sequence[Item], int], Iterable[Any]]
    judge: Callable[[Tensor, list[str]], Sequence[Any]] | None = None
    read_prompt: Callable[[str], object] = str


PICTURES = Kind(
    "images", IMAGES, "Fréchet distance", "scenes", read_pixels, check_images, read_caption
)
CLIPS = Kind(
    "clips", MOVING, "FVD-own", "moving-scenes", read_clips, check_clips, read_clip_caption
)
SPEECH = Kind("sounds", SOUNDS, "FAD-own", "voices", _read_sounds)


def judge_items(kind: Kind, items: Sequence[Item], batch_size: int) -> list[Verdict]:
    """Verdicts on each item; None where its prompt is none that is read back, or it has none, or it
    is not of 64x64 pixels."""
    verdicts: list[Verdict] = [None] * len(items)
    if kind.judge is None:
        return verdicts
    readable = [k for k, item in enumerate(items) if _reads(kind, item.prompt)]
    for k in range(0, len(readable), batch_size):
        part = readable[k : k + batch_size]
        (pixels,) = kind.read([items[i] for i in part], len(part))
        if pixels.shape[-2:] != (64, 64):
            return verdicts
        judged = kind.judge(pixels.float() / 255, [str(items[i].prompt) for i in part])
        for i, verdict in zip(part, judged, strict=True):
            verdicts[i] = verdict_of(verdict)
    return verdicts


def verdict_of(judged: Any) -> Verdict:
    """What a checker said about one item, and whether all of it is right."""
    return {**asdict(judged), "whole": judged.whole}


def _reads(kind: Kind, prompt: str | None) -> bool:
    try:
        return prompt is not None and bool(kind.read_prompt(prompt))
    except OptionError:
        return False


def sum_verdicts(verdicts: Sequence[Verdict]) -> dict[str, Any] | None:
    """Shares of right verdicts with their 95 % intervals, and n; None of no verdicts."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return None
    n = len(known)
    shares = {name: sum(verdict[name] for verdict in known) / n for name in known[0]}
    return {"n": n, "shares": shares, "intervals": {k: wilson(p, n) for k, p in shares.items()}}
