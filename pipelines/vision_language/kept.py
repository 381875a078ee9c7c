"""Which visual tokens a call kept, after all its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.vision_language.tokens import Places, find_places
from mmaccel.pipelines.vision_language.visuals import Visual


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Which visual tokens of one image or video a call kept.

    Attributes:
        modality: "image" or "video".
        index: among those of its modality that `generate` was called with.
        row: of the batch.
        kept: `[n]` bool, on the CPU; a merged token counts where it stands for its slot.
        places: where the tokens stand in the image.
    """

    modality: str
    index: int
    row: int
    kept: Tensor
    places: Places

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens before, and after."""
        return len(self.kept), int(self.kept.sum())


class KeptVisuals:
    """The images and videos of a call, and what is left of each.

    It holds no features, and of pixels the shapes alone.

    Args:
        model: the model.
        visuals: all images and videos.
        inputs: what `generate` was called with.
    """

    def __init__(self, model: Any, visuals: Sequence[Visual], inputs: Mapping[str, Any]) -> None:
        self._model = model
        self._visuals = [
            replace(v, features=v.features.new_empty(len(v.features), 0)) for v in visuals
        ]
        self._inputs = {
            name: value.to("meta") if name.startswith("pixel_values") else value
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        self._left = {_name(v): torch.arange(len(v.columns)) for v in visuals}

    def leave(self, visuals: Sequence[Visual], kept: Sequence[Tensor]) -> KeptVisuals:
        """The same, where of each of these the indices `kept` are left."""
        made = copy(self)
        made._left = self._left | {_name(v): k for v, k in zip(visuals, kept, strict=True)}
        return made

    def leave_of_rows(self, kept: Sequence[Tensor]) -> KeptVisuals:
        """The same, where of each row's visual tokens those of `kept`, `[n]` bool, are left."""
        made = self
        for row, own in enumerate(kept):
            visuals = [v for v in self._visuals if v.row == row]
            if not visuals:
                continue
            columns = [v.columns.cpu()[self._left[_name(v)]] for v in visuals]
            rank = torch.cat(columns).argsort().argsort()  # images and videos may alternate
            parts = own[rank].split([len(part) for part in columns])
            left = [self._left[_name(v)][part] for v, part in zip(visuals, parts, strict=True)]
            made = made.leave(visuals, left)
        return made

    def find(self) -> list[KeptTokens]:
        """All images, then all videos."""
        found = []
        for modality in dict.fromkeys(visual.modality for visual in self._visuals):
            own = [visual for visual in self._visuals if visual.modality == modality]
            all_places = find_places(self._model, own, self._inputs)
            for visual, places in zip(own, all_places, strict=True):
                kept = torch.zeros(len(visual.columns), dtype=torch.bool)
                kept[self._left[_name(visual)]] = True
                found.append(KeptTokens(modality, visual.index, visual.row, kept, places))
        return found


def _name(visual: Visual) -> tuple[str, int, int]:
    """What tells an image or video, and its copies in other rows, from others."""
    return visual.modality, visual.row, visual.index
