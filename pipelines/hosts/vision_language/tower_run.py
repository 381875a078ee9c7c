"""One call of a vision tower that computes some of its places: which one stands for each.

A level is one tensor of indices, its target: for each token of a row the one that stands for it.
The tokens left, the column of each, and how many each stands for follow. Behind the tower every
token gets the state of the one that stands for it, so that projectors and `pack_image_features`
work as they are.

Shapes: **R** rows of the tower: images, tiles or frames; a packed tower has one. **S** tokens of a
row, the class token included, **S'** at a level. **U** features of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.prompt_cuts.columns import ChosenColumns
from mmaccel.pipelines.hosts.vision_language.towers import VisionTower, find_side
from mmaccel.reduction.visual_tokens.plan import Plan


@dataclass(frozen=True)
class Level:
    """Which tokens of a tower are left from a layer on."""

    first: int  # the layer; -1: all layers
    target: Tensor  # [R, S] int64, the token that stands for each; its own number where it is left

    @cached_property
    def kept(self) -> Tensor:
        """`[R, S]` bool."""
        return self.target == torch.arange(self.target.shape[1], device=self.target.device)

    @cached_property
    def columns(self) -> ChosenColumns:
        """The tokens that stand in the columns of a row, S' at most."""
        return ChosenColumns.of(self.kept)

    @cached_property
    def column(self) -> Tensor:
        """`[R, S]` int64, where each token is now."""
        return (self.kept.cumsum(1) - 1).gather(1, self.target)


@dataclass
class TowerRun:
    """One call of a tower, for all images or all videos of a `generate` call."""

    tower: Any
    known: VisionTower
    unit: int  # patches of a feature along each side
    seeds: Tensor  # [R] int64
    grid: tuple[int, int]  # rows and columns of the patches of each row of the tower
    is_seen: Tensor  # [R, S] bool, tokens that the tower attends to
    weighs: bool  # whether a column counts in attention as often as it stands for tokens
    is_patch: Tensor = field(init=False)  # [R, S] bool, those that are seen and may go
    levels: list[Level] = field(init=False)  # by their first layers; level 0 has all tokens
    # [R * U] int64, which place of all rows stands for each; None: all features stay
    target: Tensor | None = None
    mask: Tensor | None = None  # [R, 1, S', S'], added to scores of attention since tokens went

    def __post_init__(self) -> None:
        token = torch.arange(self.is_seen.shape[1], device=self.is_seen.device)
        self.is_patch = self.is_seen & (token >= self.n_special)
        self.levels = [Level(-1, token.repeat(len(self.is_seen), 1))]

    @property
    def n_special(self) -> int:
        """Tokens in front of the patches, 1 or 0."""
        return self.is_seen.shape[1] - self.grid[0] * self.grid[1]

    @property
    def side(self) -> int:
        """Pixels of a patch along each side."""
        return find_side(self.tower)

    @property
    def merges(self) -> bool:
        return len(self.levels) > 1

    @property
    def size(self) -> Tensor:
        """`[R, S']` float32, how many tokens each column stands for."""
        seen = self.is_seen.float()
        return self.take(torch.zeros_like(seen).scatter_add(1, self.levels[-1].target, seen))

    def count(self, level: int) -> Tensor:
        """`[R]` int64, patches at a level."""
        return (self.is_patch & self.levels[level].kept).sum(1)

    def take(self, known: Tensor) -> Tensor:
        """What is known `[R, S]` of tokens, of those in the columns, `[R, S']`; 0 of padding."""
        columns = self.levels[-1].columns
        return columns.take(known).masked_fill(~columns.valid, 0)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of attention: `[R, S']`."""
        size = self.size.clamp(min=1) if self.weighs else torch.ones_like(self.size)
        least = torch.finfo(dtype).min / 4
        return size.log().where(self.take(self.is_seen), least).to(dtype)

    def drop(self, first: int, features: Tensor) -> bool:
        """From layer `first` on, `features` `[R, U]` int64 stand for each; False: nothing goes."""
        self.target = join_targets(features)
        rows, columns = self.grid
        unit, width = self.unit, columns // self.unit
        y = torch.arange(rows // unit * unit, device=features.device)[:, None]
        x = torch.arange(width * unit, device=features.device)
        stands = features[:, y // unit * width + x // unit]  # [R, h, w], for a patch's feature
        # the patch that lies in that feature where this one lies in its own
        patch = (stands // width * unit + y % unit) * columns + stands % width * unit + x % unit
        token = self.levels[0].target.clone()
        places = token[:, self.n_special :].view(len(token), rows, columns)
        places[:, : len(y), : len(x)] = self.n_special + patch
        if torch.equal(token, self.levels[0].target):
            return False
        self.levels.append(Level(first, token))
        return True

    def merge(self, first: int, token: Tensor, valid: Tensor, target: Tensor) -> None:
        """Open a level in which tokens of the last one are merged, if some are.

        Args:
            token, valid: `[R, N]` int64, tokens that are left; bool, False for padding.
            target: `[R, N]` int64, which of these stands for each.
        """
        step = self.levels[0].target.clone()  # every token for itself
        row = torch.arange(len(step), device=step.device)[:, None].expand_as(token)[valid]
        step[row, token[valid]] = token.gather(1, target)[valid]
        # the tokens for which a merged one stood so far follow it
        if not torch.equal(step, self.levels[0].target):
            self.levels.append(Level(first, step.gather(1, self.levels[-1].target)))

    def restore(self, states: Tensor, layer: int) -> Tensor:
        """`[R, S, C]` of the states `[R, S', C]` that a layer gave out."""
        column = next(level for level in reversed(self.levels) if level.first <= layer).column
        return states.gather(1, column[..., None].expand(-1, -1, states.shape[-1]))


def find_targets(plan: Plan) -> Tensor:
    """`[B, N]` int64, the token that stands for each; its own index where it stays."""
    itself = torch.arange(plan.assign.shape[1], device=plan.assign.device)
    stands = plan.keep.gather(1, plan.assign.clamp(0))  # the token of the slot that it is in
    return stands.where(plan.assign >= 0, itself)


def join_targets(targets: Tensor) -> Tensor:
    """The targets `[R, U]` of rows as one of all their places, `[R * U]`."""
    first = torch.arange(len(targets), device=targets.device) * targets.shape[1]
    return (targets + first[:, None]).flatten()
