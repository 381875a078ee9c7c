"""Visual tokens merged inside the vision encoder: later layers of the tower process fewer tokens.

While `generate` encodes its images, a hook in front of a tower's layer hands the patches' states to
a reducer and merges them. The layers from there on run as they are, on fewer columns; a hook in
front of their attention adds the logarithm of how many patches each key stands for, as its mask, so
that a merged key attracts what its patches did (proportional attention: D. Bolya et al., "Token
Merging: Your ViT But Faster", ICLR 2023, arXiv:2210.09461, section 3.2). The class token, and
patches that the tower's own mask hides, are columns that stay.

What leaves the tower has all its tokens again, each with the state of what it was merged into, also
the hidden states of earlier layers (`vision_feature_layer`). So projectors that pool or shuffle the
grid, and `pack_image_features`, work as they are. Where a feature is a token of the tower, one of
those that are equal is then enough: `mmaccel.pipelines.vision_language.reduction` drops the columns
of the others from the prompt.

Each image, tile or frame is a row of the tower and is reduced alone. Only layers whose states the
model uses count: with `vision_feature_layer=-2` the last one receives what the one before it had.

Departures: the attention of flash and flex kernels takes no bias; a reduced tower runs sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.layers.attention_name import attention_named, find_configs, own_attention
from mmaccel.pipelines.layers.store import HIDDEN
from mmaccel.pipelines.prompt_cuts.columns import ChosenColumns
from mmaccel.pipelines.vision_language.tokens import (
    Places,
    choose_left,
    count_tokens,
    find_attentions,
    has_class_token,
    has_tower_tokens,
)
from mmaccel.pipelines.vision_language.tower_reduction import TowerReduction
from mmaccel.pipelines.vision_language.towers import find_tower
from mmaccel.pipelines.vision_language.visuals import Visual, find_placeholder, find_seeds
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan

_WITH_BIAS = {"sdpa", "eager"}


def find_depth(model: Any, inputs: Mapping[str, Any]) -> int:
    """How many layers of the tower have run where the model takes its states.

    Args:
        inputs: what `generate` was called with.
    """
    depth = len(find_attentions(find_tower(model)))
    chosen = inputs.get("vision_feature_layer")
    if chosen is None:
        chosen = getattr(model.config, "vision_feature_layer", None)
    if chosen is None:
        return depth
    chosen = [chosen] if isinstance(chosen, int) else chosen
    return max(index if index >= 0 else depth + 1 + index for index in chosen)


@dataclass(frozen=True)
class Level:
    """Where the tokens of a tower are from a layer on; S of them in all, S' at this level.

    Attributes:
        first: the layer.
        column: `[R, S]` int64, where each token is now.
        origin: `[R, S']` int64, the token that stands in each column; -1 for padding.
        is_patch: `[R, S']` bool, what may be merged.
        is_seen: `[R, S']` bool, what is attended to.
        size: `[R, S']` float32, how many tokens each column stands for.
    """

    first: int
    column: Tensor
    origin: Tensor
    is_patch: Tensor
    is_seen: Tensor
    size: Tensor

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of attention: `[R, S']`."""
        least = torch.finfo(dtype).min / 4
        return self.size.clamp(min=1).log().where(self.is_seen, least).to(dtype)

    def merge(self, first: int, plan: Plan, patches: ChosenColumns) -> tuple[Level, Tensor]:
        """The next level, and which columns of this one its columns are, `[R, S'']` int64.

        Args:
            plan: of the patches, none of which it drops.
            patches: the columns of `is_patch`.
        """
        rows = torch.arange(len(self.column), device=self.column.device)[:, None]
        target = torch.arange(self.origin.shape[1], device=rows.device).repeat(len(rows), 1)
        kept = patches.index.gather(1, plan.keep.clamp(0))
        own = kept.gather(1, plan.assign.clamp(0))
        at = rows.expand_as(own)[patches.valid], patches.index[patches.valid]
        target[at] = own[patches.valid]
        size = self.size.clone()
        size[rows.expand_as(kept)[plan.valid], kept[plan.valid]] = plan.size[plan.valid]
        stays = (self.origin >= 0) & (target == torch.arange(target.shape[1], device=rows.device))
        width = int(stays.sum(1).max())
        order = (~stays).long().argsort(dim=1, stable=True)[:, :width]
        is_real = stays.gather(1, order)
        moved = (stays.cumsum(1) - 1).gather(1, target)
        level = Level(
            first,
            moved.gather(1, self.column),
            self.origin.gather(1, order).where(is_real, -1),
            self.is_patch.gather(1, order) & is_real,
            self.is_seen.gather(1, order) & is_real,
            size.gather(1, order).where(is_real, 0.0),
        )
        return level, order


@dataclass
class TowerRun:
    """What was merged in one call of a tower.

    Attributes:
        seeds: `[R]` int64.
        n_special: tokens in front of the patches, 1 or 0.
        parts: rows of each image or video.
        levels: by their first layers; level 0 has all tokens.
        noted: queries and keys `[R, S', H, D]` of the last layer that was asked for.
    """

    seeds: Tensor
    n_special: int
    parts: list[int]
    levels: list[Level] = field(default_factory=list)
    noted: dict[str, Tensor] = field(default_factory=dict)

    @property
    def merges(self) -> bool:
        """Whether some tokens were merged."""
        return len(self.levels) > 1

    def counts(self, level: int) -> Tensor:
        """`[R]` int64, patches at a level."""
        return self.levels[level].is_patch.sum(1)

    def restore(self, states: Tensor, layer: int) -> Tensor:
        """`[R, S, C]` of the states `[R, S', C]` that a layer gave out."""
        column = next(level for level in reversed(self.levels) if level.first <= layer).column
        return states.gather(1, column[..., None].expand(-1, -1, states.shape[-1]))

    def find_left(self, place: Places, first: int) -> tuple[Tensor, Tensor]:
        """Which features of an image are left if one of those that are equal is.

        It is that of the token which represents the others; where padding was cut off with it, the
        first of the others.

        Args:
            place: of the features.
            first: the image's first row of the tower.

        Returns:
            `[n]` bool, True for features that are no token of the tower, and `[n]` float32, how
            many tokens each stands for.
        """
        last = self.levels[-1]
        source = place.source
        n_patches = last.column.shape[1] - self.n_special
        row = first + source.clamp(0).div(n_patches, rounding_mode="floor")
        token = self.n_special + source.clamp(0) % n_patches
        slot = last.column[row, token]
        is_own = last.origin[row, slot] == token
        left = choose_left(row * last.origin.shape[1] + slot, is_own, source >= 0)
        return left, last.size[row, slot].where(source >= 0, 1.0)


class EncoderReduction(TowerReduction):
    """The encoding of one `generate` call with a reducer inside the tower.

    Args:
        model: the model.
        method: of the stage "encoder_layer".
        inputs: what `generate` was called with.
        seeds: of the prompt's rows. Images are encoded before a call's sampling is known, so that
            a policy without a seed has those of seed 0 here.

    Attributes:
        runs: the tower's calls, by modality.
    """

    def __init__(
        self, model: Any, method: TokenReducer, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        self.method, self._model, self._inputs, self._seeds = method, model, inputs, seeds
        self._tower = find_tower(model)
        self._depth = find_depth(model, inputs)
        self._before = method.layers_of(self._depth)
        self._n_special = int(has_class_token(model))
        self._modalities = [
            name
            for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos"))
            if inputs.get(pixels) is not None
        ]
        self._run: TowerRun | None = None
        self.runs: dict[str, TowerRun] = {}

    def hook(self) -> Sequence[Any]:
        attentions = find_attentions(self._tower)
        own = {id(attention) for attention in attentions}
        layers = [
            m for m in self._tower.modules() if any(id(child) in own for child in m.children())
        ]
        hooks = [
            self._tower.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._tower.register_forward_hook(self._end),
        ]
        for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
            hooks.append(attention.register_forward_pre_hook(self._attend(), with_kwargs=True))
            if index in self._before:
                hook = self._merge(index)
                hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            if index + 1 in self._before:
                for name in ("q", "k"):
                    part = getattr(attention, f"{name}_norm", None)
                    part = getattr(attention, f"{name}_proj") if part is None else part
                    hooks.append(part.register_forward_hook(self._note(name, attention)))
        return hooks

    @contextmanager
    def applied(self) -> Iterator[None]:
        """See `TowerReduction.applied`; the tower's attention takes a bias there."""
        takes_bias = own_attention(self._tower.config) in _WITH_BIAS
        configs = [] if takes_bias else find_configs(self._tower)
        with super().applied(), attention_named(configs, "sdpa"):
            yield

    @property
    def ran(self) -> bool:
        return bool(self.runs)

    @property
    def changed(self) -> bool:
        """Whether some tokens were merged."""
        return any(run.merges for run in self.runs.values())

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of all images before the first layer that merges, and after the last."""
        runs = self.runs.values()
        before, after = (sum(int(run.counts(k).sum()) for run in runs) for k in (0, -1))
        return before, after

    def find_left(
        self, visuals: Sequence[Visual], places: Sequence[Places]
    ) -> list[tuple[Tensor, Tensor]] | None:
        run = self.runs.get(visuals[0].modality)
        wanted = getattr(self.method, "features", "auto")
        if run is None or not run.merges or wanted == "all" or not has_tower_tokens(self._model):
            return None
        found = list[tuple[Tensor, Tensor]]()
        for visual, place in zip(visuals, places, strict=True):
            if place.tiles:
                found.append(run.find_left(place, sum(run.parts[: visual.index])))
            elif wanted == "merged":
                raise UnsupportedModelError(
                    f"{self.method!r}: expected {visual.modality} features that are tokens of the "
                    "encoder, received features that were pooled or resized after it; give "
                    'features="auto"'
                )
            else:
                ones = torch.ones(
                    len(visual.features), device=visual.features.device, dtype=torch.float32
                )
                found.append((ones.bool(), ones))
        return found

    def _begin(self, tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._run = None
        if not self._is_paused and len(self.runs) < len(self._modalities):
            pixels = given["pixel_values"] if "pixel_values" in given else args[0]
            modality = self._modalities[len(self.runs)]
            rows, parts = find_rows(self._model, self._inputs, modality, len(pixels))
            seeds = torch.tensor(
                find_seeds(rows, self._seeds), device=pixels.device, dtype=torch.int64
            )
            self._run = self.runs[modality] = TowerRun(seeds, self._n_special, parts)

    def _attend(self) -> Any:
        def hook(attention: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            run = self._run
            if run is None:
                return None
            states = given["hidden_states"] if "hidden_states" in given else args[0]
            if not run.levels:
                run.levels.append(_open_level(states, given.get("attention_mask"), run.n_special))
            if not run.merges:
                return None
            bias = run.levels[-1].bias(states.dtype)
            mask = bias[:, None, None, :].expand(-1, 1, states.shape[1], -1)
            return args, {**given, "attention_mask": mask}

        return hook

    def _note(self, name: str, attention: Any) -> Any:
        def hook(_part: Any, _args: Any, made: Tensor) -> None:  # [R, S', H * D] | [R * S', H, D]
            if self._run is not None:
                shape = len(self._run.seeds), -1, attention.num_heads, attention.head_dim
                self._run.noted[name] = made.detach().reshape(shape)

        return hook

    def _merge(self, index: int) -> Any:
        def hook(_layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            run = self._run
            if run is None:
                return None
            hidden = args[0]
            if not run.levels:  # no layer has attended
                mask = given.get("attention_mask", args[1] if len(args) > 1 else None)
                run.levels.append(_open_level(hidden, mask, run.n_special))
            level = run.levels[-1]
            patches = ChosenColumns.of(level.is_patch)
            x = patches.take(hidden)
            plan = self._plan(run, index, patches, x)
            if bool((plan.counts == patches.valid.sum(1)).all()):
                return None
            level, order = level.merge(index, plan, patches)
            run.levels.append(level)
            hidden = patches.put(hidden, x, plan)
            hidden = hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))
            return (hidden, *args[1:]), given

        return hook

    def _plan(self, run: TowerRun, index: int, patches: ChosenColumns, x: Tensor) -> Plan:
        """What becomes of the patches' states `[R, N, C]` in front of a layer; none is dropped."""
        return self.method.plan(self._context(run, index, patches, x))

    def _context(
        self, run: TowerRun, index: int, patches: ChosenColumns, x: Tensor
    ) -> VisualContext:
        """What a method may look at in front of a layer."""
        level = run.levels[-1]
        bias = level.bias(torch.float32)

        def attention(layer: int, queries: Queries, per_head: bool) -> Tensor:
            q, k = (run.noted[name].transpose(1, 2) for name in ("q", "k"))
            where = patches.index.where(patches.valid, -1)
            return attention_mass(
                q[:, :, :1], k, where, scale=q.shape[-1] ** -0.5, bias=bias, per_head=per_head
            )

        token = patches.take(level.origin) - run.n_special
        side = isqrt(level.column.shape[1] - run.n_special)
        is_square = side * side == level.column.shape[1] - run.n_special
        return make_context(
            x,
            patches.valid,
            row=token.div(side, rounding_mode="floor") if is_square else None,
            column=token % side if is_square else None,
            size=patches.take(level.size),
            initial=run.counts(0),
            seed=run.seeds,
            layer=index,
            depth=self._depth,
            keys=lambda layer: patches.take(run.noted["k"]),
            attention=attention if run.n_special else None,
            queries=("cls",),
        )

    def _end(self, _tower: Any, _args: Any, output: Any) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.noted.clear()
        if run is None or not run.merges:
            return
        states = output.last_hidden_state
        output.last_hidden_state = run.restore(states, len(find_attentions(self._tower)))
        hidden = getattr(output, "hidden_states", None)
        if hidden is not None:  # the first is what entered layer 0; None for those not asked for
            output.hidden_states = tuple(
                None if states is None else run.restore(states, index - 1)
                for index, states in enumerate(hidden)
            )


def _open_level(states: Tensor, mask: Tensor | None, n_special: int) -> Level:
    """Level 0 of the states `[R, S, C]` under the tower's own mask."""
    rows, width = states.shape[:2]
    column = torch.arange(width, device=states.device).repeat(rows, 1)
    is_seen = torch.ones_like(column, dtype=torch.bool)
    if mask is not None:  # of bools, or of numbers that are added: [R, 1, S, S]
        seen = mask if mask.dtype == torch.bool else mask > HIDDEN
        is_seen = seen.any(dim=2)[:, 0].expand(rows, -1)
    return Level(-1, column, column, is_seen & (column >= n_special), is_seen, is_seen.float())


def find_rows(
    model: Any, inputs: Mapping[str, Any], modality: str, n: int
) -> tuple[list[int], list[int]]:
    """The prompt's row of each of n rows of the tower, and how many of those each image or video
    has: its tiles, its frames.
    """
    ids = inputs.get("input_ids")
    if ids is None:
        ids = torch.zeros(1, 0, dtype=torch.int64)
    left = (ids == find_placeholder(model, modality)).sum(1).tolist()
    found = list[int]()
    row = 0
    counts = count_tokens(model, inputs, modality, n, sum(left))
    for rows, tokens in counts:
        while left[row] < tokens and row + 1 < len(left):
            row += 1
        left[row] -= tokens
        found += [row] * rows
    return found, [rows for rows, _ in counts]
