"""The images of `mmaccel bench`: sides warmed up, then measured round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmaccel.commands.terminal import watch
from mmaccel.evaluation.speed.measure import Side, cut_batches, measure, synchronise_for
from mmaccel.evaluation.speed.rows import compare_images
from mmaccel.pipelines.text_to_image.generator import warm_up


def measure_images(
    sides: Sequence[Side], prompts: Sequence[str], seed: int, batch_size: int
) -> list[dict[str, Any]]:
    """Run every side on every prompt.

    Args:
        sides: the others of a guidance scale are compared with its first one.
        prompts: one per image; image k has seed `seed + k`.
        seed: of the first image.
        batch_size: images generated together.

    Returns:
        A row for each side, over the prompts that every side had before Ctrl-C, or over all; none
        if the first batch was not finished.

    Cost: a few passes per side to warm up, then batch by batch every side in a changing order.
    """
    batches = cut_batches(prompts, seed, batch_size)
    for side in sides:
        _warm_up(side, batches[0].prompts, batches[0].seeds)
    synchronise = synchronise_for(str(sides[0].source.model.device))
    finished = []
    try:
        runs = measure(sides, batches, synchronise)
        for each in watch(runs, len(batches) * len(sides), "measuring"):
            finished.append(each)
    except KeyboardInterrupt:  # what was measured is reported
        pass
    n_rounds = len(finished) // len(sides)
    return compare_images(sides, finished[: n_rounds * len(sides)]) if n_rounds else []


def _warm_up(side: Side, prompts: Sequence[str], seeds: Sequence[int]) -> None:
    if side.policy is not None:
        warm_up(side.source, side.policy, side.params, prompts[0], len(prompts))
        return
    # whole images, as their length is part of what is compiled
    options: dict[str, Any] = {"seed": seeds, "batch_size": len(prompts)}
    list(side.source.stream(prompts, side.params, **options))
