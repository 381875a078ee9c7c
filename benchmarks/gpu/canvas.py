"""A masked model end to end: canvas policies against one slot a pass, on the same captions.

Whole images of `scenes-masked` in float32 with its own guidance. Seconds are those of the tokens,
of calls after the first of their kind, which is reported separately. What a bitwise policy makes
has to be what its reference made, token for token; a pass of another shape may round otherwise, and
where two tokens are next to equal an image goes another way from there on, so the share of equal
images is reported and at least `LEAST` of them have to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.parts import CheckError
from mmaccel.contracts import CanvasPolicy
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise

BATCHES = (1, 8)
LEAST = 0.8  # share of equal images of a bitwise policy
POLICIES: tuple[CanvasPolicy, ...] = (
    Stepwise(order="halton"),
    LosslessUnmask(order="halton", drafts=8),
    LosslessUnmask(order="halton", drafts=16),
    EntropyBounded(gamma=16.0),
    MaskedParallel(steps=12),
)
_REPEATS = 2  # after the first call of a kind, which is reported separately


def measure_canvas(
    device: torch.device,
    pipe: TextToImage | None = None,
    *,
    policies: Sequence[CanvasPolicy] = POLICIES,
    batches: Sequence[int] = BATCHES,
    repeats: int = _REPEATS,
) -> dict[str, Any]:
    """Seconds an image of each policy, as a part of the report keeps them.

    Args:
        device: where to run.
        pipe: a masked model; None: `scenes-masked`, on the device.
        policies: the reference, a bitwise one for the figure, and any others.
        batches: images made together.
        repeats: timed runs of each.

    Raises:
        CheckError: a bitwise policy made too many images other than its reference's.
    """
    pipe = (
        TextToImage.from_pretrained("scenes-masked", device=device, dtype="float32")
        if pipe is None
        else pipe
    )
    rows = []
    for batch in batches:
        reference = [_make(pipe, policies[0], batch, run) for run in range(repeats + 1)]
        plain = _row(policies[0], reference, reference)
        rows.append(plain | {"speed_up": 1.0})
        for policy in policies[1:]:
            made = [_make(pipe, policy, batch, run) for run in range(repeats + 1)]
            row = _row(policy, made, reference)
            rows.append(row | {"speed_up": plain["seconds"] / row["seconds"]})
    exact = [row for row in rows if row["exactness"] == "bitwise"]
    wrong = [row["policy"] for row in exact if row["same"] < LEAST * row["pictures"]]
    if wrong:
        raise CheckError(f"other tokens than the reference's: {', '.join(wrong)}", {"canvas": rows})
    speed_up = min(row["speed_up"] for row in rows if row["policy"] == repr(policies[1]))
    return {"canvas": rows, "figures": {"canvas_lossless_speed_up": speed_up}}


def _make(pipe: TextToImage, policy: CanvasPolicy, batch: int, run: int) -> ImageOutput:
    """One batch; each run has its own seeds, and all policies the same."""
    examples = pipe.image_model.examples
    captions = [examples[n % len(examples)] for n in range(batch)]
    return pipe(captions, policy=policy, seed=range(run * batch, (run + 1) * batch))


def _row(
    policy: CanvasPolicy, made: list[ImageOutput], reference: list[ImageOutput]
) -> dict[str, Any]:
    first, *timed = made
    n = sum(len(images.tokens) for images in timed)
    seconds = sum(images.stats.seconds for images in timed) / n
    same = [(a.tokens == b.tokens).all(1).sum() for a, b in zip(made, reference, strict=True)]
    return {
        "batch": len(first.tokens),
        "policy": repr(policy),
        "exactness": first.stats.exactness,
        "passes": sum(images.stats.row_passes for images in timed) / n,
        "seconds": seconds,
        "first_seconds": first.stats.seconds / len(first.tokens),
        "images_per_s": 1 / seconds,
        "same": int(sum(same)),
        "pictures": sum(len(images.tokens) for images in made),
    }
