"""Which visual tokens a call kept, after all its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.places import Places
from mmaccel.pipelines.hosts.vision_language.visuals import Visual


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


def find_kept_tokens(
    visuals: Sequence[Visual], stays: Tensor, inside: Sequence[Tensor] | None
) -> list[KeptTokens]:
    """All images, then all videos. `stays` `[B, T]` bool are columns that left the encoder; of each
    row `inside`, `[n]` bool, which visual tokens among them a method in the language model kept, if
    any.
    """
    stays = stays.cpu().clone()
    if inside is not None:
        is_visual = torch.zeros_like(stays)
        for visual in visuals:
            is_visual[visual.row, visual.columns.cpu()] = True
        stays[is_visual & stays] = torch.cat(list(inside))
    return [
        KeptTokens(v.modality, v.index, v.row, stays[v.row, v.columns.cpu()], v.places)
        for v in visuals
    ]
