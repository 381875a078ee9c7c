"""Made-up visual tokens: images, tiles and videos with keys, attention and text, and batches of
them whose padding is NaN wherever the contract says that it is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.reduction.visual_tokens.context import Text, VisualContext, make_context

DEPTH = 8  # layers of the made-up tower
HEADS = 2
QUERIES = ("cls", "all", "last", "text")
OFFERS = ("pixels",)


@dataclass(frozen=True)
class Sample:
    """One row: everything a method could ask for, without padding."""

    x: Tensor  # [N, C]
    group: Tensor  # [N]
    row: Tensor  # [N]
    column: Tensor  # [N]
    tiles: tuple[int, int]
    kind: str  # image, tiles or frames
    keys: Tensor  # [DEPTH, N, HEADS, D]
    mass: dict[str, Tensor]  # queries -> [DEPTH, HEADS, N]
    text: Tensor  # [T, C]
    text_keys: Tensor  # [T, HEADS, D]
    seed: int = 0

    @property
    def n(self) -> int:
        return len(self.x)


def fill(x: Tensor, group: Tensor, row: Tensor, column: Tensor, tiles: Any, kind: str, seed: int):
    """A sample with random keys, attention and text for these states `[N, C]`."""
    random = torch.Generator().manual_seed(seed)
    n, width = x.shape
    keys = torch.randn(DEPTH, n, HEADS, 8, generator=random)
    mass = {q: torch.rand(DEPTH, HEADS, n, generator=random) for q in QUERIES}
    n_text = 2 + seed % 4
    text = torch.randn(n_text, width, generator=random)
    text_keys = torch.randn(n_text, HEADS, 8, generator=random)
    return Sample(x, group, row, column, tiles, kind, keys, mass, text, text_keys, seed)


def image(height: int, width: int, seed: int, channels: int = 16) -> Sample:
    """A grid of random tokens."""
    return _grids([(height, width)], (0, 0), "image", seed, channels)


def tiled(
    height: int, width: int, tiles: tuple[int, int], seed: int, tile: tuple[int, int] | None = None
) -> Sample:
    """An overview and tiles, in the order of LLaVA-NeXT; of the same size unless one is given."""
    sizes = [(height, width), *[tile or (height, width)] * (tiles[0] * tiles[1])]
    return _grids(sizes, tiles, "tiles", seed, 16)


def video(frames: int, height: int, width: int, seed: int) -> Sample:
    """Frames of random tokens."""
    return _grids([(height, width)] * frames, (0, 0), "frames", seed, 16)


def _grids(sizes: Sequence[tuple[int, int]], tiles: Any, kind: str, seed: int, channels: int):
    places = [
        (group, row, column)
        for group, (height, width) in enumerate(sizes)
        for row in range(height)
        for column in range(width)
    ]
    group, row, column = torch.tensor(places).unbind(1)
    x = torch.randn(len(places), channels, generator=torch.Generator().manual_seed(seed))
    return fill(x, group, row, column, tiles, kind, seed)


def batch(
    samples: Sequence[Sample],
    *,
    layer: int | None = None,
    before: int = 0,
    after: int = 0,
    has: Iterable[str] | None = None,
) -> VisualContext:
    """A context of several rows.

    Args:
        samples: of one kind.
        layer: that receives what is left.
        before: padding before every row.
        after: padding after the longest row.
        has: the needs that the context meets; None: all that its kind has.
    """
    n = before + max(sample.n for sample in samples) + after

    def pad(values: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Rows with padding along the axis of tokens; of integers it is 0."""
        rows = []
        for value in values:
            shape = list(value.shape)
            shape[axis] = n
            row = torch.full(shape, torch.nan) if value.is_floating_point() else value.new_zeros(n)
            row.narrow(axis, before, value.shape[axis]).copy_(value)
            rows.append(row)
        return torch.stack(rows)

    def attention(at: int, queries: str, per_head: bool) -> Tensor:
        found = pad([sample.mass[queries][at] for sample in samples], 1)
        return found if per_head else found.sum(1)

    def text() -> Text:
        longest = max(len(sample.text) for sample in samples)
        states, keys = (
            torch.stack(
                [
                    torch.cat([v, v.new_full((longest - len(v), *v.shape[1:]), torch.nan)])
                    for v in vs
                ]
            )
            for vs in ([s.text for s in samples], [s.text_keys for s in samples])
        )
        lengths = torch.tensor([len(sample.text) for sample in samples])
        return Text(states, torch.arange(longest) < lengths[:, None], keys)

    kind = samples[0].kind
    context = make_context(
        pad([s.x for s in samples]),
        pad([torch.ones(s.n, dtype=torch.bool) for s in samples]),
        group=pad([s.group for s in samples]),
        groups="frames" if kind == "frames" else None,
        row=pad([s.row for s in samples]),
        column=pad([s.column for s in samples]),
        tile_grid=torch.tensor([s.tiles for s in samples]) if kind == "tiles" else None,
        seed=torch.tensor([s.seed for s in samples]),
        layer=layer,
        depth=DEPTH,
        keys=lambda at: pad([s.keys[at] for s in samples]),
        attention=attention,
        queries=QUERIES,
        text=text,
        offers=OFFERS,
    )
    return context if has is None else replace(context, has=frozenset(has))


def of_row(plan: Any, context: VisualContext, row: int, before: int = 0) -> tuple[Tensor, ...]:
    """A row's plan as if it had no padding: keep, assign, weight and size."""
    count = int(plan.counts[row])
    valid = context.valid[row]
    return (
        plan.keep[row, :count] - before,
        plan.assign[row][valid],
        plan.weight[row][valid],
        plan.size[row, :count],
    )
