"""What a folder of images, clips or sound is worth: distances from others, prompts read back, CLIP
score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.clip_score import Embed, score_batches
from mmaccel.evaluation.quality.frechet import Array, frechet_floor, frechet_of
from mmaccel.evaluation.quality.image_folder import (
    IMAGES,
    MOVING,
    SOUNDS,
    Item,
    read_clips,
    read_pixels,
)
from mmaccel.evaluation.quality.kid import measure_kid
from mmaccel.outputs.sound_files import read_sound

Verdict = dict[str, bool] | None


@dataclass(frozen=True)
class Kind:
    """What a folder holds.

    Attributes:
        unit: of its items, plural.
        suffixes: of their files.
        distance: name of the Fréchet distance over `own` features.
        own: features of the network that ships, see
            `mmaccel.evaluation.quality.features.open_extractor`.
        read: batches of items, of a size.
        draw: batches of items that no training saw, of their number and the size of a batch.
        judge: imports what takes items in 0..1 and prompts to verdicts, and what refuses prompts
            that it does not read.
    """

    unit: str
    suffixes: Sequence[str]
    distance: str
    own: str
    read: Callable[[Sequence[Item], int], Iterable[Any]]
    draw: Callable[[int, int], Iterable[Any]] | None = None
    judge: Callable[[], tuple[Callable[..., Any], Callable[[str], object]]] | None = None

    def check_prompts(self, items: Sequence[Item], batch_size: int) -> list[Verdict]:
        """The checker's verdicts on each item; None where its prompt is none that it reads, or it
        has none, or it is not of 64x64 pixels.
        """
        verdicts: list[Verdict] = [None] * len(items)
        if self.judge is None:
            return verdicts
        check, read = self.judge()
        readable = [k for k, item in enumerate(items) if _reads(read, item.prompt)]
        for k in range(0, len(readable), batch_size):
            part = readable[k : k + batch_size]
            (pixels,) = self.read([items[i] for i in part], len(part))
            if pixels.shape[-2:] != (64, 64):
                return verdicts
            found = check(pixels.float() / 255, [items[i].prompt for i in part])
            for i, verdict in zip(part, found, strict=True):
                verdicts[i] = {**asdict(verdict), "whole": verdict.whole}
        return verdicts


def _reads(read: Callable[[str], object], prompt: str | None) -> bool:
    try:
        return prompt is not None and bool(read(prompt))
    except OptionError:
        return False


def _read_sounds(items: Sequence[Item], batch_size: int) -> Iterable[Any]:
    return (read_sound(item.file) for item in items)


def _draw_pictures(count: int, batch_size: int) -> Iterable[Any]:
    from mmaccel.demo.scenes.features import draw_reference

    return draw_reference(count).split(batch_size)


def _draw_clips(count: int, batch_size: int) -> Iterable[Any]:
    from mmaccel.demo.moving_scenes.features import draw_reference_clips

    firsts = range(0, count, batch_size)
    return (draw_reference_clips(k, min(batch_size, count - k)) for k in firsts)


def _judge_pictures() -> Any:
    from mmaccel.demo.scenes.caption import read_caption
    from mmaccel.demo.scenes.checker import check_images

    return check_images, read_caption


def _judge_clips() -> Any:
    from mmaccel.demo.moving_scenes.caption import read_caption
    from mmaccel.demo.moving_scenes.tracker import check_clips

    return check_clips, read_caption


PICTURES = Kind(
    "images", IMAGES, "Fréchet distance", "scenes", read_pixels,
    draw=_draw_pictures, judge=_judge_pictures,
)  # fmt: skip
CLIPS = Kind(
    "clips", MOVING, "FVD-own", "moving-scenes", read_clips,
    draw=_draw_clips, judge=_judge_clips,
)  # fmt: skip
SPEECH = Kind("sounds", SOUNDS, "FAD-own", "voices", _read_sounds)


def measure_distances(first: Array, second: Array, seed: int = 0) -> dict[str, Any]:
    """Fréchet distance with its floor, and KID, of features `[N, D]` and `[M, D]`, ready for JSON;
    `seed` is that of splits and subsets."""
    frechet = asdict(frechet_of(first, second))
    frechet["floor"] = frechet_floor(first, second, seed=seed)
    kid = asdict(measure_kid(first, second, seed=seed))
    return {"frechet": frechet, "kid": {name: plain_number(x) for name, x in kid.items()}}


def sum_verdicts(verdicts: Sequence[Verdict]) -> dict[str, Any] | None:
    """Shares of right verdicts with their 95 % intervals, and n; None of no verdicts."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return None
    n = len(known)
    shares = {name: sum(verdict[name] for verdict in known) / n for name in known[0]}
    return {"n": n, "shares": shares, "intervals": {k: wilson(p, n) for k, p in shares.items()}}


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n (E. B. Wilson, 1927), which holds at 0 and 1 too."""
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def measure_clip(items: Sequence[Item], embed: Embed, batch_size: int) -> dict[str, Any]:
    """CLIP score of images that carry prompts, ready for JSON."""
    described = [item for item in items if item.prompt is not None]
    cuts = [described[k : k + batch_size] for k in range(0, len(described), batch_size)]
    texts = ([str(item.prompt) for item in part] for part in cuts)
    found = score_batches(zip(read_pixels(described, batch_size), texts, strict=True), embed)
    names = [item.file.name for item in described]
    return {
        "n": len(described),
        "mean": found.mean,
        "half_width": plain_number(found.half_width),
        "scores": dict(zip(names, found.scores.tolist(), strict=True)),
    }


def plain_number(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: None for these."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
