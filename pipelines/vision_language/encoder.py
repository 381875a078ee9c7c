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
from functools import cached_property, partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.layers.attention_name import attention_named, find_configs, own_attention
from mmaccel.pipelines.layers.store import HIDDEN
from mmaccel.pipelines.prompt_cuts.columns import ChosenColumns, take_states
from mmaccel.pipelines.vision_language.tokens import (
    count_tokens,
    find_attentions,
    has_class_token,
    has_tower_tokens,
    listen,
)
from mmaccel.pipelines.vision_language.tower_reduction import (
    TowerReduction,
    find_targets,
    join_targets,
    spread_states,
)
from mmaccel.pipelines.vision_language.towers import find_tower
from mmaccel.pipelines.vision_language.visuals import Visual, find_placeholder, find_seeds
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer

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
    """Which tokens of a tower are left from a layer on; S of them in all, S' at this level.

    Attributes:
        first: the layer.
        target: `[R, S]` int64, the token that stands for each; its own number where it is left.
    """

    first: int
    target: Tensor

    @cached_property
    def kept(self) -> Tensor:
        """`[R, S]` bool, the tokens that are left."""
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
    """What was merged in one call of a tower.

    Attributes:
        seeds: `[R]` int64.
        n_special: tokens in front of the patches, 1 or 0.
        parts: rows of each image or video.
        weighs: whether a column counts in attention as often as it stands for tokens.
        levels: by their first layers; level 0 has all tokens.
        is_patch, is_seen: `[R, S]` bool, which tokens may be merged, and are attended to.
        noted: queries and keys `[R, S', H, D]` of the last layer that was asked for.
    """

    seeds: Tensor
    n_special: int
    parts: list[int]
    weighs: bool
    levels: list[Level] = field(default_factory=list)
    is_patch: Tensor = field(default_factory=Tensor)
    is_seen: Tensor = field(default_factory=Tensor)
    noted: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, states: Tensor, mask: Tensor | None) -> None:
        """Open level 0 of the states `[R, S, C]` under the tower's own mask, unless it is open."""
        if self.levels:
            return
        rows, width = states.shape[:2]
        token = torch.arange(width, device=states.device).repeat(rows, 1)
        self.is_seen = torch.ones_like(token, dtype=torch.bool)
        if mask is not None:  # of bools, or of numbers that are added: [R, 1, S, S]
            seen = mask if mask.dtype == torch.bool else mask > HIDDEN
            self.is_seen = seen.any(dim=2)[:, 0].expand(rows, -1)
        self.is_patch = self.is_seen & (token >= self.n_special)
        self.levels.append(Level(-1, token))

    @property
    def merges(self) -> bool:
        """Whether some tokens were merged."""
        return len(self.levels) > 1

    @property
    def targets(self) -> Tensor:
        """`[R, N]` int64, the patch that stands for each patch at the end."""
        return self.levels[-1].target[:, self.n_special :] - self.n_special

    @property
    def size(self) -> Tensor:
        """`[R, S']` float32, how many tokens each column stands for."""
        seen = self.is_seen.float()
        return self.take(torch.zeros_like(seen).scatter_add(1, self.levels[-1].target, seen))

    def counts(self, level: int) -> Tensor:
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

    def merge(self, first: int, patches: ChosenColumns, target: Tensor) -> Tensor:
        """The columns, `[R, S'']` int64, that are left at the next level.

        Args:
            first: its first layer.
            patches: the columns of patches.
            target: `[R, N]` int64, which of these stands for each.
        """
        last = self.levels[-1]
        token = last.columns.index.gather(1, patches.index)
        step = self.levels[0].target.clone()
        row = torch.arange(len(step), device=step.device)[:, None].expand_as(token)[patches.valid]
        step[row, token[patches.valid]] = token.gather(1, target)[patches.valid]
        level = Level(first, step.gather(1, last.target))
        self.levels.append(level)
        return last.column.gather(1, level.columns.index)

    def restore(self, states: Tensor, layer: int) -> Tensor:
        """`[R, S, C]` of the states `[R, S', C]` that a layer gave out."""
        column = next(level for level in reversed(self.levels) if level.first <= layer).column
        return states.gather(1, column[..., None].expand(-1, -1, states.shape[-1]))


class EncoderReduction(TowerReduction):
    """The encoding of one `generate` call with a reducer inside the tower.

    Attributes:
        runs: the tower's calls, by modality.
    """

    weighs = True  # see `TowerRun`

    def __init__(
        self, model: Any, method: TokenReducer, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, method, inputs, seeds)
        self._depth = find_depth(model, inputs)
        self._before = method.layers_of(self._depth)
        self._n_special = int(has_class_token(model))
        if getattr(method, "features", "auto") == "merged":
            self.remedy = 'give features="auto"'
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
                hooks += listen(attention, partial(self._note, attention))
        return hooks

    @contextmanager
    def applied(self) -> Iterator[None]:
        """See `TowerReduction.applied`; the tower's attention takes a bias there."""
        takes_bias = own_attention(self._tower.config) in _WITH_BIAS
        configs = [] if takes_bias else find_configs(self._tower)
        with super().applied(), attention_named(configs, "sdpa"):
            yield

    def target(self, visual: Visual, visuals: Sequence[Visual]) -> Tensor | None:
        run = self.runs.get(visual.modality)
        wanted = getattr(self.method, "features", "auto")
        if run is None or not run.merges or wanted == "all" or not has_tower_tokens(self._model):
            return None
        first = sum(run.parts[: visual.index])
        return join_targets(list(run.targets[first : first + run.parts[visual.index]]))

    def _begin(self, tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._run = None
        if not self._is_paused and len(self.runs) < len(self._modalities):
            pixels = given["pixel_values"] if "pixel_values" in given else args[0]
            modality = self._modalities[len(self.runs)]
            rows, parts = find_rows(self._model, self._inputs, modality, len(pixels))
            seeds = torch.tensor(
                find_seeds(rows, self._seeds), device=pixels.device, dtype=torch.int64
            )
            self._run = self.runs[modality] = TowerRun(seeds, self._n_special, parts, self.weighs)
            self.ran = True

    def _attend(self) -> Any:
        def hook(attention: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            run = self._run
            if run is None:
                return None
            states = given["hidden_states"] if "hidden_states" in given else args[0]
            run.begin(states, given.get("attention_mask"))
            if not run.merges:
                return None
            bias = run.bias(states.dtype)
            mask = bias[:, None, None, :].expand(-1, 1, states.shape[1], -1)
            return args, {**given, "attention_mask": mask}

        return hook

    def _note(self, attention: Any, name: str, made: Tensor) -> None:
        """Keep queries or keys, `[R, S', H * D]` or `[R * S', H, D]`."""
        if self._run is not None:
            shape = len(self._run.seeds), -1, attention.num_heads, attention.head_dim
            self._run.noted[name] = made.reshape(shape)

    def _merge(self, index: int) -> Any:
        def hook(_layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            run = self._run
            if run is None:
                return None
            hidden = args[0]
            run.begin(hidden, given.get("attention_mask", args[1] if len(args) > 1 else None))
            patches = ChosenColumns.of(run.take(run.is_patch))
            target, hidden = self._choose(run, index, patches, hidden)
            itself = torch.arange(target.shape[1], device=target.device)
            if bool(((target == itself) | ~patches.valid).all()):
                return None
            order = run.merge(index, patches, target)
            return (take_states(hidden, order), *args[1:]), given

        return hook

    def _choose(
        self, run: TowerRun, index: int, patches: ChosenColumns, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In front of a layer: which patch stands for each, `[R, N]` int64, and the states
        `[R, S', C]` with those of merged patches.
        """
        x = patches.take(hidden)
        plan = self.method.plan(self._context(run, index, patches, x))
        return find_targets(plan), patches.put(hidden, x, plan)

    def _context(
        self, run: TowerRun, index: int, patches: ChosenColumns, x: Tensor
    ) -> VisualContext:
        """What a method may look at in front of a layer."""
        bias = run.bias(torch.float32)

        def attention(layer: int, queries: Queries, per_head: bool) -> Tensor:
            q, k = (run.noted[name].transpose(1, 2) for name in ("q", "k"))
            where = patches.index.where(patches.valid, -1)
            return attention_mass(
                q[:, :, :1], k, where, scale=q.shape[-1] ** -0.5, bias=bias, per_head=per_head
            )

        token = run.levels[-1].columns.index.gather(1, patches.index) - run.n_special
        n_patches = run.is_patch.shape[1] - run.n_special
        side = isqrt(n_patches)
        is_square = side * side == n_patches
        return make_context(
            x,
            patches.valid,
            row=token.div(side, rounding_mode="floor") if is_square else None,
            column=token % side if is_square else None,
            size=patches.take(run.size),
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
        if run is None:
            return
        run.noted.clear()
        before, after = self.counts
        self.counts = before + int(run.counts(0).sum()), after + int(run.counts(-1).sum())
        if run.merges:
            self.changed = True
            spread_states(output, len(find_attentions(self._tower)), run.restore)


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
