"""Keys and queries turned to other positions, in models with rotary ones.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv
2104.09864): a key is moved to another position by the difference of both angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels.rope_write import turn
from mmaccel.pipelines.hosts.runner.fused_structure import (
    Structure,
    UnknownDecoderError,
    read_structure,
)


@dataclass(frozen=True)
class KeyTurner:
    structure: Structure

    def turn(self, layer: int, states: Tensor, by: Tensor) -> Tensor:
        """States `[R, H, n, D]` of a layer at positions later by `[n]`, `[R, n]` or `[R, 1]`."""
        read = self.structure.layers[layer]
        if not read.attention.turns:
            return states
        by = torch.atleast_2d(by.to(states.device))
        zero = self._find_angles(torch.zeros_like(by), read.kind)
        return self._turn(states, zero, self._find_angles(by, read.kind)).to(states.dtype)

    @torch.no_grad()
    def turn_(self, layer: int, keys: Tensor, keep: Tensor) -> None:
        """Turn the first K keys of `[R, H, S, D]`, made at `keep` `[R, K]` int64 (shorter lists end
        in -1), to the positions 0 … K - 1, in place.
        """
        read = self.structure.layers[layer]
        if not read.attention.turns:
            return
        n = keep.shape[1]
        kept = keys[:, :, :n]
        to = torch.arange(n, device=keys.device)
        keep = keep.to(keys.device)
        made_at = self._find_angles(keep.clamp(min=0), read.kind)  # [R, K, P]
        turned = self._turn(kept, made_at, self._find_angles(to[None], read.kind))
        is_moved = (keep != to) & (keep >= 0)  # others keep their bits
        kept.copy_(turned.to(keys.dtype).where(is_moved[:, None, :, None], kept))

    def _turn(
        self, states: Tensor, made_at: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor]
    ) -> Tensor:
        """States `[R, H, K, D]` in float32, by the difference of angles `[R or 1, K, P]`."""
        cos, sin = made_at
        to_cos, to_sin = to
        # cos(a - b) and sin(a - b); scaled angles (YaRN) are longer than 1, by the same at both
        size = cos * cos + sin * sin
        by_cos = (to_cos * cos + to_sin * sin) / size
        by_sin = (to_sin * cos - to_cos * sin) / size
        interleaved = self.structure.spec.interleaved
        return turn(states.float(), by_cos[:, None], by_sin[:, None], interleaved)

    def _find_angles(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[R, K, P]` float32 of positions `[R, K]`."""
        structure = self.structure
        assert structure.rotary is not None
        like = torch.empty(1, device=positions.device, dtype=torch.float32)
        kinds = (kind,) if structure.spec.has_kinds else ()
        cos, sin = structure.rotary(like, positions, *kinds)
        return structure.turn_angles(cos, sin)


def open_turner(model: Any, windows: Sequence[int | None]) -> KeyTurner | str:
    """What turns the keys of a model whose layers have these windows; or why none can."""
    try:
        structure = read_structure(model, windows)
    except UnknownDecoderError as error:
        return f"how its keys turn is not known ({error})"
    if structure.rotary is None:
        return "its positions are learned, not rotary"
    if not structure.has_fixed_angles:
        return "its rotary angles depend on more than a position's number"
    return KeyTurner(structure)
