"""What all reductions of a vision tower's calls have in common.

A reduction lets the tower compute some of the places of an image and says, for each place of an
image's grid, which one stands for it: one tensor of indices, its *target*. All else follows from
it. Behind the tower every place gets the state of the one that stands for it, so that projectors
and `pack_image_features` work as they are. Of the features that are then equal one stays in the
prompt: that of the place itself or, where it was cut off with padding, the first of the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.vision_language.tokens import Places
from mmaccel.pipelines.vision_language.towers import JOINTS, describe_tower, find_tower, find_unit
from mmaccel.pipelines.vision_language.visuals import Visual
from mmaccel.reduction.visual_tokens.plan import Plan

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class TowerReduction(ABC):
    """The encoding of one `generate` call, in which the vision tower computes less.

    Args:
        model: the model.
        method: what is computed.
        inputs: what `generate` was called with.
        seeds: of the prompt's rows. Images are encoded before a call's sampling is known, so that
            a policy without a seed has those of seed 0 here.

    Attributes:
        ran: whether the tower was called.
        changed: whether it computed less.
        counts: tokens or patches of all images, and those that the tower computed last; zeros where
            they are not counted.
        remedy: what helps where features were pooled or resized after the tower; empty: all stay.
    """

    remedy = ""

    def __init__(
        self, model: Any, method: Any, inputs: Mapping[str, Any], seeds: Sequence[int]
    ) -> None:
        self.method, self._model, self._inputs, self._seeds = method, model, inputs, seeds
        self._tower = find_tower(model)
        self._unit = find_unit(model)
        self._modalities = [name for name, key in _PIXELS.items() if inputs.get(key) is not None]
        known = describe_tower(model)
        self._is_packed = known is not None and known.patches == "packed"
        self._is_joined = self._is_packed or model.config.model_type in JOINTS
        self._is_paused = False
        self.ran = self.changed = False
        self.counts = (0, 0)

    @abstractmethod
    def hook(self) -> Sequence[Any]:
        """Register the hooks of the tower; torch's handles of them."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block, the tower's calls compute less."""
        hooks = self.hook()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, the tower computes everything."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @abstractmethod
    def target(self, visual: Visual, visuals: Sequence[Visual]) -> Tensor | None:
        """`[U]` int64, which place stands for each place of an image, tile after tile, or of each
        of its tiles and frames alike; None where all features stay.

        Args:
            visuals: all of its modality.
        """

    def find_left(
        self, visuals: Sequence[Visual], places: Sequence[Places]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Which features are left in the prompt, and how many each stands for.

        Args:
            visuals: images, or videos, of one modality.
            places: of their features.

        Returns:
            `[n]` bool, True for features that are nothing of the tower's, and `[n]` float32, of
            each image; None where all features stay.

        Raises:
            UnsupportedModelError: features that were pooled or resized after the tower, if the
                method asks to drop some.
        """
        found = list[tuple[Tensor, Tensor]]()
        for visual, place in zip(visuals, places, strict=True):
            target = self.target(visual, visuals)
            if target is None:
                return None
            source = place.source
            if self._is_joined:
                source = torch.arange(len(visual.features), device=source.device)
            elif not place.tiles:
                self._check_pooled(visual)
                ones = torch.ones(len(source), device=source.device, dtype=torch.float32)
                found.append((ones.bool(), ones))
                continue
            target = target.to(source.device)
            inside = source.clamp(0) % len(target)
            size = target.bincount(minlength=len(target)).float()[target]
            left = _choose_left(source, source - inside + target[inside])
            found.append((left, size[inside].where(source >= 0, 1.0)))
        return None if all(bool(left.all()) for left, _ in found) else found

    def _check_pooled(self, visual: Visual) -> None:
        if self.remedy:
            raise UnsupportedModelError(
                f"{self.method!r}: expected {visual.modality} features that are tokens of the "
                f"encoder, received features that were pooled or resized after it; {self.remedy}"
            )


def _choose_left(source: Tensor, stands: Tensor) -> Tensor:
    """One feature of each place that stands for some: its own or, where it was cut off, the first.

    Args:
        source: `[n]` int64, the place of each feature; negative for those that are nothing of the
            tower's, all of which are chosen.
        stands: `[n]` int64, the place that stands for it.

    Returns:
        `[n]` bool.
    """
    is_place = source >= 0
    key = (2 * stands + (stands != source).long()).where(is_place, -2)
    order = key.argsort(stable=True)
    group = key[order].div(2, rounding_mode="floor")
    is_first = torch.ones_like(is_place)
    is_first[1:] = group[1:] != group[:-1]
    left = torch.empty_like(is_place)
    left[order] = is_first
    return left | ~is_place


def join_targets(targets: Sequence[Tensor]) -> Tensor:
    """The targets of tiles, frames or images, `[n]` each, as one of all their places in order."""
    first = 0
    joined = []
    for target in targets:
        joined.append(target + first)
        first += len(target)
    return torch.cat(joined)


def find_targets(plan: Plan) -> Tensor:
    """`[B, N]` int64, the token that stands for each; its own index where it stays."""
    itself = torch.arange(plan.assign.shape[1], device=plan.assign.device)
    stands = plan.keep.gather(1, plan.assign.clamp(0))
    return stands.where(plan.assign >= 0, itself)


def find_kept(target: Tensor) -> Tensor:
    """`[U]` bool, the places that stand for themselves."""
    return target == torch.arange(len(target), device=target.device)


def find_slots(target: Tensor) -> Tensor:
    """`[U]` int64, which of those that are computed stands for each place."""
    return (find_kept(target).cumsum(0) - 1)[target]


def spread_features(output: Any, slots: Tensor) -> Any:
    """What a packed tower gives out, at all places."""
    slots = slots.to(output.pooler_output.device)
    output.pooler_output = output.pooler_output[slots]
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        output.deepstack_features = [features[slots] for features in deep]
    return output


def spread_states(output: Any, depth: int, spread: Callable[[Tensor, int], Tensor]) -> Any:
    """What a tower of rows gives out, at all places.

    Args:
        depth: of its layers.
        spread: makes `[R, S, C]` of the states `[R, S', C]` that a layer gave out.
    """
    output.last_hidden_state = spread(output.last_hidden_state, depth)
    hidden = getattr(output, "hidden_states", None)
    if hidden is not None:  # the first is what entered layer 0; None for those not asked for
        output.hidden_states = tuple(
            None if states is None else spread(states, index - 1)
            for index, states in enumerate(hidden)
        )
    return output
