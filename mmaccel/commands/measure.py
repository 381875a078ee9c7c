"""Measuring policies against each other: interleaved, so that a noisy machine hits all alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmaccel.pipelines.text_to_image.contact_sheet import identical
from mmaccel.pipelines.text_to_image.pipeline import warm_up
from mmaccel.results import exactness_in

if TYPE_CHECKING:
    from mmaccel.contracts import Policy
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.samplers.sampling_params import SamplingParams


@dataclass(frozen=True)
class Setup:
    """A policy to measure, under its short name; `window` is None where it has none; `dtype` is the
    generator's.
    """

    name: str
    policy: Policy
    window: int | str | None
    dtype: str


@dataclass(frozen=True)
class Row:
    """What was measured of one setup at one guidance scale; means over `images` images.

    Attributes:
        policy, window, dtype, guidance: what was measured.
        settings: the policy's repr.
        exactness: its promise; `to_dict` adds what is left of it in this dtype as `promise`.
        images: images made.
        passes: forward passes an image took part in while unfinished.
        tokens_per_pass: tokens it gained in one.
        half_width: of the 95 % interval of that mean over images; None for fewer than ten.
        seconds: wall time per image.
        speed_up: seconds of the first setup at the same guidance, over these.
        identical: images whose tokens equal the first setup's.
        sampler_share: share of the time that is not the model's forward pass.
        total_variation: total variation spent per token.
    """

    policy: str
    window: int | str | None
    dtype: str
    guidance: float
    settings: str
    exactness: str
    images: int
    passes: float
    tokens_per_pass: float
    half_width: float | None
    seconds: float
    speed_up: float
    identical: int
    sampler_share: float
    total_variation: float

    def to_dict(self) -> dict[str, Any]:
        """All fields and `promise`, ready for JSON."""
        return {**asdict(self), "promise": exactness_in(self.exactness, self.dtype)}


def measure(
    pipes: Mapping[str, TextToImage],
    captions: Sequence[str],
    setups: Sequence[Setup],
    params: Sequence[SamplingParams],
    seed: int,
    batch_size: int,
) -> list[Row]:
    """Run every setup on every caption.

    Args:
        pipes: the model, by dtype.
        captions: one per image; image k has seed `seed + k`.
        setups: the first is what the others are compared with.
        filters: one set per guidance scale.
        seed: of the first image.
        batch_size: images made together.

    Returns:
        One row per filter and setup, filter by filter, over the captions that every setup had
        before Ctrl-C, or over all; none if the first batch was not finished. `Row.images` says how
        many.

    Cost: a few passes per setup to warm up, then batch by batch every setup in a rotating order.
    """
    from mmaccel.commands.terminal import progress_bar
    from mmaccel.pipelines.text_to_image.outputs import join

    cells = [(f, s) for f in range(len(params)) for s in range(len(setups))]
    seeds = [seed + k for k in range(len(captions))]
    runs: dict[tuple[int, int], Iterator[ImageOutput]] = {}
    made: dict[tuple[int, int], list[ImageOutput]] = {}
    for f, s in cells:
        policy, pipe = setups[s].policy, pipes[setups[s].dtype]
        warm_up(pipe, policy, params[f], captions[0], min(batch_size, len(captions)))
        runs[f, s] = pipe.stream(
            captions, params[f], policy=policy, seed=seeds, batch_size=batch_size
        )
        made[f, s] = []
    n_batches = -(-len(captions) // batch_size)
    try:
        with progress_bar() as bar:
            task = bar.add_task("measuring", total=n_batches * len(cells))
            for k in range(n_batches):
                turn = k % len(cells)
                for cell in cells[turn:] + cells[:turn]:
                    made[cell].append(next(runs[cell]))
                    bar.advance(task)
    except KeyboardInterrupt:
        n_batches = min(map(len, made.values()))
    if not n_batches:
        return []
    sides = {cell: join(parts[:n_batches]) for cell, parts in made.items()}
    return [_row(setups[s], params[f].guidance_scale, sides[f, s], sides[f, 0]) for f, s in cells]


def _row(setup: Setup, guidance: float, made: ImageOutput, plain: ImageOutput) -> Row:
    stats, images = made.stats, len(made.prompts)
    return Row(
        policy=setup.name,
        window=setup.window,
        dtype=setup.dtype,
        guidance=guidance,
        settings=stats.policy,
        exactness=stats.exactness,
        images=images,
        passes=stats.row_passes / images,
        tokens_per_pass=stats.tokens_per_pass,
        half_width=_half_width(made),
        seconds=stats.seconds / images,
        speed_up=plain.stats.seconds / stats.seconds,
        identical=identical(plain, made),
        sampler_share=1 - stats.forward_seconds / stats.seconds,
        total_variation=stats.total_variation / stats.tokens,
    )


def _half_width(made: ImageOutput) -> float | None:
    """Of the 95 % interval of the tokens a pass: normal approximation, images being independent.

    All images have equally many tokens, so that the relative error is that of the mean passes.
    """
    passes, count = made.passes.double(), len(made.passes)
    if count < 10:
        return None
    relative = 1.96 * float(passes.std() / passes.mean()) / math.sqrt(count)
    return made.stats.tokens_per_pass * relative
